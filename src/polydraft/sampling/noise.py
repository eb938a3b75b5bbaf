"""All randomness of polydraft: counter-based noise, a pure function of (seed, sample, position, stream, index).

Philox4x32-10 (Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"). The key is the request's
64-bit seed; the counter is (index // 2, position, stream, sample). Each counter gives four 32-bit words, two for each
index. Nothing depends on the slot, the batch row, the order of arrival or the size of the vocabulary.

    DRAFT, STOP, EXTRA  position = committed length at the start of the step
    RACE                position = absolute position of the token, index = token id
    EPOCH               position = committed length when an epoch of asynchronous drafts began

Trap: DRAFT and STOP keyed by a token's own position would meet, at a position that is drafted again after a rejection,
noise that the verifier has already looked at; single steps stay exact and the distribution over several steps is biased.

The functions are compiled. The floats are the same on every machine, as the words are: they are made with exact bit patterns,
+ - * / and no library logarithm.
"""

import math
from enum import IntEnum
from typing import Any

import numpy as np
from jaxtyping import Float64

from polydraft.core import NoiseKey
from polydraft.core.arrays import Array, like
from polydraft.numerics.compiled_code import njit


class Stream(IntEnum):
    """What a draw is for; streams are independent."""

    DRAFT = 0
    """Tokens of the draft: node n is drawn with index n; all draws of a context at once with that of its first copy."""
    STOP = 1
    """Where the verifier stops."""
    EXTRA = 2
    """The one token after the accepted path."""
    RACE = 3
    """Clocks of the exponential race, one for each token of the vocabulary."""
    EPOCH = 4
    """Seeds of asynchronous drafts, see `epoch_seed`."""


_RACE = int(Stream.RACE)
DRAFT: Any = np.int64(Stream.DRAFT)
"""For compiled code, which has no enumerations."""
_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_U = np.uint64

# Bits of float64. A clock is -log(u) with u = (2k + 1) / 2^53 and k of 52 bits: u and 1 - u are exact and never 0.
_ONE = 0x3FF0000000000000
_SQRT_HALF = 0x3FE6A09E667F3BCD
_MANTISSA = 0x000FFFFFFFFFFFFF
_BELOW_ONE = 1.0 - 2.0**-53
_LN2_HIGH = math.floor(math.log(2) * 2**40) / 2**40  # exact times any exponent
_LN2_LOW = 7.371002565167799e-13  # ln 2 - _LN2_HIGH
_ATANH = tuple(2 / (2 * k + 1) for k in range(1, 10))  # 2 atanh(s) = 2 s + s sum_k _ATANH[k-1] s^2k


@njit(error_model="numpy", forceinline=True)
def _round(n, k0, k1, c0, c1, c2, c3):
    a = _U(_MULTIPLIERS[0]) * c0
    b = _U(_MULTIPLIERS[1]) * c2
    k0 = (k0 + _U(n) * _U(_KEY_STEPS[0])) & _U(_MASK)
    k1 = (k1 + _U(n) * _U(_KEY_STEPS[1])) & _U(_MASK)
    return (b >> _U(32)) ^ c1 ^ k0, b & _U(_MASK), (a >> _U(32)) ^ c3 ^ k1, a & _U(_MASK)


@njit(error_model="numpy", forceinline=True)
def _philox(k0, k1, c0, c1, c2, c3):
    """Ten rounds, written out: a loop here would keep the caller's loop over tokens from being vectorised."""
    c0, c1, c2, c3 = _round(0, k0, k1, c0, c1, c2, c3)
    c0, c1, c2, c3 = _round(1, k0, k1, c0, c1, c2, c3)
    c0, c1, c2, c3 = _round(2, k0, k1, c0, c1, c2, c3)
    c0, c1, c2, c3 = _round(3, k0, k1, c0, c1, c2, c3)
    c0, c1, c2, c3 = _round(4, k0, k1, c0, c1, c2, c3)
    c0, c1, c2, c3 = _round(5, k0, k1, c0, c1, c2, c3)
    c0, c1, c2, c3 = _round(6, k0, k1, c0, c1, c2, c3)
    c0, c1, c2, c3 = _round(7, k0, k1, c0, c1, c2, c3)
    c0, c1, c2, c3 = _round(8, k0, k1, c0, c1, c2, c3)
    return _round(9, k0, k1, c0, c1, c2, c3)


@njit(error_model="numpy", forceinline=True)
def _uniform(high, low):
    return np.float64((high << _U(21)) | (low >> _U(11))) * 2.0**-53


@njit(error_model="numpy", forceinline=True)
def _clock(high, low):
    """-log((2k + 1) / 2^53) within one ulp."""
    k = (high << _U(20)) | (low >> _U(12))
    u = np.uint64(k | _U(_ONE)).view(np.float64) - _BELOW_ONE
    shifted = np.float64(u).view(np.uint64) + _U(_ONE - _SQRT_HALF)
    exponent = np.float64(np.int32(shifted >> _U(52)) - np.int32(1023))
    f = np.uint64((shifted & _U(_MANTISSA)) + _U(_SQRT_HALF)).view(np.float64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    tail = _ATANH[8]
    tail = _ATANH[7] + z * tail
    tail = _ATANH[6] + z * tail
    tail = _ATANH[5] + z * tail
    tail = _ATANH[4] + z * tail
    tail = _ATANH[3] + z * tail
    tail = _ATANH[2] + z * tail
    tail = _ATANH[1] + z * tail
    tail = _ATANH[0] + z * tail
    log_mantissa = f - s * (f - z * tail)
    return -(exponent * _LN2_HIGH) - (exponent * _LN2_LOW + log_mantissa)


@njit(error_model="numpy", forceinline=True)
def _earliest_clock(high, low):
    """A number just below `_clock`, without its logarithm: -log(u) >= 1 - u."""
    k = (high << _U(20)) | (low >> _U(12))
    return (1.0 - (np.uint64(k | _U(_ONE)).view(np.float64) - _BELOW_ONE)) * (1.0 - 1e-12)


@njit(error_model="numpy", forceinline=True)
def _words(seed, sample, position, stream, block):
    seed = _U(seed)
    return _philox(
        seed & _U(_MASK),
        seed >> _U(32),
        _U(block) & _U(_MASK),
        _U(position) & _U(_MASK),
        _U(stream) & _U(_MASK),
        _U(sample) & _U(_MASK),
    )


@njit(cache=True, error_model="numpy")
def uniform_at(seed: int, sample: int, position: int, stream: int, index: int) -> float:
    """One uniform in [0, 1), for compiled callers: the number that `uniforms` has at `index`.

    Example:
        >>> uniform_at(0, 0, 0, 0, 0)  # the first two words are 6627e8d5 e169c58d
        0.3990464...
    """
    w0, w1, w2, w3 = _words(seed, sample, position, stream, index >> 1)
    return _uniform(w2, w3) if index & 1 else _uniform(w0, w1)


def epoch_seed(seed: int, sample: int, start: int) -> int:
    """The seed of what is drafted asynchronously from one rollback to the next: such drafts cannot know where a step starts.

    With it a draft meets noise of its own place in the text and of its epoch, which no verifier has looked at; epochs never begin at one place twice.

    Example:
        >>> epoch_seed(1, 0, 10) == epoch_seed(1, 0, 10), epoch_seed(1, 0, 10) == epoch_seed(1, 0, 11)
        (True, False)
    """
    return int(uniform_at(seed, sample, start, int(Stream.EPOCH), 0) * 2.0**53)


@njit(cache=True, error_model="numpy")
def clock_at(seed: int, sample: int, position: int, index: int) -> float:
    """One clock of the race, for compiled callers: the number that `clocks` has for the token `index`.

    Example:
        >>> clock_at(7, 0, 3, 5) == clocks(NoiseKey.of([7], [0], [3]), 8)[0, 5].item()
        True
    """
    w0, w1, w2, w3 = _words(seed, sample, position, _RACE, index >> 1)
    return _clock(w2, w3) if index & 1 else _clock(w0, w1)


SPAN = 256
"""Tokens whose clocks are bounded at once."""


@njit(error_model="numpy")
def _fill_earliest(seed, sample, position, index, earliest):
    """Numbers just below the clocks from an even index on, in vector lanes."""
    key = _U(seed)
    position = _U(position) & _U(_MASK)
    sample = _U(sample) & _U(_MASK)
    block = index >> 1
    for j in range(SPAN // 2):
        w0, w1, w2, w3 = _philox(
            key & _U(_MASK), key >> _U(32), _U(block + j) & _U(_MASK), position, _U(_RACE), sample
        )
        earliest[2 * j], earliest[2 * j + 1] = _earliest_clock(w0, w1), _earliest_clock(w2, w3)


@njit(error_model="numpy")
def _has_any(rates):
    count = 0
    for t in range(rates.size):
        count += rates[t] > 0.0
    return count > 0


@njit(error_model="numpy")
def _num_possible(rates, earliest, bound):
    """How many tokens may arrive before the bound."""
    count = 0
    for t in range(rates.size):
        count += earliest[t] < bound * rates[t]
    return count


@njit(cache=True, error_model="numpy")
def arrivals(rates, begin, end, seed, sample, position, start, earliest, arrival, drawn):
    """The first arrivals of the tokens begin .. end-1, as many as there is room for; returns how many there are.

    arrival, drawn: times and tokens, in their order.  start: as of `first_arrivals`.  earliest: [SPAN] room.
    """
    count = 0
    bound = np.inf
    first = (start + begin) // 2 * 2
    for index in range(first, start + end, SPAN):
        low = max(index - start, begin)
        high = min(index + SPAN - start, end)
        part = rates[low:high]
        if not _has_any(part):
            continue
        _fill_earliest(seed, sample, position, index, earliest)
        if _num_possible(part, earliest[low + start - index :], bound) == 0:
            continue
        for t in range(low, high):
            if not earliest[t + start - index] < bound * rates[t]:
                continue
            at = clock_at(seed, sample, position, start + t) / np.float64(rates[t])
            j = min(count, drawn.size - 1)
            if count < drawn.size or at < bound:
                while j > 0 and arrival[j - 1] > at:
                    arrival[j], drawn[j] = arrival[j - 1], drawn[j - 1]
                    j -= 1
                arrival[j] = at
                drawn[j] = t
                count = min(count + 1, drawn.size)
                bound = arrival[count - 1] if count == drawn.size else np.inf
    return count


@njit(cache=True, error_model="numpy")
def first_arrivals(
    rates: np.ndarray, seed: int, sample: int, position: int, drawn: np.ndarray, start: int = 0
) -> None:
    """The winners of the race at a position: token ids in the order of clock / rate, into `drawn`; equal arrivals: lowest id first.

    rates: a distribution, [V].  Where fewer tokens have a positive rate than there is room, the last one is repeated.
    start: index of token 0's clock; that of token i is start + i.
    A clock is at least one minus its uniform, so the logarithm is only taken for tokens that may still win.

    Example:
        >>> drawn = np.zeros(3, np.int64)
        >>> first_arrivals(np.array([0.0, 0.5, 0.5]), 1, 0, 10, drawn)
        >>> sorted(set(drawn.tolist()))
        [1, 2]
    """
    count = arrivals(
        rates, 0, rates.size, seed, sample, position, start, np.empty(SPAN), np.empty(drawn.size), drawn
    )
    drawn[count:] = drawn[count - 1]


@njit(cache=True, error_model="numpy")
def _uniforms(seed, sample, position, stream, count, start):
    out = np.empty((len(seed), count))
    for b in range(len(seed)):
        for i in range(count):
            out[b, i] = uniform_at(seed[b], sample[b], position[b], stream, start + i)
    return out


@njit(error_model="numpy")
def _fill_clocks(out, k0, k1, position, sample):
    for block in range(len(out) // 2):
        w0, w1, w2, w3 = _philox(k0, k1, _U(block), position, _U(_RACE), sample)
        out[2 * block] = _clock(w0, w1)
        out[2 * block + 1] = _clock(w2, w3)


@njit(cache=True, error_model="numpy")
def _clocks(seed, sample, position, vocab_size):
    out = np.empty((len(seed), vocab_size))
    for b in range(len(seed)):
        key = _U(seed[b])
        _fill_clocks(
            out[b], key & _U(_MASK), key >> _U(32), _U(position[b]) & _U(_MASK), _U(sample[b]) & _U(_MASK)
        )
        if vocab_size % 2:
            out[b, vocab_size - 1] = clock_at(seed[b], sample[b], position[b], vocab_size - 1)
    return out


def uniforms(key: NoiseKey, stream: Stream, count: int, *, start: int = 0) -> Float64[Array, "B count"]:
    """Uniforms in [0, 1) with 53 bits, as arrays of the key's kind; column i is the draw of index start + i.

    Example:
        >>> key = NoiseKey.of([1, 2], [0, 0], [10, 10])
        >>> u = uniforms(key, Stream.DRAFT, 4)
        >>> np.array_equal(u[:, 2:], uniforms(key, Stream.DRAFT, 2, start=2))
        True
    """
    return like(_uniforms(*key.host, int(stream), count, start), key.seed)


def clocks(key: NoiseKey, vocab_size: int) -> Float64[Array, "B V"]:
    """Exp(1) clocks of the race at `key.position`, an absolute position: one for each token id, strictly positive.

    They are multiples of 2^-53 near 0, the smallest is 2^-53 and the largest 36.7.

    Example:
        >>> bool((clocks(NoiseKey.of([1], [0], [10]), 1000) > 0).all())
        True
    """
    return like(_clocks(*key.host, vocab_size), key.seed)
