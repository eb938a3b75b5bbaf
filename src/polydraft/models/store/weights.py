"""Weights of a model by transformers' names, read one at a time, wherever they lie: of a GGUF file, of a folder, of a module in memory.

What a model computes with is made of them by `write_all`: panels of a compiled model as well as tensors of a module of transformers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from polydraft.files.progress import report
from polydraft.models.matrices.formats import BLOCKS
from polydraft.models.store.places import NUMBERS
from polydraft.numerics.floats import as_float32
from polydraft.numerics.processor import usable_cores

ALL = slice(None)
NAMES = {dtype: name for name, dtype in NUMBERS.items()}


def dequantised(kind: str, blocks: np.ndarray) -> np.ndarray:
    """Bytes [..., bytes of a row] -> float32."""
    if kind in NUMBERS:
        return as_float32(np.ascontiguousarray(blocks).view(NUMBERS[kind]))
    from polydraft.models.matrices import codebooks, dequantising

    decoded = dequantising.decoded if kind in BLOCKS else codebooks.decoded
    rows = decoded(kind, blocks.reshape(-1, blocks.shape[-1]))
    return rows.reshape(*blocks.shape[:-1], -1)


class StoredWeights:
    """What every place of weights can do.

    files: that they are read from; none of a module.  has_rows: whether some rows of a matrix can be read alone.
    """

    files: tuple[Path, ...] = ()
    has_rows = False

    def read(self, name: str) -> np.ndarray:
        """A weight, as numbers."""
        raise NotImplementedError

    def kind(self, name: str) -> str:
        """Its number format, by the name that GGUF files and safetensors have for it."""
        raise NotImplementedError

    def blocks(self, name: str, rows: slice = ALL) -> tuple[str, np.ndarray]:
        """Number format of a weight in blocks, and bytes of some of its rows as a GGUF file has them, uint8 [outputs, bytes of a row]."""
        raise NotImplementedError

    def rows(self, name: str, rows: slice) -> np.ndarray:
        """Some rows of a matrix in float32, where `has_rows`."""
        raise NotImplementedError

    def forget(self, names: Iterable[str], rows: slice = ALL) -> None:
        """Give back the memory of some rows of weights, where that can be: they are read again when they are asked for again."""


class InMemory(StoredWeights):
    """Arrays that are there."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = arrays

    def read(self, name: str) -> np.ndarray:
        """See `StoredWeights.read`; nothing is copied."""
        return self.arrays[name]

    def kind(self, name: str) -> str:
        """See `StoredWeights.kind`."""
        dtype = self.arrays[name].dtype
        return NAMES.get(dtype, str(dtype))


class Renamed(StoredWeights):
    """Weights under other names. names: of theirs, by one of ours."""

    def __init__(self, weights: StoredWeights, names: Callable[[str], str]) -> None:
        self._weights = weights
        self._names = names
        self.files = weights.files
        self.has_rows = weights.has_rows

    def read(self, name: str) -> np.ndarray:
        """See `StoredWeights.read`."""
        return self._weights.read(self._names(name))

    def kind(self, name: str) -> str:
        """See `StoredWeights.kind`."""
        return self._weights.kind(self._names(name))

    def blocks(self, name: str, rows: slice = ALL) -> tuple[str, np.ndarray]:
        """See `StoredWeights.blocks`."""
        return self._weights.blocks(self._names(name), rows)

    def rows(self, name: str, rows: slice) -> np.ndarray:
        """See `StoredWeights.rows`."""
        return self._weights.rows(self._names(name), rows)

    def forget(self, names: Iterable[str], rows: slice = ALL) -> None:
        """See `StoredWeights.forget`."""
        self._weights.forget(map(self._names, names), rows)


LOSSLESS = 0.0, 0.0
"""What a writing returns that rounds nothing."""


class Writing(NamedTuple):
    """Some rows of weights that lie together in what a model computes with.

    write: reads and puts them there; returns the sums of |W - W'|^2 and of |W|^2 over what it rounds.
    """

    names: Sequence[str]
    rows: slice
    write: Callable[[], tuple[float, float]]


def write_all(
    weights: StoredWeights, writings: Sequence[Writing], name: str, num_bytes: int
) -> tuple[float, float]:
    """Do all writings, on all cores, and give back the memory that each has read; returns the sums of what they lost, and of how much.

    name: of the model, for reports of progress.  num_bytes: of what is written.

    Example:
        >>> copied = np.zeros(2)
        >>> ones = InMemory({"ones": np.ones(2)})
        >>> def copy():
        ...     copied[...] = ones.read("ones")
        ...     return LOSSLESS
        >>> write_all(ones, [Writing(["ones"], ALL, copy)], "model", 16), copied
        ((0.0, 0.0), array([1., 1.]))
    """
    lost = 0.0
    whole = 0.0

    def write(writing: Writing) -> tuple[float, float]:
        sums = writing.write()
        weights.forget(writing.names, writing.rows)
        return sums

    with ThreadPoolExecutor(usable_cores()) as pool:
        for number, (error, size) in enumerate(pool.map(write, writings), 1):
            lost += error
            whole += size
            report(name, num_bytes * number // len(writings), num_bytes)
    return lost, whole
