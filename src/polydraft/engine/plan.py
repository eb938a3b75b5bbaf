"""How much to draft in the next round, decided from past rounds and tables only.

A plan may look at tables and at rounds that are over, never at the draft it is deciding about: depth, width, trunk and short paths are
fixed before the first token of a round is drawn, so every choice here keeps the output law (specification, section 12.2).
Where the tables come from a clock they are measured once, before a request; inside a request only its own past decides.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float
from torch import Tensor

from polydraft.core import Budget, Draft, Outcome
from polydraft.engine import acceptance
from polydraft.engine.acceptance import DEPTHS, Acceptance
from polydraft.engine.costs import HINGE
from polydraft.engine.profile import Profile
from polydraft.engine.sequence import Sequence
from polydraft.verifiers._rows import compiled

__all__ = ["AdaptivePlan", "FixedPlan", "Plan"]

REMEMBERED = 4.0
"""Rounds of the past that a probe is weighed against: few, so that a change is seen, and enough to hold against the prior."""
RISEN = 0.1
"""Acceptance of a first draft that a probe must add to be followed by another one at once."""
PROBING = 0.0025
"""Share of the time without drafts that probes may take, beside the drafter's reading of what it missed."""
UNEVEN = 1.04
"""Seconds of a batch's drafts of different depths over those of as many tokens to one depth, beside what they are charged (measured, batches of four)."""
EARLY, HELD = 4, 4
"""Drafting rounds of a text that are all planned for; afterwards a plan holds for several, as planning costs 4% of a round of the embedded pair."""


class Plan(Protocol):
    """Budgets for the next round of each sequence."""

    def budgets(self, sequences: Seq[Sequence]) -> list[Budget]: ...

    def learn(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        """Take note of a round that is over; processed: the target's processed logits at the drafted nodes."""
        ...


@dataclass(frozen=True)
class FixedPlan:
    """The same budget in every round, for reproducible comparisons.

    depth: drafted tokens on a path.  width: paths (or children of a node).  trunk: tokens before the paths part.
    max_nodes: default all of them.  short: tokens of the paths after the first; 0: as many as the first has.

    Example:
        >>> FixedPlan(depth=4, width=2, trunk=1).budget
        Budget(max_nodes=7, max_depth=4, width=2, trunk=1, short=0, least=0.0)
    """

    depth: int
    width: int = 1
    max_nodes: int | None = None
    trunk: int = 0
    short: int = 0

    @property
    def budget(self) -> Budget:
        whole = Budget.of_paths(self.width, self.depth, self.trunk, self.short)
        return whole if self.max_nodes is None else replace(whole, max_nodes=self.max_nodes)

    def budgets(self, sequences: Seq[Sequence]) -> list[Budget]:
        return [self.budget] * len(sequences)

    def learn(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        """Nothing: the plan is fixed."""


@compiled
def _shapes(most, max_trunk, max_short):
    """(width, trunk, short) of all shapes for up to `most` paths, by width: a chain, equal paths, paths behind a trunk, ragged pairs."""
    out = np.zeros((1 + (most - 1) * (max_trunk + 1) + (max_short if most > 1 else 0), 3), np.int64)
    out[0, 0], k = 1, 1
    for w in range(2, most + 1):
        for i in range(1 + max_trunk + (max_short if w == 2 else 0)):
            out[k] = w, (i if i <= max_trunk else 0), max(i - max_trunk, 0)
            k += 1
    return out


@compiled
def _nodes(width, depth, trunk, short):
    """`Budget.of_paths(width, depth, trunk, short).max_nodes`."""
    return depth + (width - 1) * max((min(depth, short) if short > 0 else depth) - trunk, 0)


@compiled
def _base(costs, contexts):
    """Seconds of a round but for what is drafted; without drafts costs[11] more."""
    B, seconds = contexts.size, costs[0]
    for b in range(B):
        seconds += costs[1] + costs[2] + (costs[4] + costs[5]) * contexts[b]
    return seconds + costs[3] * max(0, B - HINGE)


@compiled
def _seconds(costs, base, B, nodes, by_context, deepest, drafting, branching):
    """Of a round that drafts `nodes` tokens; by_context: the sum over them of their sequences' cached tokens; see `costs.features`."""
    beyond = max(0, B + nodes - HINGE) - max(0, B - HINGE)
    seconds = base + (costs[2] + costs[8]) * nodes + costs[5] * by_context + costs[3] * beyond
    return seconds + costs[6] + costs[7] * deepest + costs[9] * drafting + costs[10] * branching


@compiled
def _probe(kept, seen, priors, asked, costs, max_depth):
    """(depth, loss) of the chain for all who may draft that falls least short of plain decoding; loss: in tokens of each sequence, >= 0.

    asked: as in `_choose`.
    """
    B, L = kept.shape
    base, live, by_context = _base(costs, asked[:, 2]), 0, 0.0
    rates, tokens, logs = np.empty(L), np.empty(max_depth + 1), np.zeros(max_depth + 1)
    for b in range(B):
        if asked[b, 1] > 0:
            acceptance.by_depth(kept[b], seen[b], priors[b], 1.0, asked[b, 3], rates)
            acceptance.tokens_by_depth(rates, 1, 0, 0, tokens)
            logs += np.log(tokens)
            live += 1
            by_context += asked[b, 2]
    depth, most, loss = 1, 0.0, 0.0
    for d in range(1, max_depth + 1):
        seconds = _seconds(costs, base, B, d * live, d * by_context, d, live, 0)
        each, rounds = np.exp(logs[d] / live), seconds / (base + costs[11])
        if each / rounds > most:
            depth, most, loss = d, each / rounds, max(rounds - each, 0.0)
    return depth, loss


@compiled
def _choose(kept, seen, priors, asked, costs, max_depth, max_trunk, max_short, margin, sizes):
    """sizes[b] = (width, depth, trunk, short) of the highest geometric mean of the sequences' speeds, which is returned; depth 0 where drafts do not pay.

    The sum of speeds would serve those that draft well first, and leave the others to smaller and dearer batches.
    For every deepest depth D each sequence takes the size of highest log tokens - price x seconds of its own nodes; the price,
    B / seconds of a round, follows from the last choice, each of which is better than the one before (log S <= log S0 + S/S0 - 1).
    asked[b]: gain, most paths (0 where the sequence sits this round out), cached tokens, rounds failed in a row.  priors: [B, L] acceptances.  costs: `RoundCosts.flat`.
    """
    gains, widths, contexts = asked[:, 0], asked[:, 1].astype(np.int64), asked[:, 2]
    B, L = kept.shape
    most = 0
    for b in range(B):
        most = max(most, widths[b])
        sizes[b, 0], sizes[b, 1], sizes[b, 2], sizes[b, 3] = 1, 0, 0, 0
    base = _base(costs, contexts)
    plain = base + costs[11]
    best = (1.0 + margin) / plain
    if most == 0:
        return 1.0 / plain
    shapes = _shapes(most, max_trunk, max_short)
    rates, tokens = np.empty(L), np.empty((B, len(shapes), max_depth + 1))
    for b in range(B):
        for k in range(len(shapes)):
            if k < 2 and shapes[k, 0] <= widths[b]:  # a chain, then what parts
                acceptance.by_depth(kept[b], seen[b], priors[b], gains[b] if k else 1.0, asked[b, 3], rates)
            if shapes[k, 0] <= widths[b]:
                acceptance.tokens_by_depth(rates, shapes[k, 0], shapes[k, 1], shapes[k, 2], tokens[b, k])
    room = max(0.0, (HINGE - B) / B)
    tried = np.empty_like(sizes)
    if B == 1:
        for k in range(len(shapes)):
            w, t, s = shapes[k]
            for d in range(max(t, s) + 1, max_depth + 1):
                n = _nodes(w, d, t, s)
                seconds = _seconds(costs, base, 1, n, n * contexts[0], d, 1, int(w > 1))
                if tokens[0, k, d] / seconds > best:
                    best = tokens[0, k, d] / seconds
                    sizes[0, 0], sizes[0, 1], sizes[0, 2], sizes[0, 3] = w, d, t, s
        return best
    logs, live, cached = np.log(tokens), 0, 0.0
    for b in range(B):
        live += widths[b] > 0
        cached += contexts[b] if widths[b] > 0 else 0.0
    for deepest in range(1, max_depth + 1):
        seconds = _seconds(costs, base, B, deepest * live, deepest * cached, deepest, live, 0)
        total = 0.0
        for b in range(B):
            total += logs[b, 0, deepest] if widths[b] > 0 else 0.0
        if np.exp(total / B) / seconds > best:  # all draw as deep a chain; from there on it gets better
            best = np.exp(total / B) / seconds
            for b in range(B):
                sizes[b, 0], sizes[b, 1], sizes[b, 2], sizes[b, 3] = 1, (deepest if widths[b] > 0 else 0), 0, 0
        for _ in range(4):
            price, before = B / seconds, seconds
            nodes, drafting, branching, reached, depths, total, by_context = 0, 0, 0, 0, 0, 0.0, 0.0
            for b in range(B):
                each, gain, gained = costs[2] + costs[5] * contexts[b] + costs[8], 0.0, 0.0
                tried[b, 0], tried[b, 1], tried[b, 2], tried[b, 3] = 1, 0, 0, 0
                for k in range(len(shapes)):
                    w, t, s = shapes[k]
                    if w > widths[b]:
                        break
                    once = costs[9] + (costs[10] if w > 1 else 0.0)
                    for d in range(max(t, s) + 1, deepest + 1):
                        n = _nodes(w, d, t, s)
                        value = logs[b, k, d] - price * (n * each + costs[3] * max(0.0, n - room) + once)
                        if value > gain:
                            gain, gained = value, logs[b, k, d]
                            tried[b, 0], tried[b, 1], tried[b, 2], tried[b, 3] = w, d, t, s
                n = _nodes(tried[b, 0], tried[b, 1], tried[b, 2], tried[b, 3])
                nodes += n
                by_context += n * contexts[b]
                drafting += n > 0
                branching += tried[b, 0] > 1
                reached = max(reached, tried[b, 1])
                depths += tried[b, 1]
                total += gained
            if drafting == 0:
                seconds = plain
                break
            seconds = _seconds(costs, base, B, nodes, by_context, reached, drafting, branching)
            seconds *= UNEVEN if depths < reached * drafting else 1.0
            found = np.exp(total / B) / seconds
            if found > best:
                best = found
                sizes[:] = tried
            if abs(seconds - before) < 0.005 * before:
                break
    return best


@dataclass
class AdaptivePlan:
    """Width, depth, trunk and short paths of most expected tokens per second; no drafts while they do not pay, tried again after longer and longer waits.

        speed(size) = E[tokens | acceptance by depth] / seconds(batch, rows, depth, context), the geometric mean over the batch

    Seconds come from the profile, which is measured once for a pair of models (`engine/calibrate.py`, `polydraft tune`) and
    does not change afterwards; acceptance is each sequence's own, from its past rounds, around the profile's (`engine/acceptance.py`).
    Only these decide, before the round's first draw: the output law is kept, and for one profile a seed gives one text.

    profile: None to have the engine measure one before its first request; without an engine, assumed costs.
    max_depth, max_width, max_trunk, max_short: bounds of the search; max_short: of the second of a ragged pair, 0 for none, to
        which an engine sets it where its drafter does not make them or its rule is not exact for them.
    margin: share by which drafting must promise to beat plain decoding; below 0 as a pause is not free: what is missed is read
        before the next draft, and sizes that change cost.
    first_pause, longest_pause: rounds without drafts after a stop, at least and at most: so many that the draft which
        falls least short of plain decoding loses 0.25% of them, doubled each time one changes nothing.

    After Yan et al. 2024, "Decoding Speculative Decoding" (arXiv 2402.01528), section on throughput.

    Example:
        >>> plan = AdaptivePlan(Profile.assumed())
        >>> plan.best(0.9), plan.best(0.02).max_depth
        (Budget(max_nodes=11, max_depth=11, width=1, trunk=0, short=0, least=0.0), 0)
    """

    profile: Profile | None = None
    max_depth: int = 12
    max_width: int = 4
    max_trunk: int = 2
    max_short: int = 3
    margin: float = -0.05
    first_pause: int = 4
    longest_pause: int = 256
    _planned: list[tuple[int, int, bool, int]] = field(default_factory=list, init=False, repr=False, compare=False)
    _records: list[Acceptance] = field(default_factory=list, init=False, repr=False, compare=False)
    """Those of `_planned`, held so that no other record takes their ids."""
    _held: list[tuple[Acceptance, Budget]] = field(default_factory=list, init=False, repr=False, compare=False)
    """Records and the budgets that hold while these and no others draft, for `_holding` rounds more."""
    _holding: int = field(default=0, init=False, repr=False, compare=False)
    _last: tuple[list[list[int]], float] = field(default=([], 0.0), init=False, repr=False, compare=False)

    @property
    def known(self) -> Profile:
        """The profile, or the assumed one."""
        if self.profile is None:
            self.profile = Profile.assumed()
        return self.profile

    def _sizes(
        self, records: Seq[Acceptance], widths: list[int], contexts: list[int], priors: Seq[np.ndarray]
    ) -> tuple[list[list[int]], float]:
        sizes, bounds = np.empty((len(records), 4), np.int64), (self.max_depth, self.max_trunk, self.max_short)
        speed = _choose(*self._asked(records, widths, contexts, priors), *bounds, self.margin, sizes)
        return sizes.tolist(), speed

    def _asked(
        self, records: Seq[Acceptance], widths: list[int], contexts: list[int], priors: Seq[np.ndarray]
    ) -> tuple[np.ndarray, ...]:
        """kept, seen, priors, asked and costs as `_choose` takes them."""
        if len(records) == 1:
            kept, seen, prior = records[0].kept[None], records[0].seen[None], priors[0][None]
        else:
            kept, seen, prior = np.array([r.kept for r in records]), np.array([r.seen for r in records]), np.array(priors)
        asked = np.array([[r.gain, w, c, r.failed] for r, w, c in zip(records, widths, contexts, strict=True)])
        return kept, seen, prior, asked, self.known.costs.flat

    def _priors(self, sequences: Seq[Sequence]) -> list[np.ndarray]:
        return [self.known.prior(s.request.params.temperature) for s in sequences]

    def promise(self, sequences: Seq[Sequence], out: Seq[bool]) -> tuple[list[list[int]], float]:
        """(width, depth, trunk, short) for each sequence, and the speed that they promise: the geometric mean of tokens per second over the batch.

        out: sequences that draft nothing in any case.  At temperature 0 one chain, as a second path would be a copy.
        """
        widest, records = min(self.max_width, self.known.max_width), [s.acceptance for s in sequences]
        greedy = [s.request.params.greedy for s in sequences]
        widths = [0 if o else 1 if g else widest for o, g in zip(out, greedy, strict=True)]
        seen = [(id(r), r.folded, r.due, w) for r, w in zip(records, widths, strict=True)]
        if seen != self._planned:
            contexts = [len(s.token_ids) for s in sequences]
            self._planned, self._records = seen, records
            self._last = self._sizes(records, widths, contexts, self._priors(sequences))
        return self._last

    def best(self, rate: float, *, batch: int = 1, context: int = 0, greedy: bool = False) -> Budget:
        """The budget for a known acceptance of one draft, the same at every depth."""
        record = Acceptance(kept=np.full(DEPTHS, 1e9 * rate), seen=np.full(DEPTHS, 1e9))
        width = 1 if greedy else min(self.max_width, self.known.max_width)
        priors = [self.known.prior(0.0 if greedy else 1.0)] * batch
        return Budget.of_paths(*self._sizes([record] * batch, [width] * batch, [context] * batch, priors)[0][0])

    def budgets(self, sequences: Seq[Sequence]) -> list[Budget]:
        """One each."""
        if len(sequences) == 1 and sequences[0].acceptance.waiting:
            sequences[0].acceptance.waiting -= 1
            return [_NOTHING]
        if (
            self._holding
            and len(sequences) == len(self._held)
            and all(s.drafting and s.acceptance is r for s, (r, _) in zip(sequences, self._held, strict=True))
        ):
            self._holding -= 1
            return [budget for _, budget in self._held]
        out = [s.acceptance.waiting > 0 or not s.drafting for s in sequences]
        sizes, _ = ([[1, 0, 0, 0]] * len(sequences), 0.0) if all(out) else self.promise(sequences, out)
        probe, pause = _PROBE, self.first_pause  # beside others' drafts a probe is cheap
        if not all(out) and not any(size[1] for size in sizes):
            probe, pause = self._probe(sequences, out)
        budgets = [self._budget(s, o, size, probe, pause) for s, o, size in zip(sequences, out, sizes, strict=True)]
        drafting = all(size[1] for size in sizes)
        self._held = [(s.acceptance, g) for s, g in zip(sequences, budgets, strict=True)] if drafting else []
        self._holding = HELD - 1 if drafting and all(s.acceptance.rounds >= EARLY for s in sequences) else 0
        return budgets

    def _probe(self, sequences: Seq[Sequence], out: Seq[bool]) -> tuple[Budget, int]:
        """The draft that loses least where none promises a gain, and rounds of the first pause: so many that it costs PROBING of them."""
        records, contexts = [s.acceptance for s in sequences], [len(s.token_ids) for s in sequences]
        asked = self._asked(records, [int(not o) for o in out], contexts, self._priors(sequences))
        depth, loss = _probe(*asked, self.max_depth)
        return Budget.of_paths(1, depth), max(self.first_pause, math.ceil(loss / PROBING))

    def seconds(self, sizes: Seq[Seq[float]], contexts: Seq[int]) -> float:
        """Of a round of the sizes that were promised."""
        return self.known.costs.seconds([tuple(map(int, size)) for size in sizes], contexts)

    def _of(self, size: list[Any]) -> Budget:
        """The budget of a size."""
        return Budget.of_paths(*size)

    def _budget(self, sequence: Sequence, out: bool, size: list[Any], probe: Budget, shortest: int) -> Budget:
        """Keeps the account of pauses: when one ends and nothing promises a gain, a draft probes, and another if it fitted well."""
        record = sequence.acceptance
        if out:
            record.waiting = max(record.waiting - 1, 0)
            return _NOTHING
        if size[1]:
            if size[:2] != [1, 1]:
                record.pause = 0
            return self._of(size)
        if record.due or record.rate > record.before + RISEN:
            before = record.rate if record.folded else float(self.known.prior(sequence.request.params.temperature)[0])
            record.due, record.before, record.rounds = False, before, 0
            record.fade(min(1.0, REMEMBERED / max(float(record.seen[0]), REMEMBERED)))
            return probe
        record.pause = min(max(2 * record.pause, shortest), self.longest_pause)
        record.waiting, record.due = record.pause, True
        return _NOTHING

    def learn(self, sequences: Seq[Sequence], draft: Draft, processed: Float[Tensor, "B N V"], outcome: Outcome) -> None:
        """Fold the round into each sequence's record; see `engine/acceptance.py`."""
        records = [s.acceptance for s in sequences]
        if rows := acceptance.count(records, draft, outcome):
            greedy = [s.request.params.greedy for s in sequences]
            acceptance.look(records, draft, processed, greedy, self._priors(sequences), outcome, rows=rows)


_NOTHING, _PROBE = Budget(0, 0, 1), Budget(1, 1, 1)
