"""Texts that are read and not continued: embeddings and log-likelihoods, in pieces between the steps of those that generate.

A text takes a slot as a sequence does and gives it back when it is read; no token of it is sampled.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

import numpy as np
from jaxtyping import Float

from polydraft.core import EncoderDecoder, Outcome, Target, TokenTree
from polydraft.core.cursor import Cursor
from polydraft.engine.seats import Seats
from polydraft.engine.sequence import TokenLogprob
from polydraft.errors import BusyError, CapacityError, IncompatibleError, InvalidInputError
from polydraft.models.slots import TREE_ROOM
from polydraft.sampling.softmax import log_softmax
from polydraft.sampling.softmax import top as largest

Embedding = Float[np.ndarray, " D"]
R = TypeVar("R")
PIECE = 256
"""Tokens of a text that a step reads where nothing else runs: requests that come wait no longer than that."""
MOST_WAITING = 4096
"""Texts that may wait."""
MOST_LOGITS = 1 << 23
"""Of one piece, all rows together: they are there twice in float64 when their logarithms are taken, which makes 128 MiB."""


class Text(ABC, Generic[R]):
    """A text on its way. retains: whether its slot goes on holding it, for requests that begin so."""

    retains = True

    def __init__(self, token_ids: Seq[int]) -> None:
        self.token_ids = list(token_ids)
        self.future: Future[R] = Future()
        self.cursor: Cursor | None = None

    def check(self, target: Target) -> None:
        """Refuse what this target cannot do.

        Raises:
            IncompatibleError: saying what to do.
        """

    @abstractmethod
    def read(self, cursor: Cursor, most: int) -> None:
        """Read up to so many of its next tokens."""

    @abstractmethod
    def result(self) -> R:
        """Of the whole text."""


class Mean(Text[Embedding]):
    """Its embedding: the mean of the target's last states."""

    retains = False
    _total: float | Embedding = 0.0

    def check(self, target: Target) -> None:
        if isinstance(target, EncoderDecoder) or not target.offers.hidden:
            raise IncompatibleError(
                f"the model {target.name!r} gives no embeddings: its last states cannot be read. Use a causal model."
            )

    def read(self, cursor: Cursor, most: int) -> None:
        last = cursor.model.offers.hidden[-1]
        states = cursor.read(self.token_ids, most, [last]).hidden[last]
        self._total = self._total + states[0].sum(0, dtype=np.float64)

    def result(self) -> Embedding:
        return np.asarray(self._total / len(self.token_ids), np.float32)


class Unscored(Text[None]):
    """A text that is only to be held, for a request to come."""

    def read(self, cursor: Cursor, most: int) -> None:
        cursor.read(self.token_ids, most)

    def result(self) -> None:
        return None


class Likelihood(Text[list[TokenLogprob | None]]):
    """The log-probability of each of its tokens behind those before it, None of the first; by the target's own logits. top: alternatives beside each."""

    def __init__(self, token_ids: Seq[int], top: int) -> None:
        super().__init__(token_ids)
        self._top = top
        self._logprobs: list[TokenLogprob | None] = [None]

    def check(self, target: Target) -> None:
        if isinstance(target, EncoderDecoder):
            raise IncompatibleError(
                f"the model {target.name!r} reads its prompt by an encoder, which gives no log-probabilities. Use a causal model."
            )

    def read(self, cursor: Cursor, most: int) -> None:
        target = cursor.model
        rows = min(most, TREE_ROOM, max(1, MOST_LOGITS // target.vocab_size))
        start = cursor.length
        end = start + (1 if target.plain_reason else rows)
        tree = TokenTree.chain(np.array([self.token_ids[start:end]], np.int64))
        logits = target.score([cursor.slot], tree).logits[0]
        target.commit([cursor.slot], Outcome.of_paths([list(range(1, tree.num_nodes))]))
        following = self.token_ids[start + 1 : end + 1]
        self._logprobs += _of_tokens(logits[: len(following)], following, self._top)

    def result(self) -> list[TokenLogprob | None]:
        return self._logprobs


def _of_tokens(logits: Float[np.ndarray, "T V"], token_ids: Seq[int], top: int) -> list[TokenLogprob]:
    """Of tokens by the rows before them, with their ranks among all."""
    rows = log_softmax(logits)
    own = rows[np.arange(len(rows)), token_ids][:, None]
    ranks = (rows > own).sum(-1) + 1
    values, ids = largest(rows, min(top, rows.shape[-1]))
    columns: Any = (token_ids, own[:, 0].tolist(), ids.tolist(), values.tolist(), ranks.tolist())
    return [
        TokenLogprob(token, logprob, dict(zip(best, tops, strict=True)), rank)
        for token, logprob, best, tops, rank in zip(*columns, strict=True)
    ]


class TextQueue:
    """Texts of a target that wait to be read."""

    def __init__(self, target: Target, seats: Seats) -> None:
        self._target = target
        self._seats = seats
        self._texts = deque[Text[Any]]()

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, text: Text[R]) -> "Future[R]":
        """Queue a text, from any thread.

        Raises:
            IncompatibleError: what this target cannot do.
            InvalidInputError: no tokens, or ids outside the vocabulary.
            CapacityError: a text that is longer than the context.
            BusyError: MOST_WAITING texts wait already.
        """
        target = self._target
        ids = np.asarray(text.token_ids, np.int64)
        text.check(target)
        if not len(ids) or ids.min() < 0 or ids.max() >= target.vocab_size:
            raise InvalidInputError(
                f"{len(ids)} token ids were given; expected at least one, each in [0, {target.vocab_size})."
            )
        if len(ids) > target.max_model_len:
            raise CapacityError(
                f"a text of {len(ids)} tokens was given; the context holds {target.max_model_len}. Shorten it or raise max_model_len."
            )
        if len(self._texts) >= MOST_WAITING:
            raise BusyError(f"{len(self._texts)} texts wait to be read, as many as may. Ask again later.")
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
        if not self._texts or (self._texts[0].cursor is None and not self._seats.slots.num_free):
            return
        text = self._texts[0]
        try:
            if text.cursor is None:
                text.cursor = Cursor(self._target, self._seats.slots.take(), len(text.token_ids))
            text.read(text.cursor, most)
            is_read = text.cursor.length == len(text.token_ids)
            result = text.result() if is_read else None
        except Exception as error:
            self._finish()
            if text.future.set_running_or_notify_cancel():
                text.future.set_exception(error)
            return
        if is_read:
            self._finish(retain=text.retains)
            if text.future.set_running_or_notify_cancel():
                text.future.set_result(result)

    def _finish(self, *, retain: bool = False) -> None:
        """The first text leaves."""
        text = self._texts.popleft()
        if text.cursor is not None:
            with suppress(Exception):  # a model that cannot empty it now does so before it is taken again
                self._seats.give_back(text.cursor.slot, text.token_ids if retain else ())
