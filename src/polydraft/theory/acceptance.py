"""Acceptance of each verifier at one node in closed form, or by an exact recursion: the mass that it emits on drafted tokens.

Sources: the file of each verifier under `polydraft.verifiers`. p, q: float64 distributions [V]; n draws.
"""

import numpy as np
from jaxtyping import Float

from polydraft.numerics.compiled_code import njit
from polydraft.theory.optimum import ascending
from polydraft.verifiers import importance as importance_rule
from polydraft.verifiers import transport as transport_rule
from polydraft.verifiers.kseq import solved
from polydraft.verifiers.selection import highest_probs


def single(p: np.ndarray, q: np.ndarray) -> float:
    """Speculative sampling of one draw: sum min(p, q).

    Example:
        >>> round(single(np.array([0.5, 0.5]), np.array([0.9, 0.1])), 4)
        0.6
    """
    return float(np.minimum(p, q).sum())


def target_sample(p: np.ndarray, q: np.ndarray, n: int) -> float:
    """Sampling the target and looking whether the token was drafted, n iid draws: sum p (1 - (1 - q)^n)."""
    return float((p * (1 - (1 - q) ** n)).sum())


def single_with_spares(p: np.ndarray, q: np.ndarray, n: int) -> float:
    """One test, n - 1 iid spares: sum min(p, q) + sum (p - q)+ (1 - (1 - q)^(n-1))."""
    return single(p, q) + float((np.maximum(p - q, 0) * (1 - (1 - q) ** (n - 1))).sum())


def recursive(p: np.ndarray, q: np.ndarray, n: int) -> float:
    """Recursive rejection of n iid draws: 1 - prod_i (1 - sum min(r_i, q)), r_{i+1} = N((r_i - q)+).

    Example:
        >>> round(recursive(np.array([0.5, 0.5]), np.array([0.9, 0.1]), 2), 4)
        0.64
    """
    r = p
    miss = 1.0
    for _ in range(n):
        miss *= max(0.0, 1 - float(np.minimum(r, q).sum()))
        remaining = np.maximum(r - q, 0)
        if remaining.sum() == 0:
            return 1.0
        r = remaining / remaining.sum()
    return 1 - miss


def kseq(p: np.ndarray, q: np.ndarray, n: int) -> tuple[float, float]:
    """(divisor rho, acceptance) of K-SEQ with n iid draws.

    Example:
        >>> rho, alpha = kseq(np.array([0.5, 0.5]), np.array([0.9, 0.1]), 2)
        >>> round(rho, 4), round(alpha, 4)
        (1.5844, 0.6584)
    """
    rho, _, alpha = solved(np.asarray(p, np.float64)[None], np.asarray(q, np.float64)[None], np.array([n]))[
        0
    ].tolist()
    return rho, alpha


def max_ratio(p: np.ndarray, q: np.ndarray, n: int) -> float:
    """The draw of largest p/q among n iid ones, or a single draw where that overlaps more: what its weights guarantee.

    Example:
        >>> round(max_ratio(np.array([0.5, 0.5]), np.array([0.9, 0.1]), 2), 4)
        0.69
    """
    chance = np.zeros((1, n + 1))
    chance[0, n] = 1.0
    highest, _, _ = highest_probs(p[None], q[None], chance)
    return max(single(p, q), single(p, highest[0]))


def importance(p: np.ndarray, q: np.ndarray, n: int, free_tokens: int = importance_rule.FREE_TOKENS) -> float:
    """A tournament of n iid draws by truncated linear programmes: what its weights guarantee.

    free_tokens: tokens among which weights are free, `s` of the paper.

    Example:
        >>> round(importance(np.array([0.5, 0.5]), np.array([0.9, 0.1]), 2), 4)
        0.69
    """
    winner = q[None]
    for _ in range(n - 1):
        winner = importance_rule.select_pairs(p[None], winner, q[None], free_tokens).distribution
    return single(p, winner[0])


def transport(p: np.ndarray, q: np.ndarray, n: int) -> float:
    """The optimal coupling of n iid draws by buckets, or a single draw where that overlaps more: what its weights guarantee.

    Example:
        >>> round(transport(np.array([0.5, 0.5]), np.array([0.9, 0.1]), 2), 4)
        0.69
    """
    return max(single(p, q), single(p, transport_rule.select(p, q, n)[0]))


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


def race_places(p: np.ndarray, q: np.ndarray, k: int) -> np.ndarray:
    """[k] chance that the target takes the first, second, ... arrival of the draft's race; the acceptance by position of a race tree.

    Example:
        >>> race_places(np.array([0.5, 0.5]), np.array([0.5, 0.5]), 2).round(6).tolist()
        [1.0, 0.0]
    """
    return np.diff([0.0, *(race(p, q, count) for count in range(1, k + 1))])


def list_matching(p: np.ndarray, q: np.ndarray, K: int) -> float:
    """Lower bound for K drafts with clocks of their own: sum_j K / (sum_i max(p_i / p_j, q_i / q_j) + (K - 1) / p_j).

    Rowan et al. 2025 (arXiv 2506.05632).
    """
    pj, _, sums = _sums_of_larger_ratio(p, q)
    return float((K / (sums + (K - 1) / pj)).sum())


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
