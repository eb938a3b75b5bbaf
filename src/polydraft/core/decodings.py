"""What is sampled, where it is not the target's distribution alone: decoding methods, and what each declares of itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from polydraft.core.requests import Request
from polydraft.core.targets import Needs, Scores, Target
from polydraft.core.trees import TokenTree


@dataclass(frozen=True)
class DecodingMethod:
    """What a decoding method declares about itself. lossless_to: the distribution that outputs follow with a lossless verifier, in words.
    drafter: that drafts for it where none is named.  The other fields are as of `Method`."""

    name: str
    title: str
    authors: str
    year: int
    arxiv: str
    lossless_to: str
    drafter: str = ""


class Decoding(Protocol):
    """What is sampled, from the target's rows: its sampling parameters on its logits are one decoding method, contrastive decoding another.

    needs: hidden states that it reads in `scores`.
    gives_logits: whether it returns logits in place of the target's, to which each request's sampling parameters apply and the verifiers'
        fused walks; else it returns p itself, instead of what the parameters would make.

    A method of several logits that belong together (a second model's, the same model's after another prompt) also is a `SecondSequenceDecoding`.
    One that is built by name is a `NamedDecoding` and has `build(parts, **options)`.
    A row depends on its own path alone: methods are called for whole batches and, where that fails, for single sequences.
    """

    needs: Needs
    gives_logits: bool

    def __call__(
        self, scores: Scores, tree: TokenTree, contexts: Sequence[Sequence[int]], second: Scores | None = None
    ) -> Float[np.ndarray, "B N V"]:
        """[B, N, V], row n for the token after node n. contexts: committed tokens of each sequence."""
        ...


@runtime_checkable
class NamedDecoding(Protocol):
    """A decoding method that says what it is: what an engine says of outputs it reads here."""

    info: DecodingMethod


@runtime_checkable
class SecondSequenceDecoding(Protocol):
    """A decoding method that reads a second sequence of each request, which begins differently and goes on with the same tokens.

    second_model: that runs it, with the target's vocabulary; None is the target, in slots of its own and in the same forward pass. Where it is the
        engine's draft model too, drafts are made in the slots of its second sequences, and what was scored for the draft is not scored again.
    """

    second_model: Target | None

    def second_prompt(self, request: Request) -> Sequence[int]:
        """How it begins: one token or more."""
        ...
