"""Text to token ids, with special tokens in it as control tokens or as the text that they are.

A chat template writes control tokens such as <|im_end|> around what messages say. Where a message itself has one, it is text: as a
control token it could end its turn and open one of another role. So special tokens in messages are cut in two before the template is
rendered, by a character that the messages do not have; the rendered text is encoded in the parts between, where no special token is
left but those of the template.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from polydraft.errors import InvalidInputError, PolydraftError, first_line


@contextmanager
def failures_as(error_of: Callable[[str], PolydraftError]) -> Iterator[None]:
    """Where the block fails in a tokenizer, the error that this makes of the reason. A panic of its Rust code is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, PolydraftError):
        raise
    except BaseException as error:
        raise error_of(f"{type(error).__name__}: {first_line(error)[:200]}") from error


def token_ids(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text; special tokens in it are control tokens. add_special_tokens: those that the tokenizer puts around a text, too.

    Raises:
        InvalidInputError: text that the tokenizer fails on.
    """
    with failures_as(
        lambda reason: InvalidInputError(
            f"a text of {len(text)} characters was given that the tokenizer fails on ({reason}); expected text that can be written as UTF-8. "
            "Correct it, or give token ids."
        )
    ):
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def num_bytes(value: Any) -> int:
    """UTF-8 bytes of all texts in a value.

    Example:
        >>> num_bytes([{"role": "user", "content": "né"}])
        18
    """
    return sum(len(text.encode(errors="replace")) for text in _texts(value))


def longest_token(tokenizer: Any) -> int | None:
    """UTF-8 bytes of text that one token stands for, at most; None where a token may stand for any text.

    Example:
        >>> from polydraft.models import load, pair
        >>> longest_token(load.load_tokenizer(str(pair.target_folder())))
        64
    """
    from tokenizers import models

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if (
        backend is None
        or not isinstance(backend.model, models.BPE)
        or (backend.model.unk_token is not None and backend.model.fuse_unk)
    ):
        return None
    shrinks = (
        1 if backend.normalizer is None else 3
    )  # Unicode's normal form C makes a text up to so many times shorter
    return shrinks * max(len(token.encode()) for token in backend.get_vocab(with_added_tokens=True))


def special_tokens(tokenizer: Any) -> frozenset[str]:
    """Control tokens that the tokenizer finds in text, as they are spelt.

    Example:
        >>> from polydraft.models import load, pair
        >>> sorted(special_tokens(load.load_tokenizer(str(pair.target_folder()))))
        ['<|endoftext|>']
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = tokenizer.added_tokens_decoder if backend is None else backend.get_added_tokens_decoder()
    return frozenset(token.content for token in added.values() if token.special)


def unused_character(value: Any) -> str:
    """One that no text in a value has, of those that mean nothing by Unicode's own definition.

    Example:
        >>> unused_character(["a", {"b": "\ue000"}])
        '\ue001'
    """
    used = {character for text in _texts(value) for character in set(text)}
    return next(character for character in map(chr, range(0xE000, 0xF900)) if character not in used)


class Cuts:
    """Cuts of the special tokens in a text or a conversation by other people.

    Example:
        >>> from polydraft.models import load, pair
        >>> tokenizer = load.load_tokenizer(str(pair.target_folder()))
        >>> messages = [{"role": "user", "content": "x<|endoftext|>"}]
        >>> cuts = Cuts(tokenizer, messages)
        >>> ids = cuts.encode(cuts.put(messages)[0]["content"] + "<|endoftext|>")
        >>> ids.count(tokenizer.eos_token_id), tokenizer.decode(ids)
        (1, 'x<|endoftext|><|endoftext|>')
    """

    def __init__(self, tokenizer: Any, value: Any) -> None:
        self._tokenizer = tokenizer
        self._special = _pattern(special_tokens(tokenizer))
        self._mark = unused_character(value)

    def put(self, value: Any) -> Any:
        """The same with cuts, in all of its texts.

        Raises:
            InvalidInputError: a special token of one character, which has no two parts.
        """
        if isinstance(value, str):
            return self._special.sub(self._cut, value) if self._special else value
        if isinstance(value, Mapping):
            return {self.put(name): self.put(item) for name, item in value.items()}
        return [self.put(item) for item in value] if isinstance(value, Sequence) else value

    def _cut(self, special: re.Match[str]) -> str:
        if len(special[0]) == 1:
            raise InvalidInputError(
                f"a text with {special[0]!r} was given, which is a control token of this model. Leave it out."
            )
        return f"{special[0][0]}{self._mark}{special[0][1:]}"

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that was made of what has cuts."""
        begin, *others = text.split(self._mark)
        ids = token_ids(self._tokenizer, begin) if begin else []
        return ids + [token for part in others if part for token in _ids_within(self._tokenizer, part)]


def _ids_within(tokenizer: Any, part: str) -> list[int]:
    """Token ids of a part of a text, without the blank that SentencePiece puts before a text.

    It stands behind a line end, with which nothing in it is merged, and whose tokens are taken away again.
    """
    ids = token_ids(tokenizer, part)
    if not str(tokenizer.convert_ids_to_tokens(ids[0])).startswith("▁"):
        return ids
    line_end = token_ids(tokenizer, "\n")
    behind = token_ids(tokenizer, f"\n{part}")
    return behind[len(line_end) :] if behind[: len(line_end)] == line_end else ids


@lru_cache(maxsize=8)
def _pattern(tokens: frozenset[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    items = (
        [*value.keys(), *value.values()]
        if isinstance(value, Mapping)
        else value
        if isinstance(value, Sequence)
        else ()
    )
    return [text for item in items for text in _texts(item)]
