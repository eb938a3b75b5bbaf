"""How large a most probable tree to draft in the next round: nodes and depth of most expected tokens per second.

    speed(n, D) = (1 + values of the first n places within depth D) / seconds(batch, their nodes and passes, context)

the geometric mean over the batch, where values, nodes and passes by place are each sequence's own (`engine/places.py`) and seconds are
measured (`engine/costs.py`). A node that promises less than it costs at this speed, `Budget.least`, is left out in the round itself, so
that sure contexts get deep trees and unsure ones few nodes. Which tree that is follows from the draft's laws, which are a function of
the past; for point masses no choice of them is biased.
Pauses are those of `engine/plan.py`. Places beyond what is drafted are looked at in every EXPLORE-th drafting round of a sequence, by a
tree of a quarter more nodes (two at least) and one more depth, from which none is left out: about 1% of the time.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float
from torch import Tensor

from polydraft.core import Budget, Draft, Drafter, Outcome
from polydraft.engine import places
from polydraft.engine.acceptance import Acceptance
from polydraft.engine.costs import HINGE
from polydraft.engine.places import BINS, SHAPE, SIZE
from polydraft.engine.plan import PROBING, AdaptivePlan
from polydraft.engine.profile import Profile
from polydraft.engine.sequence import Sequence
from polydraft.engine.size_search import base_seconds, plain_seconds, round_seconds
from polydraft.verifiers.fast.rows import compiled

__all__ = ["BestFirstPlan", "plan_for"]

EXPLORE = 16
"""Drafting rounds of which one looks beyond."""


@compiled
def _choose(table, asked, costs, max_nodes, max_depth, margin, sizes):
    """sizes[b] = (n, D) of the highest geometric mean of speeds, which is returned; (0, 0) where a sequence had better not draft.

    table: [B, 3, D, N], sums over places of values, nodes and passes.  asked[b]: whether it may draft, cached tokens.
    margin: as of `AdaptivePlan`; NaN for the best that drafts at all.  For the price of a batch's seconds see `plan._choose`.
    """
    B, contexts = len(sizes), asked[:, 1]
    base, plain = base_seconds(costs, contexts), plain_seconds(costs, contexts)
    sizes[:] = 0
    best = (1.0 + margin) / plain if margin == margin else 0.0
    room, tried = max(0.0, (HINGE - B) / B), np.zeros_like(sizes)
    for deepest in range(1, max_depth + 1):
        nodes, by_context, passes = 0.0, 0.0, 0.0
        for b in range(B):  # from where all draft chains, as `plan._choose` does
            if asked[b, 0] > 0:
                nodes += table[b, 1, deepest - 1, deepest - 1]
                by_context += table[b, 1, deepest - 1, deepest - 1] * contexts[b]
                passes = max(passes, table[b, 2, deepest - 1, deepest - 1])
        seconds = round_seconds(costs, base, B, nodes, by_context, passes, int(asked[:, 0].sum()), 0)
        for _ in range(4 if B > 1 else 1):
            price, before = B / seconds, seconds
            nodes, by_context, drafting, branching, passes, total = 0.0, 0.0, 0, 0, 0.0, 0.0
            for b in range(B):
                tried[b, 0], tried[b, 1] = 0, 0
                if asked[b, 0] == 0:
                    continue
                each, most = costs[2] + costs[5] * contexts[b] + costs[7], 0.0 if margin == margin else -np.inf
                for D in range(deepest if B == 1 else 1, deepest + 1):
                    for n in range(1, max_nodes + 1):
                        tokens, drafted, depth = (
                            1.0 + table[b, 0, D - 1, n - 1],
                            table[b, 1, D - 1, n - 1],
                            table[b, 2, D - 1, n - 1],
                        )
                        if B == 1:
                            value = tokens / round_seconds(costs, base, 1, drafted, drafted * contexts[0], depth, 1, n > D)
                        else:
                            value = np.log(tokens) - price * (
                                drafted * each + costs[3] * max(0.0, drafted - room) + costs[8] + costs[9] * (n > D)
                            )
                        if value > most:
                            most, tried[b, 0], tried[b, 1] = value, n, D
                n, D = tried[b]
                if n > 0:
                    drafting, branching = drafting + 1, branching + (n > D)
                    nodes += table[b, 1, D - 1, n - 1]
                    by_context += table[b, 1, D - 1, n - 1] * contexts[b]
                    passes = max(passes, table[b, 2, D - 1, n - 1])
                    total += np.log(1.0 + table[b, 0, D - 1, n - 1])
            if drafting == 0:
                break
            seconds = round_seconds(costs, base, B, nodes, by_context, passes, drafting, branching)
            found = np.exp(total / B) / seconds
            if found > best:
                best = found
                sizes[:] = tried
            if abs(seconds - before) < 0.005 * before:
                break
    return best if sizes.max() > 0 else 1.0 / plain


@dataclass
class BestFirstPlan(AdaptivePlan):
    """An adaptive plan for drafters of most probable trees (`Method.ranked`), such as "model:top_k"; see the module.

    max_nodes, max_depth: bounds of the search.  profile, margin, pauses: as of `AdaptivePlan`, whose shapes of paths are not used.

    Example:
        >>> plan = BestFirstPlan(Profile.assumed())
        >>> sure, unsure = plan.best(0.9), plan.best(0.3)
        >>> (sure.max_nodes, sure.max_depth), (unsure.max_nodes, unsure.max_depth)
        ((11, 11), (5, 1))
    """

    max_nodes: int = SHAPE[2]
    _ranked: ClassVar[bool] = True

    def _priors(self, sequences: Seq[Sequence]) -> list[np.ndarray]:
        return [self.known.prior_places(s.request.params.temperature) for s in sequences]

    def _means(self, records: Seq[Acceptance], priors: Seq[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Sums over places, [B, 3, D, N], and values by path probability, [B, BINS]."""
        found = np.empty((len(records), SIZE + BINS))
        for r, prior, out in zip(records, priors, found, strict=True):
            places.means(places.fit(r).kept, r.seen, prior, float(r.folded), out)
        return found[:, :SIZE].reshape(-1, *SHAPE).cumsum(-1), found[:, SIZE:]

    def _sizes(
        self, records: Seq[Acceptance], widths: list[int], contexts: list[int], priors: Seq[np.ndarray], *, must: bool = False
    ) -> tuple[list[list[Any]], float]:
        """(nodes, depth, least, expected nodes, expected passes) of each, and the speed."""
        (table, worth), sizes = self._means(records, priors), np.empty((len(records), 2), np.int64)
        asked, costs = np.array([[float(w > 0), float(c)] for w, c in zip(widths, contexts, strict=True)]), self.known.costs.flat
        bounds = min(self.max_nodes, SHAPE[2]), min(self.max_depth, SHAPE[1])
        speed = _choose(table, asked, costs, *bounds, np.nan if must else self.margin, sizes)
        found = [
            [int(n), int(D), 0.0, *(x[1:, D - 1, n - 1] if n else (0.0, 0.0))] for (n, D), x in zip(sizes, table, strict=True)
        ]
        seconds = self.seconds(found, contexts)
        beyond = costs[3] * (len(records) + sum(size[3] for size in found) > HINGE)
        for size, x, values, context in zip(found, table, worth, contexts, strict=True):
            if size[0]:
                tokens = 1.0 + float(x[0, size[1] - 1, size[0] - 1])
                each = costs[2] + costs[5] * context + costs[7] + beyond
                size[2] = places.least(values, len(records) * tokens * float(each) / seconds)
        return found, float(speed)

    def seconds(self, sizes: Seq[Seq[float]], contexts: Seq[int]) -> float:
        """Of a round of the sizes that were promised."""
        costs, B = self.known.costs.flat, len(sizes)
        cached, drafting = np.array(contexts, np.float64), sum(size[0] > 0 for size in sizes)
        if not drafting:
            return float(plain_seconds(costs, cached))
        nodes, by_context = sum(size[3] for size in sizes), sum(size[3] * c for size, c in zip(sizes, contexts, strict=True))
        passes, branching = max(size[4] for size in sizes), sum(size[0] > size[1] for size in sizes)
        return float(round_seconds(costs, base_seconds(costs, cached), B, nodes, by_context, passes, drafting, branching))

    def best(self, rate: float, *, batch: int = 1, context: int = 0, greedy: bool = False) -> Budget:
        """The budget for a known acceptance of first children, the same at every depth."""
        priors = [places.assumed([rate])] * batch
        return self._of(self._sizes([Acceptance() for _ in priors], [1] * batch, [context] * batch, priors)[0][0])

    def _of(self, size: list[Any]) -> Budget:
        nodes, depth, least, *_ = size
        return Budget.grown(nodes, depth, max(1, ceil(nodes / max(depth, 1))), least)

    def _probe(self, sequences: Seq[Sequence], out: Seq[bool]) -> tuple[Budget, int]:
        records, contexts = [s.acceptance for s in sequences], [len(s.token_ids) for s in sequences]
        found, speed = self._sizes(records, [int(not o) for o in out], contexts, self._priors(sequences), must=True)
        size = next(size for size, o in zip(found, out, strict=True) if not o)
        full, plain = self.seconds(found, contexts), self.seconds([(0, 0)] * len(found), contexts)
        return self._of(size), max(self.first_pause, ceil(full * (1.0 / plain - speed) / PROBING))

    def _next(self, sequences: Seq[Sequence]) -> list[Budget]:
        return [self._beyond(s.acceptance, g) for s, g in zip(sequences, super()._next(sequences), strict=True)]

    def _beyond(self, record: Acceptance, budget: Budget) -> Budget:
        if budget.max_depth == 0 or (record.rounds + 1) % EXPLORE:
            return budget
        nodes = min(budget.max_nodes + max(2, budget.max_nodes // 4), self.max_nodes, SHAPE[2])
        return Budget.grown(nodes, min(budget.max_depth + 1, self.max_depth, SHAPE[1]), budget.width)

    def _fold(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        budgets = [g if s.drafting else g.within(0) for s, (_, g) in zip(sequences, self._given, strict=True)]
        greedy = [s.request.params.greedy for s in sequences]
        places.observe([s.acceptance for s in sequences], draft, processed, greedy, budgets)


def plan_for(drafter: Drafter | None, profile: Profile | None = None) -> AdaptivePlan:
    """The adaptive plan for this drafter.

    Example:
        >>> type(plan_for(None)).__name__
        'AdaptivePlan'
    """
    return BestFirstPlan(profile) if drafter is not None and drafter.info.ranked else AdaptivePlan(profile)
