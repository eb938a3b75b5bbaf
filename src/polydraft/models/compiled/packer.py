"""Chooses the format of each matrix of a model, and packs its tensors into panels, on all cores."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from polydraft.models.loading.checkpoint import Checkpoint
from polydraft.models.matrices.dequantising import RECODED, recode
from polydraft.models.matrices.formats import BLOCKS, NUMBERS, pack, pack_blocks, raw_blocks
from polydraft.models.matrices.products import BYTES, EXACT, FORMATS, MatrixFormat, Packed
from polydraft.models.matrices.vectors import LANES, PANEL
from polydraft.models.store.weights import ALL, LOSSLESS, Writing, write_all
from polydraft.numerics.floats import BFLOAT16, as_float32

SLICE = 256 * PANEL
"""Outputs that are packed at a time: 8 MB of Q4_K at a width of 1,536. Cores then end together, and little of the file is in memory beside its panels."""


class MatrixPart(NamedTuple):
    """Tensors of one format that lie below one another in a matrix."""

    format: MatrixFormat
    names: tuple[str, ...]
    outputs: int


class Packer:
    """Chooses the format of each matrix, and packs it. integers: whether blocks take rounded activations."""

    def __init__(self, model: Checkpoint, quantization: str | None, integers: bool) -> None:
        self.model = model
        self.quantization = quantization
        self.integers = integers
        self.stored: MatrixFormat | None = None
        self.writings: list[Writing] = []
        self.rounded: dict[str, set[str]] = {}
        self.made: list[Packed] = []

    def empty(
        self,
        matrices: Sequence[Sequence[tuple[MatrixFormat, int]]],
        inputs: int | Sequence[int],
        *,
        multiplied: bool = True,
    ) -> Packed:
        """Memory for matrices, see `Packed.empty`."""
        self.made.append(Packed.empty(matrices, inputs, multiplied=multiplied))
        return self.made[-1]

    def block_format(self, name: str) -> str | None:
        """The format of a tensor's blocks in the file, if they stay as they are."""
        kind = self.model.weights.kind(name)
        if kind not in BLOCKS or self.quantization not in (None, "int8", "int4"):
            return None
        if self.quantization and BLOCKS[kind].bits > BLOCKS[FORMATS[self.quantization].weights].bits:
            self.rounded.setdefault(FORMATS[self.quantization].weights, set()).add(kind)
            return None
        return kind

    def format_of(self, name: str) -> MatrixFormat:
        kind = self.block_format(name)
        if kind:
            return MatrixFormat(kind, BYTES if self.integers else EXACT)
        if self.quantization:
            chosen = FORMATS[self.quantization]
            return chosen if self.integers or chosen.rounding != BYTES else MatrixFormat(chosen.weights)
        return MatrixFormat("float32") if self.stored is None else self.stored

    def choose_numbers(self, names: Iterable[str]) -> None:
        """How numbers are stored: in bfloat16 where that loses nothing."""
        numbers = [name for name in names if not self.block_format(name)]
        self.stored = FORMATS["bfloat16" if is_exact(self.model, numbers) else "float32"]

    def parts(self, names: Sequence[str]) -> list[MatrixPart]:
        """A matrix from top to bottom. Formats that differ where outputs are no whole panels: float32, which holds all of them."""
        parts: list[MatrixPart] = []
        for name in names:
            kind = self.format_of(name)
            outputs = self.model.outlines[name].shape[0]
            if parts and parts[-1].format == kind:
                parts[-1] = MatrixPart(kind, (*parts[-1].names, name), parts[-1].outputs + outputs)
            else:
                parts.append(MatrixPart(kind, (name,), outputs))
        if any(part.outputs % PANEL for part in parts[:-1]):
            return [MatrixPart(MatrixFormat("float32"), tuple(names), sum(part.outputs for part in parts))]
        return parts

    def packed(self, matrices: Sequence[Sequence[str]]) -> Packed:
        """Memory for matrices, each of some tensors below one another; packing them is left to the writings."""
        if not matrices:
            return Packed.none()
        parts = [self.parts(names) for names in matrices]
        inputs = [self.model.outlines[names[0]].shape[1] for names in matrices]
        w = self.empty([[(part.format, part.outputs) for part in matrix] for matrix in parts], inputs)
        for k, matrix in enumerate(parts):
            for number, part in enumerate(matrix):
                self.add_writings(part, w.panels_of(k, number))
        return w

    def add_writings(self, part: MatrixPart, panels: np.ndarray) -> None:
        """Add a writing for each slice of each tensor; tensors whose outputs are no whole panels, or that no file has in rows, are one together."""
        sizes = [self.model.outlines[name].shape[0] for name in part.names]
        stored = part.format.weights
        width = PANEL if stored in NUMBERS else LANES
        if any(size % width for size in sizes[:-1]) or not self.model.weights.has_rows:
            copied = all(self.block_format(name) == stored for name in part.names)
            write = self._copy_together if copied else self._convert_together
            self.writings.append(Writing(part.names, ALL, partial(write, part.names, panels)))
            return
        first = 0
        for name, size in zip(part.names, sizes, strict=True):
            is_last = name == part.names[-1]
            of_tensor = panels[first:] if is_last else panels[first : first + size // width]
            self._add_slices(name, size, stored, of_tensor, width)
            first += size // width

    def _add_slices(self, name: str, size: int, stored: str, panels: np.ndarray, width: int) -> None:
        """Add a writing for each slice of a tensor's rows. size: rows.  width: rows of a panel."""
        write = self._write_rows(name, stored)
        for begin in range(0, size, SLICE):
            end = min(size, begin + SLICE)
            last = -(-end // width) if end < size else len(panels)
            rows = slice(begin, end)
            some = panels[begin // width : last]
            self.writings.append(Writing([name], rows, partial(write, name, rows, some)))

    def _write_rows(self, name: str, stored: str) -> Callable[..., tuple[float, float]]:
        """What packs some rows of a tensor: as they are stored, rounded in compiled code, or as numbers."""
        if self.block_format(name) == stored:
            return self._copy_rows
        if stored == RECODED and self.model.weights.kind(name) in BLOCKS:
            return self._recode_rows
        return self._convert_rows

    def _copy_rows(self, name: str, rows: slice, panels: np.ndarray) -> tuple[float, float]:
        kind, blocks = self.model.weights.blocks(name, rows)
        pack_blocks(np.ascontiguousarray(blocks).view(raw_blocks(kind)), panels)
        return LOSSLESS

    def _recode_rows(self, name: str, rows: slice, panels: np.ndarray) -> tuple[float, float]:
        kind, blocks = self.model.weights.blocks(name, rows)
        return recode(kind, blocks, panels)

    def _convert_rows(self, name: str, rows: slice, panels: np.ndarray) -> tuple[float, float]:
        return pack(self.model.weights.rows(name, rows), panels)

    def _copy_together(self, names: Sequence[str], panels: np.ndarray) -> tuple[float, float]:
        kinds, blocks = zip(*(self.model.weights.blocks(name) for name in names), strict=True)
        pack_blocks(np.ascontiguousarray(np.concatenate(blocks)).view(raw_blocks(kinds[0])), panels)
        return LOSSLESS

    def _convert_together(self, names: Sequence[str], panels: np.ndarray) -> tuple[float, float]:
        return pack(_joined([self.model.read(name) for name in names]), panels)

    def run(self, name: str) -> tuple[float, float]:
        """Do all writings; returns what was lost, and of how much, summed. name: of the model, for reports of progress."""
        total = sum(matrices.nbytes for matrices in self.made)
        return write_all(self.model.weights, self.writings, name, total)


def is_exact(model: Checkpoint, names: Iterable[str]) -> bool:
    """Whether bfloat16 loses nothing of these weights."""
    return all(
        model.outlines[name].dtype == BFLOAT16 or _survives_bfloat16(as_float32(model.read(name)))
        for name in names
    )


def _survives_bfloat16(weight: np.ndarray) -> bool:
    return np.array_equal(weight, as_float32(weight.astype(BFLOAT16)))


def _joined(weights: Sequence[np.ndarray]) -> np.ndarray:
    """Matrices below one another, in float32 where their types differ."""
    if len({weight.dtype for weight in weights}) > 1:
        weights = list(map(as_float32, weights))
    return np.concatenate(weights) if len(weights) > 1 else weights[0]
