"""`python -m studies.passes`: what a scoring pass costs by its number of rows: compiled in every weight format, through transformers, and the floor.

The floor is the time that one thread takes, at best, to read as many bytes as the weights are, from the same kind of pages and from
the caches where they fit. Models are random: costs do not depend on weights. All are measured in turn, again and again; figures are
medians.

With `--products` products alone are measured, of blocks of these formats in the shapes of a layer of Qwen2.5-Coder 1.5B, in turns over more bytes than the caches
hold: processor time of one thread, best of several.

With `--device` passes through transformers are measured there instead, by batch and rows, for SmolLM2-135M and the shapes of models of one and of
seven billion parameters, in bfloat16, and memory.
"""

import sys
from collections.abc import Sequence
from functools import partial
from statistics import median
from time import perf_counter, thread_time
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numba import njit
from rich.console import Console
from rich.table import Table

from polydraft.core import TokenTree
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.matrices.formats import BLOCKS, panels_for
from polydraft.models.matrices.products import BYTES, MatrixFormat, Packed
from polydraft.models.matrices.rounding import rounded_bytes
from polydraft.models.matrices.vectors import aligned
from polydraft.models.memory import weight_bytes
from polydraft.models.torch.hf import HFTarget
from studies.options import Quick
from studies.profile import SIZES, compiled_multiply, random_module
from studies.timing import by_turns, shortest

ROWS = (1, 2, 4, 8, 16)
CONTEXT = 128
VOCAB_SIZE = 32_000
CHAT = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
"""SmolLM2-135M."""
MODELS = {"3M": (SIZES["3M"], 2048), "110M": (SIZES["110M"], VOCAB_SIZE), "135M": (CHAT, 49_152)}
"""Size -> shape and vocabulary."""
WIDE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
WIDER = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
ON_DEVICE = {"135M": (CHAT, 49_152), "1B": (WIDE, 128_256), "7B": (WIDER, VOCAB_SIZE)}
PRODUCTS = {"gate and up": (17_920, 1536), "down": (1536, 8960)}
"""Outputs and inputs."""
PRODUCT_ROWS = (1, 2, 4, 5, 6, 7, 8, 12, 16)
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def read_bandwidth(num_bytes: int = 256 << 20, rounds: int = 15, device: str = "cpu") -> float:
    """Bytes that are read per second from an array of this size, on a CPU by one thread in its own time; best of several.

    Example:
        >>> read_bandwidth(1 << 20, rounds=1) > 0
        True
    """
    if torch.device(device).type == "cpu":
        numbers = aligned(num_bytes // 8, dtype=np.int64, huge=True)
        numbers[:] = 1
        clock = thread_time
        read = partial(_total, numbers)
    else:
        memory = torch.ones(num_bytes // 4, device=device)
        clock = perf_counter

        def read() -> float:
            return memory.sum().item()

    return num_bytes / shortest(read, rounds, clock)


@njit(cache=True)
def _total(numbers: np.ndarray) -> int:
    total = 0
    for i in range(numbers.size):
        total += numbers[i]
    return total


def pass_costs(
    shape: dict[str, Any], vocab_size: int, *, repetitions: int = 7, context: int = CONTEXT
) -> tuple[dict[str, dict[int, float]], dict[str, int]]:
    """Median seconds of a pass by path and number of rows, with so many tokens cached; and the bytes of the weights by path."""
    module = random_module(shape, vocab_size, context + 384)
    targets: dict[str, Any] = {
        "float32": CompiledModel(module, max_num_seqs=1, cache_dtype="float32"),
        "bfloat16": CompiledModel(module, max_num_seqs=1, quantization="bfloat16", cache_dtype="float32"),
        "int8": CompiledModel(module, max_num_seqs=1, quantization="int8", cache_dtype="float32"),
        "int4": CompiledModel(module, max_num_seqs=1, quantization="int4", cache_dtype="float32"),
        "transformers": HFTarget(module, max_num_seqs=1),
    }
    text = np.random.default_rng(0).integers(0, vocab_size, context).tolist()
    for target in targets.values():
        target.prefill([0], [text])
    chains = {rows: TokenTree.chain(np.arange(rows)[None]) for rows in ROWS}
    acts = {
        (name, rows): partial(target.score, [0], chain)
        for rows, chain in chains.items()
        for name, target in targets.items()
    }
    times = by_turns(acts, repetitions, warm=0, twice=True)
    read = {
        name: getattr(target, "weight_bytes", None) or weight_bytes(module)
        for name, target in targets.items()
    }
    return {name: {rows: median(times[name, rows]) for rows in ROWS} for name in targets}, read


def product_costs(
    format_: str,
    outputs: int,
    inputs: int,
    *,
    rows: Sequence[int] = PRODUCT_ROWS,
    num_bytes: int = 300 << 20,
    repetitions: int = 7,
) -> tuple[dict[int, float], int]:
    """Seconds of a product by number of rows, its activations' rounding included, and bytes of the matrix. num_bytes: of all matrices, that take turns."""
    size = panels_for(outputs, inputs, format_).nbytes
    number = max(1, num_bytes // size)
    w = Packed.empty([[(MatrixFormat(format_, BYTES), outputs)]] * number, inputs)
    for k in range(number):
        w.panels_of(k)[BLOCKS[format_].codes] = (
            0x52525252  # written, so that it takes memory; costs depend on no weight
        )
    x = np.random.default_rng(0).normal(size=(max(rows), inputs)).astype(np.float32)
    rounded = aligned(max(rows), rounded_bytes(inputs), dtype=np.uint8)
    y = aligned(max(rows), w.outputs)

    def multiply_all(count: int) -> None:
        for k in range(number):
            compiled_multiply(x, w, k, rounded, y, count)

    acts = {count: partial(multiply_all, count) for count in rows}
    times = by_turns(acts, repetitions, clock=thread_time)
    return {count: min(each) / number for count, each in times.items()}, size


def _of_products(formats: Sequence[str], console: Console, quick: bool) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("weights", "matrix", "1 row, ms", "GB/s", *(f"{r} rows" for r in PRODUCT_ROWS[1:])):
        table.add_column(title, justify="left" if title in ("weights", "matrix") else "right")
    for format_ in formats:
        for name, shape in PRODUCTS.items():
            seconds, size = product_costs(format_, *shape, repetitions=1 if quick else 7)
            alone = seconds[1]
            rows = (f"{seconds[r] / alone:.2f}" for r in PRODUCT_ROWS[1:])
            table.add_row(
                format_,
                f"{name}, {shape[0]} x {shape[1]}",
                f"{1e3 * alone:.3f}",
                f"{size / alone / 1e9:.1f}",
                *rows,
            )
    console.print(table)
    console.print("columns of rows: times the seconds of one row; one thread", highlight=False)


def device_costs(
    shape: dict[str, Any],
    vocab_size: int,
    device: str,
    *,
    batches: Sequence[int] = BATCHES,
    repetitions: int = 7,
    dtype: str = "bfloat16",
) -> tuple[dict[tuple[int, int], float], dict[str, int]]:
    """Median seconds of a pass on a device by batch and number of rows, with CONTEXT tokens cached; and bytes of memory."""
    with torch.device(device):
        module = random_module(shape, vocab_size, 512).to(getattr(torch, dtype))
    target = HFTarget(module, max_num_seqs=max(batches), max_model_len=2 * CONTEXT)
    context = np.random.default_rng(0).integers(0, vocab_size, CONTEXT).tolist()
    target.prefill(range(max(batches)), [context] * max(batches))

    def score(batch: int, rows: int) -> None:
        target.score(range(batch), TokenTree.chain(np.tile(np.arange(rows), (batch, 1))))
        _wait(device)

    acts = {(batch, rows): partial(score, batch, rows) for batch in batches for rows in ROWS}
    times = by_turns(acts, repetitions, warm=0, twice=True)
    used = torch.cuda.max_memory_allocated() if device.startswith("cuda") else weight_bytes(module)
    return {size: median(t) for size, t in times.items()}, {"weights": weight_bytes(module), "memory": used}


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _on_device(device: str, console: Console, quick: bool) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("model", "batch", *(f"{r} rows" for r in ROWS)):
        table.add_column(title, justify="left" if title == "model" else "right")
    for size, model in ON_DEVICE.items():
        with console.status(f"measuring passes of {size} ..."):
            costs, about = device_costs(*model, device, repetitions=3 if quick else 9)
        for batch in BATCHES:
            table.add_row(size, str(batch), *(f"{1e3 * costs[batch, rows]:.2f}" for rows in ROWS))
        console.print(f"{size}: {about}", highlight=False)
    console.print(table)
    console.print(f"on {device}; {CONTEXT} tokens of context; medians, ms", highlight=False)


def main(
    quick: Quick = False,
    size: Annotated[
        list[str] | None, typer.Option(help="3M, 110M or 135M; may be repeated; all without it.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens that are cached.")] = CONTEXT,
    products: Annotated[
        list[str] | None, typer.Option(help="Format of blocks, such as Q4_K; may be repeated.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Measure transformers there, such as cuda.")] = None,
) -> None:
    """Print the table of these sizes; or of products alone; or of three models on a device."""
    torch.set_num_threads(1)
    if products:
        _of_products(products, Console() if sys.stdout.isatty() else Console(width=160), quick)
        return
    if device is not None:
        _on_device(device, Console() if sys.stdout.isatty() else Console(width=120), quick)
        return
    console = Console() if sys.stdout.isatty() else Console(width=120)
    with console.status("measuring passes ..."):
        asked = {"repetitions": 3 if quick else 9, "context": context}
        found = {name: pass_costs(*MODELS[name], **asked) for name in size or MODELS}
        floors = {n: n / read_bandwidth(n) for _, read in found.values() for n in read.values()}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("model", "path", "floor, ms", *(f"{r} rows" for r in ROWS), "8 rows / 1", "1 row / floor"):
        table.add_column(title, justify="left" if title in ("model", "path") else "right")
    for name, (costs, read) in found.items():
        for path, by_rows in costs.items():
            floor = floors[read[path]]
            cells = [f"{1e3 * by_rows[r]:.2f}" for r in ROWS]
            table.add_row(
                name,
                path,
                f"{1e3 * floor:.2f}",
                *cells,
                f"{by_rows[8] / by_rows[1]:.2f}",
                f"{by_rows[1] / floor:.2f}",
            )
    console.print(table)
    console.print(
        f"read bandwidth of one thread: {max(floors) / floors[max(floors)] / 1e9:.1f} GB/s; {context} tokens of context; medians, ms",
        highlight=False,
    )


if __name__ == "__main__":
    typer.run(main)
