"""Tensors of a folder's safetensors files: which file has each, their shapes, and one weight at a time."""

import mmap
import re
from collections.abc import Container, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from polydraft.errors import ModelLoadError
from polydraft.files.schema import read_json
from polydraft.models.matrices.formats import BLOCK
from polydraft.models.store.mapped import forgotten, mapped
from polydraft.models.store.mx_blocks import BLOCKS, FORMAT, SCALES, regrouped
from polydraft.models.store.packed_codes import BESIDE, PackedWeight, blocks_of
from polydraft.models.store.places import NUMBERS, Stored
from polydraft.models.store.scaled_weights import CODES, Scaling, numbers_of
from polydraft.models.store.weights import ALL, StoredWeights, dequantised

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""The file with all tensors, or the one that says which file has which."""
DTYPES = {
    **NUMBERS,
    **CODES,
    **{f"I{8 * size}": np.dtype(f"<i{size}") for size in (2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    "BOOL": np.dtype(np.bool_),
}
"""Types of tensors that are read, as safetensors files name them."""


class FolderTensor(NamedTuple):
    """A tensor as a safetensors file describes it. start: of its bytes in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


def used_files(folder: Path) -> list[Path]:
    """The files that transformers would choose; none where there is neither the whole nor an index.

    Raises:
        ModelLoadError: an index that is none.
    """
    if (folder / WHOLE).is_file() or (folder / WHOLE).is_symlink():
        return [folder / WHOLE]
    if not (folder / INDEX).is_file():
        return []
    return sorted({*_index_of(folder).values()})


def _index_of(folder: Path) -> dict[str, Path]:
    try:
        index = read_json((folder / INDEX).read_bytes())
        return {name: folder / file for name, file in index["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"the index {str(folder / INDEX)!r} does not say which file has which tensor ({error!r})"
        raise ModelLoadError(f"{problem}. Copy or download it again.") from error


def files_of(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, with the files that transformers would choose."""
    whole = folder / WHOLE
    return dict.fromkeys(_header(whole), whole) if whole.is_file() else _index_of(folder)


def entries_of(folder: Path) -> tuple[dict[str, FolderTensor], list[str]]:
    """What is stored of each tensor, in the file that it is to be read from; and the names of those that another one of these files has, too.

    Raises:
        ModelLoadError: a file that lacks one.
    """
    headers = {file: _header(file) for file in used_files(folder)}
    files = files_of(folder)
    for name, file in files.items():
        if name not in headers[file]:
            raise ModelLoadError(
                f"{str(file)!r} lacks the tensor {name!r}, which its index has there. Copy or download it again."
            )
    entries = {name: FolderTensor(file, *headers[file][name]) for name, file in files.items()}
    twice = [name for file, names in headers.items() for name in names if files.get(name, file) != file]
    return entries, sorted(twice)


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Types, shapes and beginnings of a file's tensors."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = read_json(opened.read(size))
    return {
        name: (entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


class FolderWeights(StoredWeights):
    """Weights in safetensors files, see `StoredWeights`. What is read are views of the mapped files.

    entries: all tensors.  places: of weights, by name.  scalings: of tensors that are codes, which are read as numbers.
    stacks: of experts in blocks, by the names that they would have as numbers, see `mx_blocks`.  packed: likewise, see `packed_codes`.
    """

    def __init__(
        self,
        entries: Mapping[str, FolderTensor],
        places: Mapping[str, Stored],
        scalings: Mapping[str, Scaling] | None = None,
        stacks: Container[str] = (),
        packed: Mapping[str, PackedWeight] | None = None,
    ) -> None:
        self.entries = entries
        self.places = places
        self.scalings = scalings or {}
        self.stacks = stacks
        self.packed = packed or {}
        used = {self._own_entry(place).file for place in places.values()}
        self.files = (*(file.parent / "config.json" for file in [*used][:1]), *sorted(used))
        self._mapped: dict[Path, mmap.mmap] = {}

    def tensor(self, name: str) -> np.ndarray:
        """A tensor by its own name."""
        return self._take(Stored(name))

    def read(self, name: str) -> np.ndarray:
        """See `StoredWeights.read`."""
        place = self.places[name]
        in_blocks = place.name in self.stacks or place.name in self.packed
        return dequantised(*self.blocks(name)) if in_blocks else self._take(place)

    def kind(self, name: str) -> str:
        """See `StoredWeights.kind`."""
        place = self.places[name]
        if place.name in self.stacks:
            return FORMAT
        if place.name in self.packed:
            return self.packed[place.name].kind
        return "F32" if place.name in self.scalings else self.entries[place.name].dtype

    def blocks(self, name: str, rows: slice = ALL) -> tuple[str, np.ndarray]:
        """See `StoredWeights.blocks`; of those in stacks, or in codes."""
        place = self.places[name]
        if place.name in self.packed:
            blocks = self._packed_blocks(self.packed[place.name])
            outputs = place.part(np.arange(len(blocks))[:, None])[:, 0][rows]
            return self.packed[place.name].kind, blocks[outputs]
        codes, exponents = (self._stored(place.name + part)[place.index or 0] for part in (BLOCKS, SCALES))
        # which of the stack's outputs are the weight's
        outputs = place.part(np.arange(len(codes))[None])[:, 0][rows]
        return FORMAT, regrouped(codes[outputs], exponents[outputs])

    def forget(self, names: Iterable[str], rows: slice = ALL) -> None:
        """See `StoredWeights.forget`; of whole tensors, and not of stacks, whose other parts are yet to be read."""
        for name in names:
            place = self.places[name]
            is_plain = place.name not in self.stacks and place.name not in self.packed
            if place.index is None and rows == ALL and is_plain:
                entry = self.entries[place.name]
                size = prod(entry.shape) * DTYPES[entry.dtype].itemsize
                forgotten(self._map(entry.file), entry.start, entry.start + size)

    def outline(self, name: str) -> np.ndarray:
        """An array without values, of a weight's shape and type.

        Raises:
            ValueError: it is of a type that is none of weights.
        """
        place = self.places[name]
        entry = self._own_entry(place)
        if place.name in self.stacks:
            _, outputs, count, _ = entry.shape
            return place._replace(index=None).outline((count * BLOCK, outputs), NUMBERS["F32"])
        if place.name in self.packed:
            return place.outline(self.packed[place.name].shape, NUMBERS["F32"])
        is_code = place.name in self.scalings
        if not is_code and entry.dtype not in NUMBERS:
            raise ValueError(f"its weight {place.name!r} is of type {entry.dtype}")
        return place.outline(entry.shape, NUMBERS["F32" if is_code else entry.dtype])

    def _own_entry(self, place: Stored) -> FolderTensor:
        if place.name in self.packed:
            return self.entries[self.packed[place.name].codes]
        return self.entries[place.name + BLOCKS if place.name in self.stacks else place.name]

    def _packed_blocks(self, weight: PackedWeight) -> np.ndarray:
        scales, *zeros = BESIDE[weight.packing.method]
        has_zeros = weight.module + zeros[0] in self.entries and zeros[0] == ".qzeros"
        return blocks_of(
            weight,
            self._stored(weight.codes),
            self._stored(weight.module + scales),
            self._stored(weight.module + zeros[0]) if has_zeros else None,
        )

    def _take(self, place: Stored) -> np.ndarray:
        tensor = self._stored(place.name)
        scaling = self.scalings.get(place.name)
        if scaling is None:
            return place.of(tensor)
        codes = tensor if place.index is None else tensor[place.index]
        return place._replace(index=None).of(self._numbers(codes, scaling, place.index))

    def _numbers(self, codes: np.ndarray, scaling: Scaling, index: int | None) -> np.ndarray:
        scale = self._beside(scaling.scale, index)
        zero_point = None if scaling.zero_point is None else self._beside(scaling.zero_point, index)
        return numbers_of(codes, scale, zero_point, scaling.sizes[-codes.ndim :])

    def _beside(self, name: str, index: int | None) -> np.ndarray:
        """What belongs to a tensor, or to one of a stack."""
        tensor = self._stored(name)
        if tensor.size == 1:
            return tensor.reshape(())
        return tensor if index is None else tensor[min(index, len(tensor) - 1)]

    def _stored(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        count = prod(entry.shape)
        if not count:
            return np.empty(entry.shape, DTYPES[entry.dtype])
        return np.frombuffer(self._map(entry.file), DTYPES[entry.dtype], count, entry.start).reshape(
            entry.shape
        )

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._mapped:
            self._mapped[file] = mapped(file)
        return self._mapped[file]


def tensors_of(file: Path) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file, as views of it.

    Raises:
        OSError, ValueError: no such file, or one that is none.
    """
    entries = {name: FolderTensor(file, *entry) for name, entry in _header(file).items()}
    weights = FolderWeights(entries, {})
    return {name: weights.tensor(name) for name in entries}


def fitting_outlines(weights: FolderWeights, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Outlines of all weights, whose shapes are these.

    Raises:
        ModelLoadError: one of a mixture of experts is of another shape: transformers does not say which.
        ValueError: any other is, or of a type that is none of weights.
    """
    outlines = {name: weights.outline(name) for name in weights.places}
    wrong = {
        name: tuple(outline.shape)
        for name, outline in outlines.items()
        if tuple(outline.shape) != shapes[name]
    }
    for name, shape in wrong.items():
        if re.search(r"\.mlp\.(gate|experts)\.", name):
            problem = (
                f"the weights of {name!r} are of shape {shape}, and its config.json expects {shapes[name]}"
            )
            raise ModelLoadError(f"{problem}: the experts do not fit. Copy or download the folder again.")
    if wrong:
        name = min(wrong)
        raise ValueError(
            f"its weight {name!r} is of shape {wrong[name]}; its configuration says {shapes[name]}"
        )
    return outlines
