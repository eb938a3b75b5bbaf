"""Selection by ratio: of the iid drafts the one with the largest p/q is picked, then tested.

The closed-form selector of two-step importance selection (Khisti et al. 2024, arXiv 2410.18234; the order is that of greedy
multi-path verification, Thomas & Pal 2026, 2602.16961).

    c_i = q-mass of the tokens up to i in ascending p/q, ties by id      q_I(i) = c_i^n - c_{i-1}^n

Where sum min(p, q_I) is below sum min(p, q) the first draw is picked instead. Good for few draws of a weak drafter; one sort.
Lossless for n iid draws of one q, as q_I is the distribution of the draw that is tested.
Traps: q in the place of q_I; ties broken by draw order.
Cost: one sort of a row, time O(V log V), memory O(V) a node.
"""

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import FIXED, DraftSampling
from polydraft.core.arrays import Array, gather, host, like, namespace, scatter
from polydraft.methods.papers import method
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.selection import highest_probs, selected


def emitted_probs(
    p: Float[Array, "M V"], q: Float[Array, "M V"], draws: Int[Array, "M n"]
) -> Float[Array, "M V"]:
    """Distribution of the emitted token given the draws; -1 = no draw.

    Example:
        >>> p, q = np.array([[0.75, 0.25]]), np.array([[0.5, 0.5]])
        >>> emitted_probs(p, q, np.array([[1, 0]])).tolist()
        [[1.0, 0.0]]
    """
    return selected(p, q, draws, _highest)


def _highest(p: Float[Array, "M V"], q: Float[Array, "M V"], draws: Int[Array, "M n"]) -> tuple[Array, Array]:
    xp = namespace(p)
    drawn = draws >= 0
    chance = np.eye(draws.shape[1] + 1)[host(drawn).sum(1)]
    distribution, _, rank = highest_probs(p, q, xp.astype(like(chance, p), p.dtype))
    rank_of_draw = xp.where(drawn, gather(rank, xp.clip(draws, min=0)), -1)
    highest = xp.argmax(rank_of_draw, axis=1, keepdims=True)
    return distribution, scatter(xp.zeros_like(draws, dtype=p.dtype), highest, 1.0)


max_ratio = PerNode(
    method("max_ratio", "Importance selection by ratio", "2410.18234", {DraftSampling.IID}, FIXED),
    emitted_probs,
)
"""The verifier."""
