"""From token ids to text, one token at a time, and where to stop.

Text is given out only when it is certain: an incomplete character waits for its other bytes, and text that might be the
beginning of a stop string waits until it is one or not. Nothing behind a stop is ever given out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6


def _held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string.

    Example:
        >>> _held_back("return x\\n\\n", ["\\n\\n\\n", "def"])
        2
    """
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


class Detokenizer:
    """Incremental detokenisation: `push` gives the text that a token completes, or "".

    The last tokens of the prompt are the left context, so that leading spaces are kept.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        context = list(prompt_token_ids[-CONTEXT_TOKENS:])
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            stream = DecodeStream(context, skip_special_tokens=skip_special_tokens)
            self.push: Callable[[int], str] = lambda token: stream.step(backend, token) or ""
        else:
            self.push = _slow_push(tokenizer, context, skip_special_tokens)


def _slow_push(tokenizer: Any, context: list[int], skip_special_tokens: bool) -> Callable[[int], str]:
    """The same for tokenizers without a compiled backend: decode a short window twice and compare."""
    window, done = list(context), tokenizer.decode(context, skip_special_tokens=skip_special_tokens)

    def push(token: int) -> str:
        nonlocal window, done
        window.append(token)
        text = tokenizer.decode(window, skip_special_tokens=skip_special_tokens)
        if text.endswith(REPLACEMENT) or len(text) <= len(done):
            return ""
        piece = text[len(done) :]
        window = window[-CONTEXT_TOKENS:]
        done = tokenizer.decode(window, skip_special_tokens=skip_special_tokens)
        return piece

    return push


@dataclass(frozen=True)
class Ending:
    """Why and where a sequence ended ("stop" or "length", or from outside "abort" or "error"), and the id or string that did it."""

    finish_reason: str
    stop_reason: int | str | None = None


class Stopper:
    """Reads a sequence token by token; knows its text and whether it has ended.

    tokenizer: None for token ids without text (then stop strings cannot be used).
    stop_ids: end-of-sequence and stop ids.  max_tokens: most tokens to emit.
    min_tokens: an id or a stop string ends the text only where a later token completes it.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int],
        *,
        stop_ids: frozenset[int],
        stop_strings: Sequence[str],
        max_tokens: int,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = tokenizer and Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._stop_ids, self._stop_strings = stop_ids, tuple(stop_strings)
        self._max_tokens, self._min_tokens = max_tokens, min_tokens
        self._num_tokens = 0
        self._text, self._given = "", 0
        self.stop: Ending | None = None

    @property
    def text(self) -> str:
        """All text so far, cut before a stop string."""
        return self._text

    def push(self, token: int) -> None:
        """Read one emitted token; afterwards `stop` says whether it was the last."""
        self._num_tokens += 1
        if token in self._stop_ids and self._num_tokens > self._min_tokens:
            self.stop = Ending("stop", token)
            return
        if self._detokenizer is not None:
            self._push_text(self._detokenizer.push(token))
        if self.stop is None and self._num_tokens >= self._max_tokens:
            self.stop = Ending("length")

    def _push_text(self, piece: str) -> None:
        num_checked = len(self._text)
        self._text += piece
        if self._num_tokens <= self._min_tokens:
            return
        searches = (
            (stop, max(0, num_checked - len(stop) + 1)) for stop in self._stop_strings
        )  # one that ended before has no say
        matches = [(at, stop) for stop, begin in searches if (at := self._text.find(stop, begin)) >= 0]
        if matches:
            at, stop = min(matches)
            self._text = self._text[:at]
            self.stop = Ending("stop", stop)

    def end(self, finish_reason: str) -> None:
        """End from outside: text that was held back is certain now."""
        self.stop = Ending(finish_reason)

    def take(self) -> str:
        """Text that is certain and was not given out before."""
        held = 0 if self.stop else _held_back(self._text, self._stop_strings)
        end = max(len(self._text) - held, self._given)
        piece, self._given = self._text[self._given : end], end
        return piece
