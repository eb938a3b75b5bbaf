"""What verifiers and drafters declare of themselves, and what they promise."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from polydraft.core.arrays import Array
from polydraft.core.budget import Budget, TreeShape
from polydraft.core.drafts import Draft, DraftSampling
from polydraft.core.outcomes import Outcome, Verdict
from polydraft.core.requests import Request
from polydraft.core.targets import Needs, Scores
from polydraft.core.trees import NoiseKey, TokenTree


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
    """A verifier: drafts and target distributions in, a verdict out. `info` declares what it accepts."""

    @property
    def info(self) -> Method: ...

    def __call__(self, draft: Draft, target_probs: Float[Array, "B N V"]) -> Verdict: ...


@runtime_checkable
class Walking(Protocol):
    """A verifier with a fast form, which is tested against its verdict. All is on the host."""

    def walk(
        self,
        draft: Draft,
        logits: Float[np.ndarray, "B N V"],
        key: NoiseKey,
        samplings: np.ndarray | None = None,
    ) -> Outcome | None:
        """The outcome that the verdict would sample, in one call that makes only the distributions that it needs; None where the call does not
        apply or what it looks at is faulty.

        logits: float32, before the temperature.  samplings: [B] of `truncation.SAMPLING`, what makes distributions of them; None: the softmax."""
        ...


class Account(NamedTuple):
    """What a drafter's state tells of its work after a step.

    counts: what became of it, for `RequestStats.drafter_counts`.  sources: who drafted each token that was accepted, where it is not the drafter's name.
    places: where each token that was emitted stands, where somebody knows.
    """

    counts: Mapping[str, float] = MappingProxyType({})
    sources: Sequence[str] = ()
    places: Sequence[Any] = ()


def _any_depth(num_tokens: int) -> int:
    """For drafters with a text of any length."""
    return sys.maxsize


class Drawing(NamedTuple):
    """What a drafter draws beyond the shapes that it declares; the policy decides by it how large drafts are.

    room: `room(num_tokens)`, the depth of the deepest draft that it makes behind a text of so many tokens.
    lead_cap: of one that drafts while the target runs, most tokens that wait.
    confident: drafts end by their own paths.
    branches: a chain is drafted spare siblings (`budget.Stop`) for a sampled request, and its drafts then say WITHOUT_REPLACEMENT; a greedy one with a
        budget that grows is drafted its most probable tree: every lossless verifier then follows the largest logits.
    foretells: its model gives the distributions of all depths in one forward pass, so that a branch costs a row of the target's forward pass and no
        draft step: trees that grow (`Budget.grown` with a stop) are drawn for sampled requests, too.
    """

    room: Callable[[int], int] = _any_depth
    lead_cap: int | None = None
    confident: bool = False
    branches: bool = False
    foretells: bool = False


_AS_DECLARED = Drawing()


@dataclass(frozen=True, kw_only=True)
class Offers:
    """What a drafter offers beyond `Drafter`, as `Needs` is what it asks for. It is read once, when parts are joined; None: not this.

    slots: of a model that it runs, equal for those that share them.
    sibling: by the name of a kind, a drafter of that kind from the same model and slots.
    draws: drafts beyond the shapes that it declares.
    read: `read(states, scores) -> states`, of one that needs `hidden`: called after `start` with the states of all tokens but the last ([B, T, D], zero
        behind the end of a shorter text), which no step scores.
    cursor: `cursor(state)`, of one that reads texts: a `Cursor`, or None where there is nothing to read. Long texts are read by it in pieces, between
        which others are served, before `propose` would read what is left. One that needs `hidden` is started before the text is read and given the states
        in pieces, as they are made: `read(states, scores, start)`, where token `start` is the first, no later than `cursor(state).length`; from there on
        all is read again.
    extra_nodes: `extra_nodes(states) -> TokenTree`, nodes below the last tokens that are scored beside the draft's where there is room and never
        accepted: called in steps for which a draft was asked. Their logits come with the next `observe`.
    learn_output: told each finished output once, with what was emitted and nothing else.
    account: of a state, what it tells of its work after a step.
    """

    slots: Any = None
    sibling: "Callable[[str], Drafter] | None" = None
    draws: Drawing = _AS_DECLARED
    read: Callable[..., list[Any]] | None = None
    cursor: Callable[[Any], Any] | None = None
    extra_nodes: Callable[[Sequence[Any]], TokenTree] | None = None
    learn_output: Callable[[Sequence[int]], None] | None = None
    account: Callable[[Any], Account] | None = None

    @property
    def model(self) -> Any:
        """The one that it runs, or None."""
        return None if self.slots is None else self.slots.model


class Drafter(Protocol):
    """A source of drafts. State is a value beside the object: only the newest state of a request is valid.

    `info.draft_sampling` and `info.shapes` hold the one draft sampling method and the shapes that it makes. `needs` says what it asks of the target
    beyond tokens; a target that cannot give it is refused when the engine is built. One that does not need every
    step is not told of steps for which no draft was asked until it is asked for the next, then of all their tokens at once,
    with the hidden states that it needs and without logits. One that needs `embeddings` or `head` is given the target when it is built.
    `offers` says what it has beyond these methods; `Offers()` is nothing.
    """

    @property
    def info(self) -> Method: ...

    @property
    def needs(self) -> Needs: ...

    @property
    def offers(self) -> Offers: ...

    def start(self, requests: Sequence[Request]) -> list[Any]:
        """Fresh state for each request; the prompt is read now, or where `offers.cursor` says how far later."""
        ...

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget]) -> Draft:
        """One batched call; row b belongs to states[b]; an empty row is legal. budgets: in shapes that it draws, and within its `room`."""
        ...

    def observe(self, states: Sequence[Any], outcome: Outcome, scores: Scores) -> list[Any]:
        """States after a step: row b emitted `outcome.emitted(scores.tree)[b]`; `scores` has what `needs` names."""
        ...

    def release(self, states: Sequence[Any]) -> None:
        """Give back what the states of finished requests hold (slots, buffers)."""
        ...
