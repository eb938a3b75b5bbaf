"""Texts of new sequences are read into the caches of their models, and their hidden states shown to drafters that need them."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np

from polydraft.core.cursor import Reading, read_all, read_each_once, states_of
from polydraft.core.methods import Drafter
from polydraft.core.targets import Mixing, Scores, Target
from polydraft.core.trees import TokenTree
from polydraft.engine.drafter_state import begin, drafter_cursor, switch_off
from polydraft.engine.sequence import Sequence, Unread, slots_of


def join(drafter: Drafter | None, s: Sequence) -> None:
    """Before a new sequence is read: a drafter that reads on begins, and the slot forgets what it holds of which states are needed."""
    if drafter is None or not s.has_drafter or not drafter.needs.hidden:
        return
    if s.speculation.offers.cursor is not None:
        begin(drafter, s)
    if s.drafting:
        own = drafter_cursor(s)
        s.cursor.cut(0 if own is None else own.length)


def resume(target: Target, s: Sequence) -> None:
    """Begin to draft for a sequence that was read without: its text is read once more for the hidden states, in pieces as that of a new one."""
    s.drafting = True
    s.postponed = 0
    s.filling = True
    if not target.rolls_back:
        target.release([s.cursor.slot])
    join(s.speculation.drafter, s)


def listener(s: Sequence) -> Drafter | None:
    """The drafter that is told the hidden states of a new sequence."""
    drafter = s.speculation.drafter
    return drafter if drafter is not None and s.has_drafter and drafter.needs.hidden else None


def num_unread(s: Sequence) -> int:
    """Tokens that are to be read of a new sequence, and of the second one beside it."""
    return sum(cursor.num_unread(text) for cursor, text, _ in readings(s))


def readings(s: Sequence) -> list[Reading]:
    """Its text in the target, and the text of the second sequence in its model."""
    own = Reading(s.cursor, s.token_ids, s.request.source_token_ids)
    return [own] if s.second is None else [own, Reading(s.second, s.second_text)]


def read_on(s: Sequence, count: int) -> None:
    """Read the next so many tokens of a new sequence, those of its second sequence last, and tell the drafter their states where it needs them."""
    drafter = listener(s)
    for cursor, text, _ in readings(s):
        start = cursor.length
        piece = min(count, cursor.num_unread(text))
        count -= piece
        if not piece:
            continue
        layers = () if drafter is None or cursor is not s.cursor else drafter.needs.hidden
        states = cursor.read(text, piece, layers)
        if layers:
            _show(drafter, s, states, start)


def score_mixed(
    target: Mixing,
    sequences: Seq[Sequence],
    tree: TokenTree,
    hidden: Seq[int],
    riding: Mapping[Sequence, int],
) -> Scores:
    """Score a tree for some sequences in the same forward pass that reads the next so many tokens of new ones, whose drafters are told their states."""
    starts = {s: s.cursor.length for s in riding}
    pieces = {s.cursor.slot: s.token_ids[starts[s] : starts[s] + count] for s, count in riding.items()}
    drafters = {s: listener(s) for s in riding}
    needed = [drafter.needs.hidden for drafter in drafters.values() if drafter is not None]
    layers = sorted({*hidden, *(layer for needs in needed for layer in needs)})
    scores, read = target.score_mixed(slots_of(sequences), tree, pieces, hidden=layers)
    for row, (s, count) in enumerate(riding.items()):
        _show(drafters[s], s, states_of(read, row, count), starts[s])
    return scores


def _show(drafter: Drafter | None, s: Sequence, states: Scores, start: int) -> None:
    offers = s.speculation.offers
    if drafter is None:
        return
    if s.state is None:
        s.unread.append(Unread(states.hidden, 0))
    elif offers.read is not None and offers.cursor is not None:
        try:
            (s.state,) = offers.read([s.state], states, start)
        except Exception as error:
            switch_off(drafter, s, error)


def _gathered(s: Sequence) -> Scores | None:
    """Hidden states that a drafter was not told yet, of the whole text but its last token."""
    if not s.unread:
        return None
    hidden = {
        layer: np.concatenate([states.hidden[layer] for states in s.unread], 1)
        for layer in s.unread[0].hidden
    }
    s.unread.clear()
    root = TokenTree.roots(np.array(s.token_ids[-1:], np.int64))
    return Scores(root, np.empty((1, 1, 0), np.float32), hidden)


def read_whole(drafter: Drafter | None, sequences: Seq[Sequence]) -> None:
    """Read new sequences to their last tokens, and let a drafter that is told of every step begin.

    Equal texts, such as the samples of one prompt, are read once and copied, unless hidden states of each are needed.
    Other drafters begin before their first draft: one whose drafts do not pay reads no prompt.
    """
    told = [s for s in sequences if listener(s) is not None]
    read_each_once(
        [Reading(s.cursor, s.token_ids, s.request.source_token_ids) for s in sequences if s not in told]
    )
    read_each_once([Reading(s.second, s.second_text) for s in sequences if s.second is not None])
    behind = [s for s in told if s.cursor.num_unread(s.token_ids)]
    starts = [s.cursor.length for s in behind]
    layers = () if drafter is None else drafter.needs.hidden
    states = read_all([Reading(s.cursor, s.token_ids) for s in behind], layers)
    for s, own, start in zip(behind, states, starts, strict=True):
        _show(drafter, s, own, start)
    if drafter is not None and drafter.needs.each_step:
        for s in sequences:
            if s.has_drafter and s.state is None:
                begin(drafter, s, _gathered(s))
