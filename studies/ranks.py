"""`python -m studies.ranks`: what a pass costs over several ranks, against one process with as many threads and with one.

A Llama of SmolLM2-135M's size with random weights, whose heads can be cut (8, 4 of them for keys, in place of 9 and 3). All are measured in turn,
again and again, on trees of so many rows behind 128 cached tokens; figures are medians. Processor time is rank 0's: what a pass would take at
least if nothing else ran, on a machine where something does.
"""

import sys
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from polydraft.core import TokenTree
from polydraft.models.load import load_model
from studies.options import Quick
from studies.passes import CHAT, CONTEXT
from studies.timing import both_seconds

ROWS = (1, 8)
SHAPE = CHAT | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


class Taken(NamedTuple):
    """Seconds of a pass, and of them the processor's in rank 0."""

    whole: float
    processor: float


def rank_costs(
    shape: dict[str, Any], vocab_size: int, num_ranks: int, repetitions: int
) -> dict[str, dict[int, list[Taken]]]:
    """What passes took by who ran them and number of rows, turn by turn."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, tie_word_embeddings=True, max_position_embeddings=CONTEXT + 384, **shape
    )
    with TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        one = load_model(folder, backend="transformers", max_num_seqs=1)
        torch.set_num_threads(num_ranks)
        sharded: Any = load_model(folder, tensor_parallel=num_ranks, max_num_seqs=1)
    runs = {"one process, one thread": (one, 1), f"one process, {num_ranks} threads": (one, num_ranks)}
    runs[f"{num_ranks} ranks of one thread"] = sharded, 1
    text = np.random.default_rng(0).integers(0, vocab_size, CONTEXT).tolist()
    for target in (one, sharded):
        target.prefill([0], [text])
    taken: dict[str, dict[int, list[Taken]]] = {name: {rows: [] for rows in ROWS} for name in runs}
    for _ in range(repetitions):
        for rows in ROWS:
            chain = TokenTree.chain(torch.arange(rows)[None])
            for name, (target, threads) in runs.items():
                torch.set_num_threads(threads)
                target.score([0], chain)  # what ran before it is out of the caches
                taken[name][rows].append(Taken(*both_seconds(partial(target.score, [0], chain))))
    sharded.close()
    return taken


def main(
    quick: Quick = False,
    ranks: Annotated[int, typer.Option(min=2, help="Processes; the heads are cut into as many: 2 or 4.")] = 2,
) -> None:
    """Print the table."""
    console = Console() if sys.stdout.isatty() else Console(width=120)
    with console.status("measuring passes ..."):
        shape = SHAPE | ({"num_hidden_layers": 2} if quick else {})
        found = rank_costs(shape, 2048 if quick else 49_152, ranks, 3 if quick else 25)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("", *(f"{r} rows, {kind}, ms" for r in ROWS for kind in Taken._fields)):
        table.add_column(title, justify="right" if title else "left")
    for name, by_rows in found.items():
        table.add_row(
            name, *(f"{1e3 * median(each):.1f}" for r in ROWS for each in zip(*by_rows[r], strict=True))
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
