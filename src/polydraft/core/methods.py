"""What verifiers and drafters declare of themselves, and what they promise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from torch import Tensor

from polydraft.core.budget import Budget, TreeShape
from polydraft.core.drafts import Draft, DraftSampling
from polydraft.core.outcomes import Outcome, Verdict
from polydraft.core.requests import Request
from polydraft.core.targets import Needs, Scores
from polydraft.core.trees import NoiseKey


@dataclass(frozen=True)
class Method:
    """What a verifier or a drafter declares about itself; tables, checks and docs are made from it.

    draft_sampling: draft sampling methods that a verifier accepts, or the one that a drafter makes.
    shapes: that a verifier accepts, or that a drafter makes: the one of its budget, but for GROWN, which it makes of any.
    arxiv: id such as "2211.17192", or "" where there is no paper.
    shared_noise: the verdict is a function of the draft's own noise, a point mass once that is known.
    ranked: a drafter whose trees of any number of nodes are its most probable nodes, in this order.
    own_vocabulary: a drafter whose draft model has a tokenizer of its own.
    """

    name: str
    title: str
    authors: str
    year: int
    arxiv: str
    draft_sampling: frozenset[DraftSampling]
    shapes: frozenset[TreeShape]
    lossless: bool = True
    shared_noise: bool = False
    ranked: bool = False
    own_vocabulary: bool = False


@runtime_checkable
class Verifier(Protocol):
    """A rule: drafts and target distributions in, a verdict out. `info` declares what it accepts."""

    @property
    def info(self) -> Method: ...

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> Verdict: ...


@runtime_checkable
class Walking(Protocol):
    """A verifier with a fast form, which is tested against its verdict. All is on the host."""

    def walk(
        self, draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey, samplings: np.ndarray | None = None
    ) -> Outcome | None:
        """The outcome that the verdict would sample, in one call that makes only the distributions that it needs; None where the call does not
        apply or what it looks at is faulty.

        logits: float32, before the temperature.  samplings: [B] of `truncation.SAMPLING`, what makes distributions of them; None: the softmax."""
        ...


class Drafter(Protocol):
    """A source of drafts. State is a value beside the object: only the newest state of a request is valid.

    `info.draft_sampling` and `info.shapes` hold the one draft sampling method and the shapes that it makes. `needs` says what it asks of the target
    beyond tokens; a target that cannot give it is refused when the engine is built. One that does not need every
    round is not told of rounds for which no draft was asked until it is asked for the next, then of all their tokens at once,
    with the hidden states that it needs and without logits.

    One that needs `hidden` has `read(states, scores) -> states`, called after `start` with the states of all tokens but the last
    ([B, T, D], zero behind the end of a shorter text): what the rounds do not score. One that needs `aux` has
    `aux(states) -> AuxRows | None`, called in rounds for which a draft was asked, whose nodes are those of its last proposal; the
    rows' logits come with the next `observe`. One that needs `embeddings` or `head` is given the target when it is built.
    `drafters.base` has what a drafter and its states may offer beyond that.
    """

    @property
    def info(self) -> Method: ...

    @property
    def needs(self) -> Needs: ...

    def start(self, requests: Sequence[Request]) -> list[Any]:
        """Fresh state for each request; reads the prompt."""
        ...

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget]) -> Draft:
        """One batched call; row b belongs to states[b]; an empty row is legal."""
        ...

    def observe(self, states: Sequence[Any], outcome: Outcome, scores: Scores) -> list[Any]:
        """States after a round: row b emitted `outcome.emitted(scores.tree)[b]`; `scores` has what `needs` names."""
        ...

    def release(self, states: Sequence[Any]) -> None:
        """Give back what the states of finished requests hold (slots, buffers)."""
        ...
