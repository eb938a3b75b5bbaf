"""K-SEQ: try iid drafts in turn, each with p/(rho q), rho the smallest divisor with which every token stays within its share.

Sun et al. 2023 (SpecTr, arXiv 2310.15141).

    b(rho) = sum_y min(p(y)/rho, q(y))      A(rho) = 1 - (1 - b)^n      n draws from one q
    rho    smallest in [1, n] with A(rho) <= rho b(rho)
    accept x_j with probability min(1, p(x_j) / (rho q(x_j))); if all are rejected emit N(p - min(p/rho, q) A/b)

Lossless for n iid draws of one q, duplicates among them; acceptance A >= (1 - 1/e) of the optimum (the paper's guarantee).
Traps: rho below its root; merged duplicates; a child list made from paths, which counts a shared draw twice; a number n that was
not fixed before the first of the n draws, as where copies of a context get theirs in turn and the tree grows by what was drawn.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import FIXED, DraftSampling
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


def solved(p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], n: Int[Tensor, " M"]) -> Float[Tensor, "M 3"]:
    """rho, b and A of each context; rho by bisection in float64, its upper end, which is valid even where the lower is not.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5]], dtype=torch.float64), torch.tensor([[0.9, 0.1]], dtype=torch.float64)
        >>> [round(x, 4) for x in solved(p, q, torch.tensor([2]))[0].tolist()]
        [1.5844, 0.4156, 0.6584]
    """
    out = np.empty((len(n), 3))
    _solve(*(x.cpu().contiguous().numpy() for x in (p, q, n)), out)
    return torch.from_numpy(out).to(p)


def emitted_probs(
    p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], draws: Int[Tensor, "M n"]
) -> Float[Tensor, "M V"]:
    """Distribution of the emitted token given the draws; -1 = no draw.

    Example:
        >>> p = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
        >>> emitted_probs(p, p, torch.tensor([[1, 0]])).tolist()
        [[0.0, 1.0]]
    """
    rho, b, A = solved(p, q, (draws >= 0).sum(1)).split(1, 1)
    distribution = torch.zeros_like(p)
    alive = torch.ones_like(p[:, 0])
    for draw in draws.unbind(1):
        x = draw.clamp(min=0)[:, None]
        accept = (p.gather(1, x) / (rho * q.gather(1, x))).clamp(max=1)[:, 0]
        accept = torch.where(draw >= 0, accept, 0.0)
        distribution = distribution.scatter_add(1, x, (alive * accept)[:, None])
        alive = alive * (1 - accept)
    share = torch.where(b > 0, A / b, 0.0)
    rest = positive_part(p - torch.minimum(p / rho, q) * share)
    return distribution + alive[:, None] * normalise_or(rest, otherwise=p)


kseq = PerNode(method("kseq", "K-SEQ", "2310.15141", {DraftSampling.IID}, FIXED), emitted_probs)
"""The verifier."""
