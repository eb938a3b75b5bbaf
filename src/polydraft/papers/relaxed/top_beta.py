"""Top-beta with tolerance (Spec-Verification, not lossless): accept a drafted token among the target's best that is not much worse than the best.

Xia et al. 2022 (SpecDec, arXiv 2203.16487).

    x is accepted iff p(x) is among the beta largest and log max p - log p(x) <= tau; the first failure emits argmax p
    behind the last token of a draft that was accepted whole stands argmax p, too

beta = 1 or tau = 0 is greedy decoding of p, exactly, up to ties; otherwise the output follows the draft within the tolerance, however
large its distance from p: see `output_probs` and `deviation`. Give p a temperature of 1: at temperature 0 it is one-hot, and every beta and
tau then is greedy decoding.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import Draft, DraftSampling, Method, TreeShape
from polydraft.errors import InvalidInputError
from polydraft.methods.papers import method
from polydraft.verifiers.lift.verdict import TreeVerdict
from polydraft.verifiers.residual import normalise

BETA = 3
TAU = 1.0


def acceptable(p: Float[Tensor, "M V"], beta: int = BETA, tau: float = TAU) -> Float[Tensor, "M V"]:
    """1 for the tokens that are accepted, 0 for the others.

    Example:
        >>> acceptable(torch.tensor([[0.5, 0.4, 0.1]]), beta=3, tau=1.0).tolist()
        [[1.0, 1.0, 0.0]]
    """
    best = p.topk(min(beta, p.shape[-1])).values
    return ((p >= best[:, -1:]) & (p >= best[:, :1] * torch.e**-tau)).to(p.dtype)


def _greedy(p: Tensor) -> Tensor:
    return torch.zeros_like(p).scatter_(1, p.argmax(1, keepdim=True), 1.0)


def output_probs(
    p: Float[Tensor, "M V"], q: Float[Tensor, "M V"], beta: int = BETA, tau: float = TAU
) -> Float[Tensor, "M V"]:
    """Distribution of the next token for one draft from q.

    Example:
        >>> output_probs(torch.tensor([[0.5, 0.4, 0.1]]), torch.tensor([[0.0, 0.5, 0.5]])).tolist()
        [[0.5, 0.5, 0.0]]
    """
    accepted = q * acceptable(p, beta, tau)
    return accepted + (1 - accepted.sum(-1, keepdim=True)) * _greedy(p)


def deviation(
    p: Float[Tensor, "*M V"], drafted_tokens: Int[Tensor, "*M"], beta: int = BETA, tau: float = TAU
) -> Float[Tensor, "*M"]:
    """Probability by which the emitted token, where `own` was drafted, is another than greedy decoding's: 1 or 0.

    Example:
        >>> deviation(torch.tensor([[0.5, 0.4, 0.1]] * 3), torch.tensor([0, 1, 2])).tolist()
        [0.0, 1.0, 0.0]
    """
    accepted = (
        acceptable(p.reshape(-1, p.shape[-1]), beta, tau)
        .view(p.shape)
        .gather(-1, drafted_tokens[..., None])[..., 0]
    )
    return accepted * (drafted_tokens != p.argmax(-1))


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

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> TreeVerdict:
        p = normalise(target_probs.double())
        rows = torch.arange(len(p), device=p.device)
        best = p.argmax(-1)
        x = draft.tree.tokens[:, 1:, None]
        is_accepted = (
            acceptable(p[:, :-1].flatten(0, 1), self.beta, self.tau)
            .view(p[:, :-1].shape)
            .gather(-1, x)[..., 0]
        )
        if self.greedy:  # of tied tokens the first
            is_accepted = (x[..., 0] == best[:, :-1]).to(p.dtype)
        accepted = torch.where(draft.tree.is_node[:, 1:], is_accepted, 0)
        reach = torch.cat([torch.ones_like(p[:, :1, 0]), accepted], 1).cumprod(1)
        end = reach.sum(1).long() - 1
        stop = torch.zeros_like(reach).scatter_(1, end[:, None], 1.0)
        return TreeVerdict(
            draft.tree, stop, lambda at: torch.nn.functional.one_hot(best[rows, at], p.shape[-1]).to(p.dtype)
        )


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
