"""Contrastive decoding: what an expert says and an amateur would not, exactly, with drafts.

Li et al. 2022, contrastive decoding (arXiv 2210.15097); Yuan et al. 2023, speculative contrastive decoding (arXiv 2311.08981).
    Y_e, Y_a    logits of the expert, which is the target, and of the amateur
    V*          plausible tokens: Y_e >= ln(alpha) + max Y_e; all of them where alpha is 0, always the largest
    distribution         softmax over V* of ((1 + beta) Y_e - beta Y_a); sampling parameters, temperature among them, apply to these logits

Lossless to this distribution, not to the expert's: with every lossless verifier and any drafter. Where the amateur is the draft model, too, its logits at all
nodes, leaves included, come from drafting; E[accepted] of one draw is 1 - TV(decoding, amateur's), less than towards the expert.
Traps: beta = 0 is the expert only where alpha is 0, else it is the expert cut by min-p = alpha; the bonus row is contrastive like the others.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
from jaxtyping import Float

from polydraft.core import Needs, Request, Scores, Target, TokenTree
from polydraft.drafters.base import Parts
from polydraft.errors import InvalidInputError
from polydraft.methods.papers import decoding_method


def contrast(
    expert: Float[np.ndarray, "*M V"], amateur: Float[np.ndarray, "*M V"], alpha: float, beta: float
) -> Float[np.ndarray, "*M V"]:
    """Logits of the contrastive distribution.

    Example:
        >>> expert, amateur = np.array([2.0, 1.5, -3.0]), np.array([2.0, 0.0, 0.0])
        >>> contrast(expert, amateur, alpha=0.1, beta=0.5).tolist()
        [2.0, 2.25, -inf]
    """
    scores = expert if beta == 0 else (1 + beta) * expert - beta * amateur
    if alpha == 0:
        return scores
    largest = expert.max(-1, keepdims=True)
    implausible = (expert < largest + math.log(alpha)) & (expert < largest)
    return np.where(implausible, -np.inf, scores)


class Contrastive:
    """See the module. amateur: a weaker model of the expert's vocabulary.

    Raises:
        InvalidInputError: alpha outside [0, 1], or beta below 0.
    """

    info = decoding_method(
        "contrastive",
        "Speculative contrastive decoding",
        "2311.08981 2210.15097",
        "the contrastive distribution of target and amateur",
    )
    needs = Needs()
    gives_logits = True

    def __init__(self, amateur: Target, alpha: float = 0.1, beta: float = 0.5) -> None:
        for name, value, most in (("alpha", alpha, 1.0), ("beta", beta, math.inf)):
            if not isinstance(value, Real) or not 0 <= value <= most or value == math.inf:
                reach = "0 (no mask) to 1" if name == "alpha" else "a finite number >= 0"
                raise InvalidInputError(
                    f"{name}={value!r} was given to the decoding method 'contrastive'; expected {reach}."
                )
        self.second_model = amateur
        self.alpha = alpha
        self.beta = beta

    @classmethod
    def build(
        cls, parts: Parts, *, amateur: Any = None, alpha: float = 0.1, beta: float = 0.5
    ) -> "Contrastive":
        """For the engine. amateur: a model; without one the draft model is it.

        Raises:
            InvalidInputError: no model at all, or numbers out of range.
        """
        model = parts.draft_model if amateur is None else amateur
        if model is None:
            raise InvalidInputError(
                "the decoding method 'contrastive' was asked for without an amateur; give a weaker model of the same vocabulary: amateur=... or "
                "draft_model=... (--amateur, --draft-model)."
            )
        return cls(model, alpha, beta)

    def second_prompt(self, request: Request) -> Sequence[int]:
        """The amateur reads the same text."""
        return request.prompt_token_ids

    def __call__(
        self, scores: Scores, tree: TokenTree, contexts: Sequence[Sequence[int]], second: Scores | None = None
    ) -> Float[np.ndarray, "B N V"]:
        """Contrastive logits at every node.

        Raises:
            InvalidInputError: NaN or infinite logits of the amateur.
        """
        assert second is not None
        amateur = second.logits
        if self.beta and not np.isfinite(amateur.sum()) and not np.isfinite(amateur).all():
            raise InvalidInputError(
                "the amateur's logits hold NaN or infinities; expected finite ones. Check its weights and precision."
            )
        return contrast(scores.logits, amateur, self.alpha, self.beta)
