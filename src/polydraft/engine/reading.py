"""Texts of new sequences are read into the target's cache, and their hidden states shown to drafters that need them."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from polydraft.core.batch import select
from polydraft.core.methods import Drafter
from polydraft.core.targets import Mixing, Scores, Target
from polydraft.core.trees import TokenTree
from polydraft.engine.drafter_state import begin_one, switch_off
from polydraft.engine.sequence import Sequence, Unread


def join(target: Target, drafter: Drafter | None, s: Sequence) -> None:
    """Before a new sequence is read: a drafter that reads on begins, and the slot forgets what it holds of which states are needed."""
    if drafter is None or not s.drafting or not drafter.needs.hidden:
        return
    num_held = 0
    held = s.speculation.offers.held
    if held is not None:
        begin_one(drafter, s, len(s.token_ids))
        num_held = 0 if s.state is None else held(s.state)
    assert s.slot is not None
    if s.drafting and target.lengths[s.slot] > num_held:
        target.cut(s.slot, num_held)


def resume(target: Target, s: Sequence) -> None:
    """Begin to draft for a sequence that was read without: its text is read once more for the hidden states, in pieces as that of a new one."""
    s.drafting = True
    s.postponed = 0
    s.filling = True
    if not target.rolls_back and s.slot is not None:
        target.release([s.slot])
    join(target, s.speculation.drafter, s)


def reader(s: Sequence) -> Drafter | None:
    """The drafter that is told the hidden states of a new sequence."""
    drafter = s.speculation.drafter
    return drafter if drafter is not None and s.drafting and drafter.needs.hidden else None


def read_on(target: Target, s: Sequence, count: int) -> None:
    """Append the next so many tokens of a new sequence to its cache, and tell the drafter their states where it needs them."""
    drafter = reader(s)
    held = _held(target, s)
    (states,) = states_of(target, drafter, [s], [s.token_ids[held : held + count]])
    _show(drafter, s, states, held)


def score_mixed(
    target: Mixing,
    sequences: Seq[Sequence],
    tree: TokenTree,
    hidden: Seq[int],
    riding: Mapping[Sequence, int],
) -> Scores:
    """Score a tree for some sequences in the same forward pass that reads the next so many tokens of new ones, whose drafters are told their states."""
    held = {s: int(target.lengths[s.slot]) for s in riding}
    pieces = {
        s.slot: s.token_ids[held[s] : held[s] + count] for s, count in riding.items() if s.slot is not None
    }
    drafters = {s: reader(s) for s in riding}
    layers = sorted(
        {
            *hidden,
            *(
                layer
                for drafter in drafters.values()
                if drafter is not None
                for layer in drafter.needs.hidden
            ),
        }
    )
    scores, read = target.score_mixed(
        [s.slot for s in sequences if s.slot is not None], tree, pieces, hidden=layers
    )
    for b, (s, count) in enumerate(riding.items()):
        row = select(read, [b])
        _show(
            drafters[s],
            s,
            replace(row, hidden={layer: x[:, :count] for layer, x in row.hidden.items()}),
            held[s],
        )
    return scores


def _held(target: Target, s: Sequence) -> int:
    return 0 if s.slot is None else int(target.lengths[s.slot])


def _show(drafter: Drafter | None, s: Sequence, states: Scores, start: int) -> None:
    offers = s.speculation.offers
    if drafter is None:
        return
    if s.state is None:
        s.unread.append(Unread(states.hidden, 0))
    elif offers.read is not None and offers.held is not None:
        try:
            (s.state,) = offers.read([s.state], states, start)
        except Exception as error:
            switch_off(drafter, s, error)


def _gathered(s: Sequence) -> Scores | None:
    """Hidden states that a drafter was not told yet, of the whole text but its last token."""
    if not s.unread:
        return None
    hidden = {
        layer: torch.cat([states.hidden[layer] for states in s.unread], 1) for layer in s.unread[0].hidden
    }
    s.unread.clear()
    return Scores(TokenTree.roots(torch.tensor(s.token_ids[-1:])), torch.empty(1, 1, 0), hidden)


def fill(target: Target, drafter: Drafter | None, sequences: Seq[Sequence]) -> None:
    """Fill the caches of new sequences with all their tokens but the last, those left out that their slots still hold, and let a drafter
    that is told of every step begin.

    Equal texts, such as the samples of one prompt, are read once and copied, unless hidden states of each are needed.
    Others begin before their first draft: one whose drafts do not pay reads no prompt.
    """
    if drafter is not None and drafter.needs.hidden and not all(s.drafting for s in sequences):
        fill(target, None, [s for s in sequences if not s.drafting])
        sequences = [s for s in sequences if s.drafting]
    held = {s: _held(target, s) for s in sequences}
    behind = [s for s in sequences if len(s.token_ids) - 1 > held[s]]
    whole = {s.context: s.slot for s in sequences if s not in behind}
    read = behind
    if drafter is None or not drafter.needs.hidden:
        read = [s for s in _first_of_each(behind) if s.context not in whole]
    states = states_of(target, drafter, read, [s.token_ids[held[s] : -1] for s in read]) if read else []
    copied = whole | {s.context: s.slot for s in read}
    for s in behind:
        source = copied[s.context]
        if s not in read and source is not None and s.slot is not None:
            target.cut(s.slot, 0)
            target.copy(source, s.slot, len(s.token_ids) - 1)
    if drafter is not None and drafter.needs.each_step:
        state_of = {s.slot: state for s, state in zip(read, states, strict=True)}
        for s in sequences:
            if s.drafting and drafter.needs.hidden and s.slot in state_of:
                _show(drafter, s, state_of[s.slot], held[s])
            if s.drafting and s.state is None:
                begin_one(drafter, s, len(s.token_ids), _gathered(s))


def _first_of_each(sequences: Seq[Sequence]) -> list[Sequence]:
    """Sequences of which no earlier one has the same text."""
    return list({s.context: s for s in reversed(sequences)}.values())[::-1]


def states_of(
    target: Target, drafter: Drafter | None, sequences: Seq[Sequence], token_ids: Seq[Seq[int]]
) -> list[Scores]:
    """Append texts to the sequences' caches; the hidden states of each that the drafter needs."""
    layers = () if drafter is None else drafter.needs.hidden
    scores = target.prefill([s.slot for s in sequences if s.slot is not None], token_ids, hidden=layers)
    rows = [select(scores, [b]) for b in range(len(token_ids))] if layers else [scores] * len(token_ids)
    return [
        replace(row, hidden={layer: x[:, : len(ids)] for layer, x in row.hidden.items()})
        for row, ids in zip(rows, token_ids, strict=True)
    ]
