"""Every run of a program that draws from distributions: each draw in turn takes every token that its distribution allows, with its probability."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from polydraft.core import DraftSampling
from polydraft.sampling import categorical
from polydraft.testing import sibling_draws


class Draws:
    """Stands in for the noise. trail: for each draw of this run the (token, probability) that are left to take, the present one first."""

    def __init__(self) -> None:
        self.trail: list[list[tuple[int, float]]] = []
        self.begin()

    def begin(self) -> None:
        self.at = 0
        self.probability = 1.0

    def choose(self, probs: np.ndarray, *_: Any) -> np.ndarray:
        """In the place of `categorical.choose` and `categorical.draw`."""
        rows = probs.astype(np.float64).reshape(-1, probs.shape[-1])
        return np.array([self._draw(row / row.sum()) for row in rows]).reshape(probs.shape[:-1])

    def choose_systematic(self, probs: np.ndarray, u: float, drawn: np.ndarray) -> None:
        """In the place of `categorical.choose_systematic`: one draw of a tuple."""
        every = list(sibling_draws(DraftSampling.SYSTEMATIC, [probs.astype(float)], len(drawn)))
        drawn[:] = every[self._draw(np.array([p for p, _ in every], dtype=np.float64))][1]

    def _draw(self, distribution: np.ndarray) -> int:
        if self.at == len(self.trail):
            self.trail.append([(t, p) for t, p in enumerate(distribution.tolist()) if p > 0])
        token, p = self.trail[self.at][0]
        self.at += 1
        self.probability *= p
        return token

    def turn(self) -> bool:
        """On to the next run; False where there is none."""
        assert self.at == len(self.trail), (
            "a run drew less often than the one before: it has other randomness"
        )
        while self.trail and len(self.trail[-1]) == 1:
            self.trail.pop()
        if self.trail:
            self.trail[-1].pop(0)
        return bool(self.trail)


def every_run(program: Callable[[], Any], monkeypatch: Any) -> Iterator[tuple[float, Any]]:
    """(probability, result) of every run of a program whose only randomness is `categorical.choose`, `categorical.choose_systematic` and `categorical.draw`."""
    draws = Draws()
    more = True
    monkeypatch.setattr(categorical, "choose", draws.choose)
    monkeypatch.setattr(categorical, "draw", draws.choose)
    monkeypatch.setattr(categorical, "choose_systematic", draws.choose_systematic)
    while more:
        draws.begin()
        result = program()
        yield draws.probability, result
        more = draws.turn()
