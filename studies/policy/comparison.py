"""A policy beside the best of several fixed shapes, as speeds over many prompts.

The fastest of N shapes on some prompts is partly the luckiest one: its speed there is more than it makes on others. So the shape of each part of the prompts
is chosen on the others, and the speed in hindsight, the best on the very prompts, stands beside it: what lies between them is the choice's luck.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

PARTS = 5
DIVISIONS = 20
"""Parts of the prompts, and different divisions into so many; the ratio is the mean over all divisions."""
RESAMPLES = 2000


class Comparison(NamedTuple):
    """The policy's speed over that of a fixed shape. ratio: the shape chosen on other prompts.  interval: 95% of it, bootstrap over prompts.
    hindsight: the shape chosen on the very prompts."""

    ratio: float
    interval: tuple[float, float]
    hindsight: float


def compare(
    policy: Float[np.ndarray, "P 2"],
    shapes: Float[np.ndarray, "S P 2"],
    *,
    rng: np.random.Generator | None = None,
) -> Comparison:
    """Tokens and seconds of every prompt, by the policy and by each fixed shape.

    Example:
        >>> slow, fast = np.full((6, 2), (10.0, 2.0)), np.full((6, 2), (10.0, 1.0))
        >>> compare(slow, np.array([slow, fast]))
        Comparison(ratio=0.5, interval=(0.5, 0.5), hindsight=0.5)
    """
    rng = rng or np.random.default_rng(0)
    count = len(policy)
    resampled = rng.integers(count, size=(RESAMPLES, count))
    divisions = list[Float[np.ndarray, "P 2"]]()
    for _ in range(DIVISIONS):
        best = np.empty_like(policy)
        part = rng.permutation(count) % PARTS
        for here in (part == number for number in range(min(PARTS, count))):
            best[here] = shapes[_fastest(shapes[:, ~here] if count > 1 else shapes), here]
        divisions.append(best)
    ratios, spread = zip(*(_ratio(policy, best, resampled) for best in divisions), strict=True)
    low, high = np.quantile(np.mean(spread, 0), (0.025, 0.975))
    hindsight = _ratio(policy, shapes[_fastest(shapes)], resampled)[0]
    return Comparison(float(np.mean(ratios)), (float(low), float(high)), hindsight)


def _fastest(shapes: Float[np.ndarray, "S P 2"]) -> int:
    tokens, seconds = np.moveaxis(shapes.sum(1), -1, 0)
    return int((tokens / seconds).argmax())


def _ratio(
    policy: Float[np.ndarray, "P 2"], best: Float[np.ndarray, "P 2"], resampled: Int[np.ndarray, "R P"]
) -> tuple[float, Float[np.ndarray, " R"]]:
    """Of all prompts, and of each resampling of them."""
    rates = [both.sum(-2) for both in (policy, best)]
    whole = rates[0][0] / rates[0][1] / (rates[1][0] / rates[1][1])
    ours = policy[resampled].sum(1)
    others = best[resampled].sum(1)
    return float(whole), ours[:, 0] / ours[:, 1] / (others[:, 0] / others[:, 1])
