"""A model's layers as a list of parts, which threads share one after the other.

    part        what one compiled function does: part(arguments, begin, end, thread) does items begin .. end-1 of its work
    arguments   a tuple of its own: the weights that it reads, of all layers that have it, the workspace, the step
    program     the parts of all layers in their order, and what each layer's `index` is among the weights of its part

What walks a program knows no part by name: it is compiled once for all models, and of parts only those that a model has. A new kind of
layer is a file in `mixers` and its place in `layers.layer_parts`.
"""

import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from polydraft.models.matrices.vectors import aligned
from polydraft.numerics.compile_time import inner, unowned
from polydraft.numerics.shared_code import put_arguments, shared_code
from polydraft.numerics.threads import share, sync

PART = np.dtype(
    [(name, np.int64) for name in ("code", "arguments", "index", "items", "number", "pieces", "grain")]
)
STEP = np.dtype(
    [(name, np.int64) for name in ("index", "rows", "of_prompt", "runs", "pieces", "counted", "logits")]
)
"""The part that is open. index: of its layer among those that have it.  rows, runs: of the forward pass.  of_prompt: whether its rows stand in a prompt, 0 or 1.  pieces: that its items are cut into.
counted: what parts leave for those behind them.  logits: address."""
_LINE = 64
"""Bytes of a cache line."""
FEW = 4
"""Rows that are not worth sharing."""
UNITS = 4
SMALLEST = 1 << 17
"""Units that a product is cut into for each thread, and bytes of weights of the smallest."""


class Items(IntEnum):
    """What a part's items are: rows of the forward pass; a number that is known when a model is built; runs of rows of one slot, times `number`, each
    cut into up to `pieces` where there are fewer than threads; what a part before it wrote to `step.counted`, times `number`."""

    ROWS = 0
    FIXED = 1
    RUNS = 2
    COUNTED = 3


class Work(NamedTuple):
    """A part's items."""

    items: Items = Items.ROWS
    number: int = 0
    pieces: int = 1
    grain: int = FEW


class Part(NamedTuple):
    """A part of a model, for all layers that have it. code: compiled, of arguments and an address, see `lasting_code`."""

    code: Callable[[Any, int], tuple[int, int]]
    arguments: Any
    work: Work = Work()


class Program(NamedTuple):
    """parts: all layers' one after the other.  layers: [L + 2] layer l has layers[l] .. layers[l + 1]-1, the head the last ones.
    arguments: bytes.  step: [1] of STEP.  threads: that share the work."""

    parts: np.ndarray
    layers: np.ndarray
    arguments: np.ndarray
    step: np.ndarray
    threads: int
    sync: np.ndarray


@inner
def lasting_code(function, arguments, address):
    """Addresses of what calls a part with arguments that were written to an address, and bytes of these."""
    code, _ = shared_code(function, arguments)
    return code, put_arguments(arguments, address)


def new_step() -> np.ndarray:
    """Of a program, to be an argument of its parts."""
    return np.zeros(1, STEP)


@inner
def panel_grain(panels, panel_bytes, threads):
    """Panels of a unit: some units a thread, so that one that lost its core is not waited for long, and each worth claiming."""
    return max(-(-panels // (UNITS * threads)), min(panels, SMALLEST // panel_bytes + 1))


def panel_work(panels: int, panel_bytes: int, threads: int) -> Work:
    """All panels of a matrix."""
    return Work(Items.FIXED, panels, grain=panel_grain.py_func(panels, panel_bytes, threads))


def new_program(layers: Sequence[Sequence[tuple[Part, int]]], step: np.ndarray, threads: int) -> Program:
    """layers: the parts of each with the layer's index among those that have it, the head's at the end. Arguments live as long as the program."""
    parts = list({id(part): part for layer in layers for part, _ in layer}.values())
    offsets = np.cumsum([0, *(-(-part.code(part.arguments, 0)[1] // _LINE) * _LINE for part in parts)])
    arguments = aligned(int(offsets[-1]), dtype=np.uint8)
    addresses = {
        id(part): arguments.ctypes.data + int(offset) for part, offset in zip(parts, offsets, strict=False)
    }
    codes = {id(part): part.code(part.arguments, addresses[id(part)])[0] for part in parts}
    weakref.finalize(arguments, list.clear, parts)
    rows = [
        (codes[id(part)], addresses[id(part)], index, *part.work) for layer in layers for part, index in layer
    ]
    return Program(np.array(rows, PART), np.cumsum([0, *map(len, layers)]), arguments, step, threads, sync)


def replace_part(program: Program, place: int, part: Part) -> None:
    """Give a part of one layer other arguments, and as many items as they have. The caller owns their arrays."""
    row = program.parts[place]
    part.code(part.arguments, int(row["arguments"]))
    row["items"], row["number"], row["pieces"], row["grain"] = part.work


@unowned
def run_parts(program, layer, rows, runs, logits):
    """Do the parts of a layer one after the other, with whoever helps. runs: of `layers.cut_runs`.  logits: address where they go."""
    step = program.step[0]
    threads = program.threads
    step.rows = rows
    step.runs = runs
    step.logits = logits
    for p in range(program.layers[layer], program.layers[layer + 1]):
        part = program.parts[p]
        step.index = part.index
        count = part.number
        if part.items == Items.ROWS:
            count = rows
        elif part.items == Items.RUNS:
            step.pieces = max(1, min(part.pieces, threads // (runs * count)))
            count *= runs * step.pieces
        elif part.items == Items.COUNTED:
            count *= step.counted
        share(program.sync, threads, (part.code, part.arguments), count, part.grain)
