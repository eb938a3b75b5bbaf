"""K-SEQ: try iid drafts in turn, each with p/(rho q), rho the smallest divisor with which every token stays within its share.

Sun et al. 2023 (SpecTr, arXiv 2310.15141).

    b(rho) = sum_y min(p(y)/rho, q(y))      A(rho) = 1 - (1 - b)^n      n draws from one q
    rho    smallest in [1, n] with A(rho) <= rho b(rho)
    accept x_j with probability min(1, p(x_j) / (rho q(x_j))); if all are rejected emit N(p - min(p/rho, q) A/b)

Lossless for n iid draws of one q, duplicates among them; acceptance A >= (1 - 1/e) of the optimum (the paper's guarantee).
Traps: rho below its root; merged duplicates; a child list made from paths, which counts a shared draw twice; a number n that was
not fixed before the first of the n draws, as where copies of a context get theirs in turn and the tree grows by what was drawn.
Cost: n draws of a node: O(V) for each of the steps in which rho is found by bisection, memory O(V).
"""

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import FIXED, DraftSampling
from polydraft.core.arrays import Array, gather, host, like, namespace, scatter_add
from polydraft.methods.papers import method
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.residual import normalise_or, positive_part
from polydraft.verifiers.walks.rows import compiled


@compiled
def _accepted(p, q, rho, n):
    """b, acceptance of one try, and A, of all n."""
    b = 0.0
    share = 1.0 / rho
    for t in range(p.size):
        b += min(p[t] * share, q[t])
    b = min(b, 1.0)
    return b, -np.expm1(n * np.log1p(-b))


@compiled
def _valid(p, q, rho, n):
    b, A = _accepted(p, q, rho, n)
    return rho * b >= A


@compiled
def _solve(p, q, n, out):
    """out[i] = rho, b, A."""
    for i in range(len(n)):
        low = 1.0
        high = max(float(n[i]), 1.0)
        if n[i] < 2 or _valid(p[i], q[i], low, n[i]):
            high = low
        while high - low > 2e-16 * high:
            middle = (low + high) / 2.0
            if middle <= low or middle >= high:
                break
            if _valid(p[i], q[i], middle, n[i]):
                high = middle
            else:
                low = middle
        out[i, 0] = high
        out[i, 1:] = _accepted(p[i], q[i], high, n[i])


def solved(p: Float[Array, "M V"], q: Float[Array, "M V"], n: Int[Array, " M"]) -> Float[Array, "M 3"]:
    """rho, b and A of each context; rho by bisection in float64, its upper end, which is valid even where the lower is not.

    Example:
        >>> p, q = np.array([[0.5, 0.5]]), np.array([[0.9, 0.1]])
        >>> solved(p, q, np.array([2]))[0].round(4).tolist()
        [1.5844, 0.4156, 0.6584]
    """
    out = np.empty((len(n), 3))
    _solve(host(p), host(q), host(n), out)
    return like(out.astype(host(p).dtype, copy=False), p)


def emitted_probs(
    p: Float[Array, "M V"], q: Float[Array, "M V"], draws: Int[Array, "M n"]
) -> Float[Array, "M V"]:
    """Distribution of the emitted token given the draws; -1 = no draw.

    Example:
        >>> p = np.array([[0.25, 0.75]])
        >>> emitted_probs(p, p, np.array([[1, 0]])).tolist()
        [[0.0, 1.0]]
    """
    xp = namespace(p)
    count = xp.count_nonzero(draws >= 0, axis=1)
    solution = solved(p, q, count)
    rho = solution[:, :1]
    b = solution[:, 1:2]
    A = solution[:, 2:]
    distribution = xp.zeros_like(p)
    alive = xp.ones_like(p[:, 0])
    for j in range(draws.shape[1]):
        draw = draws[:, j]
        x = xp.clip(draw, min=0)[:, None]
        ratio = gather(p, x) / (rho * gather(q, x))
        accept = xp.where(draw >= 0, xp.clip(ratio, max=1.0)[:, 0], 0.0)
        distribution = scatter_add(distribution, x, (alive * accept)[:, None])
        alive = alive * (1 - accept)
    share = xp.where(b > 0, A / b, 0.0)
    rest = positive_part(p - xp.minimum(p / rho, q) * share)
    return distribution + alive[:, None] * normalise_or(rest, otherwise=p)


kseq = PerNode(method("kseq", "K-SEQ", "2310.15141", {DraftSampling.IID}, FIXED), emitted_probs)
"""The verifier."""
