"""How much any lossless verifier can accept at one node: optimal transport between the drafts and the target.

Hu et al. 2025 (arXiv 2502.18779), Khisti et al. 2024 (2410.18234); without replacement through an exponential race.

    alpha* = 1 + min over sets H of tokens of psi(H)      psi(H) = P(H) - Q(H)      Q(H) = Pr(all draws lie in H)

For draws from one q, with or without replacement, a minimiser is a beginning of the tokens sorted by ascending p/q (p = 0
first, q = 0 < p last): one sort and cumulative sums. All functions take float64 distributions [V] that sum to one; acceptance means
that the emitted token is one of the drafted ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from polydraft.core import DraftSampling
from polydraft.errors import InvalidInputError
from polydraft.numerics.compiled_code import njit

LOG_STEP = 0.08
"""Of the trapezoid in log t; error about 1e-12."""
ROUNDING = 1e-12
"""Below this an acceptance of one is missed by rounding alone."""
LARGEST_BRUTE_FORCE = 18
"""Most tokens for which all subsets are tried."""


@dataclass(frozen=True)
class Optimum:
    """alpha: the largest acceptance of any lossless verifier.  witness: a set H that none can serve better, token ids."""

    alpha: float
    witness: np.ndarray


def optimum(p: np.ndarray, q: np.ndarray, n: int, sampling: DraftSampling = DraftSampling.IID) -> Optimum:
    """The largest acceptance of any lossless verifier for n drafts of a draft sampling.

    p, q: the target's and the draft's distribution, [V].  Draws of one race (COUPLED) are draws without replacement.
    SYSTEMATIC draws and LISTED ones have no closed form here, see `bounds.best_acceptance`; INDEPENDENT ones have several q, see `independent`.

    Raises:
        InvalidInputError: no distributions of equal length, or a draft sampling without a closed form.

    Example:
        >>> p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
        >>> [round(optimum(p, q, n).alpha, 3) for n in (1, 2, 4)]
        [0.6, 0.69, 0.844]
    """
    match sampling:
        case DraftSampling.IID:
            return with_replacement(p, q, n)
        case DraftSampling.WITHOUT_REPLACEMENT | DraftSampling.COUPLED:
            return without_replacement(p, q, n)
        case DraftSampling.GREEDY_PLUS_ONE:
            return greedy_plus_one(p, q, n)
        case DraftSampling.POINT_MASS:
            return point_mass(p, top(q, n))
        case _:
            raise InvalidInputError(
                f"sampling={sampling.name} was given; expected IID, WITHOUT_REPLACEMENT, COUPLED, GREEDY_PLUS_ONE or POINT_MASS. "
                "Use `independent` for several draft models, `bounds.best_acceptance` for others."
            )


def gap(
    acceptance: float, p: np.ndarray, q: np.ndarray, n: int, sampling: DraftSampling = DraftSampling.IID
) -> float:
    """What a verifier's acceptance lacks of the optimum; 0 where nothing is left to gain.

    Example:
        >>> p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
        >>> round(gap(0.64, p, q, 2), 3)  # recursive rejection
        0.05
    """
    return optimum(p, q, n, sampling).alpha - acceptance


def checked(*rows: np.ndarray) -> list[np.ndarray]:
    """Distributions in float64, refused where they are none or of unequal length."""
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
    p, q = checked(p, q)
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
    p, q = checked(p, q)
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
    p, q = checked(p, q)
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
    (p,) = checked(p)
    return Optimum(float(p[np.unique(children)].sum()), np.unique(children))


def independent(p: np.ndarray, qs: list[np.ndarray]) -> Optimum:
    """Optimum for one draw from each of several distributions: Q(H) = product of q_i(H).

    All subsets are tried for up to 18 tokens. Beyond, fixed points of "i is in H iff p(i) is below what it adds to Q" are tried
    from many starts: then alpha is an upper bound, as every H gives one, and not always the least.

    Example:
        >>> round(independent(np.array([0.5, 0.5]), [np.array([0.9, 0.1]), np.array([0.2, 0.8])]).alpha, 4)
        1.0
    """
    p, *distributions = checked(p, *qs)
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
            for psi, tried in _towards_fixed_point(p, q, H):
                if psi < best:
                    best = psi
                    witness = tried
    return Optimum(1.0 + best, np.flatnonzero(witness))


def _towards_fixed_point(p: np.ndarray, q: np.ndarray, H: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    """psi(H) and H, again and again for the tokens whose p is below what they add to Q; at most 50."""
    for _ in range(50):
        inside = q @ H
        yield float(p @ H - inside.prod()), H
        others = np.array([np.delete(inside, i).prod() for i in range(len(q))])
        new = p < others @ q
        if (new == H).all():
            return
        H = new


def is_certain(p: np.ndarray, q: np.ndarray, n: int = 2) -> tuple[bool, np.ndarray]:
    """Whether n iid draws can always be accepted, P(S) >= q(S)^n for all S; and a set that shows it where they cannot.

    Khisti et al. 2024 (arXiv 2410.18234, the necessary and sufficient condition for two drafts), for any n.

    Example:
        >>> certain, witness = is_certain(np.array([0.5, 0.5]), np.array([0.9, 0.1]))
        >>> certain, witness.tolist()
        (False, [0])
    """
    best = with_replacement(p, q, n)
    if best.alpha > 1 - ROUNDING:
        return True, best.witness[:0]
    return False, best.witness
