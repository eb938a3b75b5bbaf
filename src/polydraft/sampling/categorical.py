"""One token of a row of probabilities for one uniform: the inverse of the cumulative distribution.

Sums are made in float64. Compiled and torch form draw from the same distribution; within rounding of a border they may take either of two tokens.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import NoiseKey
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


def try_choose(probs: Float[Tensor, "M V"], u: Float[Tensor, " M"]) -> Int[Tensor, " M"]:
    """`choose` in torch operations, without a look at the result: -1 for a row that has no positive finite sum.

    Same distribution as `choose_row`; a parallel sum rounds differently, so a draw within 1e-15 of a border may differ.

    Example:
        >>> try_choose(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([0.5, 0.5])).tolist()
        [1, -1]
    """
    p = probs.double()
    cumulative = p.cumsum(-1)
    total = cumulative[:, -1:]
    possible = p > 0
    crossed = possible & (cumulative > u[:, None] * total)
    last = probs.shape[-1] - 1 - possible.flip(-1).int().argmax(-1)
    chosen = torch.where(crossed.any(-1), crossed.int().argmax(-1), last)
    return torch.where(((total > 0) & total.isfinite()).squeeze(-1), chosen, -1)


def choose(probs: Float[Tensor, "*M V"], u: Float[Tensor, "*M"]) -> Int[Tensor, "*M"]:
    """Inverse of the cumulative distribution: the first token whose cumulative sum, in float64, is above u times the total.

    Rows need not sum to one. A token of probability 0 is never chosen, not even for a u that was rounded to 1.

    Raises:
        InvalidInputError: a row is all zero, or holds NaN or infinity.

    Example:
        >>> choose(torch.tensor([[0.0, 0.5, 0.5], [1.0, 1.0, 0.0]]), torch.tensor([0.2, 0.999])).tolist()
        [1, 1]
    """
    rows = probs.detach().reshape(-1, probs.shape[-1])
    draws = u.detach().to(probs.device).double().flatten()
    if rows.device.type == "cpu":
        rows = (rows if rows.dtype in (torch.float32, torch.float64) else rows.double()).contiguous()
        chosen = _choose(rows.numpy(), draws.numpy())
        refused = (chosen < 0).any()
        ids = torch.from_numpy(chosen)
    else:
        ids = try_choose(rows, draws)
        refused = (ids < 0).any()
    if refused:
        bad = int((ids < 0).nonzero()[0])
        raise InvalidInputError(
            f"probability row {bad} sums to {float(rows[bad].sum())}; expected a positive finite sum. Check its logits for NaN."
        )
    return ids.view(u.shape)


@njit(cache=True, error_model="numpy")
def _draw(probs, seed, sample, position, stream):
    out = np.empty(len(seed), np.int64)
    for b in range(len(seed)):
        out[b] = choose_row(probs[b], uniform_at(seed[b], sample[b], position[b], stream, 0))
    return out


def draw(probs: Float[Tensor, "B V"], key: NoiseKey, stream: Stream) -> Int[Tensor, " B"]:
    """`choose` with draw 0 of a stream: row b meets the noise of row b of the key.

    Example:
        >>> draw(torch.tensor([[0.0, 1.0]]), NoiseKey.of([1], [0], [10]), Stream.EXTRA).tolist()
        [1]
    """
    if probs.device.type != "cpu" or probs.dtype not in (torch.float32, torch.float64):
        return choose(probs, uniforms(key, stream, 1)[:, 0])
    drawn = _draw(probs.contiguous().numpy(), *key.host, int(stream))
    return torch.from_numpy(drawn) if drawn.min() >= 0 else choose(probs, uniforms(key, stream, 1)[:, 0])
