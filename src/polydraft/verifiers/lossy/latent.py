"""Latent neighbourhoods (not lossless): a drafted image token may borrow the target's mass of its codebook neighbours.

Jang et al. 2024 (LANTERN, arXiv 2410.03355). For models whose tokens are codes of a quantised latent space.

    A(x)    the longest beginning of x's nearest neighbours whose mass under p stays within the budget:
            additive        sum_A p <= delta
            multiplicative  sum_A p <= factor p(x)
    a(x)  = min(1, (p(x) + sum_A p) / q(x));  a rejection emits N((p - q)+)

    output(y) = q(y) a(y) + (1 - sum q a) N((p - q)+)(y)

The budget limits the mass borrowed for one candidate, not the total variation of the output: with p on even and q on odd tokens,
each the other's neighbour, delta = 0.005 gives a total variation of 1. So measure `output_law`. Budget 0: speculative sampling.
There is no default codebook, hence no entry in the registry: make the rule with `latent(neighbours, ...)`.
"""

from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import SiblingLaw, TreeShape
from polydraft.errors import InvalidInputError
from polydraft.papers import method
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.speculative import residual


def accept_probability(
    p: Float[Tensor, "M V"],
    q: Float[Tensor, "M V"],
    x: Int[Tensor, "M C"],
    neighbours: Int[Tensor, "V m"],
    *,
    delta: float = 0.0,
    factor: float = 0.0,
) -> Float[Tensor, "M C"]:
    """a(x) of tokens x.

    Example:
        >>> p, q = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5]])
        >>> near, every = torch.tensor([[1], [0]]), torch.tensor([[0, 1]])
        >>> accept_probability(p, q, every, near).tolist()
        [[0.5, 1.0]]
        >>> accept_probability(p, q, every, near, delta=0.8).tolist()
        [[1.0, 1.0]]
    """
    own = p.gather(1, x)
    near = p.gather(1, neighbours[x].flatten(1)).view(*x.shape, -1)
    mass = near.cumsum(-1)
    within = mass <= torch.maximum(torch.full_like(own, delta), factor * own)[..., None]
    borrowed = torch.where(within, mass, 0.0).amax(-1)
    qx = q.gather(1, x)
    return torch.where(qx > 0, (own + borrowed) / qx, 0.0).clamp(max=1)


def emitted_law(
    p: Float[Tensor, "M V"],
    q: Float[Tensor, "M V"],
    draws: Int[Tensor, "M n"],
    *,
    neighbours: Int[Tensor, "V m"],
    delta: float,
    factor: float,
) -> Float[Tensor, "M V"]:
    """Law of the emitted token given the one draw."""
    x = draws[:, :1]
    accept = accept_probability(p, q, x, neighbours, delta=delta, factor=factor)
    return ((1 - accept) * residual(p, q)).scatter_add(1, x, accept)


def output_law(
    p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], neighbours: Int[Tensor, "V m"], *, delta: float = 0.0, factor: float = 0.0
) -> Float[Tensor, "M V"]:
    """Law of the next token for one draft from q.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])
        >>> output_law(p, q, torch.tensor([[1], [0]])).tolist()  # no budget: the target's law
        [[0.5, 0.5]]
    """
    every = torch.arange(p.shape[-1], device=p.device).expand(len(p), -1)
    taken = q * accept_probability(p, q, every, neighbours, delta=delta, factor=factor)
    return taken + (1 - taken.sum(-1, keepdim=True)) * residual(p, q)


def latent(neighbours: Int[Tensor, "V m"], *, delta: float = 0.0, factor: float = 0.0) -> PerNode:
    """The verifier for one codebook.

    neighbours: the m nearest other tokens of each token, nearest first.  delta, factor: additive and multiplicative budget; the
    larger of the two counts.

    Raises:
        InvalidInputError: a negative budget, or neighbours that are no table of token ids.

    Example:
        >>> latent(torch.tensor([[1], [0]]), delta=0.1).info.lossless
        False
    """
    if (
        min(delta, factor) < 0
        or neighbours.ndim != 2
        or not (0 <= int(neighbours.min()) <= int(neighbours.max()) < len(neighbours))
    ):
        raise InvalidInputError(
            f"delta={delta}, factor={factor} and neighbours of shape {tuple(neighbours.shape)} were given; expected budgets >= 0 and "
            "a [V, m] table of token ids, nearest first. Build it from the distances between codebook rows."
        )
    info = method("latent", "Latent neighbourhoods (LANTERN)", "2410.03355", {SiblingLaw.IID}, {TreeShape.CHAIN}, lossless=False)
    return PerNode(info, partial(emitted_law, neighbours=neighbours, delta=delta, factor=factor))
