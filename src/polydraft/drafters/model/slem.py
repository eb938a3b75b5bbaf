"""Drafts from a model with any other vocabulary, through text: string-level exact match.

Timor et al. 2025 (arXiv 2502.05202), SLEM. The draft model continues the text greedily in its own tokens; the continuation is
decoded and read with the target's tokenizer. Such a draft has no q: it is POINT_MASS and verified by matching, which is
lossless for any draft whatever, so nothing here can bias the output.

The text is read again by the draft's tokenizer in every step, and the longest common prefix of its cache stays. A character
of which the target has emitted only some bytes is left out until it is complete. A continuation that would change how the
last committed tokens are cut is read on its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polydraft.core import (
    Budget,
    Draft,
    DraftSampling,
    Needs,
    Offers,
    Outcome,
    Request,
    Scores,
    Target,
    TokenTree,
    TreeShape,
)
from polydraft.core import geometry as trees
from polydraft.core.cursor import Cursor
from polydraft.drafters.base import Parts
from polydraft.drafters.model.tli import check_parts
from polydraft.methods.papers import method
from polydraft.models.load import encode
from polydraft.models.slot_pool import Slots, common_length, given_back_on_error
from polydraft.models.tokens.spelling import REPLACEMENT

TAIL = 16
"""Committed tokens that are read again together with a continuation, to cut it as the target would."""


@dataclass(frozen=True)
class SlemState:
    """One request: how far the draft model has read, all committed target tokens, and the draft tokens that are read."""

    request: Request
    cursor: Cursor
    token_ids: tuple[int, ...]
    cached: list[int]

    def read(self, ids: list[int]) -> None:
        """Bring the cache to the end of a text in draft tokens, but for its last one."""
        self.cursor.cut(min(common_length(self.cached, ids), len(ids) - 1))
        if num_unread := self.cursor.num_unread(ids):
            self.cursor.read(ids, num_unread)
        self.cached[:] = ids[:-1]


class SlemDrafter:
    """A smaller model of another tokenizer, whose text is drafted.

    Example:
        >>> SlemDrafter.info.draft_sampling
        frozenset({<DraftSampling.POINT_MASS: 3>})
    """

    info = method(
        "slem",
        "Smaller model of another vocabulary, its text",
        "2502.05202",
        {DraftSampling.POINT_MASS},
        {TreeShape.CHAIN},
        own_vocabulary=True,
    )
    methods = (info,)
    needs: Needs = Needs()

    def __init__(
        self, model: Target, draft_tokenizer: Any, target_tokenizer: Any, slots: Slots | None = None
    ) -> None:
        self.model = model
        self._theirs = draft_tokenizer
        self._ours = target_tokenizer
        self.slots = Slots(model) if slots is None else slots

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        return Offers(slots=self.slots)

    @classmethod
    def build(cls, parts: Parts) -> "SlemDrafter":
        """For the engine: its draft model and both tokenizers.

        Raises:
            InvalidInputError: one of them is missing.
        """
        check_parts(parts, "slem")
        assert parts.draft_model is not None
        return cls(parts.draft_model, parts.draft_tokenizer, parts.tokenizer, parts.draft_slots)

    def start(self, requests: Sequence[Request]) -> list[SlemState]:
        """Take a slot for each request; the prompt is read by the first proposal."""
        with given_back_on_error():
            return [
                SlemState(request, Cursor(self.model, self.slots.take()), request.prompt_token_ids, [])
                for request in requests
            ]

    def release(self, states: Sequence[SlemState]) -> None:
        """Give the slots back."""
        for state in states:
            self.slots.give_back(state.cursor.slot)

    def _text(self, token_ids: Sequence[int]) -> str:
        """The text so far, without special tokens and without a character that is not complete."""
        text = _decoded(self._ours, token_ids)
        return text.rstrip(REPLACEMENT)

    def _continue(
        self, states: Sequence[SlemState], contexts: Sequence[list[int]], depths: Sequence[int]
    ) -> list[list[int]]:
        """Greedy continuations in the draft's tokens, one forward pass of the batch for each depth; they end after EOS."""
        continuations: list[list[int]] = [[] for _ in states]
        eos = self._theirs.eos_token_id
        for b, (s, ids) in enumerate(zip(states, contexts, strict=True)):
            if depths[b]:
                s.read(ids)
        for depth in range(max(depths, default=0)):
            live = [
                b
                for b in range(len(states))
                if depth < depths[b] and not (continuations[b] and continuations[b][-1] == eos)
            ]
            if not live:
                break
            roots = [continuations[b][-1] if continuations[b] else contexts[b][-1] for b in live]
            following = self._following([states[b].cursor.slot for b in live], roots)
            for b, root, token in zip(live, roots, following, strict=True):
                states[b].cached.append(root)
                continuations[b].append(token)
        return continuations

    def _following(self, slots: Sequence[int], roots: Sequence[int]) -> list[int]:
        """The likeliest tokens behind these, which go to the cache."""
        logits = self.model.score(slots, TokenTree.roots(np.array(roots, np.int64))).logits[:, 0]
        self.model.commit(slots, Outcome.of_paths([()] * len(slots)))
        return logits.argmax(-1).tolist()

    def _translate(self, token_ids: Sequence[int], continuation: Sequence[int]) -> list[int]:
        """A continuation in the target's tokens, cut as the target's tokenizer would cut it behind the last tokens."""
        ends_text = bool(continuation) and continuation[-1] == self._theirs.eos_token_id
        text = _decoded(self._theirs, continuation)
        text = text.rstrip(REPLACEMENT)
        translated = self._cut(self._text(token_ids[-TAIL:]), text) if text else []
        last = self._ours.eos_token_id
        return [*translated, last] if ends_text and last is not None else translated

    def _cut(self, tail: str, text: str) -> list[int]:
        before, whole = (self._ours(x, add_special_tokens=False)["input_ids"] for x in (tail, tail + text))
        if whole[: len(before)] == before:
            return whole[len(before) :]
        return self._ours(text, add_special_tokens=False)["input_ids"]

    def propose(self, states: Sequence[SlemState], budgets: Sequence[Budget]) -> Draft:
        """One chain for each request; see `core.Drafter.propose`. Calling it again drafts the same."""
        contexts = [encode(self._theirs, text) if (text := self._text(s.token_ids)) else [] for s in states]
        rooms = [self.model.max_model_len - len(ids) - 1 if ids else 0 for ids in contexts]
        depth_limits = [g.chain_length for g in budgets]
        depths = [max(0, min(depth, room)) for depth, room in zip(depth_limits, rooms, strict=True)]
        continuations = self._continue(states, contexts, depths)
        translated = [
            self._translate(s.token_ids, new)[:most]
            for s, new, most in zip(states, continuations, depth_limits, strict=True)
        ]
        return Draft.point_mass(
            trees.chains([[s.token_ids[-1], *tokens] for s, tokens in zip(states, translated, strict=True)])
        )

    def observe(self, states: Sequence[SlemState], outcome: Outcome, scores: Scores) -> list[SlemState]:
        """Append what was emitted; the cache is set right by the next proposal."""
        emitted = outcome.emitted(scores.tree)
        return [
            replace(s, token_ids=s.token_ids + tuple(new)) for s, new in zip(states, emitted, strict=True)
        ]


def _decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of ids without special tokens, with blanks where the tokens have them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return backend.decode(list(token_ids), skip_special_tokens=True)
    return tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
