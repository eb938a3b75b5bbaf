"""`python -m studies.passes`: what a scoring pass costs by its number of rows: compiled in every weight format, through transformers, and the floor.

The floor is the time to read the weights once at the bandwidth that one thread measures here. Models are random: costs do not
depend on weights. All are measured in turn, again and again; figures are medians.
"""

import sys
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from polydraft.core import TokenTree
from polydraft.models.compiled.llama import CompiledLlama
from polydraft.models.hf import HFTarget
from polydraft.models.memory import read_bandwidth
from studies.options import Quick
from studies.profile import SIZES

__all__ = ["ROWS", "main", "pass_costs"]

ROWS = (1, 2, 4, 8, 16)
CONTEXT = 128
VOCAB_SIZE = 32_000
MODELS = {"3M": 2048, "110M": VOCAB_SIZE}
"""Size -> vocabulary."""


def pass_costs(shape: dict[str, Any], vocab_size: int, *, repetitions: int = 7) -> tuple[dict[str, dict[int, float]], int]:
    """Median seconds of a pass by path and number of rows, with CONTEXT tokens cached; and the number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocab_size, tie_word_embeddings=True, max_position_embeddings=512, **shape)
    module = LlamaForCausalLM(config).eval()
    targets: dict[str, Any] = {
        "float32": CompiledLlama(module, max_num_seqs=1),
        "bfloat16": CompiledLlama(module, max_num_seqs=1, quantization="bfloat16"),
        "bfloat16-dot": CompiledLlama(module, max_num_seqs=1, quantization="bfloat16-dot"),
        "int8": CompiledLlama(module, max_num_seqs=1, quantization="int8"),
        "int4": CompiledLlama(module, max_num_seqs=1, quantization="int4"),
        "transformers": HFTarget(module, max_num_seqs=1),
    }
    context = np.random.default_rng(0).integers(0, vocab_size, CONTEXT).tolist()
    for target in targets.values():
        target.prefill([0], [context])
    taken: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in targets}
    for _ in range(repetitions):
        for rows in ROWS:
            chain = TokenTree.chain(torch.arange(rows)[None])
            for name, target in targets.items():
                target.score([0], chain)  # what ran before it is out of the caches
                start = perf_counter()
                target.score([0], chain)
                taken[name][rows].append(perf_counter() - start)
    return {name: {rows: median(t) for rows, t in each.items()} for name, each in taken.items()}, module.num_parameters()


def main(quick: Quick = False) -> None:
    """Print the table for a small and a larger model."""
    torch.set_num_threads(1)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    with console.status("measuring passes ..."):
        bandwidth = read_bandwidth()
        found = {name: pass_costs(SIZES[name], vocab, repetitions=3 if quick else 9) for name, vocab in MODELS.items()}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("model", "path", "floor, ms", *(f"{r} rows" for r in ROWS), "8 rows / 1", "1 row / floor"):
        table.add_column(title, justify="left" if title in ("model", "path") else "right")
    bytes_each = {"float32": 4, "bfloat16": 2, "bfloat16-dot": 2, "int8": 34 / 32, "int4": 18 / 32, "transformers": 4}
    for size, (costs, parameters) in found.items():
        for path, by_rows in costs.items():
            floor = parameters * bytes_each[path] / bandwidth
            cells = [f"{1e3 * by_rows[r]:.2f}" for r in ROWS]
            table.add_row(size, path, f"{1e3 * floor:.2f}", *cells, f"{by_rows[8] / by_rows[1]:.2f}", f"{by_rows[1] / floor:.2f}")
    console.print(table)
    console.print(
        f"read bandwidth of one thread: {bandwidth / 1e9:.1f} GB/s; {CONTEXT} tokens of context; medians, ms", highlight=False
    )


if __name__ == "__main__":
    typer.run(main)
