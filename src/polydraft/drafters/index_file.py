"""Index files: arrays with a declared kind, version and tokenizer, written whole or not at all, mapped and not read.

The format is safetensors; the header's metadata says what the file is. A save writes a neighbour file and renames it, so that a
full disk or a second writer leaves the old index or a new one, never half of one.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError

__all__ = ["IndexFile", "check_store", "check_tokens", "check_vocabulary", "fingerprint", "kind_of", "load", "save"]

FORMAT = "polydraft"
_DTYPES = {
    "F32": np.float32,
    "F64": np.float64,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "I32": np.int32,
    "I64": np.int64,
}


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


def check_vocabulary(what: str, vocab_size: int, tokens_of: str, target_vocab_size: int, tokenizer: Any) -> None:
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
    facts: dict[str, Any]


def save(
    path: str | Path, kind: str, version: int, arrays: Mapping[str, np.ndarray], *, vocab_size: int, tokens_of: str, **facts: Any
) -> None:
    """Write an index; whatever was at `path` stays until the new one is complete.

    Raises:
        CapacityError: the disk is full, or the folder cannot be written to.
    """
    path = Path(path)
    about = {"format": FORMAT, "kind": kind, "version": version, "vocab_size": vocab_size, "tokens_of": tokens_of, "facts": facts}
    scratch = None
    try:
        descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(descriptor)
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, scratch, metadata={FORMAT: json.dumps(about)})
        with open(scratch, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(scratch, path)
        scratch = None
    except (OSError, SafetensorError) as error:
        raise CapacityError(
            f"{kind} index {str(path)!r} could not be written ({error}); what was there before is intact. "
            "Make room, or choose another folder."
        ) from error
    finally:
        if scratch is not None:
            with suppress(OSError):
                os.unlink(scratch)


def kind_of(path: str | Path) -> str:
    """The kind of an index file.

    Raises:
        InvalidInputError: no such file, or not an index.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length < 1 << 24 else None
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"{Path(path).name!r} was given as an index and cannot be read ({error}); expected a file of `polydraft index build`."
        ) from error
    about = (header.get("__metadata__") or {}).get(FORMAT) if isinstance(header, dict) else None
    if about is None:
        raise InvalidInputError(
            f"{Path(path).name!r} was given as an index; it is a file of another program. Expected one of `polydraft index build`."
        )
    return json.loads(about)["kind"]


def load(path: str | Path, kind: str, version: int) -> IndexFile:
    """Map an index of this kind.

    Raises:
        InvalidInputError: no such file, not an index of this kind and version, or truncated.
    """
    path = Path(path)
    refused = f"{path.name!r} was given as a {kind} index"
    advice = f"Build one with `polydraft index build --kind {kind}`."
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 0 < length < size else None
    except OSError as error:
        raise InvalidInputError(f"{refused} and cannot be read: {error.strerror}. {advice}") from error
    except ValueError as error:
        raise InvalidInputError(f"{refused}; it is no such file, or its beginning is damaged. {advice}") from error
    about = (header.get("__metadata__") or {}).get(FORMAT) if isinstance(header, dict) else None
    if not isinstance(header, dict) or about is None:
        raise InvalidInputError(f"{refused}; it is a file of another program. {advice}")
    about = json.loads(about)
    if (about["kind"], about["version"]) != (kind, version):
        raise InvalidInputError(
            f"{refused}; it is a {about['kind']} index of version {about['version']}, version {version} of {kind} was expected. {advice}"
        )
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if size != end:
        raise InvalidInputError(
            f"{refused}; it has {size} bytes where its header says {end}: it is truncated or damaged. {advice}"
        )
    return IndexFile(
        {name: _map(path, 8 + length, entry) for name, entry in entries.items()},
        about["vocab_size"],
        about["tokens_of"],
        about["facts"],
    )


def _map(path: Path, begin: int, entry: Mapping[str, Any]) -> np.ndarray:
    """One array of the file, as a plain read-only array over mapped memory."""
    shape, dtype = tuple(entry["shape"]), np.dtype(_DTYPES[entry["dtype"]])
    if 0 in shape:
        empty = np.empty(shape, dtype)
        empty.flags.writeable = False
        return empty
    return np.asarray(np.memmap(path, dtype, "r", begin + entry["data_offsets"][0], shape))
