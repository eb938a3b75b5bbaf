"""One round for a batch of running sequences: draft, score, verify, keep.

propose   a token tree for each sequence, within the plan's budget
score     every distinct prefix once, in one pass of the target
law       logits -> p, each node with the context of its own path
verify    the rule's verdict, then two draws: stop node and extra token
commit    the caches keep the path; the drafter learns what was kept
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft import sampling
from polydraft.core import AuxRows, Draft, Drafter, NoiseKey, Outcome, Scores, Target, Verifier
from polydraft.engine import drafting
from polydraft.engine.plan import Plan, remember, root_overlap
from polydraft.engine.sequence import Sequence
from polydraft.engine.stats import Stopwatch
from polydraft.tree import Dedup, dedup, depths

__all__ = ["Round", "Stepper"]


@dataclass(frozen=True)
class Round:
    """What one step did for its batch: the draft, what was scored, the target law at each drafted node, what was kept."""

    draft: Draft
    scores: Scores
    probs: Float[Tensor, "B N V"]
    outcome: Outcome
    seconds: dict[str, float]

    @cached_property
    def nodes(self) -> list[list[int]]:
        """Nodes whose rows emitted each row's tokens: the root, then the accepted path."""
        return [[0, *(n for n in path if n >= 0)] for path in self.outcome.path.tolist()]

    @cached_property
    def tokens(self) -> list[list[int]]:
        """What each row emits, before any stop."""
        return self.outcome.emitted(self.draft.tree)

    @cached_property
    def parents(self) -> list[list[int]]:
        """`draft.tree.parents` as lists."""
        return self.draft.tree.parents.tolist()


@dataclass(frozen=True)
class Stepper:
    """The parts of a step. `drafter` None decodes plainly. `stop_ids`: ids that `min_tokens` masks."""

    target: Target
    drafter: Drafter | None
    verifier: Verifier
    plan: Plan
    stop_ids: frozenset[int]

    def __call__(self, sequences: Seq[Sequence]) -> Round:
        """One round; target cache and drafter states move on, the sequences' tokens are the caller's to extend."""
        watch = Stopwatch()
        key = NoiseKey.of(
            [s.request.seed for s in sequences],
            [s.request.sample for s in sequences],
            [len(s.token_ids) for s in sequences],
        )
        with watch.phase("drafting"):
            draft = replace(self._propose(sequences), noise=key)
            extra = drafting.aux(self.drafter, sequences)
        slots = [s.slot for s in sequences if s.slot is not None]
        with watch.phase("scoring"):
            unique = dedup(draft.tree)
            scored = self.target.score(slots, unique.tree, aux=None if extra is None else _hung(unique, extra))
        with watch.phase("verifying"):
            probs = unique.expand(self._laws(sequences, scored))
            outcome = self.verifier(draft, probs).sample(key)
        with watch.phase("scoring"):
            self.target.commit(slots, _in(unique, outcome))
        hidden = {k: unique.expand(h) for k, h in scored.hidden.items()}
        scores = Scores(draft.tree, unique.expand(scored.logits), hidden, scored.aux_logits)
        with watch.phase("drafting"):
            if self.drafter is not None:
                drafting.observe(self.drafter, sequences, outcome, scores)
        self._record(sequences, draft, probs, outcome)
        return Round(draft, scores, probs, outcome, watch.stop())

    def _propose(self, sequences: Seq[Sequence]) -> Draft:
        roots = torch.tensor([s.token_ids[-1] for s in sequences])
        if self.drafter is None:
            return Draft.empty(roots)
        budgets = self.plan.budgets(sequences)
        rooms = [self._room(s) for s in sequences]
        budgets = [replace(g, max_depth=min(g.max_depth, room)) for g, room in zip(budgets, rooms, strict=True)]
        return drafting.propose(self.drafter, sequences, budgets, roots, self.target.vocab_size)

    def _room(self, sequence: Sequence) -> int:
        """Deepest useful draft: the block's extra token is the last that the context or `max_tokens` leaves room for."""
        ends = self.target.max_model_len
        if sequence.request.params.max_tokens is not None:
            ends = min(ends, sequence.num_prompt_tokens + sequence.request.params.max_tokens)
        return max(0, ends - len(sequence.token_ids) - 1)

    def _laws(self, sequences: Seq[Sequence], scores: Scores) -> Float[Tensor, "B M V"]:
        return sampling.laws(
            scores.logits,
            scores.tree,
            [s.token_ids for s in sequences],
            [s.num_prompt_tokens for s in sequences],
            [s.request.params for s in sequences],
            tuple(self.stop_ids),
        )

    def _record(self, sequences: Seq[Sequence], draft: Draft, probs: Tensor, outcome: Outcome) -> None:
        deep, overlaps = depths(draft.tree).tolist(), root_overlap(draft, probs)
        for b, (s, kept) in enumerate(zip(sequences, outcome.num_accepted.tolist(), strict=True)):
            s.sample.stats.record(num_nodes=sum(d > 0 for d in deep[b]), depth=max(deep[b]), num_accepted=kept)
            remember(s, overlaps[b])


def _hung(unique: Dedup, aux: AuxRows) -> AuxRows:
    """The same auxiliary rows in terms of the scored tree's nodes."""
    return aux if unique.same else replace(aux, nodes=unique.row.gather(1, aux.nodes))


def _in(unique: Dedup, outcome: Outcome) -> Outcome:
    """The same outcome in terms of the scored tree's nodes."""
    if unique.same:
        return outcome
    path = torch.where(outcome.path >= 0, unique.row.gather(1, outcome.path.clamp(min=0)), -1)
    return Outcome(path, outcome.num_accepted, outcome.token)
