"""What a check of a sampler found: the verdict, the mistake that looks most like it, and the smallest example."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polydraft.testing import Path, RowSource

SAME = 0.02
"""Share of the bias by which mistakes may differ from the likeliest one and still explain it as well."""
ALIKE = 0.5
"""Share beyond which no known mistake looks like it."""


@dataclass(frozen=True)
class Suspect:
    """A known mistake beside what was found. distance: between the two, as a share of the bias; 0 where they are the same."""

    name: str
    distance: float


@dataclass(frozen=True)
class Example:
    """The rows on which a fault shows. path: tokens before.  p, q: rows there.  emitted: distribution of the next token."""

    path: Path
    p: tuple[float, ...]
    q: tuple[float, ...]
    emitted: tuple[float, ...]

    def __str__(self) -> str:
        rows = {"p": self.p, "q": self.q, "emitted": self.emitted}
        written = (f"{name} = [{', '.join(f'{x:.4g}' for x in row)}]" for name, row in rows.items())
        return f"after tokens {list(self.path)}: " + ", ".join(written)


@dataclass(frozen=True)
class Report:
    """status: "passed", "failed" or "inconclusive".  how: what is certain.  error: largest total variation distance of a case; of the frequencies where it was sampled.

    bound: what the distance is at most.  p_value: None where probabilities are exact.  samples: texts that were drawn.
    candidates: known mistakes that explain it, the likeliest first; none where none does.  nearest: the likeliest, even so.
    """

    status: str
    how: str
    error: float
    bound: float
    cases: int
    p_value: float | None = None
    samples: int = 0
    candidates: tuple[str, ...] = ()
    nearest: Suspect | None = None
    example: Example | None = None

    @property
    def mistake(self) -> str | None:
        """The known mistake that it most likely has; None of what passed, and where none is alike."""
        return self.candidates[0] if self.candidates else None

    def __str__(self) -> str:
        lines = [f"{self.status if self.status == 'passed' else self.status.upper()}: {self.how}"]
        tested = "" if self.p_value is None else f", p-value {self.p_value:.3g}, {self.samples} texts"
        lines.append(
            f"  total variation {self.error:.3g}, at most {self.bound:.3g}, on {self.cases} cases{tested}"
        )
        if self.candidates:
            lines.append(f"  looks like: {' or '.join(self.candidates)}")
        elif self.nearest is not None:
            off = f"{self.nearest.distance:.0%} of the bias off"
            lines.append(
                f"  looks like none of the known mistakes; the nearest is {self.nearest.name}, {off}"
            )
        if self.example is not None:
            lines.append(f"  {self.example}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        told = {"status": self.status, "how": self.how, "error": self.error, "bound": self.bound}
        told |= {"cases": self.cases, "p_value": self.p_value, "samples": self.samples}
        told |= {"mistake": self.mistake, "candidates": list(self.candidates)}
        told["nearest"] = None if self.nearest is None else vars(self.nearest)
        return told | {"example": None if self.example is None else vars(self.example)}


def alike(suspects: Sequence[Suspect]) -> tuple[str, ...]:
    """Those that explain an exact distribution, and no other as much better."""
    if not suspects or suspects[0].distance > ALIKE:
        return ()
    return tuple(suspect.name for suspect in suspects if suspect.distance <= suspects[0].distance + SAME)


def ranked(
    seen: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    mistakes: Mapping[str, Sequence[np.ndarray]],
) -> tuple[Suspect, ...]:
    """Known mistakes by their distance from what was seen, over all cases."""
    bias = _total(seen, expected)
    suspects = [
        Suspect(name, _total(seen, probs) / bias)
        for name, probs in mistakes.items()
        if bias > 0 and _total(expected, probs) > 0.05 * bias
    ]
    return tuple(sorted(suspects, key=lambda suspect: suspect.distance))


def _total(ones: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    return float(sum(np.abs(one - other).sum() for one, other in zip(ones, others, strict=True)))


def example_of(case: RowSource, seen: np.ndarray, expected: np.ndarray) -> Example:
    """Where the next token's distribution is off most, weighted by how often one comes there."""
    worst = 0.0
    found = ()
    emitted = np.zeros(case.V)
    for length in range(seen.ndim):
        behind = tuple(range(length + 1, seen.ndim))
        ours = seen.sum(behind)
        theirs = expected.sum(behind)
        for path in np.ndindex(ours.shape[:-1]):
            mass = ours[path].sum()
            if mass <= 0 or theirs[path].sum() <= 0:
                continue
            row = ours[path] / mass
            off = mass * np.abs(row - theirs[path] / theirs[path].sum()).sum()
            if off > 1.5 * worst:  # a shorter path is the simpler example
                worst = off
                found = path
                emitted = row
    rows = (case.row("p", found), case.row("q", found), emitted)
    return Example(found, *(tuple(map(float, row)) for row in rows))
