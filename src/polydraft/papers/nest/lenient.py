"""NEST's lenient test (not lossless): accept a drafted token by its share of the likeliest one's probability.

Li et al. 2024 (arXiv 2405.19325).

    x is accepted with probability min(1, p(x) / (gamma max p)); the first that is not ends the walk, and one token of p follows

For chains of deterministic drafts. At a node whose draft is x, the emitted distribution differs from p by total variation a(x) (1 - p(x)), a the chance to
accept it: `deviation`. gamma -> infinity accepts nothing and is p; gamma = 1 always accepts the likeliest, and others with p / max.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from polydraft.core import Draft, DraftSampling, Method, TreeShape
from polydraft.errors import InvalidInputError
from polydraft.methods.papers import method
from polydraft.verifiers.lift.verdict import TreeVerdict
from polydraft.verifiers.residual import normalise

GAMMA = 0.05


def accept_probability(
    p: Float[Tensor, "*M V"], token_probs: Float[Tensor, "*M"], gamma: float = GAMMA
) -> Float[Tensor, "*M"]:
    """own: probability of the drafted token.

    Example:
        >>> accept_probability(torch.tensor([[0.8, 0.2], [0.8, 0.2]]), torch.tensor([0.8, 0.2]), gamma=1).tolist()
        [1.0, 0.25]
    """
    return (token_probs / (gamma * p.amax(-1))).clamp(max=1)


def deviation(
    p: Float[Tensor, "*M V"], token_probs: Float[Tensor, "*M"], gamma: float = GAMMA
) -> Float[Tensor, "*M"]:
    """Total variation between p and the distribution of the token that is emitted where that token was drafted."""
    return accept_probability(p, token_probs, gamma) * (1 - token_probs)


@dataclass(frozen=True)
class Lenient:
    """The verifier, with its threshold."""

    info: Method
    gamma: float = GAMMA

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise InvalidInputError(
                f"gamma={self.gamma} was given to the verifier 'lenient'; expected more than 0."
            )

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> TreeVerdict:
        p = normalise(target_probs.double())
        real = draft.tree.is_node[:, 1:]
        rows = torch.arange(len(p))
        token_probs = p[:, :-1].gather(-1, draft.tree.tokens[:, 1:, None])[..., 0]
        accepted = torch.where(real, accept_probability(p[:, :-1], token_probs, self.gamma), 0)
        reach = torch.cat([torch.ones_like(p[:, :1, 0]), accepted], 1).cumprod(1)
        stop = reach * (
            1 - torch.cat([accepted, torch.zeros_like(accepted[:, :1] if accepted.shape[1] else reach)], 1)
        )
        return TreeVerdict(draft.tree, stop, lambda at: p[rows, at])


lenient = Lenient(
    method(
        "lenient",
        "Lenient span test (NEST)",
        "2405.19325",
        {DraftSampling.POINT_MASS},
        {TreeShape.CHAIN},
        lossless=False,
    )
)
"""The verifier."""
