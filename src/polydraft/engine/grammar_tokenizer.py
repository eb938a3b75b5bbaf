"""What grammars see of a tokenizer: how it spells a text in ordinary tokens, and its tokens alone, as the process that tries grammars has them.

Where a grammar leaves one way to go on, llguidance writes it with the tokens that the tokenizer makes of it. A tokenizer finds its added tokens
in any text: "a <|im_end|> b" would end the output. So such texts are cut behind their first character before they are encoded, as texts of
users are (`models.encoding.Cuts`). A grammar in Lark's notation names an added token by <|im_end|> or <[151645]> outside of quotation marks.
"""

import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Any

EXACT_LENGTH = 2048
"""Characters; a tokenizer takes a millisecond for as many."""


class GrammarTokenizer:
    """A `TokenizerWrapper` of llguidance. backend: of the `tokenizers` library.  stop_ids: that end a text.

    vocab_size: ids that may be written; those behind them, such as padding that a file has names for, spell nothing.

    Example:
        >>> from polydraft.models import load, pair
        >>> tokenizer = load.load_tokenizer(str(pair.target_folder()))
        >>> whole = GrammarTokenizer(tokenizer.backend_tokenizer, len(tokenizer), [0])
        >>> tokenizer("<|endoftext|>")["input_ids"], tokenizer.decode(whole("<|endoftext|>")), 0 in whole("<|endoftext|>")
        ([0], '<|endoftext|>', False)
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, backend: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        from llguidance import LLTokenizer

        num_ids = max(vocab_size, 1 + max(backend.get_vocab(with_added_tokens=True).values()))
        self._whole = LLTokenizer(backend.to_str(), num_ids, list(stop_ids), slices=[])
        self.eos_token_id = stop_ids[0]
        self.tokens = [self._whole.decode_bytes([token]) for token in range(vocab_size)]
        self.special_token_ids = [token for token in range(vocab_size) if self._whole.is_special_token(token)]
        self._unwritten = frozenset([*self.special_token_ids, *range(vocab_size, num_ids)])
        names = {self._whole.decode_bytes([token]).decode(errors="replace") for token in self._unwritten} - {
            ""
        }
        self._names = (
            re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None
        )

    def __call__(self, text: str) -> list[int]:
        """Ordinary tokens that spell a text: the tokenizer's own, or the longest that fit where it would write another text.

        llguidance asks for a whole text that is left at each token, and takes the first: behind EXACT_LENGTH it is the longest that fit.
        """
        if len(text) > EXACT_LENGTH:
            return [*self(text[:EXACT_LENGTH]), *self._longest(self._parts(text[EXACT_LENGTH:]))]
        parts = self._parts(text)
        ids = [token for part in parts for token in self._whole.tokenize_str(part)]
        if self._unwritten.isdisjoint(ids) and b"".join(self.tokens[token] for token in ids) == text.encode():
            return ids
        return self._longest(parts)

    def _parts(self, text: str) -> list[str]:
        """Cut where it spells the name of a token."""
        cuts = [name.start() + 1 for name in self._names.finditer(text)] if self._names else []
        return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]

    def _longest(self, parts: Sequence[str]) -> list[int]:
        return [token for part in parts for token in self._whole.greedy_tokenize(part)]


@dataclass(frozen=True)
class Vocabulary:
    """Tokens as bytes, those that are no text, and those that end one. name: of these."""

    tokens: Sequence[bytes]
    special_ids: Sequence[int]
    stop_ids: Sequence[int]
    name: str = ""

    @classmethod
    def of(cls, tokens: Sequence[bytes], special_ids: Sequence[int], stop_ids: Sequence[int]) -> "Vocabulary":
        """With its name."""
        parts = list(tokens), list(special_ids), list(stop_ids)
        return cls(*parts, name=sha256(pickle.dumps(parts)).hexdigest())


class LongestTokens:
    """A `TokenizerWrapper` of llguidance for tokens alone: texts are the longest that fit."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], stop_ids: list[int]) -> None:
        from llguidance import LLTokenizer

        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = stop_ids[0]
        self._longest: Any = None
        wrapper: Any = self
        self._longest = LLTokenizer(wrapper, eos_token=stop_ids)

    def __call__(self, text: str) -> list[int]:
        return [] if self._longest is None else self._longest.greedy_tokenize(text)
