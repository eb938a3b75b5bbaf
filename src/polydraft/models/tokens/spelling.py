"""What tokens stand for: bytes, or text as it is written; and which of them are hidden where special tokens are skipped.

Byte-level tokens spell bytes with an alphabet of their own ("Ġthe" is " the"), SentencePiece marks a space with "▁" and single bytes
as "<0x0A>". Tokens of other kinds (whole words, "##ing") have no bytes of their own.
"""

import codecs
import json
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

REPLACEMENT = "\ufffd"
"""Written for bytes that are no character."""
EACH_BYTE = "polydraft.each_byte"
"""For `bytes.decode`: one replacement for each byte that is part of no character."""


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _each_byte)


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes: printable ones as they are, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def kind_of(tokenizer: Any) -> str:
    """How tokens are written: "bytes", "spaces" or "words"."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = "" if backend is None else repr(backend.decoder)
    if "ByteLevel" in decoder:
        return "bytes"
    return "spaces" if "Metaspace" in decoder or "▁" in decoder or "ByteFallback" in decoder else "words"


def spelled(token: str, kind: str) -> bytes | str:
    """A token as bytes, or as it is written where it is none of its kind.

    Example:
        >>> spelled("Ġé", "bytes"), spelled("▁the", "spaces"), spelled("<0x0A>", "spaces"), spelled("##ing", "words")
        (b' \\xe9', b' the', b'\\n', '##ing')
    """
    if kind == "bytes":
        alphabet = byte_alphabet()
        return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token
    if kind == "spaces":
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()
    return token


def _spells(decoder: Any) -> bool:
    """Whether a decoder does nothing but spell bytes, and perhaps strip the first space of a text."""
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    parts = state.get("decoders", [state])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return True
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    replaces = bool(parts) and parts[0] == {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    return replaces and kinds[1:3] == ["ByteFallback", "Fuse"] and parts[3:] in ([], [strip])


class Spelling:
    """Tokens of a tokenizer as its decoder writes them.

    special: texts of the tokens that are hidden where special tokens are skipped, by id.
    spells: whether tokens are bytes.  strips: whether a text loses the space that it begins with.  errors: of `bytes.decode`, for what is no
        character: byte-level decoders write one replacement for each broken character, SentencePiece one for each byte of it.

    Example:
        >>> from polydraft.models import load, pair
        >>> words = Spelling.of(load.load_tokenizer(str(pair.target_folder())))
        >>> words.special, words.spells, words.strips, words.bytes_of(260)
        ({0: '<|endoftext|>'}, True, False, b'in')
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = None
        self.special = dict[int, str]()
        if backend is not None:
            decoder = backend.decoder
            self._piece = backend.id_to_token
            self.special = {
                i: token.content for i, token in backend.get_added_tokens_decoder().items() if token.special
            }
        else:
            self.special = {
                i: str(tokenizer.convert_ids_to_tokens(i)) for i in getattr(tokenizer, "all_special_ids", ())
            }
        self._kind = kind_of(tokenizer)
        self.spells = _spells(decoder)
        self.strips = "Strip" in repr(decoder)
        self.errors = "replace" if self._kind == "bytes" else EACH_BYTE
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def of(cls, tokenizer: Any) -> "Spelling":
        """The one of a tokenizer, which is made once."""
        if tokenizer not in _SPELLINGS:
            _SPELLINGS[tokenizer] = cls(tokenizer)
        return _SPELLINGS[tokenizer]

    def bytes_of(self, token: int) -> bytes:
        """Of a token, where tokens are bytes; none of an id that has no token."""
        if token not in self._bytes:
            key = spelled(self._piece(token) or "", self._kind)
            self._bytes[token] = key.encode() if isinstance(key, str) else key
        return self._bytes[token]


_SPELLINGS: WeakKeyDictionary[Any, Spelling] = WeakKeyDictionary()
