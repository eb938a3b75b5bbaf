"""Where a text stops, read token by token.

Text is given out only when it is certain: an incomplete character waits for its other bytes, and text that might be the
beginning of a stop string waits until it is one or not. Nothing behind a stop is ever given out. Stop strings are searched in the text
with its special tokens, whether these are shown or not; of a model that thinks, in its answer alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polydraft.core.thinking import BLANKS, PhaseOfText, Thinking
from polydraft.engine.detokenizer import Detokenizer


def _held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string.

    Example:
        >>> _held_back("return x\\n\\n", ["\\n\\n\\n", "def"])
        2
    """
    longest = 0
    for stop in stops:
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        longest = max(longest, len(text) - at if at >= 0 else 0)
    return longest


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
    thinking: what the model thinks first; in it `stop_strings` end nothing, nor do `answer_stop_ids`.
    include_stop: the text ends behind what ended it, and not before.
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
        thinking: Thinking | None = None,
        answer_stop_ids: frozenset[int] = frozenset(),
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = tokenizer and Detokenizer(
            tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
        self._stop_ids = stop_ids
        self._stop_strings = tuple(stop_strings)
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._num_tokens = 0
        self._text = ""
        self._given = 0
        self._end = ""
        self._places = list[
            int
        ]()  # of what is searched: its last characters, and how much text is before each
        self._longest = max(map(len, self._stop_strings), default=0)
        watched = tokenizer is not None and bool(self._stop_strings or answer_stop_ids)
        self._thinking = thinking if watched else None
        self._answer_stop_ids = answer_stop_ids
        self._place = PhaseOfText("answer") if self._thinking is None else self._thinking.begin()
        self._at_once = True
        """Whether the answer's first blanks are part of it: those behind thoughts are not."""
        self._undecided = list[tuple[int, str, str]]()
        """What `_search_behind` takes of an output that may yet begin to think."""
        self.stop: Ending | None = None

    @property
    def text(self) -> str:
        """All text so far, cut at a stop string."""
        return self._text

    def push(self, token: int) -> None:
        """Read one emitted token; afterwards `stop` says whether it was the last."""
        self._num_tokens += 1
        stops = self._is_stop(token) and self._num_tokens > self._min_tokens
        if self._detokenizer is not None:
            text = "" if stops and not self._include_stop else self._detokenizer.push(token)
            self._push_text(text, "" if text else self._detokenizer.special(token))
        if stops:
            self._finish(Ending("stop", token))
        elif self._num_tokens >= self._max_tokens:
            self._finish(Ending("length"))

    def _is_stop(self, token: int) -> bool:
        if token in self._answer_stop_ids and self._place.phase != "thoughts":
            return True
        return token in self._stop_ids

    def end(self, finish_reason: str) -> None:
        """End from outside: text that was held back is certain now. "error": no more is read, as this may be what failed."""
        if finish_reason != "error":
            self._flush()
        self.stop = Ending(finish_reason)

    def _finish(self, ending: Ending) -> None:
        """End, unless a stop string did it."""
        self._flush()
        self.stop = self.stop or ending

    def _flush(self) -> None:
        """Take the bytes of a character that nothing completes any more."""
        if self.stop is None and self._detokenizer is not None:
            self._push_text(self._detokenizer.flush())
            self._decide()

    def _push_text(self, text: str, hidden: str = "") -> None:
        """What a token adds: text, or the text of a special token that is not shown."""
        begin = len(self._text)
        self._text += text
        if self._thinking is None or self._place.phase == "answer":
            self._search_behind(begin, text, hidden)
            return
        before = self._place.phase
        self._place = self._thinking.after(self._place, text + hidden)
        if self._place.phase == "thoughts":
            self._undecided.clear()
        elif before == "start" and self._stop_strings:
            self._undecided.append((begin, text, hidden))
        elif before == "thoughts":
            shown = min(len(self._place.tail), len(text))
            self._at_once = False
            self._search_behind(len(self._text) - shown, text[len(text) - shown :], "")
        if self._place.phase == "answer":
            self._decide()

    def _decide(self) -> None:
        """Search an output that did not begin to think."""
        for begin, text, hidden in self._undecided:
            if self.stop is None:
                self._search_behind(begin, text, hidden)
        self._undecided.clear()

    def _search_behind(self, begin: int, text: str, hidden: str) -> None:
        """Look for stop strings in more of the answer, which stands in the text from `begin` on."""
        if not self._at_once:
            blanks = len(text) - len(text.lstrip(BLANKS))
            begin = begin + blanks
            text = text[blanks:]
            self._at_once = bool(text or hidden)
        if not self._stop_strings:
            return
        num_checked = len(self._end)
        self._end += text + hidden
        self._places += [*range(begin, begin + len(text)), *[begin + len(text)] * len(hidden)]
        if self._num_tokens > self._min_tokens:
            self._search(num_checked)
        surplus = max(0, len(self._end) - self._longest)
        self._end = self._end[surplus:]
        self._places = self._places[surplus:]

    def _search(self, num_checked: int) -> None:
        """Cut the text before or behind a stop string; one that ended within the checked characters has no say."""
        searches = ((stop, max(0, num_checked - len(stop) + 1)) for stop in self._stop_strings)
        matches = [(at, stop) for stop, begin in searches if (at := self._end.find(stop, begin)) >= 0]
        if matches:
            at, stop = min(matches)
            end = at + len(stop) if self._include_stop else at
            self._text = self._text[: [*self._places, len(self._text)][end]]
            self.stop = Ending("stop", stop)

    def take(self) -> str:
        """Text that is certain and was not given out before."""
        held = 0 if self.stop else _held_back(self._end, self._stop_strings)
        certain = self._places[-held] if held else len(self._text)
        if self._undecided and not self.stop:
            certain = self._undecided[0][0]
        end = max(certain, self._given)
        piece = self._text[self._given : end]
        self._given = end
        return piece
