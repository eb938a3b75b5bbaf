"""Tensors of a folder's safetensors files: which file has each, their shapes, and one weight at a time."""

import re
import threading
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polydraft.errors import ModelLoadError
from polydraft.files.schema import read_json
from polydraft.models.store.mx_blocks import BLOCKS, MxWeights
from polydraft.models.store.places import NUMBERS, Stored
from polydraft.models.store.scaled_weights import Scaling, numbers_of

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""The file with all tensors, or the one that says which file has which."""


class Entry(NamedTuple):
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


def entries_of(folder: Path) -> tuple[dict[str, Entry], list[str]]:
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
    entries = {name: Entry(file, *headers[file][name]) for name, file in files.items()}
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


def weight_in(tensor: Any, place: Stored) -> Tensor:
    """The weight that is all of a tensor, one of its stack, or some of its rows."""
    return place.part(tensor[:] if place.index is None else tensor[place.index])


class Reader:
    """Reads weights of safetensors files one by one. A tensor holds its file open, and an open file what was read of it: every so many tensors the file
    is opened again, which takes milliseconds where it has thousands. scalings: of tensors that are codes, which are read as numbers."""

    def __init__(
        self,
        files: Mapping[str, Path],
        places: Mapping[str, Stored],
        scalings: Mapping[str, Scaling] | None = None,
    ) -> None:
        self.files = files
        self.places = places
        self.scalings = scalings or {}
        self._file: Path | None = None
        self._opened: Any = None
        self._count = 0
        self._guard = threading.Lock()

    def tensor(self, name: str) -> Tensor:
        """By its own name."""
        return self._take(Stored(name))

    def matrix(self, tensor: str, index: int) -> Tensor:
        """One of a stack."""
        return self._take(Stored(tensor, index))

    def read(self, name: str) -> Tensor:
        """A weight."""
        return self._take(self.places[name])

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

        file = self.files[name]
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


def readers(
    files: Mapping[str, Path],
    places: Mapping[str, Stored],
    stacks: Container[str],
    scalings: Mapping[str, Scaling],
) -> tuple[Reader, MxWeights]:
    """What reads weights that are numbers, and those of stacks in blocks."""
    reader = Reader(
        files, {name: place for name, place in places.items() if place.name not in stacks}, scalings
    )
    return reader, MxWeights(
        {name: place for name, place in places.items() if place.name in stacks}, reader.matrix
    )


def outlines_of(
    entries: Mapping[str, Entry],
    places: Mapping[str, Stored],
    shapes: Mapping[str, tuple[int, ...]],
    mx: MxWeights,
    scalings: Container[str] = (),
) -> dict[str, Tensor]:
    """Of weights by name. places: of those that are numbers.  scalings: tensors that are read as numbers.

    Raises:
        ModelLoadError: one of a mixture of experts is of another shape: transformers does not say which.
        ValueError: any other is, or of a type that is none of weights.
    """
    tensor_names = {place.name for place in places.values()} | {
        place.name + BLOCKS for place in mx.places.values()
    }
    types = NUMBERS | {"U8": torch.uint8}
    tensors = dict[str, Tensor]()
    for name in tensor_names:
        _, dtype, shape = entries[name]
        if name not in scalings and dtype not in types:
            raise ValueError(f"its weight {name!r} is of type {dtype}")
        tensors[name] = torch.empty(
            shape, dtype=torch.float32 if name in scalings else types[dtype], device="meta"
        )
    outlines = {name: weight_in(tensors[place.name], place) for name, place in places.items()}
    outlines |= {
        name: mx.outline(name, tuple(tensors[place.name + BLOCKS].shape)) for name, place in mx.places.items()
    }
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
