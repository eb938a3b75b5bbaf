"""What an engine offers to a drafter that is made by name, and what several drafters do together."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from polydraft.core.decodings import Decoding, SecondSequenceDecoding
from polydraft.core.geometry import chains
from polydraft.core.methods import Drafter, Method
from polydraft.core.outcomes import Outcome
from polydraft.core.params import SamplingParams
from polydraft.core.requests import Request
from polydraft.core.targets import EncoderDecoder, Scores, Target
from polydraft.errors import unknown_name
from polydraft.models.slot_pool import Slots


@dataclass(frozen=True)
class Parts:
    """The engine's parts at the time a drafter is built; a drafter class takes what it needs in `build(parts, **options)`.

    target: the model that is accelerated.  draft_model: a smaller one, or None.  tokenizer: the target's, or None.
    draft_tokenizer: the draft model's where it is another one.  decoding: what is sampled, or None.
    """

    target: Target
    draft_model: Target | None
    tokenizer: Any
    eos_token_ids: Sequence[int]
    draft_tokenizer: Any = None
    decoding: Decoding | None = None

    @property
    def second_model(self) -> Target | None:
        """Of the decoding method's second sequences, where it is not the target."""
        return self.decoding.second_model if isinstance(self.decoding, SecondSequenceDecoding) else None

    @cached_property
    def draft_slots(self) -> Slots:
        """Of the draft model, for every drafter that runs requests in it: no two of them write to one slot."""
        assert self.draft_model is not None
        return Slots(self.draft_model)


def named_kind(kinds: Mapping[str, Method], kind: str, drafter: str) -> Method:
    """What a kind of a drafter declares.

    Raises:
        UnknownNameError: a kind that does not exist.
    """
    if kind not in kinds:
        raise unknown_name(f"kind of {drafter} drafter", kind, kinds)
    return kinds[kind]


def read_source(model: Target, slot: int, request: Request) -> None:
    """Where a draft model is an encoder-decoder, it reads the source of a request that has taken a slot of it."""
    if isinstance(model, EncoderDecoder):
        model.encode([slot], [request.source_token_ids])


def is_bound(params: SamplingParams, draft_ids: Sized) -> bool:
    """Whether a model that drafts these tokens, all where there are none, may have no token that a request allows."""
    return params.structured_outputs is not None or 0 < len(draft_ids) <= len(params.logit_bias)


def teach_each(drafters: Iterable[Drafter], token_ids: Sequence[int]) -> None:
    """Tell a finished output to those of several drafters that learn from it."""
    for drafter in drafters:
        if (learn := drafter.offers.learn_output) is not None:
            learn(token_ids)


def as_one_step(last: Sequence[int], missed: Sequence[Sequence[int]]) -> tuple[Outcome, Scores]:
    """What `observe` takes, for tokens of several steps at once: a step whose draft was right; without logits.

    last: the last token before, of every row.  missed: what each row emitted since, one token or more.

    Example:
        >>> outcome, scores = as_one_step([7], [[1, 2, 3]])
        >>> outcome.emitted(scores.tree), scores.tree.tokens.tolist()
        ([[1, 2, 3]], [[7, 1, 2]])
    """
    tree = chains([[root, *ids[:-1]] for root, ids in zip(last, missed, strict=True)])
    outcome = Outcome.of_paths([range(1, len(ids)) for ids in missed], [ids[-1] for ids in missed])
    return outcome, Scores(tree, np.empty((*tree.tokens.shape, 0), np.float32))
