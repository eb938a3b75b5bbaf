"""`python -m studies.threads --model FILE`: what further threads gain, by format and number of threads, beside llama.cpp on the same file.

All take turns, each for a moment: passes of one row and of several behind a context, and a prompt. A gain is the median over the turns of one
thread's seconds over those of so many threads in the same turn, the best turn's in brackets: other processes can only lessen it.
Processor time over wall time tells whether the threads work at all, and a last column how many cores other processes had. `--neighbours`
runs so many busy processes beside.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from statistics import median
from subprocess import Popen
from time import perf_counter, process_time
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from polydraft.core import SamplingParams, TokenTree
from polydraft.models import load
from polydraft.models.compiled.llama import CompiledLlama
from polydraft.numerics.threads import Pool, usable_cores
from studies.options import Quick

__all__ = ["Sample", "busy_neighbours", "main", "measure", "on_threads", "table"]

CONTEXT, SEVERAL, PROMPT = 100, 8, 128
"""Tokens behind which passes run, rows of the larger pass, and tokens of the prompt that is read."""
Tasks = Mapping[str, Callable[[], float]]
"""What is measured -> a function that does it and returns its seconds."""


class Sample(NamedTuple):
    """One contender's turn. seconds: by task.  processor: its processor time over wall time.  others: cores that other processes had."""

    seconds: dict[str, float]
    processor: float
    others: float


def on_threads(model: CompiledLlama, number: int) -> CompiledLlama:
    """The same weights and slots with another number of threads, at most that of the model."""
    other, work = copy(model), model.arrays.work
    other.arrays = model.arrays._replace(
        work=work._replace(queries=work.queries[:number]), program=model.arrays.program._replace(threads=number)
    )
    other.pool = Pool(number)
    return other


def tasks(model: CompiledLlama, repetitions: int) -> Tasks:
    """Seconds of a pass of one row and of several behind the context in slot 0, and of a prompt in slot 1."""

    def passes(rows: int) -> float:
        chain, begin = TokenTree.chain(torch.arange(rows)[None]), perf_counter()
        for _ in range(repetitions):
            model.score([0], chain)
        return (perf_counter() - begin) / repetitions

    def prompt() -> float:
        begin = perf_counter()
        model.prefill([1], [_ids(PROMPT)])
        seconds = perf_counter() - begin
        model.release([1])
        return seconds / PROMPT

    return {"1 row": lambda: passes(1), f"{SEVERAL} rows": lambda: passes(SEVERAL), "prompt": prompt}


def _ids(count: int) -> list[int]:
    return np.random.default_rng(0).integers(10, 1000, count).tolist()


def peer_tasks(file: Path, number: int, repetitions: int) -> Tasks | None:
    """Those of llama.cpp, seconds a token; None where it is not installed. It has no passes of several rows to be called."""
    try:
        from polydraft.bench.llama_cpp import LlamaCpp

        server = LlamaCpp(file, exact=False, num_threads=number, context=1024)
    except ImportError:
        return None

    def seconds(prompt: list[int], num_tokens: int, part: str) -> float:
        """Of a token of the prompt or behind it, greedy, by its own clock."""
        answer = server.server.handle_completions(server.request(prompt, SamplingParams(temperature=0, max_tokens=num_tokens)))
        return answer["timings"][f"{part}_per_token_ms"] / 1e3

    return {
        "1 row": lambda: seconds(_ids(8), repetitions, "predicted"),
        "prompt": lambda: seconds(_ids(PROMPT), 1, "prompt"),
    }


def measure(contenders: Mapping[tuple[str, int], Tasks], turns: int) -> dict[tuple[str, int], list[Sample]]:
    """Samples of all contenders, a name and a number of threads, in turns; a first turn is not counted."""
    samples: dict[tuple[str, int], list[Sample]] = {key: [] for key in contenders}
    for _ in range(turns + 1):
        for key, each in contenders.items():
            begin, own, busy = perf_counter(), process_time(), _busy_seconds()
            seconds = {name: task() for name, task in each.items()}
            wall, own, busy = perf_counter() - begin, process_time() - own, _busy_seconds() - busy
            samples[key].append(Sample(seconds, own / wall, (busy - own) / wall))
    return {key: each[1:] for key, each in samples.items()}


def _busy_seconds() -> float:
    """That all cores have worked so far; 0 where the system does not tell."""
    try:
        with open("/proc/stat") as file:
            ticks = [int(t) for t in file.readline().split()[1:9]]
    except OSError:
        return 0.0
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


@contextmanager
def busy_neighbours(number: int) -> Iterator[None]:
    """So many processes that want a core each."""
    processes = [Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def table(model: str, samples: Mapping[tuple[str, int], Sequence[Sample]]) -> Table:
    """A row for each contender; gains over the same name's smallest number of threads."""
    names = list(dict.fromkeys(task for each in samples.values() for task in each[0].seconds))
    titles = ("weights", "threads", *(f"{n}, ms" for n in names), *(f"{n}, gain" for n in names), "processor / wall", "others")
    rows = Table(*titles, title=model, box=None)
    for (name, number), each in samples.items():
        fewest = samples[name, min(n for other, n in samples if other == name)]
        seconds = {task: [s.seconds[task] for s in each] for task in each[0].seconds}
        gains = {task: [a.seconds[task] / b.seconds[task] for a, b in zip(fewest, each, strict=True)] for task in seconds}
        times = (f"{1e3 * median(seconds[n]):.2f}" if n in seconds else "-" for n in names)
        ratios = (f"{median(gains[n]):.2f} ({max(gains[n]):.2f})" if n in gains else "-" for n in names)
        load = f"{median(s.processor for s in each):.2f}", f"{median(s.others for s in each):.2f}"
        rows.add_row(name, str(number), *times, *ratios, *load)
    return rows


def main(
    model: Annotated[list[str], typer.Option(help="GGUF file, folder or name of a model; may be repeated.")],
    quantization: Annotated[
        list[str] | None, typer.Option(help="Format of the weights; the file's own without it; may be repeated.")
    ] = None,
    threads: Annotated[list[int] | None, typer.Option(help="Numbers of threads; 1 and all cores without it.")] = None,
    neighbours: Annotated[int, typer.Option(min=0, help="Busy processes beside.")] = 0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 15,
    quick: Quick = False,
) -> None:
    """Print a table for each model."""
    torch.set_num_threads(1)
    numbers, turns, repetitions = sorted({*(threads or (1, usable_cores()))}), 2 if quick else turns, 2 if quick else 8
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for name in model:
        contenders: dict[tuple[str, int], Tasks] = {}
        for kind in quantization or [None]:
            loaded = load.load_model(
                name, device="cpu", max_num_seqs=2, max_model_len=1024, quantization=kind, threads=max(numbers)
            )
            assert isinstance(loaded, CompiledLlama), "only compiled models have threads"
            loaded.prefill([0], [_ids(CONTEXT)])
            contenders |= {(kind or loaded.weight_format or "", n): tasks(on_threads(loaded, n), repetitions) for n in numbers}
        if name.endswith(".gguf"):
            peers = {("llama.cpp", n): peer_tasks(Path(name), n, 2 * repetitions) for n in numbers}
            contenders |= {key: peer for key, peer in peers.items() if peer}
        with busy_neighbours(neighbours):
            console.print(table(Path(name).name, measure(contenders, turns)))
    console.print(
        f"{CONTEXT} tokens of context; prompt of {PROMPT}, ms a token; {neighbours} busy neighbours of its own", highlight=False
    )


if __name__ == "__main__":
    typer.run(main)
