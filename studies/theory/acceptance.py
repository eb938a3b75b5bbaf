"""How much any lossless rule can accept at one node: optimal transport between the drafts and the target.

Hu et al. 2025 (arXiv 2502.18779), Khisti et al. 2024 (2410.18234); without replacement through an exponential race.

    alpha* = 1 + min over sets H of tokens of psi(H)      psi(H) = P(H) - Q(H)      Q(H) = Pr(all draws lie in H)

For draws from one q, with or without replacement, a minimiser is a beginning of the tokens sorted by ascending p/q (p = 0
first, q = 0 < p last): one sort and cumulative sums. All functions take float64 distributions [V] that sum to one; acceptance means
that the emitted token is one of the drafted ones.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from polydraft.errors import InvalidInputError

LOG_STEP = 0.08
"""Of the trapezoid in log t; error about 1e-12."""


@dataclass(frozen=True)
class Optimum:
    """alpha: the largest acceptance of any lossless rule.  witness: a set H that no rule can serve better, token ids."""

    alpha: float
    witness: np.ndarray


def _checked(*rows: np.ndarray) -> list[np.ndarray]:
    distributions = [np.asarray(row, np.float64) for row in rows]
    for row in distributions:
        if (
            row.shape != distributions[0].shape
            or row.ndim != 1
            or not (row >= 0).all()
            or abs(row.sum() - 1) > 1e-6
        ):
            raise InvalidInputError(
                f"a row of shape {row.shape} that sums to {row.sum():g} was given; expected distributions [V] of equal length. Normalise them."
            )
    return distributions


def ascending(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Token ids by ascending p/q; p = 0 first, q = 0 < p last.

    Example:
        >>> ascending(np.array([0.5, 0.25, 0.25]), np.array([0.0, 0.75, 0.25])).tolist()
        [1, 2, 0]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(p > 0, p / q, 0.0)
    return np.argsort(ratio, kind="stable")


def _best(order: np.ndarray, P: np.ndarray, Q: np.ndarray) -> Optimum:
    """P, Q: of the prefixes of lengths 1..V; the empty one has psi = 0."""
    psi = P - Q
    least = int(psi.argmin())
    return Optimum(1.0 + float(psi[least]), order[: least + 1]) if psi[least] < 0 else Optimum(1.0, order[:0])


def with_replacement(p: np.ndarray, q: np.ndarray, n: int) -> Optimum:
    """Optimum for n iid draws from q: Q(H) = q(H)^n. O(V log V).

    Example:
        >>> round(with_replacement(np.array([0.5, 0.5]), np.array([0.9, 0.1]), 2).alpha, 4)
        0.69
    """
    p, q = _checked(p, q)
    order = ascending(p, q)
    return _best(order, p[order].cumsum(), np.minimum(q[order].cumsum(), 1.0) ** n)


@njit(cache=True)
def _all_inside(q, n, t, weight, rest):
    """Pr(n draws without replacement lie in the first i + 1 tokens), all i: first arrivals of a race with rates q."""
    inside = np.zeros(q.size)
    below = np.zeros((n, t.size))  # below[m, k] = Pr(m of the prefix have arrived by t[k])
    below[0] = 1.0
    for i in range(q.size):
        late = np.exp(-q[i] * t)
        for m in range(n - 1, -1, -1):
            below[m] *= late
            if m > 0:
                below[m] += below[m - 1] * (1.0 - late)
        if rest[i] <= 0.0:
            inside[i] = 1.0
            continue
        fewer = 0.0
        for k in range(t.size):
            arrived = 0.0
            for m in range(n):
                arrived += below[m, k]
            fewer += weight[k] * rest[i] * np.exp(-rest[i] * t[k]) * arrived
        inside[i] = max(0.0, 1.0 - fewer)
    return inside


def without_replacement(p: np.ndarray, q: np.ndarray, n: int) -> Optimum:
    """Optimum for n draws without replacement (all of supp q where it is smaller): closed form for n <= 2, else the race integral.

    Q(H) = 1 - int c e^(-ct) Pr(N_H(t) < n) dt, c = q outside H, N_H(t) = arrivals in H of clocks with rates q before t.

    Example:
        >>> round(without_replacement(np.array([0.5, 0.5]), np.array([0.9, 0.1]), 2).alpha, 4)
        1.0
    """
    p, q = _checked(p, q)
    support = q > 0
    if n >= support.sum():
        return Optimum(float(p[support].sum()), np.flatnonzero(support))
    order = ascending(p, q)
    s = q[order]
    if n == 1:
        Q = s.cumsum()
    elif n == 2:
        Q = s.cumsum() * (s / (1 - s)).cumsum() - (s * s / (1 - s)).cumsum()
    else:
        t = np.exp(np.arange(np.log(1e-12), np.log(1e12), LOG_STEP))
        rest = np.append(s[::-1].cumsum()[::-1][1:], 0.0)
        Q = _all_inside(s, n, t, LOG_STEP * t, rest)
    return _best(order, p[order].cumsum(), np.minimum(Q, 1.0))


def top(q: np.ndarray, n: int) -> np.ndarray:
    """The n most probable tokens; ties: lowest id."""
    return np.argsort(-q, kind="stable")[:n]


def greedy_plus_one(p: np.ndarray, q: np.ndarray, n: int) -> Optimum:
    """Optimum for the top n-1 tokens S of q and one draw from the rest: P(S) + sum over x outside S of min(p, q / (1 - q(S))).

    Example:
        >>> greedy_plus_one(np.array([0.5, 0.5, 0.0]), np.array([0.5, 0.25, 0.25]), 2).alpha
        1.0
    """
    p, q = _checked(p, q)
    fixed = top(q, n - 1)
    rest = q.copy()
    rest[fixed] = 0.0
    if rest.sum() > 0:
        rest /= rest.sum()
    lacking = rest > p
    lacking[fixed] = False
    witness = np.union1d(fixed, np.flatnonzero(lacking))
    return Optimum(
        float(p[fixed].sum() + np.minimum(p, rest).sum() - np.minimum(p, rest)[fixed].sum()), witness
    )


def point_mass(p: np.ndarray, children: np.ndarray) -> Optimum:
    """Optimum for deterministic children: P(children), which target sampling attains."""
    (p,) = _checked(p)
    return Optimum(float(p[np.unique(children)].sum()), np.unique(children))
