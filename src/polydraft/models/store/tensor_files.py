"""Tensors of a folder's safetensors files: which file has each, their shapes, and one weight at a time."""

import re
import threading
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polydraft.errors import ModelLoadError
from polydraft.files.schema import read_json
from polydraft.models.matrices.formats import BLOCK
from polydraft.models.store.mx_blocks import BLOCKS, FORMAT, SCALES, regrouped
from polydraft.models.store.places import NUMBERS, Stored
from polydraft.models.store.scaled_weights import Scaling, numbers_of
from polydraft.models.store.weights import StoredWeights, dequantised

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""The file with all tensors, or the one that says which file has which."""


class FolderTensor(NamedTuple):
    """A tensor as a safetensors file describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


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


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Types and shapes of a file's tensors."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = read_json(opened.read(size))
    return {
        name: (entry["dtype"], tuple(entry["shape"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }


class FolderWeights(StoredWeights):
    """Weights in safetensors files, see `StoredWeights`. A tensor that was read holds its file open, and an open file what was read of it: every so many
    tensors the file is opened again, which takes milliseconds where it has thousands.

    entries: all tensors.  places: of weights, by name.  scalings: of tensors that are codes, which are read as numbers.
    stacks: of experts in blocks, by the names that they would have as numbers, see `mx_blocks`.
    """

    def __init__(
        self,
        entries: Mapping[str, FolderTensor],
        places: Mapping[str, Stored],
        scalings: Mapping[str, Scaling] | None = None,
        stacks: Container[str] = (),
    ) -> None:
        self.entries = entries
        self.places = places
        self.scalings = scalings or {}
        self.stacks = stacks
        used = {self._own_entry(place).file for place in places.values()}
        self.files = (*(file.parent / "config.json" for file in [*used][:1]), *sorted(used))
        self._file: Path | None = None
        self._opened: Any = None
        self._count = 0
        self._guard = threading.Lock()

    def tensor(self, name: str) -> Tensor:
        """A tensor by its own name."""
        return self._take(Stored(name))

    def read(self, name: str) -> Tensor:
        """See `StoredWeights.read`."""
        place = self.places[name]
        return dequantised(*self.blocks(name)) if place.name in self.stacks else self._take(place)

    def kind(self, name: str) -> str:
        """See `StoredWeights.kind`."""
        place = self.places[name]
        if place.name in self.stacks:
            return FORMAT
        return "F32" if place.name in self.scalings else self.entries[place.name].dtype

    def blocks(self, name: str) -> tuple[str, np.ndarray]:
        """See `StoredWeights.blocks`; of those in stacks."""
        place = self.places[name]
        codes, exponents = (self._stored(place.name + part, place.index or 0) for part in (BLOCKS, SCALES))
        # which of the stack's outputs are the weight's
        rows = place.part(torch.arange(len(codes))[None])[:, 0]
        return FORMAT, regrouped(codes[rows].numpy(), exponents[rows].numpy())

    def outline(self, name: str) -> Tensor:
        """A tensor without values, of a weight's shape and type.

        Raises:
            ValueError: it is of a type that is none of weights.
        """
        place = self.places[name]
        entry = self._own_entry(place)
        if place.name in self.stacks:
            _, outputs, count, _ = entry.shape
            return place.part(torch.empty(count * BLOCK, outputs, device="meta"))
        is_code = place.name in self.scalings
        if not is_code and entry.dtype not in NUMBERS:
            raise ValueError(f"its weight {place.name!r} is of type {entry.dtype}")
        dtype = torch.float32 if is_code else NUMBERS[entry.dtype]
        return place.of(torch.empty(entry.shape, dtype=dtype, device="meta"))

    def _own_entry(self, place: Stored) -> FolderTensor:
        return self.entries[place.name + BLOCKS if place.name in self.stacks else place.name]

    def _take(self, place: Stored) -> Tensor:
        tensor = self._stored(place.name, place.index)
        scaling = self.scalings.get(place.name)
        if scaling is not None:
            tensor = self._numbers(tensor, scaling, place.index)
        return place.part(tensor)

    def _numbers(self, codes: Tensor, scaling: Scaling, index: int | None) -> Tensor:
        scale = self._beside(scaling.scale, index)
        zero_point = None if scaling.zero_point is None else self._beside(scaling.zero_point, index)
        return numbers_of(codes, scale, zero_point, scaling.sizes[-codes.ndim :])

    def _beside(self, name: str, index: int | None) -> Tensor:
        """What belongs to a tensor, or to one of a stack."""
        tensor = self._stored(name)
        if tensor.numel() == 1:
            return tensor.reshape(())
        return tensor if index is None else tensor[min(index, len(tensor) - 1)]

    def _stored(self, name: str, index: int | None = None) -> Tensor:
        from safetensors import safe_open

        file = self.entries[name].file
        with self._guard:
            if file != self._file or self._count >= 32:
                self._file = file
                self._opened = safe_open(file, "pt")
                self._count = 0
            self._count += 1
            opened = self._opened
        return _read(opened, name, index)


def _read(opened: Any, name: str, index: int | None) -> Tensor:
    return opened.get_tensor(name) if index is None else opened.get_slice(name)[index]


def fitting_outlines(weights: FolderWeights, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
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
