"""Asking a drafter for drafts without trusting it: one that raises is switched off and the text is unharmed.

Every call is guarded, and only the requests that fail lose their drafts. `propose` and `extra_nodes` are pure: a failing batch is asked
again one row at a time. `observe` changes states: after a failure of the batch each request begins anew from its committed tokens, in pieces as a new
one, and is told of the next step alone. What a drafter returns is checked before it is scored.

Steps without any draft are not told: a drafter that pauses is not called at all, and reads what it missed in one go when it
is asked again, with the hidden states that it needs. Only one that says so is told of every step. Auxiliary rows ride in the
steps for which the policy asks for drafts, and in no others.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np
from jaxtyping import Int

from polydraft.core.batch import scatter, select, stacked
from polydraft.core.budget import Budget
from polydraft.core.drafts import Draft
from polydraft.core.geometry import chains
from polydraft.core.methods import Drafter, Verifier
from polydraft.core.outcomes import Outcome
from polydraft.core.targets import Scores
from polydraft.core.trees import TokenTree
from polydraft.drafters.base import as_one_step
from polydraft.engine.drafter_state import begin_anew, switch_off
from polydraft.engine.grammar import pruned
from polydraft.engine.sequence import Sequence, Unread
from polydraft.engine.speculation import Speculation
from polydraft.errors import IncompatibleError
from polydraft.verifiers import inputs

T = TypeVar("T")


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
            switch_off(drafter, sequences[b], error)
    live = [b for b in live if sequences[b].drafting]
    try:
        return (ask(live), live) if live else (None, [])
    except Exception as error:
        for b in live:
            switch_off(drafter, sequences[b], error)
        return None, []


def propose(
    drafter: Drafter,
    verifier: Verifier,
    sequences: Seq[Sequence],
    budgets: Seq[Budget],
    roots: Int[np.ndarray, " B"],
    vocab_size: int,
) -> Draft:
    """One draft for the whole batch, whose states have begun, that the verifier is exact for; sequences whose drafting is off get bare roots, and
    those with tokens to copy those, without a call of the drafter: it is told of them when it is asked again."""
    for s, budget in zip(sequences, budgets, strict=True):
        s.copying = s.drafting and bool(budget.copied)
    copying = [b for b, s in enumerate(sequences) if s.copying]
    if not copying:
        return _proposed(drafter, verifier, sequences, budgets, roots, vocab_size)
    copied = _copied([sequences[b] for b in copying], [budgets[b] for b in copying])
    others = [b for b, s in enumerate(sequences) if not s.copying]
    if not others:
        return copied
    rest = [sequences[b] for b in others], [budgets[b] for b in others], roots[others]
    return Draft.scatter([copying, others], [copied, _proposed(drafter, verifier, *rest, vocab_size)])


def _proposed(
    drafter: Drafter,
    verifier: Verifier,
    sequences: Seq[Sequence],
    budgets: Seq[Budget],
    roots: Int[np.ndarray, " B"],
    vocab_size: int,
) -> Draft:
    """The drafter's own, of sequences that have nothing to copy."""
    live = _up_to_date(drafter, sequences)
    if not live:
        return Draft.bare(roots)

    def ask(rows: list[int]) -> Draft:
        draft = drafter.propose([sequences[b].state for b in rows], [budgets[b] for b in rows])
        own_roots = roots if len(rows) == len(roots) else roots[rows]
        return _checked(draft, verifier, [sequences[b] for b in rows], own_roots, vocab_size)

    draft, live = _ask(drafter, sequences, live, ask)
    if draft is None:
        return Draft.bare(roots)
    idle = [b for b in range(len(sequences)) if b not in live]
    return Draft.scatter([live, idle], [draft, Draft.bare(roots[idle])]) if idle else draft


def _up_to_date(drafter: Drafter, sequences: Seq[Sequence]) -> list[int]:
    """Rows whose drafter has begun; it is told what it missed of them."""
    begun = [b for b, s in enumerate(sequences) if s.drafting and s.state is not None]
    tell_missed(drafter, [sequences[b] for b in begun if sequences[b].num_told < len(sequences[b].token_ids)])
    return [b for b in begun if sequences[b].drafting]


def _checked(
    draft: Draft,
    verifier: Verifier,
    sequences: Seq[Sequence],
    roots: Int[np.ndarray, " B"],
    vocab_size: int,
) -> Draft:
    """What a drafter proposed for these sequences, without what their requests do not allow.

    Raises:
        IncompatibleError: the verifier is not exact for trees of this shape.
        InvalidInputError: it is no draft behind these roots.
    """
    params = [s.request.params for s in sequences]
    draft = pruned(draft, [s.token_ids for s in sequences], params)
    greedy = [verifier.info.lossless and p.greedy for p in params]
    if draft.shape not in verifier.info.shapes and not all(greedy):
        raise IncompatibleError(
            f"a draft of shape {draft.shape.name} was proposed; expected one that verifier {verifier.info.name!r} is exact for. "
            "Give budgets of other trees, or another verifier."
        )
    inputs.check_draft(draft, vocab_size, roots, greedy)
    is_first = not all(s.sample.stats.drafted_tokens for s in sequences)
    if is_first:
        inputs.check_draft_probs(draft)
    return draft


def _copied(sequences: Seq[Sequence], budgets: Seq[Budget]) -> Draft:
    """The chains that sequences copy, as far as the forms of their outputs allow them."""
    tree = chains([[s.token_ids[-1], *budget.copied] for s, budget in zip(sequences, budgets, strict=True)])
    copied = replace(Draft.point_mass(tree), confidence=np.ones(tree.tokens.shape, np.float32))
    return pruned(copied, [s.token_ids for s in sequences], [s.request.params for s in sequences])


def tell_missed(drafter: Drafter, behind: Seq[Sequence]) -> None:
    """Tell the drafter all that these sequences emitted since it was last told, as one step whose draft was right."""
    if not behind:
        return
    outcome, scores = as_one_step(
        [s.token_ids[s.num_told - 1] for s in behind], [s.token_ids[s.num_told :] for s in behind]
    )
    layers = drafter.needs.hidden
    unread = {
        layer: [np.concatenate([states.hidden[layer][states.row] for states in s.unread]) for s in behind]
        for layer in layers
    }
    hidden = {layer: stacked(rows) for layer, rows in unread.items()}
    _tell(drafter, behind, outcome, replace(scores, hidden=hidden))
    for s in behind:
        s.num_told = len(s.token_ids)
        s.unread.clear()


def extra_nodes(speculation: Speculation, sequences: Seq[Sequence], room: int) -> TokenTree | None:
    """What the drafter wants scored beside its draft, below the last tokens; sequences whose drafting is off get no such nodes.

    room: rows that the drafted tree leaves in the forward pass; where they are too few, the tree goes alone.
    """
    drafter = speculation.drafter
    offered = speculation.offers.extra_nodes
    live = [b for b, s in enumerate(sequences) if s.has_drafter]
    if drafter is None or offered is None or not live:
        return None
    nodes, live = _ask(drafter, sequences, live, lambda rows: offered([sequences[b].state for b in rows]))
    if nodes is None or nodes.num_nodes - 1 > room:
        return None
    idle = [b for b in range(len(sequences)) if b not in live]
    bare = TokenTree.roots(np.zeros(len(idle), np.int64))
    return scatter([live, idle], [nodes, bare]) if idle else nodes


def observe(drafter: Drafter, sequences: Seq[Sequence], outcome: Outcome, scores: Scores) -> None:
    """Tell the drafter what the step accepted, unless the forward pass carried nothing of its own. The target's KV caches hold it already."""
    bare = scores.tree.num_nodes == 1 and scores.extra_logits is None and not drafter.needs.every_step
    untold = [b for b, s in enumerate(sequences) if s.has_drafter and (bare or s.copying)]
    if drafter.needs.hidden:
        for b in untold:
            sequences[b].unread.append(_unread(scores, b, None if bare else outcome.lists.paths[b]))
    live = [b for b, s in enumerate(sequences) if s.drafting and s.state is not None and b not in untold]
    if not live:
        return
    if len(live) < len(sequences):
        outcome, scores = select((outcome, scores), live)
    observers = [sequences[b] for b in live]
    _tell(drafter, observers, outcome, scores)
    for s, accepted in zip(observers, outcome.num_accepted.tolist(), strict=True):
        s.num_told = len(s.token_ids) + accepted + 1
        _count(s)


def _count(s: Sequence) -> None:
    """What its drafter counts goes to the statistics."""
    account = s.speculation.offers.account
    if account is not None and s.drafting:
        s.sample.stats.drafter_counts = dict(account(s.state).counts) or None


def _unread(scores: Scores, b: int, path: Seq[int] | None) -> Unread:
    """The states of one sequence's step, for when its drafter is asked again. path: the accepted nodes; None: the step had no draft."""
    if path is None:
        return Unread(scores.hidden, b)
    nodes = [0, *path]
    return Unread({layer: states[b : b + 1, nodes] for layer, states in scores.hidden.items()}, 0)


def _tell(drafter: Drafter, sequences: Seq[Sequence], outcome: Outcome, scores: Scores) -> None:
    """One step for all but those that were in a step that failed: each of these is told alone."""
    suspects = [[b] for b, s in enumerate(sequences) if s.is_suspect]
    for rows in [*suspects, [b for b, s in enumerate(sequences) if not s.is_suspect]]:
        some = [sequences[b] for b in rows]
        if not some:
            continue
        told = (outcome, scores) if len(some) == len(sequences) else select((outcome, scores), rows)
        try:
            states = drafter.observe([s.state for s in some], *told)
        except Exception as error:
            for s in some:
                begin_anew(drafter, s, error)
            continue
        for s, state in zip(some, states, strict=True):
            s.state = state
            s.is_suspect = False
