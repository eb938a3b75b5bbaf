"""A file that brings prefix caches over a restart: blocks of KV cache entries of a target and a draft model, by their tokens.

    beginning   MAGIC, bytes of the header (8, little endian), header in JSON: version, CRC-32 of what follows, and of each model a `ModelPart`
    parts       of each model: parents [blocks], whether a block has states [blocks], tokens [blocks, block_tokens] (int64), and the arrays of
                every block one behind the other, its states behind its entries

Entries are as good as what this model computes: the first block of a file is computed anew, by these weights on this processor, and nothing is used
where it differs. What is damaged, of another model or another version is not used either; the server then reads its prompts.
"""

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from polydraft.core import Target
from polydraft.errors import CapacityError, InvalidInputError
from polydraft.files.atomic import replacing
from polydraft.files.schema import ListOf, Number, Record, String, fault, read_json
from polydraft.models.prefix_cache import PrefixCache, StoredBlock
from polydraft.models.slot_pool import Slots
from polydraft.numerics.floats import BFLOAT16
from polydraft.numerics.processor import processor

MAGIC = b"PDPREFIX"
VERSION = 1
MOST_HEADER = 1 << 16
"""Bytes: a longer one is that of no such file."""
ARRAY = Record({"kind": String("[a-z0-9_.]{1,32}"), "shape": ListOf(Number(0, 1 << 40), 0, 8)})
PART = Record(
    {"role": String("[a-z]{1,16}"), "model": String(".{1,500}"), "blocks": Number(0, 1 << 40), "block_tokens": Number(1, 4096), "arrays": ListOf(ARRAY, 0, 4096), "with_states": Number(0, 1 << 40), "states": ListOf(ARRAY, 0, 4096)}
)  # fmt: skip
HEADER = Record({"version": Number(), "checksum": Number(0, 2**32 - 1), "parts": ListOf(PART, 0, 8)})


class _UnusableError(Exception):
    """Why a file is not used, as the end of a sentence about it."""


@dataclass(frozen=True)
class ModelPart:
    """One model's blocks. arrays, states: kind of numbers and shape of each array of a block's entries, and of its states.
    with_states: blocks that have these."""

    role: str
    model: str
    blocks: int
    block_tokens: int
    arrays: Sequence[Mapping[str, Any]]
    with_states: int
    states: Sequence[Mapping[str, Any]]

    @property
    def num_bytes(self) -> int:
        """In the file."""
        block_bytes = 8 * (2 + self.block_tokens) + _bytes_of_form(self.arrays)
        return self.blocks * block_bytes + self.with_states * _bytes_of_form(self.states)


Contents = Mapping[str, tuple[PrefixCache, Sequence[StoredBlock]]]
"""Of each role's cache, what it held at one time."""


def prefix_contents(caches: Mapping[str, tuple[Slots, PrefixCache]]) -> Contents:
    """What the caches and the free slots hold; it stays as it is while they go on. caches: by role."""
    for slots, _ in caches.values():
        slots.store_retained()
    return {role: (cache, cache.contents()) for role, (_, cache) in caches.items()}


def save_prefixes(path: str | os.PathLike[str], contents: Contents) -> int:
    """Write what caches hold, whole or not at all.

    Returns:
        the tokens that were written.

    Raises:
        InvalidInputError: there is no such folder.
        CapacityError: the disk is full, or the folder cannot be written to.
    """
    parts = [_part(role, cache, blocks) for role, (cache, blocks) in contents.items() if blocks]
    checksum = 0
    for part in parts:
        for data in _data(contents[part.role][1]):
            checksum = zlib.crc32(data, checksum)
    header = json.dumps(
        {"version": VERSION, "checksum": checksum, "parts": [asdict(part) for part in parts]}
    ).encode()
    try:
        with replacing(path) as file:
            file.write(MAGIC + len(header).to_bytes(8, "little") + header)
            for part in parts:
                for data in _data(contents[part.role][1]):
                    file.write(data)
    except OSError as error:
        raise CapacityError(
            f"the prefix cache could not be written to {str(path)!r} ({error}). Make room, or choose another folder."
        ) from error
    return sum(part.blocks * part.block_tokens for part in parts)


def load_prefixes(
    path: str | os.PathLike[str], caches: Mapping[str, tuple[Slots, PrefixCache]]
) -> tuple[int, str | None]:
    """Fill the caches from a file, as far as they go: the tokens that are there now, and why some or all are not used, or None.

    Raises:
        InvalidInputError: a file that is none of these.
    """
    check_prefix_file(path)
    num_tokens = 0
    reason = None
    try:
        with open(path, "rb") as file:
            checksum, parts = _header(file)
            _check_sum(file, checksum)
            for part in parts:
                start = file.tell()
                try:
                    num_tokens += _restore(file, part, caches)
                except _UnusableError as error:
                    reason = f"{part.role} model: {error}"
                file.seek(start + part.num_bytes)
    except (OSError, ValueError, _UnusableError) as error:
        reason = str(error)
    return num_tokens, reason


def check_prefix_file(path: str | os.PathLike[str]) -> None:
    """Refuse a path where a file of another kind is, or no folder.

    Raises:
        InvalidInputError: what is there.
    """
    path = Path(path)
    if not path.parent.is_dir() or path.is_dir():
        raise InvalidInputError(
            f"prefix_cache_file={str(path)!r} was given; expected a file in a folder that is there."
        )
    if path.exists():
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) not in (MAGIC, b""):
                raise InvalidInputError(
                    f"prefix_cache_file={str(path)!r} was given, which is another kind of file. Give a name of its own."
                )


def _part(role: str, cache: PrefixCache, blocks: Sequence[StoredBlock]) -> ModelPart:
    stated = [block.states for block in blocks if block.states is not None]
    forms = _form(blocks[0].entries), len(stated), _form(stated[0]) if stated else []
    return ModelPart(role, _identity(cache.model), len(blocks), cache.model.block_tokens, *forms)


def _form(arrays: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"kind": array.dtype.name, "shape": list(array.shape)} for array in arrays]


def _bytes_of_form(form: Sequence[Mapping[str, Any]]) -> int:
    return sum(math.prod(array["shape"]) * _kind(array["kind"]).itemsize for array in form)


def _identity(model: Target) -> str:
    """What a model's entries depend on, beside its weights, which are compared by what they compute."""
    from polydraft import __version__

    return " ".join(
        map(str, (type(model).__name__, model.weight_format, model.activations, __version__, processor()))
    )


def _data(blocks: Sequence[StoredBlock]) -> Iterator[bytes]:
    yield np.array([block.parent for block in blocks], np.int64).tobytes()
    yield np.array([block.states is not None for block in blocks], np.int64).tobytes()
    yield np.array([block.tokens for block in blocks], np.int64).tobytes()
    for block in blocks:
        for array in (*block.entries, *(block.states or ())):
            yield np.ascontiguousarray(array).tobytes()


def _header(file: BinaryIO) -> tuple[int, list[ModelPart]]:
    """The checksum, and the models' parts, of which the first one follows."""
    file.seek(len(MAGIC))
    size = int.from_bytes(file.read(8), "little")
    if not 0 < size <= MOST_HEADER:
        raise _UnusableError("it is damaged")
    header = read_json(file.read(size))
    if (message := fault(header, HEADER)) is not None:
        raise _UnusableError(f"it is damaged: {message}")
    if header["version"] != VERSION:
        raise _UnusableError(f"it has version {header['version']}, version {VERSION} was expected")
    parts = [ModelPart(**part) for part in header["parts"]]
    whole = file.tell() + sum(part.num_bytes for part in parts)
    if os.fstat(file.fileno()).st_size != whole:
        raise _UnusableError("it is cut off, or longer than it says")
    return header["checksum"], parts


def _check_sum(file: BinaryIO, expected: int) -> None:
    start = file.tell()
    checksum = 0
    while piece := file.read(1 << 24):
        checksum = zlib.crc32(piece, checksum)
    if checksum != expected:
        raise _UnusableError("it does not add up to its checksum: it is damaged")
    file.seek(start)


def _restore(file: BinaryIO, part: ModelPart, caches: Mapping[str, tuple[Slots, PrefixCache]]) -> int:
    """Fill one model's cache from what follows; its tokens."""
    if part.role not in caches or not part.blocks:
        return 0
    slots, cache = caches[part.role]
    model = cache.model
    if part.model != _identity(model) or part.block_tokens != model.block_tokens:
        raise _UnusableError("it is of another model, version or processor")
    outlines = _read_outlines(file, part, model.vocab_size)
    entries, states = _computed(slots, model, list(outlines[0].tokens))
    form = list(part.arrays), list(part.states if part.with_states else _form(states))
    if (_form(entries), _form(states)) != form:
        raise _UnusableError("its entries have another form than this model's")
    blocks = _read_blocks(file, outlines, entries, states, cache)
    first = blocks[0]  # a block without a parent, as none is before it
    pairs = [*zip(entries, first.entries, strict=True), *zip(states, first.states or (), strict=False)]
    if not all(_alike(computed, read, model) for computed, read in pairs):
        raise _UnusableError("these weights compute other entries")
    return part.block_tokens * cache.restore(blocks)


class _Outline(NamedTuple):
    """What a file says of a block before its entries."""

    parent: int
    has_states: int
    tokens: tuple[int, ...]


def _read_outlines(file: BinaryIO, part: ModelPart, vocab_size: int) -> list[_Outline]:
    """Of all blocks of a model.

    Raises:
        _UnusableError: no block can be so.
    """
    parents, stated = np.frombuffer(file.read(16 * part.blocks), np.int64).reshape(2, part.blocks)
    num_tokens = part.blocks * part.block_tokens
    tokens = np.frombuffer(file.read(8 * num_tokens), np.int64).reshape(part.blocks, part.block_tokens)
    in_order = (parents >= -1).all() and (parents < np.arange(part.blocks)).all()
    with_states = np.isin(stated, (0, 1)).all() and stated.sum() == part.with_states
    in_vocabulary = (tokens >= 0).all() and (tokens < vocab_size).all()
    if not (in_order and with_states and in_vocabulary):
        raise _UnusableError("it holds tokens or blocks that cannot be")
    texts = map(tuple, tokens.tolist())
    return list(map(_Outline, parents.tolist(), stated.tolist(), texts))


def _read_blocks(
    file: BinaryIO, outlines: Sequence[_Outline], entries: Any, states: Any, cache: PrefixCache
) -> list[StoredBlock]:
    """As many blocks as the cache has room for, one at least. entries, states: of the form of those that are read."""
    blocks = list[StoredBlock]()
    num_bytes = 0
    for parent, has_states, tokens in outlines:
        num_bytes += cache.bytes_of(states if has_states else None)
        if blocks and num_bytes > cache.capacity_bytes:
            break
        block_entries = type(entries)(_read(file, array) for array in entries)
        block_states = tuple(_read(file, array) for array in states) if has_states else None
        blocks.append(StoredBlock(parent, tokens, block_entries, block_states))
    return blocks


def _computed(slots: Slots, model: Any, token_ids: Sequence[int]) -> tuple[Any, Any]:
    """Entries and states of a text's first block as this model computes them now."""
    slot = slots.take()
    try:
        model.prefill([slot], [token_ids])
        return model.read_block(slot, 0), model.read_states(slot, len(token_ids)) or ()
    finally:
        slots.give_back(slot)


def _kind(name: str) -> np.dtype:
    """Of numbers in an array.

    Raises:
        _UnusableError: there is no such kind.
    """
    try:
        kind = np.dtype(name)
    except TypeError:
        kind = np.dtype(object)
    if kind != BFLOAT16 and kind.kind not in "biuf":
        raise _UnusableError(f"it holds numbers of the kind {name[:32]!r}")
    return kind


def _read(file: BinaryIO, like: np.ndarray) -> np.ndarray:
    """The next array, of the form of another one."""
    return np.frombuffer(bytearray(file.read(like.nbytes)), like.dtype).reshape(like.shape)


def _alike(computed: np.ndarray, read: np.ndarray, model: Target) -> bool:
    """The same bits where they do not depend on the rest of a forward pass, as on the compiled path; else nearly the same numbers."""
    if model.same_bits:
        return np.array_equal(computed, read)
    return np.allclose(computed.astype(np.float32), read.astype(np.float32), rtol=1e-3, atol=1e-3)
