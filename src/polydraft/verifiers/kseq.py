"""K-SEQ: try iid drafts in turn, each with p/(rho q), rho the smallest divisor that keeps every token within its share.

Sun et al. 2023 (SpecTr, arXiv 2310.15141).

    b(rho) = sum_y min(p(y)/rho, q(y))      A(rho) = 1 - (1 - b)^n      n draws from one q
    rho    smallest in [1, n] with A(rho) <= rho b(rho)
    accept x_j with probability min(1, p(x_j) / (rho q(x_j))); if all are rejected emit N(p - min(p/rho, q) A/b)

Lossless for n iid draws of one q, duplicates kept; acceptance A, at least (1 - 1/e) of the optimum (the paper's guarantee).
Traps: rho below its root; merged duplicates; a child list made from paths, which counts a shared draw twice; a number n that was
not fixed before the first of the n draws, as where copies of a context get theirs in turn and the tree grows by what was drawn.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import Method, SiblingLaw, TreeShape
from polydraft.verifiers.fast.rows import compiled
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.residual import normalise_or, positive_part

__all__ = ["divisor", "emitted_law", "kseq"]


def _accepted(
    p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], rho: Float[Tensor, " M"], n: Int[Tensor, " M"]
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """b, acceptance of one try, and A, of all n."""
    b = torch.minimum(p / rho[:, None], q).sum(-1).clamp(max=1)
    return b, -torch.expm1(n * torch.log1p(-b))


@compiled
def _valid(p, q, rho, n):
    """Whether A(rho) <= rho b(rho)."""
    b, share = 0.0, 1.0 / rho
    for t in range(p.size):
        b += min(p[t] * share, q[t])
    b = min(b, 1.0)
    return -np.expm1(n * np.log1p(-b)) <= rho * b


@compiled
def _divisors(p, q, n, out):
    for i in range(len(n)):
        low, high = 1.0, max(float(n[i]), 1.0)
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
        out[i] = high


def divisor(p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], n: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
    """rho, by bisection in float64; its upper end, which is valid even where the lower is not.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5]], dtype=torch.float64), torch.tensor([[0.9, 0.1]], dtype=torch.float64)
        >>> round(divisor(p, q, torch.tensor([2])).item(), 4)
        1.5844
    """
    rho = np.empty(len(n))
    _divisors(*(x.cpu().contiguous().numpy() for x in (p, q, n)), rho)
    return torch.from_numpy(rho).to(p)


def emitted_law(p: Float[Tensor, "M V"], q: Float[Tensor, "M V"] | None, draws: Int[Tensor, "M n"]) -> Float[Tensor, "M V"]:
    """Law of the emitted token given the draws; -1 = no draw.

    Example:
        >>> p = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
        >>> emitted_law(p, p, torch.tensor([[1, 0]])).tolist()
        [[0.0, 1.0]]
    """
    assert q is not None
    n = (draws >= 0).sum(1)
    rho = divisor(p, q, n)
    b, A = _accepted(p, q, rho, n)
    law, alive = torch.zeros_like(p), torch.ones_like(p[:, 0])
    for draw in draws.unbind(1):
        x = draw.clamp(min=0)[:, None]
        accept = (p.gather(1, x) / (rho[:, None] * q.gather(1, x))).clamp(max=1)[:, 0]
        accept = torch.where(draw >= 0, accept, 0.0)
        law, alive = law.scatter_add(1, x, (alive * accept)[:, None]), alive * (1 - accept)
    share = torch.where(b > 0, A / b, 0.0)[:, None]
    rest = positive_part(p - torch.minimum(p / rho[:, None], q) * share)
    return law + alive[:, None] * normalise_or(rest, otherwise=p)


kseq = PerNode(
    Method(
        name="kseq",
        title="K-SEQ",
        authors="Sun et al.",
        year=2023,
        arxiv="2310.15141",
        laws=frozenset({SiblingLaw.IID}),
        shapes=frozenset(TreeShape) - {TreeShape.GROWN},
    ),
    emitted_law,
)
"""The verifier."""
