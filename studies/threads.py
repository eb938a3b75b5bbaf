"""`python -m studies.threads --model FILE`: what further threads gain, by format and number of threads, beside llama.cpp on the same file.

All take turns, each for a moment: passes of one row and of several behind a context, and a prompt. A gain is the median over the turns of one
thread's seconds over those of so many threads in the same turn, the best turn's in brackets: other processes can only lessen it.
Processor time over wall time tells whether the threads work at all, and a last column how many cores other processes had. `--neighbours`
runs so many busy processes beside. `--serial` counts instead, in processor time of one thread, what each kind of part of a pass takes, and which of them
one thread does while the others wait; behind a pass, a distribution of the target's or the draft model's, by temperature; and what two threads take for
one another: joins of parts that are shared, and all that is no part's: 2 wall - processor time of one thread.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from statistics import fmean, median
from subprocess import Popen
from time import thread_time
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from polydraft.core import SamplingParams, TokenTree
from polydraft.models import load
from polydraft.models.compiled import layers
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.mixers.program import Items, Part, Program, new_program
from polydraft.numerics.compile_time import unowned
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.processor import usable_cores
from polydraft.numerics.shared_code import shared_code
from polydraft.numerics.threads import Pool, num_pieces, share, sync
from polydraft.sampling.processing import samplings_of
from polydraft.sampling.truncation import soften_rows
from studies import timing
from studies.options import Quick
from studies.timing import by_turns, shortest

CONTEXT = 100
SEVERAL = 8
PROMPT = 128
"""Tokens behind which passes run, rows of the larger pass, and tokens of the prompt that is read."""
Tasks = Mapping[str, Callable[[], float]]
"""What is measured -> a function that does it and returns its seconds."""


class Sample(NamedTuple):
    """One contender's turn. seconds: by task.  processor: its processor time over wall time.  others: cores that other processes had."""

    seconds: dict[str, float]
    processor: float
    others: float


class PartTime(NamedTuple):
    """All parts of a kind in a pass. number: of them.  units: of each, at least.  seconds: of one thread."""

    number: int
    units: int
    seconds: float


def on_threads(model: CompiledModel, number: int) -> CompiledModel:
    """The same weights and slots with another number of threads, at most that of the model."""
    other = copy(model)
    work = model.arrays.work
    other.arrays = model.arrays._replace(
        work=work._replace(queries=work.queries[:number]),
        program=model.arrays.program._replace(threads=number),
    )
    other.pool = Pool(number)
    return other


@contextmanager
def named_parts(names: list[str]) -> Iterator[None]:
    """Note the kinds of the parts of a program that is made inside, in their order."""

    def noted(parts: Sequence[Sequence[tuple[Part, int]]], step: np.ndarray, threads: int) -> Program:
        code: list[Any] = [part.code for layer in parts for part, _ in layer]
        names[:] = [each.py_func.__name__.removesuffix("_code") for each in code]
        return new_program(parts, step, threads)

    with patch.object(layers, "new_program", noted):
        yield


def only(model: CompiledModel, kept: np.ndarray) -> CompiledModel:
    """The same model whose passes do these parts and no others. kept: whether each of its program is."""
    other = copy(model)
    program = model.arrays.program
    parts = program.parts.copy()
    parts["items"], parts["number"] = (
        np.where(kept, parts["items"], Items.FIXED),
        np.where(kept, parts["number"], 0),
    )
    other.arrays = model.arrays._replace(program=program._replace(parts=parts))
    return other


def units_of(part: Any, rows: int) -> int:
    """Units that one slot's pass of so many rows cuts a part into: as many threads may help at most."""
    count = {Items.ROWS: rows, Items.RUNS: part["number"] * part["pieces"]}.get(
        Items(part["items"]), part["number"]
    )
    return -(-int(count) // int(part["grain"]))


def part_seconds(
    model: CompiledModel, names: Sequence[str], rows: int, repetitions: int
) -> dict[str, PartTime]:
    """By kind of part, what all parts of it take a pass of one thread, the smallest of some; less what walking a program takes."""
    chain = TokenTree.chain(np.arange(rows)[None])
    kinds = np.array(names)
    alone = on_threads(model, 1)

    def seconds(kept: np.ndarray) -> float:
        return shortest(partial(only(alone, kept).score, [0], chain), repetitions, thread_time)

    nothing = seconds(kinds == "")
    times = dict[str, PartTime]()
    for kind in dict.fromkeys(names):
        parts = model.arrays.program.parts[kinds == kind]
        times[kind] = PartTime(
            len(parts),
            min(units_of(part, rows) for part in parts),
            max(seconds(kinds == kind) - nothing, 0.0),
        )
    return times


@unowned
def _nothing(arguments, begin, end, thread):
    pass


@njit(nogil=True)
def _join(sync, threads, count):
    """Share and join so many parts of nothing, as many units as a product has."""
    units = 4 * threads
    for _ in range(count):
        share(sync, threads, shared_code(_nothing, (count,)), units, np.int64(1))


def join_seconds(repetitions: int, count: int = 1000) -> float:
    """Wall time of one part that two threads share and that does nothing, the smallest of some."""
    with Pool(2):
        return shortest(partial(_join, sync, np.int64(2), np.int64(count)), repetitions) / count


def distribution_seconds(vocab_size: int, params: SamplingParams, repetitions: int) -> float:
    """Processor time of the distribution of one row of logits on one thread, the smallest of some: the target's at a node, or a draft's."""
    logits = np.random.default_rng(0).normal(size=(1, vocab_size)).astype(np.float32) * 4
    out = np.empty_like(logits)
    samplings = samplings_of([params])
    return shortest(partial(soften_rows, sync, logits, samplings, out), repetitions, thread_time)


SAMPLED = {
    "T = 0": SamplingParams(temperature=0.0),
    "T = 1": SamplingParams(temperature=1.0),
    "T = 1, top-p .95": SamplingParams(temperature=1.0, top_p=0.95),
}


def behind_a_pass(vocab_size: int, repetitions: int) -> dict[str, PartTime]:
    """Distributions of a row, by sampling parameters."""
    pieces = num_pieces.py_func(vocab_size)
    return {
        f"distribution, {name}": PartTime(1, pieces, distribution_seconds(vocab_size, params, repetitions))
        for name, params in SAMPLED.items()
    }


def between_threads(
    model: CompiledModel, times: Mapping[str, PartTime], rows: int, repetitions: int
) -> dict[str, PartTime]:
    """What a pass of two threads takes beside its parts. seconds: of joins wall time, of all else that of both threads."""
    chain = TokenTree.chain(np.arange(rows)[None])
    two = on_threads(model, 2)
    wall = shortest(partial(two.score, [0], chain), repetitions)
    shared = sum(part.number for part in times.values() if part.units > 1)
    rest = 2 * wall - sum(part.seconds for part in times.values())
    return {
        "joins of two threads": PartTime(shared, 2, shared * join_seconds(repetitions)),
        "waiting, joins, memory": PartTime(1, 2, max(rest, 0.0)),
    }


def parts_table(
    model: str,
    times: Mapping[int, Mapping[str, PartTime]],
    others: Mapping[int, Mapping[str, PartTime]] | None = None,
) -> Table:
    """A row for each kind of part, columns by rows of a pass; what is cut into one unit is done by one thread. others: what is no part of a pass."""
    rows = Table("part", "a pass", *(f"{n} rows: units, us" for n in times), title=model, box=None)
    for kind, first in next(iter(times.values())).items():
        rows.add_row(
            kind,
            str(first.number),
            *(f"{each[kind].units}, {1e6 * each[kind].seconds:.0f}" for each in times.values()),
        )
    shares = list[str]()
    for each in times.values():
        serial = sum(part.seconds for part in each.values() if part.units == 1)
        shares.append(f"{1e6 * serial:.0f} ({serial / sum(part.seconds for part in each.values()):.1%})")
    rows.add_row("on one thread", "", *shares)
    others = others or {}
    for name, first in next(iter(others.values()), dict[str, PartTime]()).items():
        cells = (f"{each[name].units}, {1e6 * each[name].seconds:.0f}" for each in others.values())
        rows.add_row(name, str(first.number), *cells)
    return rows


def tasks(model: CompiledModel, repetitions: int) -> Tasks:
    """Seconds of a pass of one row and of several behind the context in slot 0, and of a prompt in slot 1."""

    def passes(rows: int) -> float:
        chain = TokenTree.chain(np.arange(rows)[None])
        return fmean(by_turns({rows: partial(model.score, [0], chain)}, repetitions, warm=0)[rows])

    def prompt() -> float:
        took = timing.seconds(partial(model.prefill, [1], [_ids(PROMPT)]))
        model.release([1])
        return took / PROMPT

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
        answer = server.server.handle_completions(
            server.request(prompt, SamplingParams(temperature=0, max_tokens=num_tokens))
        )
        return answer["timings"][f"{part}_per_token_ms"] / 1e3

    return {
        "1 row": lambda: seconds(_ids(8), repetitions, "predicted"),
        "prompt": lambda: seconds(_ids(PROMPT), 1, "prompt"),
    }


def _sample(tasks: Tasks) -> Sample:
    """One turn of a contender."""
    seconds = dict[str, float]()
    busy = _busy_seconds()
    wall, own = timing.both_seconds(lambda: seconds.update({name: task() for name, task in tasks.items()}))
    busy = _busy_seconds() - busy
    return Sample(seconds, own / wall, (busy - own) / wall)


def measure(contenders: Mapping[tuple[str, int], Tasks], turns: int) -> dict[tuple[str, int], list[Sample]]:
    """Samples of all contenders, a name and a number of threads, in turns; a first turn is not counted."""
    samples: dict[tuple[str, int], list[Sample]] = {key: [] for key in contenders}
    for _ in range(turns + 1):
        for key, each in contenders.items():
            samples[key].append(_sample(each))
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
    """So many processes that want a core each, and keep to one where the system lets them: the last, the one before, ..."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = [
        f"import os; os.sched_setaffinity(0, [{cores[-1 - k % len(cores)]}])\n" if cores else ""
        for k in range(number)
    ]
    processes = [Popen([sys.executable, "-c", f"{code}while True: pass"]) for code in pinned]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def table(model: str, samples: Mapping[tuple[str, int], Sequence[Sample]]) -> Table:
    """A row for each contender; gains over the same name's smallest number of threads."""
    names = list(dict.fromkeys(task for each in samples.values() for task in each[0].seconds))
    titles = (
        "weights",
        "threads",
        *(f"{n}, ms" for n in names),
        *(f"{n}, gain" for n in names),
        "processor / wall",
        "others",
    )
    rows = Table(*titles, title=model, box=None)
    for (name, number), each in samples.items():
        fewest = samples[name, min(n for other, n in samples if other == name)]
        seconds = {task: [s.seconds[task] for s in each] for task in each[0].seconds}
        gains = {
            task: [a.seconds[task] / b.seconds[task] for a, b in zip(fewest, each, strict=True)]
            for task in seconds
        }
        times = (f"{1e3 * median(seconds[n]):.2f}" if n in seconds else "-" for n in names)
        ratios = (f"{median(gains[n]):.2f} ({max(gains[n]):.2f})" if n in gains else "-" for n in names)
        load = f"{median(s.processor for s in each):.2f}", f"{median(s.others for s in each):.2f}"
        rows.add_row(name, str(number), *times, *ratios, *load)
    return rows


def count_parts(model: str, repetitions: int) -> Table:
    """The table of one model, two threads' units."""
    names = list[str]()
    with named_parts(names):
        loaded = load.load_model(model, device="cpu", max_num_seqs=2, max_model_len=1024, threads=2)
    assert isinstance(loaded, CompiledModel), "only compiled models have threads"
    loaded.prefill([0], [_ids(CONTEXT)])
    times = {n: part_seconds(loaded, names, n, repetitions) for n in (1, 4, SEVERAL)}
    sampled = behind_a_pass(loaded.vocab_size, repetitions)
    others = {n: sampled | between_threads(loaded, each, n, repetitions) for n, each in times.items()}
    return parts_table(Path(model).name, times, others)


def main(
    model: Annotated[list[str], typer.Option(help="GGUF file, folder or name of a model; may be repeated.")],
    quantization: Annotated[
        list[str] | None,
        typer.Option(help="Format of the weights; the file's own without it; may be repeated."),
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option(help="Numbers of threads; 1 and all cores without it.")
    ] = None,
    neighbours: Annotated[int, typer.Option(min=0, help="Busy processes beside.")] = 0,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each contender.")] = 15,
    serial: Annotated[bool, typer.Option(help="Count what one thread does while others wait.")] = False,
    quick: Quick = False,
) -> None:
    """Print a table for each model."""
    torch.set_num_threads(1)
    if serial:
        for name in model:
            Console(width=None if sys.stdout.isatty() else 160).print(count_parts(name, 2 if quick else 15))
        return
    numbers = sorted({*(threads or (1, usable_cores()))})
    turns = 2 if quick else turns
    repetitions = 2 if quick else 8
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for name in model:
        contenders: dict[tuple[str, int], Tasks] = {}
        for kind in quantization or [None]:
            loaded = load.load_model(
                name,
                device="cpu",
                max_num_seqs=2,
                max_model_len=1024,
                quantization=kind,
                threads=max(numbers),
            )
            assert isinstance(loaded, CompiledModel), "only compiled models have threads"
            loaded.prefill([0], [_ids(CONTEXT)])
            contenders |= {
                (kind or loaded.weight_format or "", n): tasks(on_threads(loaded, n), repetitions)
                for n in numbers
            }
        if name.endswith(".gguf"):
            peers = {("llama.cpp", n): peer_tasks(Path(name), n, 2 * repetitions) for n in numbers}
            contenders |= {key: peer for key, peer in peers.items() if peer}
        with busy_neighbours(neighbours):
            console.print(table(Path(name).name, measure(contenders, turns)))
    console.print(
        f"{CONTEXT} tokens of context; prompt of {PROMPT}, ms a token; {neighbours} busy neighbours of its own",
        highlight=False,
    )


if __name__ == "__main__":
    typer.run(main)
