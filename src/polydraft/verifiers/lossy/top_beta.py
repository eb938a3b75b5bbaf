"""Top-beta with tolerance (not lossless): keep a drafted token among the target's best that is not much worse than the best.

Xia et al. 2022 (SpecDec, arXiv 2203.16487).

    x is kept iff p(x) is among the beta largest and log max p - log p(x) <= tau; the first failure emits argmax p

beta = 1 or tau = 0 is greedy decoding, exactly; otherwise the output follows the draft within the tolerance: see `output_law`.
"""

from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import SiblingLaw, TreeShape
from polydraft.papers import method
from polydraft.verifiers.lift.per_node import PerNode

BETA, TAU = 3, 1.0


def kept(p: Float[Tensor, "M V"], beta: int = BETA, tau: float = TAU) -> Float[Tensor, "M V"]:
    """1 for the tokens that are kept, 0 for the others.

    Example:
        >>> kept(torch.tensor([[0.5, 0.4, 0.1]]), beta=3, tau=1.0).tolist()
        [[1.0, 1.0, 0.0]]
    """
    best = p.topk(min(beta, p.shape[-1])).values
    return ((p >= best[:, -1:]) & (p >= best[:, :1] * torch.e**-tau)).to(p.dtype)


def _greedy(p: Tensor) -> Tensor:
    return torch.zeros_like(p).scatter_(1, p.argmax(1, keepdim=True), 1.0)


def emitted_law(
    p: Float[Tensor, "M V"],
    q: Float[Tensor, "M V"] | Float[Tensor, "M n V"] | None,
    draws: Int[Tensor, "M n"],
    *,
    beta: int = BETA,
    tau: float = TAU,
) -> Float[Tensor, "M V"]:
    """Law of the emitted token given the draw: it, or the most probable one."""
    x = draws[:, :1]
    accept = kept(p, beta, tau).gather(1, x)
    return ((1 - accept) * _greedy(p)).scatter_add(1, x, accept)


def output_law(p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], beta: int = BETA, tau: float = TAU) -> Float[Tensor, "M V"]:
    """Law of the next token for one draft from q.

    Example:
        >>> output_law(torch.tensor([[0.5, 0.4, 0.1]]), torch.tensor([[0.0, 0.5, 0.5]])).tolist()
        [[0.5, 0.5, 0.0]]
    """
    taken = q * kept(p, beta, tau)
    return taken + (1 - taken.sum(-1, keepdim=True)) * _greedy(p)


top_beta = PerNode(
    method("top_beta", "Top-beta with tolerance (SpecDec)", "2203.16487", SiblingLaw, {TreeShape.CHAIN}, lossless=False),
    partial(emitted_law, beta=BETA, tau=TAU),
)
"""The verifier."""
