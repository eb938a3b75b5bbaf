"""The output layer of a draft model over a part of the vocabulary.

FR-Spec, Zhao et al. 2025 (arXiv 2502.14856). Of a small model with a large vocabulary the output layer is a third of what a draft step reads.

    outputs     the first tokens, whose ids byte-level BPE gives by merge, so that they are the frequent ones; special tokens; and text tokens
    text token  a token beyond the first ones that the text of a slot holds; only this slot drafts it, from then on
    q           draft distribution, 0 for all other tokens

While more than MOST_NEW of the last RECENT tokens of a text were new text tokens, as in languages other than those of the first tokens, all are drafted.
A slot's q is a function of its own text: it is the same alone and in a batch. Any q is exact for a verifier that is told of it, zeros included.
Each output is computed as in the whole layer, bit for bit.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polydraft.core.params import SamplingParams
from polydraft.models.matrices.products import Packed, copy_outputs
from polydraft.models.matrices.vectors import PANEL
from polydraft.numerics.compiled_code import njit
from polydraft.sampling.processing import samplings_of

FIRST_TOKENS = 32_768
"""First tokens of a draft vocabulary by default."""
RECENT = 32
MOST_NEW = 4
"""Tokens of a text that are looked at, and new text tokens among them, above which the whole vocabulary is drafted."""


class OutputTokens(NamedTuple):
    """Tokens of a draft model's outputs.

    ids: [D] of each output, or [0] where they are all tokens in order.
    in_text: [slots, T] whether a slot drafts each of the last T outputs, or [slots, 0] where it drafts all outputs.
    """

    ids: np.ndarray
    in_text: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray) -> "OutputTokens":
        """Of a model that drafts the same tokens for every text."""
        return cls(ids, np.zeros((1, 0), np.bool_))

    def spread(self, rows: np.ndarray, slot: int, logits: np.ndarray) -> None:
        """logits [T, V] = rows [T, outputs] of a slot, -inf for the tokens that it does not draft.

        Example:
            >>> tokens, logits = OutputTokens(np.array([0, 1, 4]), np.array([[True], [False]])), np.zeros((1, 6), np.float32)
            >>> tokens.spread(np.array([[5.0, 6.0, 7.0]], np.float32), 1, logits)
            >>> logits.tolist()
            [[5.0, 6.0, -inf, -inf, -inf, -inf]]
        """
        _spread(rows, self.ids, self.in_text[slot], logits)


@njit(cache=True)
def _spread(rows, ids, in_text, logits):
    num_outputs = ids.size if ids.size else logits.shape[1]
    num_always = num_outputs - in_text.size
    for r in range(len(rows)):
        row = rows[r]
        out = logits[r]
        out[:] = -np.inf
        for i in range(num_outputs):
            if i < num_always or in_text[i - num_always]:
                out[ids[i] if ids.size else i] = row[i]


@njit
def hide_other_texts(logits, in_text, slot, num_outputs):
    """Logits of text tokens that are not of this slot's text are -inf."""
    num_text = in_text.shape[1]
    for t in range(num_text):
        if not in_text[slot, t]:
            logits[num_outputs - num_text + t] = -np.inf


class DraftVocabulary:
    """The outputs of a model with slots: `layer` is its output layer, `tokens` says of what.

    whole: the output layer of all tokens.  num_first: in whole panels.  special_ids: drafted for every text.
    """

    def __init__(
        self, whole: Packed, vocab_size: int, num_first: int, special_ids: Sequence[int], num_slots: int
    ) -> None:
        assert num_first % PANEL == 0
        self._whole = whole
        self._size = vocab_size
        self._first = num_first
        self._special = sorted({token for token in special_ids if num_first <= token < vocab_size})
        self._positions: list[dict[int, int]] = [{} for _ in range(num_slots)]
        """Of each slot, its text tokens and where they come first."""
        self._drafting_all: set[int] = set()
        """Slots that draft every token."""
        self._column: dict[int, int] = {}
        """By token, its place among text tokens; one that is in no text any more has it until it is needed."""
        self._part = OutputTokens(np.arange(num_first), np.zeros((num_slots, 0), np.bool_))
        self._place(self._special)
        self._part.in_text[:, : len(self._special)] = True

    @property
    def layer(self) -> Packed:
        """The output layer: the whole one while a slot drafts every token."""
        return self._whole if self._drafting_all else self._part_layer

    @property
    def tokens(self) -> OutputTokens:
        """Of the outputs of `layer`."""
        if not self._drafting_all:
            return self._part
        in_text = np.zeros((len(self._positions), self._size - self._first), np.bool_)
        for slot, positions in enumerate(self._positions):
            in_text[slot, [token - self._first for token in (*self._special, *positions)]] = True
            in_text[slot] |= slot in self._drafting_all
        return OutputTokens(np.empty(0, np.int64), in_text)

    def read(self, slot: int, token_ids: Sequence[int], position: int) -> None:
        """Draft these tokens of a slot's text, of which the first has this position, from now on."""
        positions = self._positions[slot]
        tokens = [*enumerate(token_ids, position)]
        new = {token: place for place, token in reversed(tokens) if self._first <= token < self._size}
        new = {
            token: place
            for token, place in new.items()
            if token not in positions and token not in self._special
        }
        positions |= new
        self._place([token for token in new if token not in self._column])
        self._mark(slot, position + len(tokens))

    def cut(self, slot: int, length: int) -> None:
        """A slot's text is its first so many tokens."""
        self._positions[slot] = {
            token: place for token, place in self._positions[slot].items() if place < length
        }
        self._mark(slot, length)

    def copy(self, source: int, slot: int, length: int) -> None:
        """A slot's text is the first so many tokens of another one's."""
        self._positions[slot] = dict(self._positions[source])
        self.cut(slot, length)

    def _mark(self, slot: int, length: int) -> None:
        """Say which text tokens a slot drafts, whose text has this length."""
        positions = self._positions[slot]
        self._part.in_text[slot] = False
        self._part.in_text[slot, [self._column[token] for token in (*self._special, *positions)]] = True
        num_new = sum(place >= length - RECENT for place in positions.values())
        (self._drafting_all.add if num_new > MOST_NEW else self._drafting_all.discard)(slot)

    def _place(self, new: Sequence[int]) -> None:
        """Give tokens their columns; where too few are free, take those of tokens that no text holds, and double their number for more."""
        num_text = self._part.in_text.shape[1]
        if len(self._column) + len(new) > num_text:
            held = {*self._special, *(token for positions in self._positions for token in positions)}
            self._column = {token: column for token, column in self._column.items() if token in held}
        if len(self._column) + len(new) > num_text or num_text == 0:
            self._make_room(max(len(self._column) + len(new), 2 * num_text, 1))
        in_use = set(self._column.values())
        columns = [column for column in range(self._part.in_text.shape[1]) if column not in in_use][
            : len(new)
        ]
        self._column |= zip(new, columns, strict=True)
        self._fill(new, columns)

    def _make_room(self, num_text: int) -> None:
        """Columns for at least so many text tokens; those that have one stay there."""
        in_text = np.zeros((len(self._positions), -(-num_text // PANEL) * PANEL), np.bool_)
        in_text[:, : self._part.in_text.shape[1]] = self._part.in_text
        self._part = OutputTokens(np.r_[np.arange(self._first), np.full(in_text.shape[1], -1)], in_text)
        self._text_outputs = self._whole.like(in_text.shape[1])
        self._fill(list(self._column), list(self._column.values()))
        self._part_layer = self._whole.followed_by(self._first // PANEL, self._text_outputs)

    def _fill(self, token_ids: Sequence[int], columns: Sequence[int]) -> None:
        outputs = np.array(token_ids, np.int64)
        places = np.array(columns, np.int64)
        copy_outputs(self._whole, outputs, self._text_outputs, places)
        self._part.ids[self._first + places] = outputs


def draft_samplings(
    params: Sequence[SamplingParams], vocab_size: int, ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A `SAMPLING` of every row, and what is added to its logits, [B, V or draft vocabulary] or [B, 0]."""
    bias = np.zeros((len(params), vocab_size if any(g.logit_bias for g in params) else 0), np.float32)
    for b, g in enumerate(params):
        for token, value in g.logit_bias.items():
            bias[b, token] = value
    bias = bias[:, ids] if ids.size and bias.size else bias
    return samplings_of(params), bias
