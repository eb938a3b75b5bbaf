"""Chooses the format of each matrix of a model, and packs its tensors into panels, on all cores."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from polydraft.files.progress import report
from polydraft.models.loading.checkpoint import Checkpoint
from polydraft.models.matrices.dequantising import RECODED, recode
from polydraft.models.matrices.formats import BLOCKS, NUMBERS, pack, pack_blocks, raw_blocks
from polydraft.models.matrices.products import BYTES, EXACT, FORMATS, Format, Packed
from polydraft.models.matrices.vectors import LANES, PANEL
from polydraft.numerics.floats import BFLOAT16, as_float32
from polydraft.numerics.processor import usable_cores

SLICE = 256 * PANEL
"""Outputs that are packed at a time: 8 MB of Q4_K at a width of 1,536. Cores then end together, and little of the file is in memory beside its panels."""


class MatrixPart(NamedTuple):
    """Tensors of one format that lie below one another in a matrix."""

    format: Format
    names: tuple[str, ...]
    outputs: int


class Packer:
    """Chooses the format of each matrix, and packs it. integers: whether blocks take rounded activations."""

    def __init__(self, model: Checkpoint, quantization: str | None, integers: bool) -> None:
        self.model = model
        self.quantization = quantization
        self.integers = integers
        self.stored: Format | None = None
        self.jobs: list[Callable[[], tuple[float, float]]] = []
        self.rounded: dict[str, set[str]] = {}
        self.made: list[Packed] = []

    def empty(
        self,
        matrices: Sequence[Sequence[tuple[Format, int]]],
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

    def format_of(self, name: str) -> Format:
        kind = self.block_format(name)
        if kind:
            return Format(kind, BYTES if self.integers else EXACT)
        if self.quantization:
            chosen = FORMATS[self.quantization]
            return chosen if self.integers or chosen.rounding != BYTES else Format(chosen.weights)
        return Format("float32") if self.stored is None else self.stored

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
            return [MatrixPart(Format("float32"), tuple(names), sum(part.outputs for part in parts))]
        return parts

    def packed(self, matrices: Sequence[Sequence[str]]) -> Packed:
        """Memory for matrices, each of some tensors below one another; packing them is left to the jobs."""
        if not matrices:
            return Packed.none()
        parts = [self.parts(names) for names in matrices]
        inputs = [self.model.outlines[names[0]].shape[1] for names in matrices]
        w = self.empty([[(part.format, part.outputs) for part in matrix] for matrix in parts], inputs)
        for k, matrix in enumerate(parts):
            for number, part in enumerate(matrix):
                self.add_jobs(part, w.panels_of(k, number))
        return w

    def add_jobs(self, part: MatrixPart, panels: np.ndarray) -> None:
        """Add a job for each slice of each tensor; tensors whose outputs are no whole panels, or that no file has in rows, are one job together."""
        sizes = [self.model.outlines[name].shape[0] for name in part.names]
        stored = part.format.weights
        copied = [self.block_format(name) == stored for name in part.names]
        width = PANEL if stored in NUMBERS else LANES
        if any(size % width for size in sizes[:-1]) or not self.model.weights.has_rows:
            self.jobs.append(lambda: self._pack_together(part.names, panels, all(copied)))
            return
        first = 0
        for name, size, is_copied in zip(part.names, sizes, copied, strict=True):
            pack_rows = (
                self._copy_rows
                if is_copied
                else self._recode_rows
                if self._recodes(name, stored)
                else self._convert_rows
            )
            for begin in range(0, size, SLICE):
                end = min(size, begin + SLICE)
                last = first + -(-end // width) if end < size or name != part.names[-1] else len(panels)
                some = panels[first + begin // width : last]
                self.jobs.append(
                    lambda pack_rows=pack_rows, name=name, rows=slice(begin, end), some=some: pack_rows(
                        name, rows, some
                    )
                )
            first += size // width

    def _recodes(self, name: str, stored: str) -> bool:
        """Whether the stored blocks of a tensor come of rounding in compiled code."""
        return stored == RECODED and self.model.weights.kind(name) in BLOCKS

    def _copy_rows(self, name: str, rows: slice, panels: np.ndarray) -> tuple[float, float]:
        kind, blocks = self.model.weights.blocks(name, rows)
        pack_blocks(np.ascontiguousarray(blocks).view(raw_blocks(kind)), panels)
        self.model.weights.forget([name], rows)
        return 0.0, 0.0

    def _recode_rows(self, name: str, rows: slice, panels: np.ndarray) -> tuple[float, float]:
        kind, blocks = self.model.weights.blocks(name, rows)
        sums = recode(kind, blocks, panels)
        self.model.weights.forget([name], rows)
        return sums

    def _convert_rows(self, name: str, rows: slice, panels: np.ndarray) -> tuple[float, float]:
        sums = pack(self.model.weights.rows(name, rows), panels)
        self.model.weights.forget([name], rows)
        return sums

    def _pack_together(self, names: Sequence[str], panels: np.ndarray, copied: bool) -> tuple[float, float]:
        sums = 0.0, 0.0
        if copied:
            kinds, blocks = zip(*(self.model.weights.blocks(name) for name in names), strict=True)
            pack_blocks(np.ascontiguousarray(np.concatenate(blocks)).view(raw_blocks(kinds[0])), panels)
        else:
            weights = [self.model.read(name) for name in names]
            sums = pack(_joined(weights), panels)
        self.model.weights.forget(names, slice(None))
        return sums

    def run(self, name: str) -> tuple[float, float]:
        """Do all jobs, on all cores; returns what was lost, and of how much, summed. name: of the model, for reports of progress."""
        lost = 0.0
        whole = 0.0
        total = sum(matrices.nbytes for matrices in self.made)
        with ThreadPoolExecutor(usable_cores()) as pool:
            for k, (error, size) in enumerate(pool.map(lambda job: job(), self.jobs), 1):
                lost = lost + error
                whole = whole + size
                report(name, total * k // len(self.jobs), total)
        return lost, whole


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
