"""From measured rounds to prices.

Each phase of a round (drafting, scoring, other) has its own non-negative prices, found by least squares on relative
errors (Huber's weights for outliers), so that a noisy clock can never make more work look cheaper. Chains, which are nearly always
what is chosen, and rounds without drafts, to which all others are compared, count twice.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from polydraft.errors import InvalidInputError
from polydraft.plan.costs import Charges, RoundCosts, Work, charges

CHAINS = 2.0
"""What a round of chains, or without drafts, counts for in the fit; others 1."""
HUBER_ROUNDS = 10
_PLAIN = ("plain_once", "plain_sequences", "plain_context")
_CHARGED = {
    "drafting": ("once", "asked", "depth", "nodes", "rows_context", *_PLAIN),
    "scoring": ("once", "sequences", "rows", "rows_beyond", "context", "rows_context", *_PLAIN),
    "other": ("once", "sequences", "rows", "branching", *_PLAIN),
}


class Observation(NamedTuple):
    """One measured kind of round: `batch` equal sequences, each with `width` paths of `depth`; seconds by phase.

    Depth 0 is a round without drafts, and width 0 one that asked for drafts in vain.
    """

    batch: int
    width: int
    depth: int
    context: int
    drafting: float
    scoring: float
    other: float

    @property
    def seconds(self) -> float:
        """Of the whole round."""
        return self.drafting + self.scoring + self.other

    @property
    def work(self) -> Work:
        """What such a round does."""
        asked = self.batch * (self.depth > 0 or not self.width)
        return Work.drafted([(self.width * self.depth, self.depth)] * self.batch, [self.context] * self.batch, asked)


def fit(observations: Sequence[Observation]) -> RoundCosts:
    """Prices from measured rounds, least squares on relative errors, none negative; outliers count less (Huber weights).

    Raises:
        InvalidInputError: no round without drafts, or times that are not positive.
    """
    if not any(o.depth == 0 < o.width for o in observations) or any(o.seconds <= 0 for o in observations):
        raise InvalidInputError(
            f"{len(observations)} measured rounds were given; expected positive seconds and at least one round without "
            "drafts (depth 0). Measure plain rounds too."
        )
    x = np.array([charges(o.work) for o in observations], np.float64)
    weight = np.array([(CHAINS if o.width == 1 else 1.0) / o.seconds for o in observations])
    drafted = any(o.depth or not o.width for o in observations)
    found: dict[str, Charges] = {}
    for phase, names in _CHARGED.items():
        used = x[:, [Charges._fields.index(name) for name in names]]
        scale = np.maximum(used.max(0), 1e-12)
        y, trust, solved = np.array([getattr(o, phase) for o in observations]) * weight, np.ones(len(weight)), scale
        for _ in range(HUBER_ROUNDS):
            solved, _ = nnls(used / scale * (weight * trust)[:, None], y * trust)
            missed = np.abs(used / scale * weight[:, None] @ solved - y)
            trust = np.sqrt(np.minimum(1.0, 2 * max(float(np.median(missed)), 1e-3) / np.maximum(missed, 1e-12)))
        prices = Charges(**dict(zip(names, (solved / scale).tolist(), strict=True)))
        if not drafted:  # as far as is known, drafts cost nothing
            prices = prices._replace(once=prices.plain_once, sequences=prices.plain_sequences, context=prices.plain_context)
        found[phase] = prices
    costs = RoundCosts(found)
    return RoundCosts(found, float(np.mean([abs(costs.seconds(o.work) / o.seconds - 1) for o in observations])))
