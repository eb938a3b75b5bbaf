"""Index files: arrays with a declared kind, version, tokenizer and checksum, written whole or not at all, mapped and read through once.

The format is safetensors; the header's metadata says what the file is. A save writes a neighbour file and renames it, so that a
full disk or a second writer leaves the old index or a new one, never half of one. What a file says is checked against
`schema.INDEXES` before anything computes with it: compiled code follows its integers without looking.
"""

import hashlib
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError
from polydraft.files.atomic import replacing
from polydraft.files.schema import (
    ANYTHING,
    INDEXES,
    MOST_IDS,
    ListOf,
    Number,
    Record,
    String,
    fault,
    read_json,
)

FORMAT = "polydraft"
MOST_HEADER = 1 << 20
"""Bytes: a longer one is that of no index."""
_FORMATS = {
    "F32": np.dtype(np.float32),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
_KIND = Record({"kind": String("[a-z-]{1,32}"), "version": Number(0, 1 << 20)}, more=True)
_ABOUT = Record(
    {
        "kind": ANYTHING,
        "version": ANYTHING,
        "vocab_size": Number(1, MOST_IDS),
        "tokens_of": String("|[0-9a-f]{16}"),
        "checksum": Number(0, (1 << 32) - 1),
    }
)
_ENTRY = Record(
    {
        "dtype": String("|".join(_FORMATS)),
        "shape": ListOf(Number(0, 1 << 40), 1, 4),
        "data_offsets": ListOf(Number(0, 1 << 60), 2, 2),
    }
)


def fingerprint(tokenizer: Any) -> str:
    """Sixteen hexadecimal digits that two tokenizers share only if they give every token the same id; "" without one.

    Example:
        >>> fingerprint(None)
        ''
    """
    if tokenizer is None:
        return ""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def check_tokens(tokens: np.ndarray, vocab_size: int, where: str) -> None:
    """Raise InvalidInputError unless all ids are in [0, vocab_size); `where` names their source."""
    bad = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(bad):
        raise InvalidInputError(
            f"token id {bad[0]} was given in {where}; expected 0 <= id < {vocab_size}. Use the target's own tokenizer."
        )


def check_size(vocab_size: int) -> None:
    """Raise InvalidInputError for a vocabulary that no index file may have."""
    if not 1 <= vocab_size <= MOST_IDS:
        raise InvalidInputError(
            f"vocab_size={vocab_size} was given; expected 1 to {MOST_IDS}. Give the number of the tokenizer's ids."
        )


def check_vocabulary(
    what: str, vocab_size: int, tokens_of: str, target_vocab_size: int, tokenizer: Any
) -> None:
    """Refuse an index that was made with another tokenizer than the engine's.

    what: names the index in the message.  tokens_of: fingerprint stored with it.

    Raises:
        IncompatibleError: another vocabulary size, or other tokens behind the same ids.
    """
    ours = fingerprint(tokenizer)
    if vocab_size > target_vocab_size:
        raise IncompatibleError(
            f"{what} holds ids of a vocabulary of {vocab_size}; the target has {target_vocab_size}. Build it with the target's tokenizer."
        )
    if ours and tokens_of and ours != tokens_of:
        raise IncompatibleError(
            f"{what} was made with a tokenizer of fingerprint {tokens_of}; the engine's is {ours}. Build it with the target's tokenizer."
        )


def check_store(what: str, store: Any, target_vocab_size: int, tokenizer: Any) -> None:
    """Refuse a store that was loaded from a file of another tokenizer; one that was made here has no `made_with`.

    Raises:
        IncompatibleError: see `check_vocabulary`.
    """
    if store is not None and store.made_with is not None:
        check_vocabulary(what, *store.made_with, target_vocab_size, tokenizer)


@dataclass(frozen=True)
class IndexFile:
    """What a file holds. arrays: read-only, mapped into memory.  tokens_of: fingerprint of the tokenizer, or ""."""

    arrays: dict[str, np.ndarray]
    vocab_size: int
    tokens_of: str


class _DamagedError(Exception):
    """What is wrong with a file, as the end of a sentence about it."""


def save(
    path: str | Path, kind: str, arrays: Mapping[str, np.ndarray], *, vocab_size: int, tokens_of: str
) -> None:
    """Write an index; whatever was at `path` stays until the new one is complete.

    Raises:
        InvalidInputError: there is no such folder.
        CapacityError: the disk is full, or the folder cannot be written to.
    """
    path = Path(path)
    names = {dtype: name for name, dtype in _FORMATS.items()}
    aligned = sorted(arrays, key=lambda name: -arrays[name].itemsize)
    stored = {name: np.ascontiguousarray(arrays[name]) for name in aligned}
    entries = {}
    end = 0
    for name, array in stored.items():
        entries[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    about = {"kind": kind, "version": INDEXES[kind].version, "vocab_size": vocab_size, "tokens_of": tokens_of}
    data = [array.reshape(-1).view(np.uint8).data for array in stored.values()]
    about["checksum"] = _checksum(about, entries, *data)
    header = json.dumps({"__metadata__": {FORMAT: json.dumps(about)}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    try:
        with replacing(path) as file:
            for part in (len(header).to_bytes(8, "little"), header, *data):
                file.write(part)
    except OSError as error:
        raise CapacityError(
            f"{kind} index {str(path)!r} could not be written ({error}); what was there before is intact. "
            "Make room, or choose another folder."
        ) from error


def _checksum(about: Mapping[str, Any], entries: Mapping[str, Any], *data: memoryview) -> int:
    """Of all that a file says, less the checksum itself."""
    fields = {name: value for name, value in about.items() if name != "checksum"}
    checksum = zlib.crc32(json.dumps([fields, entries], sort_keys=True).encode())
    for part in data:
        checksum = zlib.crc32(part, checksum)
    return checksum


def load(path: str | Path, kind: str, **sizes: int) -> IndexFile:
    """Map an index of this kind, after a look at all of it. sizes: those that the arrays' schema leaves to the reader.

    Raises:
        InvalidInputError: no such file, not an index of this kind and version, truncated, damaged, or with numbers that cannot be.
    """
    try:
        with open(path, "rb") as file:
            about, entries, begin = _header_of(file, kind)
            whole = np.memmap(file, np.uint8, "r")
        arrays = _arrays(np.asarray(whole[begin:]), entries, begin)
        if _checksum(about, entries, whole[begin:].data) != about["checksum"]:
            raise _DamagedError("it does not add up to its checksum: it is damaged")
        _check(arrays, INDEXES[kind].arrays, {"vocab_size": about["vocab_size"], **sizes})
    except (OSError, ValueError, _DamagedError) as error:
        raise _refusal(path, kind, error) from error
    return IndexFile(arrays, about["vocab_size"], about["tokens_of"])


def check_header(path: str | Path, kind: str) -> None:
    """Refuse a file that is no index of this kind, by its beginning. Raises as `load`."""
    try:
        with open(path, "rb") as file:
            _header_of(file, kind)
    except (OSError, ValueError, _DamagedError) as error:
        raise _refusal(path, kind, error) from error


def _header_of(file: BinaryIO, kind: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    """As `_header`, of an index of this kind and version."""
    about, entries, begin = _header(file)
    if (about["kind"], about["version"]) != (kind, INDEXES[kind].version):
        raise _DamagedError(
            f"it is a {about['kind']} index of version {about['version']}, version {INDEXES[kind].version} of {kind} was expected"
        )
    _check(about, _ABOUT)
    return about, entries, begin


def _refusal(path: str | Path, kind: str, error: Exception) -> InvalidInputError:
    return InvalidInputError(
        f"{Path(path).name!r} was given as a {kind} index, but {_why(error)}. {INDEXES[kind].remedy}"
    )


def _why(error: Exception) -> str:
    return f"it cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)


def _check(value: Any, schema: Any, names: dict[str, int] | None = None) -> None:
    message = fault(value, schema, names)
    if message:
        raise _DamagedError(message)


def _header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, Any], int]:
    """(what the file says of itself, of its arrays, where their bytes begin); only kind and version are checked."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    header = read_json(file.read(length)) if 0 < length <= min(size, MOST_HEADER) else None
    if not isinstance(header, dict):
        raise _DamagedError("it is no such file, or its beginning is damaged")
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(FORMAT), str):
        raise _DamagedError("it is a file of another program")
    about = read_json(metadata[FORMAT])
    _check(about, _KIND)
    return about, header, 8 + length


def _check_entry(name: str, entry: dict[str, Any], begin: int) -> None:
    """Raise _DamagedError where an array does not fit its bytes. begin: of all arrays in the file."""
    _check(entry, _ENTRY)
    first, last = entry["data_offsets"]
    dtype = _FORMATS[entry["dtype"]]
    if last - first != math.prod(entry["shape"]) * dtype.itemsize or (begin + first) % dtype.itemsize:
        raise _DamagedError(
            f"its array {name!r} of {entry['dtype']} {entry['shape']} does not fit the bytes {first} to {last}"
        )


def _arrays(data: np.ndarray, entries: dict[str, Any], begin: int) -> dict[str, np.ndarray]:
    """The arrays of a file as read-only views of its bytes, which they fill one after the other."""
    for name, entry in entries.items():
        _check_entry(name, entry, begin)
    spans = sorted(entry["data_offsets"] for entry in entries.values())
    end = max((last for _, last in spans), default=0)
    if len(data) != end:
        raise _DamagedError(
            f"it has {len(data)} bytes of arrays where its header says {end}: it is truncated or damaged"
        )
    if any(a[1] != b[0] for a, b in pairwise([[0, 0], *spans])):
        raise _DamagedError("its arrays overlap or leave gaps")
    return {
        name: data[slice(*entry["data_offsets"])].view(_FORMATS[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in entries.items()
    }
