"""Incremental detokenisation: the text that each token completes, behind a prompt whose text is never given again.

Where tokens are bytes (byte-level vocabularies, SentencePiece with byte fallback) a character comes out with its last byte. Any other
tokenizer decodes two windows of a few tokens, up to the read offset and up to the new token, as vLLM's `detokenize_incrementally` does.
What a prompt begins of a character belongs to the prompt.
"""

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from polydraft.models.slot_pool import common_length
from polydraft.models.tokens.spelling import REPLACEMENT, Spelling

CONTEXT_TOKENS = 6
"""Tokens of the prompt that are decoded with the first ones of the output."""
MOST_WAITING = 4
"""Tokens that one character may be spread over."""


class Detokenizer:
    """Incremental detokenisation: `push` gives the text that a token completes, or "", and `flush` what is left at the end.

    prompt_token_ids: what stands before.  skip_special_tokens: hide them.

    Example:
        >>> from polydraft.models import load, pair
        >>> tokenizer = load.load_tokenizer(str(pair.target_folder()))
        >>> detokenizer = Detokenizer(tokenizer, tokenizer.encode("x"), skip_special_tokens=True)
        >>> [detokenizer.push(token) for token in tokenizer.encode(" = é")]
        [' =', ' ', '', 'é']
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        spelling = Spelling.of(tokenizer)
        self._special = spelling.special
        self._hidden = spelling.special if skip_special_tokens else {}
        visible = (token for token in reversed(prompt_token_ids) if token not in self._hidden)
        context = list(islice(visible, CONTEXT_TOKENS))[::-1]
        reader = _Bytes(spelling, context) if spelling.spells else _Windows(tokenizer, context)
        self._read = reader.push
        self.flush = reader.flush

    def special(self, token: int) -> str:
        """The text of a special token, shown or not; of any other token ""."""
        return self._special.get(token, "")

    def push(self, token: int) -> str:
        """The text that a token completes."""
        return "" if token in self._hidden else self._read(token)


class _Bytes:
    """Of tokens that are bytes. context: the last visible tokens of the prompt."""

    def __init__(self, spelling: Spelling, context: Sequence[int]) -> None:
        self._bytes_of = spelling.bytes_of
        self._decoder = getincrementaldecoder("utf-8")(spelling.errors)
        before = b"".join(map(self._bytes_of, context))
        self._decoder.decode(before)
        self._begun = len(self._decoder.getstate()[0])
        self._strips = spelling.strips and not before

    def push(self, token: int) -> str:
        text = self._decoder.decode(self._bytes_of(token))
        return self._behind_prompt(text) if text and (self._begun or self._strips) else text

    def flush(self) -> str:
        return self._behind_prompt(self._decoder.decode(b"", True))

    def _behind_prompt(self, text: str) -> str:
        """The first text of an output, without the character that the prompt begins, or the space that no text begins with."""
        begun = self._begun
        strips = self._strips
        self._begun = 0
        self._strips = False
        if begun:
            broken = len(text) - len(text.lstrip(REPLACEMENT))
            return text[max(1, min(begun, broken)) :]
        return text.removeprefix(" ") if strips else text


class _Windows:
    """Of any tokenizer: what decoding gives up to the new token, without what it gives up to the read offset."""

    def __init__(self, tokenizer: Any, context: Sequence[int]) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decode: Callable[..., str] = tokenizer.decode if backend is None else backend.decode
        self._decode = lambda ids: decode(ids, skip_special_tokens=False)
        self._ids, self._read_offset, self._before = list(context), len(context), self._decode(list(context))

    def push(self, token: int) -> str:
        self._ids.append(token)
        return self._take(self._decode(self._ids), MOST_WAITING)

    def flush(self) -> str:
        return self._take(self._decode(self._ids), 0)

    def _take(self, text: str, most_waiting: int) -> str:
        """What is new in a text, unless a character may be incomplete; the window then begins where the last one ended."""
        if text.endswith(REPLACEMENT) and len(self._ids) - self._read_offset < most_waiting:
            return ""
        same = common_length(self._before, text)
        piece = text[
            same + (same < len(self._before)) :
        ]  # where the texts differ, a character of the prompt was completed
        if piece:
            del self._ids[: self._read_offset]
        if piece or text != self._before:
            self._read_offset, self._before = len(self._ids), self._decode(self._ids)
        return piece
