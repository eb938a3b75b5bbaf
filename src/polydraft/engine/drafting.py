"""Asking a drafter for drafts without trusting it: one that raises is switched off and the text is unharmed.

Every call is guarded, and only the requests that fail lose their drafts. `propose` and `aux` are pure: a failing batch is asked
again one row at a time. `observe` changes states: after a failure of the batch each request begins anew from its committed tokens
and is told again, alone. A state whose `release` fails is forgotten; what it holds is the drafter's to mend. What a drafter returns is
checked before it is scored.

Rounds without any draft are not told: a drafter that pauses is not called at all, and reads what it missed in one go when it
is asked again, with the hidden states that it needs. Only one that says so is told of every round. Auxiliary rows ride in the
rounds for which the policy asks for drafts, and in no others.
"""

import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from polydraft.core.batch import scatter, select
from polydraft.core.budget import Budget
from polydraft.core.drafts import Draft
from polydraft.core.geometry import chains
from polydraft.core.methods import Drafter, Verifier
from polydraft.core.outcomes import Outcome
from polydraft.core.targets import AuxRows, Mixing, Scores, Target
from polydraft.core.trees import TokenTree
from polydraft.drafters.base import as_one_round, teach_each
from polydraft.engine.sequence import Sequence
from polydraft.engine.speculation import Speculation
from polydraft.engine.structured import pruned
from polydraft.errors import DrafterWarning, DraftWorkerError, IncompatibleError, place
from polydraft.models.slots import given_back_on_error
from polydraft.verifiers import inputs

T = TypeVar("T")
PIECE, FIRST, FEWEST = 512, 64, 16
"""Tokens of a prompt that a draft model reads in a round at most; beside others, before any was timed; and at least."""
PIECE_SECONDS = 0.05
"""That a piece takes beside others; the last one may be twice as long."""


def _switch_off(drafter: Drafter, sequence: Sequence, error: Exception) -> None:
    if isinstance(error, DraftWorkerError):  # no failure of this request's
        raise error
    sequence.drafting = False
    _note(sequence, error)
    release(drafter, [sequence])


def _note(sequence: Sequence, error: Exception) -> None:
    at = place(error)
    reason = f"{type(error).__name__}: {error}" + (f", at {at}" if at else "")
    sequence.sample.stats.drafter_error = sequence.sample.stats.drafter_error or reason
    warnings.warn(
        f"the drafter failed for request {sequence.request.id!r} and is off for it now ({reason}); its text goes on without drafts.",
        DrafterWarning,
        stacklevel=2,
    )


def join(target: Target, drafter: Drafter | None, s: Sequence) -> None:
    """Before a new sequence is read: a drafter that reads on begins, and the slot forgets what it holds of which states are needed."""
    if drafter is None or not s.drafting or not drafter.needs.hidden:
        return
    num_held, held = 0, s.speculation.offers.held
    if held is not None:
        _begin(drafter, s, len(s.token_ids))
        num_held = 0 if s.state is None else held(s.state)
    assert s.slot is not None
    if s.drafting and target.lengths[s.slot] > num_held:
        target.cut(s.slot, num_held)


def resume(target: Target, s: Sequence) -> None:
    """Begin to draft for a sequence that was read without: the hidden states of its text are computed once more."""
    drafter, s.drafting, s.postponed = s.speculation.drafter, True, 0
    assert drafter is not None and s.slot is not None
    target.release([s.slot])
    (states,) = _states(target, drafter, [s], [s.token_ids[:-1]])
    _begin(drafter, s, len(s.token_ids), states)


def reads_on(s: Sequence) -> bool:
    """Whether a new sequence may be read in pieces."""
    drafter = s.speculation.drafter
    return drafter is None or not s.drafting or not drafter.needs.hidden or s.speculation.offers.held is not None


def read_on(target: Target, s: Sequence, count: int) -> None:
    """Append the next so many tokens of a new sequence to its cache, and tell the drafter their states where it needs them."""
    drafter = s.speculation.drafter if s.state is not None else None
    held = _held(target, s)
    (states,) = _states(target, drafter, [s], [s.token_ids[held : held + count]])
    _show(drafter, s, states, held)


def score_mixed(
    target: Mixing, sequences: Seq[Sequence], tree: TokenTree, hidden: Seq[int], riding: Mapping[Sequence, int]
) -> Scores:
    """Score a tree for some sequences in the same pass that reads the next so many tokens of new ones, whose drafters are told their states."""
    held = {s: int(target.lengths[s.slot]) for s in riding}
    pieces = {s.slot: s.token_ids[held[s] : held[s] + count] for s, count in riding.items() if s.slot is not None}
    drafters = {s: s.speculation.drafter if s.state is not None else None for s in riding}
    layers = sorted({*hidden, *(layer for drafter in drafters.values() if drafter is not None for layer in drafter.needs.hidden)})
    scores, read = target.score_mixed([s.slot for s in sequences if s.slot is not None], tree, pieces, hidden=layers)
    for b, (s, count) in enumerate(riding.items()):
        row = select(read, [b])
        _show(drafters[s], s, replace(row, hidden={layer: x[:, :count] for layer, x in row.hidden.items()}), held[s])
    return scores


def _held(target: Target, s: Sequence) -> int:
    return 0 if s.slot is None else int(target.lengths[s.slot])


def _show(drafter: Drafter | None, s: Sequence, states: Scores, start: int) -> None:
    offers = s.speculation.offers
    if drafter is not None and offers.read is not None and offers.held is not None:
        try:
            (s.state,) = offers.read([s.state], states, start)
        except Exception as error:
            _switch_off(drafter, s, error)


def fill(target: Target, drafter: Drafter | None, sequences: Seq[Sequence]) -> None:
    """Fill the caches of new sequences with all their tokens but the last, those left out that their slots still hold, and let a drafter
    that is told of every round begin.

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
    states = _states(target, drafter, read, [s.token_ids[held[s] : -1] for s in read]) if read else []
    copied = whole | {s.context: s.slot for s in read}
    for s in behind:
        source = copied[s.context]
        if s not in read and source is not None and s.slot is not None:
            target.cut(s.slot, 0)
            target.copy(source, s.slot, len(s.token_ids) - 1)
    if drafter is not None and drafter.needs.each_round:
        state_of = {s.slot: state for s, state in zip(read, states, strict=True)}
        for s in sequences:
            if s.state is not None and s.slot in state_of:
                _show(drafter, s, state_of[s.slot], held[s])
            elif s.drafting and s.state is None:
                _begin(drafter, s, len(s.token_ids), state_of.get(s.slot))


def _first_of_each(sequences: Seq[Sequence]) -> list[Sequence]:
    """Sequences of which no earlier one has the same text."""
    return list({s.context: s for s in reversed(sequences)}.values())[::-1]


def _states(target: Target, drafter: Drafter | None, sequences: Seq[Sequence], token_ids: Seq[Seq[int]]) -> list[Scores]:
    """Append texts to the sequences' caches; the hidden states of each that the drafter needs."""
    layers = () if drafter is None else drafter.needs.hidden
    scores = target.prefill([s.slot for s in sequences if s.slot is not None], token_ids, hidden=layers)
    rows = [select(scores, [b]) for b in range(len(token_ids))] if layers else [scores] * len(token_ids)
    return [
        replace(row, hidden={layer: x[:, : len(ids)] for layer, x in row.hidden.items()})
        for row, ids in zip(rows, token_ids, strict=True)
    ]


class Pace:
    """How many tokens of a long text a drafter's own model reads in a round: as many as take PIECE_SECONDS where others wait for the round."""

    def __init__(self) -> None:
        self._token_seconds = 0.0

    def count(self, beside: bool) -> int:
        """beside: whether others wait."""
        if not beside:
            return PIECE
        return min(max(int(PIECE_SECONDS / self._token_seconds), FEWEST), PIECE) if self._token_seconds else FIRST

    def learn(self, count: int, seconds: float) -> None:
        """So many tokens took so long."""
        self._token_seconds = seconds / count


def begin(drafter: Drafter, sequences: Seq[Sequence], pace: Pace | None, *, beside: bool = False) -> list[Sequence]:
    """Give each sequence without one a drafter state that has read all its committed tokens; those that have to wait for theirs.

    A long text is read over several rounds, one text a round. Meanwhile its sequence has no drafts; where these decide the output, with a seed above
    temperature 0, it is left out of the rounds; without a pace all of it is read at once then. beside: whether others wait for this round.
    """
    late, count, spent = list[Sequence](), pace.count(beside) if pace else PIECE, False
    for s in [s for s in sequences if s.drafting and s.state is None]:
        start = perf_counter()
        at_once = pace is None and _decided_by_drafts(s)
        if at_once or ((not spent or len(s.token_ids) <= count) and _read_ahead(drafter, s, count)):
            _begin(drafter, s, len(s.token_ids))
            continue
        if pace and not spent and s.drafting:
            pace.learn(count, perf_counter() - start)
            spent = True
        if s.drafting and _decided_by_drafts(s):
            late.append(s)
    return late


def _decided_by_drafts(s: Sequence) -> bool:
    return s.request.params.seed is not None and not s.request.params.greedy


def _read_ahead(drafter: Drafter, s: Sequence, count: int) -> bool:
    """Whether a drafter has read enough of a text to begin; so many tokens more are read where it has not."""
    read_ahead = s.speculation.offers.read_ahead
    if read_ahead is None:
        return True
    try:
        return read_ahead(s.token_ids, count)
    except Exception as error:
        _switch_off(drafter, s, error)
        return False


def _begin(drafter: Drafter, s: Sequence, length: int, known: Scores | None = None) -> None:
    """Begin with so many of the committed tokens. known: hidden states of all of them but the last, where there are more."""
    request = replace(s.request, prompt_token_ids=tuple(s.token_ids[:length]), slot=s.slot, second_slot=s.second_slot)
    try:
        with given_back_on_error():
            (s.state,) = drafter.start([request])
        s.num_read = length
        if drafter.needs.hidden and known is not None:  # all of them
            read = s.speculation.offers.read
            assert read is not None  # as was checked when the engine was built
            (s.state,) = read([s.state], known)
    except Exception as error:
        _switch_off(drafter, s, error)


def release(drafter: Drafter, sequences: Seq[Sequence]) -> None:
    """Give back what the sequences' states hold, each on its own: one that fails keeps no other from it."""
    for s in sequences:
        s.unread.clear()
        if s.state is not None:
            state, s.state = s.state, None
            try:
                drafter.release([state])
            except Exception as error:
                _note(s, error)


def teach(drafter: Drafter, sequence: Sequence) -> None:
    """Tell a drafter that learns from outputs what a finished sequence emitted."""
    emitted = sequence.token_ids[sequence.num_prompt_tokens :]
    try:
        if emitted:
            teach_each([drafter], emitted)
    except Exception as error:
        _note(sequence, error)


def _ask(
    drafter: Drafter, sequences: Seq[Sequence], live: list[int], ask: Callable[[list[int]], T]
) -> tuple[T | None, list[int]]:
    """`ask(rows)` for the rows that draft, and those rows; where it fails each is asked alone, and once more those that did not fail."""
    with suppress(Exception):
        return ask(live), live
    for b in live:
        try:
            ask([b])
        except Exception as error:
            _switch_off(drafter, sequences[b], error)
    live = [b for b in live if sequences[b].drafting]
    try:
        return (ask(live), live) if live else (None, [])
    except Exception as error:
        for b in live:
            _switch_off(drafter, sequences[b], error)
        return None, []


def propose(
    target: Target,
    drafter: Drafter,
    verifier: Verifier,
    sequences: Seq[Sequence],
    budgets: Seq[Budget],
    roots: Int[Tensor, " B"],
    vocab_size: int,
) -> Draft:
    """One draft for the whole batch, whose states have begun, that the verifier is exact for; sequences whose drafting is off get bare roots, and
    those with tokens to copy those, without a call of the drafter: it is told of them when it is asked again."""
    for s, budget in zip(sequences, budgets, strict=True):
        s.copying = s.drafting and bool(budget.copied)
    copying, others = ([b for b, s in enumerate(sequences) if s.copying is copies] for copies in (True, False))
    if copying:
        copied = _copied([sequences[b] for b in copying], [budgets[b] for b in copying])
        if not others:
            return copied
        rest = [sequences[b] for b in others], [budgets[b] for b in others], roots[others]
        return Draft.scatter([copying, others], [copied, propose(target, drafter, verifier, *rest, vocab_size)])
    begun = [b for b, s in enumerate(sequences) if s.drafting and s.state is not None]
    _catch_up(target, drafter, [sequences[b] for b in begun if sequences[b].num_read < len(sequences[b].token_ids)])
    live = [b for b in begun if sequences[b].drafting]
    if not live:
        return Draft.bare(roots)

    def ask(rows: list[int]) -> Draft:
        draft = drafter.propose([sequences[b].state for b in rows], [budgets[b] for b in rows])
        params = [sequences[b].request.params for b in rows]
        draft = pruned(draft, [sequences[b].token_ids for b in rows], params)
        greedy = [verifier.info.lossless and p.greedy for p in params]
        if draft.shape not in verifier.info.shapes and not all(greedy):
            raise IncompatibleError(
                f"a draft of shape {draft.shape.name} was proposed; expected one that verifier {verifier.info.name!r} is exact for. "
                "Give budgets of other trees, or another verifier."
            )
        inputs.check_draft(draft, vocab_size, roots if len(rows) == len(roots) else roots[rows], greedy)
        if not all(sequences[b].sample.stats.drafted_tokens for b in rows):  # a request's first draft
            inputs.check_draft_probs(draft)
        return draft

    draft, live = _ask(drafter, sequences, live, ask)
    if draft is None:
        return Draft.bare(roots)
    idle = [b for b in range(len(sequences)) if b not in live]
    return Draft.scatter([live, idle], [draft, Draft.bare(roots[idle])]) if idle else draft


def _copied(sequences: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
    """The chains that sequences copy, as far as the forms of their outputs allow them."""
    tree = chains([[s.token_ids[-1], *budget.copied] for s, budget in zip(sequences, budgets, strict=True)])
    copied = replace(Draft.point_mass(tree), confidence=torch.ones(tree.tokens.shape))
    return pruned(copied, [s.token_ids for s in sequences], [s.request.params for s in sequences])


def _catch_up(target: Target, drafter: Drafter, behind: Seq[Sequence]) -> None:
    """Tell the drafter all that these sequences emitted since it was last told, as one round whose draft was right."""
    if not behind:
        return
    outcome, scores = as_one_round([s.token_ids[s.num_read - 1] for s in behind], [s.token_ids[s.num_read :] for s in behind])
    layers = drafter.needs.hidden
    unread = {layer: [torch.cat([states[layer][b] for states, b in s.unread]) for s in behind] for layer in layers}
    hidden = {layer: pad_sequence(rows, batch_first=True) for layer, rows in unread.items()}
    _tell(target, drafter, behind, outcome, replace(scores, hidden=hidden))
    for s in behind:
        s.num_read = len(s.token_ids)
        s.unread.clear()


def aux(speculation: Speculation, sequences: Seq[Sequence], room: int) -> AuxRows | None:
    """The auxiliary rows that the drafter wants in the target's pass; sequences whose drafting is off get idle ones.

    room: rows that the drafted tree leaves in the pass; where they are too few, the tree goes alone.
    """
    drafter, offered, live = speculation.drafter, speculation.offers.aux, [b for b, s in enumerate(sequences) if s.drafting]
    if drafter is None or offered is None or not drafter.needs.aux or not live:
        return None
    rows, live = _ask(drafter, sequences, live, lambda rows: offered([sequences[b].state for b in rows]))
    if rows is None or rows.nodes.shape[1] > room:
        return None
    idle = [b for b in range(len(sequences)) if b not in live]
    resting = (x.new_zeros(len(idle), *x.shape[1:]) for x in (rows.inputs, rows.positions, rows.nodes, rows.mask))
    return scatter([live, idle], [rows, AuxRows(*resting)]) if idle else rows


def observe(target: Target, drafter: Drafter, sequences: Seq[Sequence], outcome: Outcome, scores: Scores) -> None:
    """Tell the drafter what the round kept, unless the pass carried nothing of its own. The target's caches hold it already."""
    bare = scores.tree.num_nodes == 1 and scores.aux_logits is None and not drafter.needs.every_round
    untold = [b for b, s in enumerate(sequences) if s.drafting and (bare or s.copying)]
    for b in untold if drafter.needs.hidden else ():
        nodes = [0, *outcome.lists[0][b]]
        sequences[b].unread.append(
            (scores.hidden, b) if bare else ({k: x[b : b + 1, nodes] for k, x in scores.hidden.items()}, 0)
        )
    live = [b for b, s in enumerate(sequences) if s.drafting and s.state is not None and b not in untold]
    if not live:
        return
    live_outcome, live_scores = (outcome, scores) if len(live) == len(sequences) else select((outcome, scores), live)
    observers = [sequences[b] for b in live]
    _tell(target, drafter, observers, live_outcome, live_scores)
    for s, accepted in zip(observers, live_outcome.num_accepted.tolist(), strict=True):
        s.num_read = len(s.token_ids) + accepted + 1
        if s.speculation.offers.report is not None and s.drafting:
            s.sample.stats.drafter_counts = dict(s.speculation.offers.report(s.state)) or None


def _tell(target: Target, drafter: Drafter, sequences: Seq[Sequence], outcome: Outcome, scores: Scores) -> None:
    """One round for all; where that fails, each begins anew with what it knew before and is told alone.

    target: to make the hidden states of what it knew once more, in the sequence's own slot.
    """

    def tell(told: Seq[Sequence], outcome: Outcome, scores: Scores) -> None:
        states = drafter.observe([s.state for s in told], outcome, scores)
        for s, state in zip(told, states, strict=True):
            s.state = state

    with suppress(Exception):
        tell(sequences, outcome, scores)
        return
    for b, s in enumerate(sequences):
        release(drafter, [s])
        states = _once_more(target, drafter, s, outcome.emitted(scores.tree)[b]) if drafter.needs.hidden else None
        _begin(drafter, s, s.num_read, states)
        try:
            if s.drafting:
                tell([s], *select((outcome, scores), [b]))
        except Exception as error:
            _switch_off(drafter, s, error)


def _once_more(target: Target, drafter: Drafter, s: Sequence, emitted: Seq[int]) -> Scores | None:
    """Hidden states of what a drafter was told of a sequence, less its last token: the cache is emptied and filled again."""
    assert s.slot is not None
    target.release([s.slot])
    (states,) = _states(target, drafter, [s], [[*s.token_ids[: s.num_read], *emitted[:-1]]])
    num_observed = s.num_read - 1
    return replace(states, hidden={layer: x[:, :num_observed] for layer, x in states.hidden.items()}) if num_observed else None
