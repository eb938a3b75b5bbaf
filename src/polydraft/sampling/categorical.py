"""One token of a row of probabilities for one uniform: the inverse of the cumulative distribution.

Sums are made in float64. The compiled form and the one for other devices draw from the same distribution; within rounding of a border they may take either of two tokens.
"""

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import NoiseKey
from polydraft.core.arrays import Array, double, first, host, host_floats, is_on_host, like, namespace
from polydraft.errors import InvalidInputError
from polydraft.numerics.compiled_code import njit
from polydraft.sampling.noise import Stream, uniform_at, uniforms

_BLOCK = 128


@njit(cache=True, error_model="numpy", fastmath={"reassoc"})
def choose_row(probs: np.ndarray, u: float) -> int:
    """`choose` for one row, for compiled callers; -1 where the row has no positive finite sum.

    Example:
        >>> choose_row(np.array([0.0, 0.25, 0.75]), 0.25)
        2
    """
    V = len(probs)
    full = V // _BLOCK
    sums = np.zeros(full + 1)
    total = 0.0
    for j in range(full):
        part = 0.0
        for i in range(_BLOCK):  # a constant count is summed in vector lanes
            part += np.float64(probs[j * _BLOCK + i])
        sums[j] = part
        total += part
    for i in range(full * _BLOCK, V):
        sums[full] += np.float64(probs[i])
    total += sums[full]
    if not 0.0 < total < np.inf:
        return -1
    threshold = u * total
    below = 0.0
    j = 0
    end = V
    while j <= full and below + sums[j] <= threshold:
        below += sums[j]
        j += 1
    if j <= full:
        end = min(V, (j + 1) * _BLOCK)
        for i in range(j * _BLOCK, end):
            below += np.float64(probs[i])
            if below > threshold:
                return i
    while probs[end - 1] <= 0.0:  # rounding left no crossing: the last token that can be
        end -= 1
    return end - 1


@njit(cache=True, error_model="numpy")
def last_nonzero(probs):
    """The last place of a number that is not 0; 0 where there is none. A draft vocabulary leaves most of a row 0 behind it."""
    last = len(probs) - 1
    while last > 0 and probs[last] == 0.0:
        last -= 1
    return last


@njit(cache=True, error_model="numpy")
def choose_systematic(probs: np.ndarray, u: float, drawn: np.ndarray) -> None:
    """k draws at equal steps of one uniform, for compiled callers; into `drawn`, whose length is k; -1 where the row has no positive finite sum.

    Draw j is the first token whose cumulative sum is above (u + j)/k of the whole, at most the last with any mass. Sums are added up one
    after the other in float64: `verifiers.flow` finds the distribution of the draws by the same sums.

    Example:
        >>> drawn = np.zeros(4, np.int64)
        >>> choose_systematic(np.array([0.5, 0.25, 0.25]), 0.5, drawn)
        >>> drawn.tolist()
        [0, 0, 1, 2]
    """
    k = len(drawn)
    j = 0
    last = last_nonzero(probs)
    total = 0.0
    below = 0.0
    for i in range(last + 1):
        total += np.float64(probs[i])
    if not 0.0 < total < np.inf:
        drawn[:] = -1
        return
    for i in range(last + 1):
        below += np.float64(probs[i])
        while j < k and (i == last or below / total > (u + j) / k):
            drawn[j] = i
            j += 1


@njit(cache=True, error_model="numpy")
def _choose(probs, u):
    out = np.empty(len(u), np.int64)
    for b in range(len(u)):
        out[b] = choose_row(probs[b], u[b])
    return out


def try_choose(probs: Float[Array, "M V"], u: Float[Array, " M"]) -> Int[Array, " M"]:
    """`choose` in operations of the arrays' own library, for those of other devices: -1 for a row that has no positive finite sum.

    Same distribution as `choose_row`; a parallel sum rounds differently, so a draw within 1e-15 of a border may differ.

    Example:
        >>> try_choose(np.array([[0.0, 1.0], [0.0, 0.0]]), np.array([0.5, 0.5])).tolist()
        [1, -1]
    """
    xp = namespace(probs)
    p = double(probs)
    cumulative = xp.cumulative_sum(p, axis=-1)
    total = cumulative[:, -1:]
    possible = p > 0
    crossed = possible & (cumulative > u[:, None] * total)
    last = p.shape[-1] - 1 - first(xp.flip(possible, axis=-1))
    chosen = xp.where(xp.any(crossed, axis=-1), first(crossed), last)
    is_row = (total > 0) & xp.isfinite(total)
    return xp.where(is_row[:, 0], chosen, -1)


def choose(probs: Float[Array, "*M V"], u: Float[Array, "*M"]) -> Int[Array, "*M"]:
    """Inverse of the cumulative distribution: the first token whose cumulative sum, in float64, is above u times the total.

    Rows need not sum to one. A token of probability 0 is never chosen, not even for a u that was rounded to 1.

    Raises:
        InvalidInputError: a row is all zero, or holds NaN or infinity.

    Example:
        >>> choose(np.array([[0.0, 0.5, 0.5], [1.0, 1.0, 0.0]]), np.array([0.2, 0.999])).tolist()
        [1, 1]
    """
    xp = namespace(probs)
    rows = xp.reshape(probs, (-1, probs.shape[-1]))
    draws = host(u).astype(np.float64, copy=False).reshape(-1)
    on_host = is_on_host(probs)
    ids = _choose(host_floats(rows), draws) if on_host else host(try_choose(rows, like(draws, rows)))
    if (ids < 0).any():
        bad = int(first(ids < 0))
        raise InvalidInputError(
            f"probability row {bad} sums to {float(xp.sum(rows[bad]))}; expected a positive finite sum. Check its logits for NaN."
        )
    return like(ids.reshape(tuple(u.shape)), probs)


@njit(cache=True, error_model="numpy")
def _draw(probs, seed, sample, position, stream):
    out = np.empty(len(seed), np.int64)
    for b in range(len(seed)):
        out[b] = choose_row(probs[b], uniform_at(seed[b], sample[b], position[b], stream, 0))
    return out


def draw(probs: Float[Array, "B V"], key: NoiseKey, stream: Stream) -> Int[Array, " B"]:
    """`choose` with draw 0 of a stream: row b meets the noise of row b of the key.

    Example:
        >>> draw(np.array([[0.0, 1.0]]), NoiseKey.of([1], [0], [10]), Stream.EXTRA).tolist()
        [1]
    """
    if is_on_host(probs):
        drawn = _draw(host_floats(probs), *key.host, int(stream))
        if drawn.min() >= 0:
            return like(drawn, probs)
    return choose(probs, host(uniforms(key, stream, 1))[:, 0])
