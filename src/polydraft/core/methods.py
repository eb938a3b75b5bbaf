"""What verifiers and drafters declare of themselves, and what they promise."""

from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True, kw_only=True)
class Offers:
    """What a drafter offers beyond `Drafter`, as `Needs` is what it asks for. It is read once, when parts are joined; None and False: not this.

    model, slots: a model that it runs, and its slots, equal for those that share them.
    sibling: by the name of a kind, a drafter of that kind from the same model and slots.
    confident: drafts end by their own paths.
    greedy_trees: a greedy request with a budget that grows is drafted its most probable tree: every lossless verifier then follows the largest logits.
    spares: a sampled chain is drafted spare siblings (`budget.Stop`); its drafts then say WITHOUT_REPLACEMENT.
    foretells: its model gives the distributions of all depths in one forward pass, so that a branch costs a row of the target's forward pass and no
        draft step: trees that grow (`Budget.grown` with a stop) are drawn for sampled requests, too.
    lead_cap: of one that drafts while the target runs, most tokens that wait.
    read: `read(states, scores) -> states`, of one that needs `hidden`: called after `start` with the states of all tokens but the last ([B, T, D], zero
        behind the end of a shorter text), which no step scores.
    held: `held(state)`, of one that is given those states in pieces, as they are made: tokens at the beginning of the text whose states it does not need,
        as it stored what it made of an earlier request's. `read(states, scores, start)` then says which token is the first; from there on all is read again.
    extra_nodes: `extra_nodes(states) -> TokenTree`, nodes below the last tokens that are scored beside the draft's where there is room and never
        accepted: called in steps for which a draft was asked. Their logits come with the next `observe`.
    read_ahead: `read_ahead(token_ids, count)`, of one whose model reads a long prompt in pieces, between which others are served: read at most so many
        more tokens of a text, for `start` to find; whether that would read no more than as many.
    num_unread: of a text, the tokens that `start` would read.
    num_pending: of a state, the tokens that the next draft would read, as they were emitted while nothing was drafted.
    catch_up: `catch_up(state, count) -> state`, of one whose model reads many of them in pieces: behind so many, fewer than there are.
    report: of a state, what became of the work for its request; it goes into `RequestStats.drafter_counts` after every step.
    learn_output: told each finished output once, with what was emitted and nothing else.
    credit: of a state that knows more than the drafter's name, the sources of the tokens that were accepted in the last step.
    attribution: of a state that knows it, where each token that the last step emitted stands.
    """

    model: Any = None
    slots: Any = None
    sibling: "Callable[[str], Drafter] | None" = None
    confident: bool = False
    greedy_trees: bool = False
    spares: bool = False
    foretells: bool = False
    lead_cap: int | None = None
    read: Callable[..., list[Any]] | None = None
    held: Callable[[Any], int] | None = None
    extra_nodes: Callable[[Sequence[Any]], TokenTree] | None = None
    read_ahead: Callable[[Sequence[int], int], bool] | None = None
    num_unread: Callable[[Sequence[int]], int] = len
    num_pending: Callable[[Any], int] | None = None
    catch_up: Callable[[Any, int], Any] | None = None
    report: Callable[[Any], Mapping[str, float]] | None = None
    learn_output: Callable[[Sequence[int]], None] | None = None
    credit: Callable[[Any], Sequence[str]] | None = None
    attribution: Callable[[Any], Sequence[Any]] | None = None


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
        """Fresh state for each request; reads the prompt."""
        ...

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget]) -> Draft:
        """One batched call; row b belongs to states[b]; an empty row is legal."""
        ...

    def observe(self, states: Sequence[Any], outcome: Outcome, scores: Scores) -> list[Any]:
        """States after a step: row b emitted `outcome.emitted(scores.tree)[b]`; `scores` has what `needs` names."""
        ...

    def release(self, states: Sequence[Any]) -> None:
        """Give back what the states of finished requests hold (slots, buffers)."""
        ...
