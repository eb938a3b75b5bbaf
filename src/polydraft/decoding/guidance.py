"""Classifier-free guidance: logits pushed away from those after a prompt that lacks what is asked for.

Ho & Salimans 2022 (arXiv 2207.12598); of language models Sanchez et al. 2023 (arXiv 2306.17806).
    Y_c, Y_u    the target's logits after the prompt, and after the unconditional prompt and the same output
    distribution         softmax of Y_u + scale (Y_c - Y_u); sampling parameters apply to these logits

Lossless to this distribution with every lossless verifier. The second sequence has a slot of its own and is scored in the forward pass of the first: one of
2 N rows. scale = 1 is the target itself, 0 the unconditional distribution.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Real

import numpy as np
from jaxtyping import Float

from polydraft.core import Needs, Request, Scores, TokenTree
from polydraft.drafters.base import Parts
from polydraft.errors import InvalidInputError
from polydraft.methods.papers import decoding_method
from polydraft.models.load import encode


class Guidance:
    """See the module. unconditional: the prompt without the condition: token ids, or a function of the request that gives them.

    Raises:
        InvalidInputError: a scale that is no finite number, or no tokens.
    """

    info = decoding_method(
        "guidance",
        "Classifier-free guidance",
        "2306.17806 2207.12598",
        "the guided distribution of the target's two prompts",
    )
    needs = Needs()
    gives_logits = True
    second_model = None

    def __init__(
        self, unconditional: Sequence[int] | Callable[[Request], Sequence[int]], scale: float = 1.5
    ) -> None:
        if not isinstance(scale, Real) or not math.isfinite(scale):
            raise InvalidInputError(
                f"scale={scale!r} was given to the decoding method 'guidance'; expected a finite number; 1 is no guidance."
            )
        self.scale = scale
        self._unconditional = unconditional
        if not callable(unconditional) and not len(unconditional):
            raise InvalidInputError(
                "an empty unconditional prompt was given to the decoding method 'guidance'; expected at least one token."
            )

    @classmethod
    def build(cls, parts: Parts, *, negative: str | None = None, scale: float = 1.5) -> "Guidance":
        """For the engine. negative: text of the unconditional prompt; default each prompt's last token alone."""
        if negative is None:
            return cls(lambda request: request.prompt_token_ids[-1:], scale)
        if parts.tokenizer is None:
            raise InvalidInputError(
                "negative=... was given to an engine without a tokenizer; build `Guidance` of token ids."
            )
        return cls(encode(parts.tokenizer, negative), scale)

    def second_prompt(self, request: Request) -> Sequence[int]:
        """The unconditional prompt."""
        return self._unconditional(request) if callable(self._unconditional) else self._unconditional

    def __call__(
        self, scores: Scores, tree: TokenTree, contexts: Sequence[Sequence[int]], second: Scores | None = None
    ) -> Float[np.ndarray, "B N V"]:
        """Guided logits at every node."""
        assert second is not None
        return second.logits + self.scale * (scores.logits - second.logits)
