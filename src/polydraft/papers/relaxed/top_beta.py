"""Top-beta with tolerance (Spec-Verification, not lossless): accept a drafted token among the target's best that is not much worse than the best.

Xia et al. 2022 (SpecDec, arXiv 2203.16487).

    x is accepted iff p(x) is among the beta largest and log max p - log p(x) <= tau; the first failure emits argmax p
    behind the last token of a draft that was accepted whole stands argmax p, too

beta = 1 or tau = 0 is greedy decoding of p, exactly, up to ties; otherwise the output follows the draft within the tolerance, however
large its distance from p: see `output_probs` and `deviation`. Give p a temperature of 1: at temperature 0 it is one-hot, and every beta and
tau then is greedy decoding.
"""

from dataclasses import dataclass
from math import exp

from jaxtyping import Float, Int

from polydraft.core import Draft, DraftSampling, Method, TreeShape
from polydraft.core.arrays import Array, double, gather, like, namespace, scatter
from polydraft.errors import InvalidInputError
from polydraft.methods.papers import method
from polydraft.verifiers.lift.verdict import TreeVerdict
from polydraft.verifiers.residual import normalise

BETA = 3
TAU = 1.0


def acceptable(p: Float[Array, "*M V"], beta: int = BETA, tau: float = TAU) -> Float[Array, "*M V"]:
    """1 for the tokens that are accepted, 0 for the others.

    Example:
        >>> import numpy as np
        >>> acceptable(np.array([[0.5, 0.4, 0.1]]), beta=3, tau=1.0).tolist()
        [[1.0, 1.0, 0.0]]
    """
    xp = namespace(p)
    best = xp.sort(p, axis=-1, descending=True)[..., : min(beta, p.shape[-1])]
    return xp.astype((p >= best[..., -1:]) & (p >= best[..., :1] * exp(-tau)), p.dtype)


def _greedy(p: Array) -> Array:
    xp = namespace(p)
    return scatter(xp.zeros_like(p), xp.argmax(p, axis=1, keepdims=True), 1.0)


def output_probs(
    p: Float[Array, "M V"], q: Float[Array, "M V"], beta: int = BETA, tau: float = TAU
) -> Float[Array, "M V"]:
    """Distribution of the next token for one draft from q.

    Example:
        >>> import numpy as np
        >>> output_probs(np.array([[0.5, 0.4, 0.1]]), np.array([[0.0, 0.5, 0.5]])).tolist()
        [[0.5, 0.5, 0.0]]
    """
    accepted = q * acceptable(p, beta, tau)
    return accepted + (1 - namespace(p).sum(accepted, axis=-1, keepdims=True)) * _greedy(p)


def deviation(
    p: Float[Array, "*M V"], drafted_tokens: Int[Array, "*M"], beta: int = BETA, tau: float = TAU
) -> Float[Array, "*M"]:
    """Probability by which the emitted token, where `own` was drafted, is another than greedy decoding's: 1 or 0.

    Example:
        >>> import numpy as np
        >>> deviation(np.array([[0.5, 0.4, 0.1]] * 3), np.array([0, 1, 2])).tolist()
        [0.0, 1.0, 0.0]
    """
    xp = namespace(p)
    accepted = gather(acceptable(p, beta, tau), drafted_tokens[..., None])[..., 0]
    return xp.where(drafted_tokens != xp.argmax(p, axis=-1), accepted, 0.0)


@dataclass(frozen=True)
class TopBeta:
    """The verifier, with its rank and tolerance. beta: beyond the vocabulary it is all of it.  tau: in nats; infinity leaves beta alone.

    Raises:
        InvalidInputError: beta below 1, tau negative or no number.

    Example:
        >>> TopBeta(top_beta.info, beta=1).greedy
        True
    """

    info: Method
    beta: int = BETA
    tau: float = TAU

    def __post_init__(self) -> None:
        if isinstance(self.beta, bool) or not isinstance(self.beta, int) or self.beta < 1:
            raise InvalidInputError(
                f"beta={self.beta!r} was given to the verifier 'top_beta'; expected a whole number >= 1. 1 is greedy decoding."
            )
        if not self.tau >= 0:
            raise InvalidInputError(
                f"tau={self.tau!r} was given to the verifier 'top_beta'; expected a number >= 0, in nats. 0 is greedy decoding."
            )

    @property
    def greedy(self) -> bool:
        """Whether it is greedy decoding, exactly."""
        return self.beta == 1 or self.tau == 0

    def __call__(self, draft: Draft, target_probs: Float[Array, "B N V"]) -> TreeVerdict:
        xp = namespace(target_probs)
        p = normalise(double(target_probs))
        best = xp.argmax(p, axis=-1)
        x = like(draft.tree.host.tokens[:, 1:, None], p)
        accepted = gather(acceptable(p[:, :-1, :], self.beta, self.tau), x)[..., 0]
        if self.greedy:  # of tied tokens the first
            accepted = xp.astype(x[..., 0] == best[:, :-1], p.dtype)
        is_node = like(draft.tree.host.parents[:, 1:] >= 0, p)
        accepted = xp.where(is_node, accepted, 0.0)
        reach = xp.cumulative_prod(xp.concat([xp.ones_like(p[:, :1, 0]), accepted], axis=1), axis=1)
        end = xp.astype(xp.sum(reach, axis=1, keepdims=True), xp.int64) - 1
        stop = scatter(xp.zeros_like(reach), end, 1.0)

        def after(node: Int[Array, " B"]) -> Float[Array, "B V"]:
            return scatter(xp.zeros_like(p[:, 0, :]), gather(best, node[:, None]), 1.0)

        return TreeVerdict(draft.tree, stop, after)


top_beta = TopBeta(
    method(
        "top_beta",
        "Top-beta with tolerance (SpecDec)",
        "2203.16487",
        DraftSampling,
        {TreeShape.CHAIN},
        lossless=False,
    )
)
"""The verifier."""
