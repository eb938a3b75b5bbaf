"""Tensors of a folder's safetensors files: which file has each, their shapes, and one weight at a time."""

import json
import re
import threading
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polydraft.errors import ModelLoadError
from polydraft.models.compiled.architectures import Stored
from polydraft.models.loading.gguf import NUMBERS
from polydraft.models.loading.mx_blocks import BLOCKS, MxWeights

__all__ = ["Reader", "files_of", "outlines_of", "readers", "weight_in"]


def files_of(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, with the files that transformers would choose."""
    from safetensors import safe_open

    whole = folder / "model.safetensors"
    if whole.is_file():
        with safe_open(whole, "pt") as opened:
            return dict.fromkeys(opened.keys(), whole)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return {name: folder / file for name, file in index["weight_map"].items()}


def weight_in(tensor: Any, place: Stored) -> Tensor:
    """The weight that is all of a tensor, one of its stack, or some of its rows."""
    return place.part(tensor[:] if place.index is None else tensor[place.index])


class Reader:
    """Reads weights of safetensors files one by one. A tensor holds its file open, and an open file what was read of it: every so many tensors the file
    is opened again, which takes milliseconds where it has thousands."""

    def __init__(self, files: Mapping[str, Path], places: Mapping[str, Stored]) -> None:
        self.files, self.places = files, places
        self._file: Path | None = None
        self._opened: Any = None
        self._count, self._guard = 0, threading.Lock()

    def matrix(self, tensor: str, index: int) -> Tensor:
        """One of a stack."""
        return self._take(Stored(tensor, index))

    def read(self, name: str) -> Tensor:
        """A weight."""
        return self._take(self.places[name])

    def _take(self, place: Stored) -> Tensor:
        from safetensors import safe_open

        file = self.files[place.name]
        with self._guard:
            if file != self._file or self._count >= 32:
                self._file, self._opened, self._count = file, safe_open(file, "pt"), 0
            self._count += 1
            opened = self._opened
        return _read(opened, place)


def _read(opened: Any, place: Stored) -> Tensor:
    return place.part(opened.get_tensor(place.name) if place.index is None else opened.get_slice(place.name)[place.index])


def readers(files: Mapping[str, Path], places: Mapping[str, Stored], stacks: Container[str]) -> tuple[Reader, MxWeights]:
    """What reads weights that are numbers, and those of stacks in blocks."""
    reader = Reader(files, {name: place for name, place in places.items() if place.name not in stacks})
    return reader, MxWeights({name: place for name, place in places.items() if place.name in stacks}, reader.matrix)


def outlines_of(
    files: Mapping[str, Path], places: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]], mx: MxWeights
) -> dict[str, Tensor]:
    """Of weights by name. places: of those that are numbers.

    Raises:
        ModelLoadError: one of a mixture of experts is of another shape: transformers does not say which.
        ValueError: any other is.
    """
    from safetensors import safe_open

    tensor_names, tensors = {place.name for place in places.values()}, dict[str, Tensor]()
    tensor_names |= {place.name + BLOCKS for place in mx.places.values()}
    for file in {files[name] for name in tensor_names}:
        with safe_open(file, "pt") as opened:
            for name in tensor_names.intersection(opened.keys()):
                entry = opened.get_slice(name)
                tensors[name] = torch.empty(
                    entry.get_shape(), dtype=(NUMBERS | {"U8": torch.uint8})[entry.get_dtype()], device="meta"
                )
    outlines = {name: weight_in(tensors[place.name], place) for name, place in places.items()}
    outlines |= {name: mx.outline(name, tuple(tensors[place.name + BLOCKS].shape)) for name, place in mx.places.items()}
    wrong = {name: tuple(outline.shape) for name, outline in outlines.items() if tuple(outline.shape) != shapes[name]}
    for name, shape in wrong.items():
        if re.search(r"\.mlp\.(gate|experts)\.", name):
            problem = f"the weights of {name!r} are of shape {shape}, and its config.json expects {shapes[name]}"
            raise ModelLoadError(f"{problem}: the experts do not fit. Copy or download the folder again.")
    if wrong:
        raise ValueError(min(wrong))
    return outlines
