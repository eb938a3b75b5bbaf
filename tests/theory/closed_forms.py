"""Acceptance that the tests compare verifiers with: of races, of lists, of draws from several distributions."""

from itertools import product

import numpy as np
from jaxtyping import Float
from numba import njit

from studies.theory.acceptance import Optimum, _checked, ascending, with_replacement

LARGEST_BRUTE_FORCE = 18
"""Most tokens for which all subsets are tried."""


@njit(cache=True)
def _miss(r, c, n):
    remaining = np.maximum(r - c, 0.0)
    s = remaining.sum()
    if n == 1 or s == 0.0:
        return s
    remaining /= s
    total = 0.0
    for x in range(c.size):
        if c[x] > r[x]:
            rest = c.copy()
            rest[x] = 0.0
            mass = rest.sum()
            total += (c[x] - r[x]) * (_miss(remaining, rest / mass, n - 1) if mass > 0.0 else 1.0)
    return total


def recursive_wor(p: np.ndarray, q: np.ndarray, n: int) -> float:
    """Recursive rejection of n draws without replacement, by recursion over all of them: O(V^n), for small cases."""
    return 1 - _miss(np.asarray(p, np.float64), np.asarray(q, np.float64), min(n, int((q > 0).sum())))


def _sums_of_larger_ratio(p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(p_j, q_j, sum_i max(p_i / p_j, q_i / q_j)) of the tokens with p_j, q_j > 0: a sort instead of all pairs."""
    order = ascending(p, q)
    p = p[order]
    q = q[order]
    above = p.sum() - p.cumsum()
    upto = q.cumsum()
    both = (p > 0) & (q > 0)
    return p[both], q[both], above[both] / p[both] + upto[both] / q[both]


def race_of_one(p: np.ndarray, q: np.ndarray) -> float:
    """One draft that shares the target's clocks: sum_j 1 / sum_i max(p_i / p_j, q_i / q_j). O(V log V).

    Between (1 - TV) / (1 + TV) and 1 - TV (Daliri et al. 2024, arXiv 2408.07978).

    Example:
        >>> race_of_one(np.array([0.5, 0.5]), np.array([0.5, 0.5]))
        1.0
    """
    _, _, sums = _sums_of_larger_ratio(p, q)
    return float((1 / sums).sum())


@njit(cache=True)
def _race(p, q, k, s, step):
    total = 0.0
    counts = np.empty(k)
    for j in range(p.size):
        if p[j] <= 0.0 or q[j] <= 0.0:
            continue
        before = np.maximum(q * (p[j] / q[j]) - p, 0.0)
        before[j] = 0.0
        last = 0.0
        for m in range(s.size):
            counts[:] = 0.0
            counts[0] = 1.0
            for i in range(p.size):
                if before[i] > 0.0:
                    hit = -np.expm1(-s[m] * before[i])
                    for c in range(k - 1, 0, -1):
                        counts[c] = counts[c] * (1.0 - hit) + counts[c - 1] * hit
                    counts[0] *= 1.0 - hit
            f = np.exp(-s[m]) * counts.sum() * s[m]
            if m > 0:
                total += p[j] * (f + last) / 2 * step
            last = f
    return total


def race(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """k drafts that share the target's clocks, by quadrature in log time, error below 1e-12. O(V^2 k nodes).

    Kobus & Gunduz 2025 (arXiv 2504.15475).
    """
    step = 0.05
    return float(
        _race(
            np.asarray(p, np.float64),
            np.asarray(q, np.float64),
            k,
            np.exp(np.arange(np.log(1e-22), np.log(80), step)),
            step,
        )
    )


def list_matching(p: np.ndarray, q: np.ndarray, K: int) -> float:
    """Lower bound for K drafts with clocks of their own: sum_j K / (sum_i max(p_i / p_j, q_i / q_j) + (K - 1) / p_j).

    Rowan et al. 2025 (arXiv 2506.05632).
    """
    pj, _, sums = _sums_of_larger_ratio(p, q)
    return float((K / (sums + (K - 1) / pj)).sum())


def independent(p: np.ndarray, qs: list[np.ndarray]) -> Optimum:
    """Optimum for one draw from each of several distributions: Q(H) = product of q_i(H).

    All subsets are tried for up to 18 tokens. Beyond, fixed points of "i is in H iff p(i) is below what it adds to Q" are tried
    from many starts: then alpha is an upper bound, as every H gives one, and not always the least.

    Example:
        >>> round(independent(np.array([0.5, 0.5]), [np.array([0.9, 0.1]), np.array([0.2, 0.8])]).alpha, 4)
        1.0
    """
    p, *distributions = _checked(p, *qs)
    q = np.stack(distributions)
    if p.size <= LARGEST_BRUTE_FORCE:
        sets = np.array(list(product([False, True], repeat=p.size)))
        psi = sets @ p - (sets @ q.T).prod(1)
        least = int(psi.argmin())
        return Optimum(1.0 + float(psi[least]), np.flatnonzero(sets[least]))
    best = 0.0
    witness = np.zeros(p.size, bool)
    for start in np.concatenate([q, q.mean(0, keepdims=True)]):
        order = ascending(p, start)
        for size in np.unique(np.geomspace(1, p.size, 24).astype(int)):
            H = np.zeros(p.size, bool)
            H[order[:size]] = True
            for _ in range(50):
                inside = q @ H
                psi = float(p @ H - inside.prod())
                if psi < best:
                    best = psi
                    witness = H
                others = np.array([np.delete(inside, i).prod() for i in range(len(q))])
                new = p < others @ q
                if (new == H).all():
                    break
                H = new
    return Optimum(1.0 + best, np.flatnonzero(witness))


def is_certain(p: np.ndarray, q: np.ndarray, n: int = 2) -> tuple[bool, np.ndarray]:
    """Whether n iid draws can always be accepted, P(S) >= q(S)^n for all S; and a set that shows it where they cannot.

    Khisti et al. 2024, for n = 2.

    Example:
        >>> certain, witness = is_certain(np.array([0.5, 0.5]), np.array([0.9, 0.1]))
        >>> certain, witness.tolist()
        (False, [0])
    """
    rates = with_replacement(p, q, n)
    return rates.alpha > 1 - 1e-12, rates.witness if rates.alpha <= 1 - 1e-12 else rates.witness[:0]


def of_tables(accepted: Float[np.ndarray, "V V"], root: int, depth: int) -> float:
    """E[accepted] + 1 of a top-down rule on Markov tables, for trees of distinct siblings grown to `depth`.

    accepted: row x has, for each token y, the probability that y is drafted after x and emitted there.

    Example:
        >>> of_tables(np.array([[0.25, 0.25], [0.25, 0.25]]), 0, 2)
        1.75
    """
    f = np.zeros(len(accepted))
    for _ in range(depth):
        f = accepted @ (1 + f)
    return 1 + float(f[root])
