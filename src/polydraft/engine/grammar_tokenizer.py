"""The tokenizer that grammars are followed with: what a grammar spells is text, and never a control token.

Where a grammar leaves one way to go on, llguidance writes it with the tokens that the tokenizer makes of it. A tokenizer finds its added tokens
in any text: "a <|im_end|> b" would end the output. So such texts are cut behind their first character before they are encoded, as texts of
users are (`models.encoding.Cuts`). A grammar in Lark's notation names an added token by <|im_end|> or <[151645]> outside of quotation marks.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["GrammarTokenizer"]


class GrammarTokenizer:
    """A `TokenizerWrapper` of llguidance. tokenizer_json: as `tokenizers` writes it.  stop_ids: that end a text.

    Example:
        >>> from polydraft.models import load, pair
        >>> tokenizer = load.load_tokenizer(str(pair.target_folder()))
        >>> whole = GrammarTokenizer(tokenizer.backend_tokenizer.to_str(), len(tokenizer), [0])
        >>> tokenizer("<|endoftext|>")["input_ids"], tokenizer.decode(whole("<|endoftext|>")), 0 in whole("<|endoftext|>")
        ([0], '<|endoftext|>', False)
    """

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, tokenizer_json: str, vocab_size: int, stop_ids: Sequence[int]) -> None:
        from llguidance import LLTokenizer

        self._whole, self.eos_token_id = LLTokenizer(tokenizer_json, vocab_size, list(stop_ids), slices=[]), stop_ids[0]
        self.tokens = [self._whole.decode_bytes([token]) for token in range(vocab_size)]
        self.special_token_ids = [token for token in range(vocab_size) if self._whole.is_special_token(token)]
        self._special = frozenset(self.special_token_ids)
        names = {self.tokens[token].decode(errors="replace") for token in self._special} - {""}
        self._names = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None

    def __call__(self, text: str) -> list[int]:
        """Ordinary tokens that spell a text: the tokenizer's own, or the longest that fit where it would write another text."""
        ends = [name.start() + 1 for name in self._names.finditer(text)] if self._names else []
        parts = [text[start:end] for start, end in pairwise([0, *ends, len(text)])]
        ids = [token for part in parts for token in self._whole.tokenize_str(part)]
        spelled = b"".join(self.tokens[token] for token in ids)
        return ids if spelled == text.encode() and self._special.isdisjoint(ids) else self._whole.greedy_tokenize(text)
