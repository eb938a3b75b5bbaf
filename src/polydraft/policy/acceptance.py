"""What drafts are worth: how often drafted tokens are accepted, and what steps with drafts brought; counted with decay around a prior.

    lanes 0 .. 9   tokens by the draft's confidence in them, see `polydraft.core.confidence`; before anything was counted the identity
    SPARE          whether a spare sibling was accepted, where its elder was rejected
    FIRST, NEXT    whether one of the tokens below the root, and one of those below an accepted token, was accepted
    means          tokens, drafted nodes and draft steps of a step with drafts

A request starts from what all requests have shown, and one that names a seed from what was known when the engine was built.
"""

from collections.abc import Sequence

import numpy as np

from polydraft.core.confidence import BINS, IDENTITY, bin_of
from polydraft.numerics.compiled_code import njit
from polydraft.policy.costs import Costs
from polydraft.policy.marginal import CERTAIN, Expected, speed_of

FIRST = BINS
NEXT = BINS + 1
SPARE = BINS + 2
MIN_STRENGTH = 0.5
MIN_TRIES = 2.0
"""Steps and tries that a prior never falls below."""
UNKNOWN = (*IDENTITY, 0.6, 0.75, 0.3)
"""Rates where nothing was counted, at temperature 0."""
UNKNOWN_SAMPLED = (0.35, 0.4, 0.5, 0.55, 0.6, 0.68, 0.75, 0.85, 0.95, 0.98, 0.6, 0.75, 0.3)
"""Rates of sampled tokens: one of small probability q is accepted with min(1, p / q). First and fifth bin at temperature 1: .65 and .66 for the embedded
pair, .21 and .50 for SmolLM2-135M with its head, .54 and .48 for Qwen2.5-Coder 1.5B with 0.5B; speeds over plain go from 1.77 to 1.81, 1.34 to 1.40 and 1.79 to 1.86."""


@njit(cache=True)
def _observe(hits, tries, decay, parents, path, confidence, in_turn):
    """Fold in a step; returns (nodes, depth)."""
    hits *= decay
    tries *= decay
    nodes = 0
    depth = 0
    visited = 0
    levels = np.zeros(len(parents), np.int64)
    for n in range(1, len(parents)):
        if parents[n] < 0:
            continue
        levels[n] = levels[parents[n]] + 1
        nodes = nodes + 1
        depth = max(depth, levels[n])
    for step in range(len(path) + 1):  # the children of each accepted node
        below = False
        accepted = path[step] if step < len(path) else -1
        for n in range(visited + 1, len(parents)):
            if parents[n] == visited:
                if len(confidence):
                    lane = SPARE if in_turn and below else bin_of(confidence[n])
                    tries[lane] += 1.0
                    hits[lane] += n == accepted
                below = True
                if in_turn and n == accepted:
                    break
        if below:
            lane = FIRST if step == 0 else NEXT
            tries[lane] += 1.0
            hits[lane] += accepted >= 0
        visited = accepted
    return nodes, depth


class Acceptance:
    """Counts around a prior.

    rates: of each lane where nothing was counted.  expected: of a step with drafts where there was none.
    strength: tries that a rate counts for at first, and steps that `expected` counts for.  decay: what is left of a step, and of the prior, after the next.

    Example:
        >>> seen = Acceptance(UNKNOWN, Expected(2.0, 3.0, 3.0), 8.0, 0.99)
        >>> for _ in range(50):
        ...     _ = seen.observe([-1, 0, 1], [1], [1.0, 0.95, 0.6])
        >>> seen.rates[FIRST] > 0.9, seen.rates[NEXT] < 0.2, round(seen.expected.tokens, 1)
        (True, True, 2.0)
    """

    def __init__(self, rates: Sequence[float], expected: Expected, strength: float, decay: float) -> None:
        self._prior = np.array(rates)
        self._means = np.array(expected)
        self._strength = strength
        self._decay = decay
        self._hits = np.zeros(len(rates))
        self._tries = np.zeros(len(rates))
        self._weight = 0.0
        self._totals = np.zeros(len(expected))
        """Steps with drafts, decayed, and the fields of `Expected`, summed over them."""
        self.steps = 0

    def observe(
        self,
        parents: Sequence[int],
        path: Sequence[int],
        confidence: Sequence[float] | None = None,
        *,
        in_turn: bool = False,
    ) -> tuple[int, int]:
        """Take note of a step: the draft's parents, the accepted nodes, and the confidence in each node. Returns nodes and depth of the draft.

        in_turn: whether the children of a node are a drawn token and its spare siblings, which are tried where it was rejected.
        """
        probabilities = np.empty(0) if confidence is None else np.asarray(confidence, np.float64)
        self.steps += 1
        nodes = np.array(path, np.int64)
        self._strength = max(self._decay * self._strength, MIN_STRENGTH)
        size, depth = _observe(
            self._hits, self._tries, self._decay, np.asarray(parents), nodes, probabilities, in_turn
        )
        self._weight = self._decay * self._weight + 1.0
        self._totals = self._decay * self._totals + np.array(Expected(len(path) + 1, size, depth))
        return size, depth

    @property
    def rates(self) -> list[float]:
        """Acceptance of each lane."""
        strength = max(self._strength, MIN_TRIES)
        return ((self._hits + strength * self._prior) / (self._tries + strength)).tolist()

    @property
    def expected(self) -> Expected:
        """Of the next step with drafts."""
        return Expected(
            *((self._totals + self._strength * self._means) / (self._weight + self._strength)).tolist()
        )

    def forget(self, steps: float) -> None:
        """Let what was counted weigh as so many steps at most, and the prior hardly anything: a few steps may now show something else."""
        share = min(1.0, steps / max(self._weight, 1e-9))
        self._weight *= share
        for counts in (self._hits, self._tries, self._totals):
            counts *= share
        self._strength = min(self._strength, MIN_STRENGTH)

    def fastest(self, num_sequences: int, costs: Costs) -> float:
        """Speed of a batch that drafts: as before, one token, or, alone, one that is accepted for sure."""
        drafts = [self.expected, Expected(1.0 + self.rates[FIRST], 1.0, 1.0)]
        if num_sequences == 1:
            drafts.append(CERTAIN)
        return max(speed_of([draft] * num_sequences, num_sequences, costs) for draft in drafts)
