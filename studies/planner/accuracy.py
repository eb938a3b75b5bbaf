"""The adaptive plan against every fixed size, workload by workload, in one interleaved run each; see `workloads`.

The best fixed plan is the best of all sizes, plain decoding included. All run for a quarter of the rounds; those that are then more than
CLOSE behind the best are left out, so that there is time for more rounds of the others. The largest of many noisy figures is too
large, so the best is chosen on one half of the rounds and met on the other, both ways round: every prompt is in both halves, with
another seed. Rates count decoding without the prefill, in CPU seconds on one thread, so that other work on the machine counts little.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from polydraft import tree
from polydraft.core import Budget, SiblingLaw
from polydraft.plan.fixed import FixedPlan
from polydraft.plan.plan import AdaptivePlan
from polydraft.tune.measure import measured_profile
from studies.planner.workloads import Workload

__all__ = ["Accuracy", "accuracy", "markdown", "sizes_of"]

DEPTHS = {1: (1, 2, 3, 4, 5, 6, 8, 10), 2: (1, 2, 3, 4, 6), 3: (1, 2, 3, 4)}
"""Fixed sizes: paths -> depths."""
CLOSE = 0.1


def sizes_of(max_width: int) -> list[tuple[int, int]]:
    """(paths, depth) of all fixed plans that are run.

    Example:
        >>> len(sizes_of(1)), len(sizes_of(3))
        (8, 17)
    """
    return [(w, d) for w, depths in DEPTHS.items() if w <= max_width for d in depths]


@dataclass
class Accuracy:
    """One workload. rounds: setting -> (tokens, seconds) of each round, in the same order for all settings; of some sizes only the first rounds."""

    name: str
    rounds: dict[str, list[tuple[int, float]]] = field(default_factory=dict[str, list[tuple[int, float]]])
    tokens_per_call: float = 0.0

    def speed(self, name: str, rounds: Sequence[int] | None = None) -> float:
        """Tokens per second over all rounds, or over some."""
        chosen = self.rounds[name] if rounds is None else [self.rounds[name][i] for i in rounds]
        return sum(t for t, _ in chosen) / sum(s for _, s in chosen)

    @property
    def best_fixed(self) -> str:
        """The fastest fixed plan over all rounds, plain decoding included; those that were left out are not."""
        return self._fastest(range(len(self.rounds["plain"])))

    def _fastest(self, rounds: Sequence[int]) -> str:
        whole = len(self.rounds["adaptive"])
        return max(
            (n for n, r in self.rounds.items() if n != "adaptive" and len(r) == whole), key=lambda n: self.speed(n, rounds)
        )

    def _ratio(self, pairs: Sequence[int]) -> float:
        """Of the rounds 2i and 2i + 1, i in pairs: the geometric mean over both ways to choose on one half and compare on the other."""
        first, second = [2 * i for i in pairs], [2 * i + 1 for i in pairs]
        found = [self.speed("adaptive", b) / self.speed(self._fastest(a), b) for a, b in ((first, second), (second, first))]
        return math.sqrt(found[0] * found[1])

    @property
    def ratio(self) -> float:
        """Speed of the adaptive plan over that of the best fixed one, which is chosen on other rounds."""
        return self._ratio(range(len(self.rounds["plain"]) // 2))

    @property
    def interval(self) -> tuple[float, float]:
        """90% bootstrap interval of `ratio` over pairs of rounds, the best fixed plan chosen anew in each resample."""
        rng, count = np.random.default_rng(0), len(self.rounds["plain"]) // 2
        found = [self._ratio(rng.integers(count, size=count).tolist()) for _ in range(200)]
        low, high = np.percentile(found, [5, 95])
        return float(low), float(high)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "workload": self.name,
            "tokens_per_second": {n: self.speed(n) for n in self.rounds},
            "rounds": {n: len(r) for n, r in self.rounds.items()},
            "best_fixed": self.best_fixed,
            "ratio": self.ratio,
            "interval": self.interval,
            "tokens_per_call": self.tokens_per_call,
        }


def accuracy(name: str, work: Workload, *, progress: Callable[[], None] = lambda: None) -> Accuracy:
    """Run one workload: an even number of rounds of plain decoding, the adaptive plan and the fixed sizes, in a turning order.

    The profile is measured on the workload's first prompt, as an engine does before its first request.
    """
    probe = work.engine(FixedPlan(Budget.fixed(tree.chain(1))))
    assert probe.drafter is not None
    profile = measured_profile(probe.target, probe.drafter, probe.verifier, work.batches[0][:1])
    made = {"plain": work.plain(), "adaptive": work.engine(AdaptivePlan(profile))}
    for w, d in sizes_of(1 if probe.drafter.info.laws == {SiblingLaw.POINT_MASS} else 3):
        made[f"{w}x{d}"] = work.engine(FixedPlan(Budget.fixed(tree.paths(w, d))))
    found, names, calls = Accuracy(name, {n: [] for n in made}), list(made), [0, 0]
    for engine in made.values():
        engine.generate(work.batches[0], [replace(p, max_tokens=4, seed=0) for p in work.params])
    for number, batch in enumerate(work.batches):
        if number == max(2, len(work.batches) // 8 * 2):
            least = (1 - CLOSE) * max(found.speed(n) for n in names)
            names = [n for n in names if n in ("plain", "adaptive") or found.speed(n) >= least]
        turn = number % len(names)
        for setting in names[turn:] + names[:turn]:
            results = made[setting].generate(batch, [replace(p, seed=number) for p in work.params])
            stats = [r.stats for r in results]
            seconds = sum(s.total_seconds - s.seconds["prefill"] for s in stats)
            found.rounds[setting].append((sum(s.emitted for s in stats), seconds))
            if setting == "adaptive":
                calls = [calls[0] + sum(s.emitted for s in stats), calls[1] + sum(s.target_calls for s in stats)]
            progress()
    found.tokens_per_call = calls[0] / calls[1]
    return found


def markdown(found: Sequence[Accuracy]) -> str:
    """The table."""
    lines = [
        "| workload | plain | adaptive | tokens/call | best fixed | its tokens/s | adaptive / best fixed | 90% interval | adaptive / plain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for a in found:
        low, high = a.interval
        best = a.best_fixed
        lines.append(
            f"| {a.name} | {a.speed('plain'):.0f} | {a.speed('adaptive'):.0f} | {a.tokens_per_call:.2f} | {best} | {a.speed(best):.0f} | "
            f"{a.ratio:.3f} | {low:.3f}-{high:.3f} | {a.speed('adaptive') / a.speed('plain'):.2f} |"
        )
    return "\n".join(lines)
