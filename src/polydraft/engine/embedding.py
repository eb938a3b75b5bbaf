"""Embeddings of texts: the mean of the target's last states, read in pieces between the steps of those that generate.

A text takes a slot as a sequence does and gives it back when it is read; no token of it is sampled.
"""

from collections import deque
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import EncoderDecoder, Target
from polydraft.errors import BusyError, CapacityError, IncompatibleError, InvalidInputError
from polydraft.models.slot_pool import Slots

Embedding = Float[np.ndarray, " D"]
PIECE = 256
"""Tokens of a text that a step reads where nothing else runs: requests that come wait no longer than that."""
MOST_WAITING = 4096
"""Texts that may wait."""


@dataclass(eq=False)
class _Text:
    token_ids: Int[np.ndarray, " T"]
    future: "Future[Embedding]" = field(default_factory=Future)
    slot: int | None = None
    num_read: int = 0
    total: float | Embedding = 0.0


class Embeddings:
    """Texts of a target that wait to be read. slots: of the target."""

    def __init__(self, target: Target, slots: Slots) -> None:
        self._target, self._slots, self._texts = target, slots, deque[_Text]()

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, token_ids: Seq[int]) -> "Future[Embedding]":
        """Queue a text, from any thread.

        Raises:
            IncompatibleError: a target that gives no states, or reads a source first.
            InvalidInputError: no tokens, or ids outside the vocabulary.
            CapacityError: a text that is longer than the context.
            BusyError: MOST_WAITING texts wait already.
        """
        target, ids = self._target, np.asarray(token_ids, np.int64)
        if isinstance(target, EncoderDecoder) or not target.offers.hidden:
            raise IncompatibleError(
                f"the model {target.name!r} gives no embeddings: its last states cannot be read. Use a causal model."
            )
        if not len(ids) or ids.min() < 0 or ids.max() >= target.vocab_size:
            raise InvalidInputError(f"{len(ids)} token ids were given; expected at least one, each in [0, {target.vocab_size}).")
        if len(ids) > target.max_model_len:
            raise CapacityError(
                f"a text of {len(ids)} tokens was given; the context holds {target.max_model_len}. Shorten it or raise max_model_len."
            )
        if len(self._texts) >= MOST_WAITING:
            raise BusyError(f"{len(self._texts)} texts wait to be embedded, as many as may. Ask again later.")
        text = _Text(ids)
        self._texts.append(text)
        return text.future

    def cancel(self) -> None:
        """Nobody wants what waits."""
        for text in list(self._texts):
            text.future.cancel()

    def step(self, most: int) -> None:
        """Read up to so many tokens of the first text, where a slot is free for it."""
        while self._texts and self._texts[0].future.cancelled():
            self._finish()
        if not self._texts or (self._texts[0].slot is None and not self._slots.num_free):
            return
        text = self._texts[0]
        try:
            if text.slot is None:
                text.slot = self._slots.take()
            self._read(text, most)
        except Exception as error:
            self._finish()
            if text.future.set_running_or_notify_cancel():
                text.future.set_exception(error)
            return
        if text.num_read == len(text.token_ids):
            self._finish()
            if text.future.set_running_or_notify_cancel():
                text.future.set_result(np.asarray(text.total / text.num_read, np.float32))

    def _read(self, text: _Text, most: int) -> None:
        assert text.slot is not None
        last, piece = self._target.offers.hidden[-1], text.token_ids[text.num_read : text.num_read + most]
        states = self._target.prefill([text.slot], [piece.tolist()], hidden=[last]).hidden[last]
        text.total = text.total + states[0].double().sum(0).cpu().numpy()
        text.num_read += len(piece)

    def _finish(self) -> None:
        """The first text leaves."""
        slot = self._texts.popleft().slot
        if slot is not None:
            with suppress(Exception):  # a model that cannot empty it now does so before it is taken again
                self._slots.give_back(slot)
