"""NEST's lenient test (not lossless): accept a drafted token by its share of the likeliest one's probability.

Li et al. 2024 (arXiv 2405.19325).

    x is accepted with probability min(1, p(x) / (gamma max p)); the first that is not ends the walk, and one token of p follows

For chains of deterministic drafts. At a node whose draft is x, the emitted distribution differs from p by total variation a(x) (1 - p(x)), a the chance to
accept it: `deviation`. gamma -> infinity accepts nothing and is p; gamma = 1 always accepts the likeliest, and others with p / max.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from polydraft.core import Draft, DraftSampling, Method, TreeShape
from polydraft.core.arrays import Array, double, gather, like, namespace
from polydraft.errors import InvalidInputError
from polydraft.methods.papers import method
from polydraft.verifiers.lift.verdict import TreeVerdict
from polydraft.verifiers.residual import normalise

GAMMA = 0.05


def accept_probability(
    p: Float[Array, "*M V"], token_probs: Float[Array, "*M"], gamma: float = GAMMA
) -> Float[Array, "*M"]:
    """own: probability of the drafted token.

    Example:
        >>> accept_probability(np.array([[0.8, 0.2], [0.8, 0.2]]), np.array([0.8, 0.2]), gamma=1).tolist()
        [1.0, 0.25]
    """
    xp = namespace(p)
    return xp.clip(token_probs / (gamma * xp.max(p, axis=-1)), max=1.0)


def deviation(
    p: Float[Array, "*M V"], token_probs: Float[Array, "*M"], gamma: float = GAMMA
) -> Float[Array, "*M"]:
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

    def __call__(self, draft: Draft, target_probs: Float[Array, "B N V"]) -> TreeVerdict:
        xp = namespace(target_probs)
        p = normalise(double(target_probs))
        is_node = like(draft.tree.host.parents[:, 1:] >= 0, p)
        rows = like(np.arange(len(p)), p)
        tokens = like(draft.tree.host.tokens[:, 1:, None], p)
        above = p[:, :-1, :]
        accepted = accept_probability(above, gather(above, tokens)[..., 0], self.gamma)
        accepted = xp.where(is_node, accepted, 0.0)
        one = xp.ones_like(p[:, :1, 0])
        reach = xp.cumulative_prod(xp.concat([one, accepted], axis=1), axis=1)
        stop = reach * (1 - xp.concat([accepted, 0 * one], axis=1))
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
