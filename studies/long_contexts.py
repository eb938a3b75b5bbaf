"""`python -m studies.long_contexts --model NAME`: reading a prompt and decoding behind it, by its length and by the type of keys and values.

Times are CPU time of one thread, of the forward passes alone; types take turns, passages as well. Deviations are of a text's next tokens behind `--depth`
tokens of it, from keys and values in float32: mean |log-probability difference| of the text's tokens, KL divergence, and the share with the same argmax.
"""

import argparse
import doctest
import inspect
import tarfile
import typing
from functools import partial
from pathlib import Path
from time import process_time
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from polydraft.bench.record import csv_table, write_texts
from polydraft.core import TokenTree
from polydraft.models import load
from polydraft.models.slots import TREE_ROOM
from polydraft.sampling.softmax import log_softmax
from studies import timing
from studies.options import Quick

DECODED = 24
"""Passes of each number of rows at each length; the smallest time counts."""
ROWS = 1, 4, 8


def _text(name: str, length: int) -> list[int]:
    """Ids of the standard library's own sources."""
    ids = list[int]()
    tokenizer = load.load_tokenizer(name)
    for module in (argparse, typing, inspect, tarfile, doctest):
        if len(ids) < length:
            ids += load.encode(tokenizer, inspect.getsource(module))
    return (ids * (length // len(ids) + 1))[:length]


def seconds(model: Any, ids: list[int], lengths: list[int]) -> dict[str, float]:
    """Of reading so many tokens from nothing, of a token of the last piece, and of each row of a pass behind them."""
    took = dict[str, float]()
    total = 0.0
    begin = 0
    last = 0.0
    piece = ids[:1]
    for length in lengths:
        while begin < length:
            piece = ids[begin : min(begin + TREE_ROOM, length)]
            last = timing.seconds(partial(model.prefill, [0], [piece]), process_time)
            total += last
            begin = begin + len(piece)
        took[f"prompt {length}"], took[f"piece {length}"] = total / length, last / len(piece)
        for rows in ROWS:
            tree = TokenTree.chain(np.array([ids[length : length + rows]], np.int64))
            shortest = timing.shortest(partial(model.score, [0], tree), DECODED, process_time)
            took[f"decoding {length}" if rows == 1 else f"row of {rows} {length}"] = shortest / rows
    model.release([0])
    return took


def _log_probs(model: Any, ids: list[int], depth: int) -> np.ndarray:
    model.prefill([0], [ids[:depth]])
    rows = list[np.ndarray]()
    for begin in range(depth, len(ids), 64):
        piece = ids[begin : begin + 64]
        rows.append(log_softmax(model.score([0], TokenTree.chain(np.array([piece], np.int64))).logits[0]))
        model.prefill([0], [piece])
    model.release([0])
    return np.concatenate(rows)


def deviations(exact: np.ndarray, other: np.ndarray, ids: list[int]) -> tuple[float, float, float]:
    """Mean |difference| of the log-probabilities of the tokens that follow, KL divergence, and the share with the same argmax."""
    at = np.arange(len(ids)), np.array(ids)
    difference = np.abs(exact[at] - other[at]).mean()
    divergence = (np.exp(exact) * (exact - other)).sum(-1).mean()
    return float(difference), float(divergence), float((exact.argmax(-1) == other.argmax(-1)).mean())


def main(
    model: Annotated[str, typer.Option(help="Name of `polydraft models list`, folder or GGUF file.")],
    types: Annotated[str, typer.Option(help="Types of keys and values.")] = "float32,bfloat16,q8_0",
    lengths: Annotated[str, typer.Option(help="Lengths of the context.")] = "500,4000,8000",
    depth: Annotated[
        int, typer.Option(help="Tokens before those whose distributions are compared; 0 compares none.")
    ] = 2000,
    compared: Annotated[int, typer.Option(help="Tokens whose distributions are compared.")] = 512,
    turns: Annotated[int, typer.Option(help="Turns of the types.")] = 1,
    out: Annotated[Path | None, typer.Option(help="CSV file for the figures.")] = None,
    quick: Quick = False,
) -> None:
    """Print a table of speeds and deviations by type."""
    if quick:
        lengths = "100,200"
        depth = 32
        compared = 32
    names = types.split(",")
    sizes = [int(x) for x in lengths.split(",")]
    ids = _text(model, max(*sizes, depth + compared) + max(ROWS))
    rows = list[dict[str, Any]]()
    exact = None
    times: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names:
            llm: Any = load.load_model(
                model, cache_dtype=name, max_num_seqs=1, max_model_len=len(ids) + TREE_ROOM, threads=1
            )
            times[name].append(seconds(llm, ids, sizes))
            if turn > 0:
                continue
            row: dict[str, Any] = {"type": name, "bytes a token": llm.bytes_per_token}
            if depth:
                log_probs = _log_probs(llm, ids[: depth + compared], depth)
                exact = log_probs if exact is None else exact
                figures = deviations(exact, log_probs, ids[depth + 1 : depth + compared + 1])
                row |= dict(zip(("log-probability", "KL", "same argmax"), figures, strict=True))
            rows.append(row)
    for row in rows:
        best = {
            key: float(np.min([took[key] for took in times[row["type"]]])) for key in times[row["type"]][0]
        }
        row |= {f"{key}, tokens/s": 1 / value for key, value in best.items()}
        for kind in ("prompt", "decoding"):
            row |= {
                f"{kind} {n} / {sizes[0]}": best[f"{kind} {sizes[0]}"] / best[f"{kind} {n}"]
                for n in sizes[1:]
            }
    table = Table("", *(row["type"] for row in rows))
    for key in list(rows[0])[1:]:
        table.add_row(key, *(f"{row[key]:.4g}" for row in rows))
    Console(width=130).print(table)
    if out:
        write_texts({out: csv_table(list(rows[0]), (row.values() for row in rows))})


if __name__ == "__main__":
    typer.run(main)
