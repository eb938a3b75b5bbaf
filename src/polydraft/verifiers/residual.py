"""The few pieces that verifiers share: positive part, normalising, what an empty residual means, and places in an order.

An empty residual arises only where two distributions are equal up to rounding; a rejection then has probability 0, and the distribution to
go on with is stated by the caller. Never a uniform distribution and never an added constant: both emit tokens with p = 0.
"""

import numpy as np
from jaxtyping import Float, Int

from polydraft.core.arrays import Array, like, namespace, scatter


def positive_part(x: Array) -> Array:
    """max(x, 0), elementwise."""
    return namespace(x).clip(x, min=0.0)


def normalise(x: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """x / sum(x) over the last axis; NaN where the sum is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return x / namespace(x).sum(x, axis=-1, keepdims=True)


def normalise_or(x: Float[Array, "*B V"], *, otherwise: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    """x / sum(x), or `otherwise` where the sum is 0.

    Example:
        >>> normalise_or(np.zeros(2), otherwise=np.array([0.25, 0.75])).tolist()
        [0.25, 0.75]
    """
    xp = namespace(x)
    total = xp.sum(x, axis=-1, keepdims=True)
    return xp.where(total > 0, x / xp.where(total > 0, total, 1.0), otherwise)


def ranks(order: Int[Array, "M V"]) -> Int[Array, "M V"]:
    """Place of each token in an order of them.

    Example:
        >>> ranks(np.array([[2, 0, 1]])).tolist()
        [[1, 2, 0]]
    """
    places = np.tile(np.arange(order.shape[1]), (len(order), 1))
    return scatter(order, order, like(places, order))
