"""Two vocabularies and what they have in common, by the bytes that tokens stand for.

Tokens that spell bytes are compared as bytes, see `spelling`. Tokens of other kinds (whole words, "##ing") are compared as written, and
only with their own kind. Special tokens are mapped by role (beginning, end, padding, unknown), or not at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polydraft.errors import IncompatibleError
from polydraft.models.tokens.spelling import kind_of, spelled

Key = bytes | str


def token_bytes(tokenizer: Any) -> dict[int, Key]:
    """What each ordinary token stands for: bytes, or the token as written where it is no piece of text.

    Special and added tokens are left out.

    Example:
        >>> from polydraft.models import load, pair
        >>> tokenizer = load.load_tokenizer(str(pair.target_folder()))
        >>> token_bytes(tokenizer)[tokenizer.convert_tokens_to_ids("Ġself")]
        b' self'
    """
    kind = kind_of(tokenizer)
    special = set(tokenizer.get_added_vocab().values()) | set(tokenizer.all_special_ids)
    return {i: spelled(token, kind) for token, i in tokenizer.get_vocab().items() if i not in special}


def _by_key(keys: dict[int, Key], size: int) -> dict[Key, int]:
    """The lowest id of each key; a model may have fewer rows than the tokenizer has ids."""
    by_key: dict[Key, int] = {}
    for i in sorted(keys):
        if i < size:
            by_key.setdefault(keys[i], i)
    return by_key


@dataclass(frozen=True)
class Translation:
    """From one vocabulary to another: common tokens one to one, any other token as several.

    ours, theirs: ids of the common tokens in both, in the same order.  pieces: id of ours -> ids of theirs, at least one.

    Raises (from `of`):
        IncompatibleError: no token in common.
    """

    ours: np.ndarray
    theirs: np.ndarray
    pieces: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, target: Any, draft: Any, target_size: int, draft_size: int) -> "Translation":
        """Between two tokenizers; sizes: rows of the models' logits."""
        ours = token_bytes(target)
        theirs = token_bytes(draft)
        their_ids = _by_key(theirs, draft_size)
        common = {i: their_ids[key] for key, i in _by_key(ours, target_size).items() if key in their_ids}
        if not common:
            raise IncompatibleError(
                f"the vocabularies of target ({len(ours)} tokens) and draft ({len(theirs)} tokens) have no token in common; "
                "expected some for drafter 'tli'. Use drafter='slem', which goes through text."
            )
        for role in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
            a = getattr(target, role)
            b = getattr(draft, role)
            if a is not None and b is not None and a < target_size and b < draft_size:
                common.setdefault(a, b)
        filler = next(
            (i for i in (draft.unk_token_id, draft.eos_token_id) if i is not None),
            next(iter(common.values())),
        )
        spell = _Speller(draft, their_ids, draft_size)
        pieces = tuple(
            (common[i],) if i in common else (spell(ours.get(i)) or (filler,)) for i in range(target_size)
        )
        pairs = sorted({v: k for k, v in reversed(common.items())}.items(), key=lambda pair: pair[1])
        return cls(np.array([a for _, a in pairs]), np.array([b for b, _ in pairs]), pieces)

    def expand(self, token_ids: Sequence[int]) -> list[int]:
        """A text of ours in ids of theirs."""
        return [piece for token in token_ids for piece in self.pieces[token]]


@dataclass(frozen=True)
class _Speller:
    """A token that the other side lacks, spelled with tokens that it has: as text, else byte by byte, else not at all."""

    tokenizer: Any
    ids: dict[Key, int]
    size: int

    def __call__(self, key: Key | None) -> tuple[int, ...]:
        if key is None:
            return ()
        if isinstance(key, str):
            text = key
        else:
            try:
                text = key.decode()
            except UnicodeDecodeError:
                single = [self.ids.get(bytes([b])) for b in key]
                return tuple(i for i in single if i is not None) if None not in single else ()
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tuple(i for i in ids if i < self.size)
