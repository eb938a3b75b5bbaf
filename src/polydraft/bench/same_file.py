"""A GGUF file in this library and in llama.cpp: start, memory, first tokens and speed, each in a process of its own, by turns.

One sequence, with the settings that a user gets who names the file and the number of threads: this library by default, with the file's draft
model or head, and plain; llama.cpp plain. Speed is that of answers to questions, between their first and last token.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from polydraft.bench.record import command_line, markdown_table, processor
from polydraft.core import SamplingParams
from polydraft.errors import IncompatibleError
from polydraft.models import load, pair
from polydraft.models.gguf import GgufFile
from polydraft.models.hub import default_draft, located
from polydraft.threads import usable_cores

__all__ = ["Row", "as_dicts", "compare", "markdown"]

QUESTIONS = (
    "Explain in simple words why the sky is blue.",
    "Write a Python function that merges two sorted lists.",
    "Give three tips for learning a new language.",
    "Write a Python class for a binary search tree with insert and search.",
    "What is the capital of France, and what is it known for?",
    "Write a Python function that parses a CSV file without the csv module.",
)
PROMPTS = (30, 1000)
"""Tokens of the two prompts."""
MOST_CONTEXT = 2048
NUM_TOKENS = 128
FIGURES = {
    "start": "start, s",
    "memory": "peak memory, MB",
    "first_30": "first token of 30, s",
    "first_1000": "first token of 1,000, s",
    "speed_0": "tokens/s, T = 0",
    "speed_1": "tokens/s, T = 1",
}
MORE_IS_BETTER = ("speed_0", "speed_1")


@dataclass(frozen=True)
class Row:
    """Medians of one engine on one file: seconds, MB, and tokens/s between the first and the last token. The last row of a comparison is
    llama.cpp's."""

    file: str
    threads: int
    engine: str
    figures: Mapping[str, float]


def compare(
    names: Sequence[str],
    threads: Sequence[int],
    *,
    draft: str | None = None,
    repetitions: int = 3,
    num_tokens: int = NUM_TOKENS,
    progress: Any = None,
) -> list[list[Row]]:
    """Measure files, by names as of `hub.located`, with each number of threads: rows of one file and number, llama.cpp's last.

    draft: name of a draft model of all of them; without it, that of a file's entry in `polydraft models list`.

    Raises:
        IncompatibleError: llama.cpp is not installed.
    """
    if find_spec("xllamacpp") is None:
        raise IncompatibleError("llama.cpp is not installed. Install polydraft[bench].")
    comparisons = []
    for name in names:
        small = draft or default_draft(name)
        for count in threads:
            comparisons.append(_measure(located(name), located(small) if small else None, count, repetitions, num_tokens))
            if progress:
                progress(len(names) * len(threads), len(comparisons))
    return comparisons


def _measure(file: Path, draft: Path | None, threads: int, repetitions: int, num_tokens: int) -> list[Row]:
    text = "".join(prompt.text for prompt in pair.prompts())
    tokenizer = load.load_tokenizer(str(file))
    whole = load.encode(tokenizer, text)
    while len(whole) < max(PROMPTS):
        whole = whole + whole
    questions = [_question(tokenizer, text) for text in QUESTIONS]
    engines: dict[str, tuple[Any, ...]] = {
        "polydraft": (_ours, file, "auto", draft),
        "polydraft, no drafts": (_ours, file, None, None),
        "llama.cpp": (_llama_cpp, file),
    }
    with ExitStack() as stack:
        both = {name: stack.enter_context(_worker(threads, *parts)) for name, parts in engines.items()}
        seen: dict[str, dict[str, list[float]]] = {name: {"start": [worker[1]]} for name, worker in both.items()}
        for repetition in range(repetitions + 1):  # the first one warms up
            jobs = [(f"first_{size}", whole[repetition : repetition + size], 1, 0.0) for size in PROMPTS]
            jobs += [(f"speed_{t}", questions[repetition % len(questions)], num_tokens, float(t)) for t in (0, 1)]
            for figure, ids, count, temperature in jobs:
                for name, (pipe, _) in both.items():
                    pipe.send((ids, count, temperature))
                    first, rate = pipe.recv()
                    if repetition:
                        seen[name].setdefault(figure, []).append(rate if figure.startswith("speed") else first)
        for name, (pipe, _) in both.items():
            pipe.send(None)
            seen[name]["memory"] = [pipe.recv()]
    return [Row(file.name, threads, name, {figure: median(seen[name][figure]) for figure in FIGURES}) for name in both]


@contextmanager
def _worker(threads: int, build: Any, file: Path, *options: Any) -> Iterator[tuple[Any, float]]:
    """A process with an engine, and the seconds from its start until it answers."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(build, str(file), options, threads, there), daemon=True)
    begin = perf_counter()
    process.start()
    there.close()
    try:
        here.recv()
        yield here, perf_counter() - begin
    except EOFError as error:
        raise IncompatibleError(
            f"{build.__name__.strip('_')} ended on {str(file)!r}; its message is above. Try another file."
        ) from error
    finally:
        process.terminate()
        process.join()


def _serve(build: Any, file: str, options: Sequence[Any], threads: int, pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    generate = build(file, threads, *options)
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        pipe.send(generate(*job))
    pipe.send(_peak_megabytes())


def _ours(file: str, threads: int, drafter: str | None, draft: Path | None) -> Any:
    from polydraft.engine.api import Engine

    options: dict[str, Any] = {"threads": threads, "max_model_len": _context(file), "max_num_seqs": 1}
    model, tokenizer = load.load_model(file, **options), load.load_tokenizer(file)
    small = load.load_model(str(draft), **options) if draft else None
    if small is not None:
        model.vocab_size = small.vocab_size = load.num_token_ids(tokenizer, min(model.vocab_size, small.vocab_size))
    parts: dict[str, Any] = {"draft_model": small, "draft_tokenizer": tokenizer, "drafter": drafter}
    engine = Engine.of(model, tokenizer=tokenizer, **parts)  # whose slots keep no prompt

    def generate(ids: list[int], count: int, temperature: float) -> tuple[float, float]:
        times, begin = [], perf_counter()
        for step in engine.stream(ids, SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, seed=1)):
            times += [perf_counter()] * len(step.token_ids)
        return times[0] - begin, _rate(times)

    return generate


def _llama_cpp(file: str, threads: int) -> Any:
    from polydraft.bench.llama_cpp import LlamaCpp

    server = LlamaCpp(Path(file), exact=False, num_threads=threads, context=_context(file))

    def generate(ids: list[int], count: int, temperature: float) -> tuple[float, float]:
        times: list[float] = []
        begin = perf_counter()
        server.stream(
            ids, SamplingParams(temperature=temperature, max_tokens=count, seed=1), lambda: times.append(perf_counter())
        )
        return times[0] - begin, _rate(times)

    return generate


def _question(tokenizer: Any, text: str) -> list[int]:
    """A question as the model's chat template puts it, where it has one."""
    if not getattr(tokenizer, "chat_template", None):
        return load.encode(tokenizer, text)
    turn = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(whole, add_special_tokens=False)["input_ids"])


def _context(file: str) -> int:
    return min(MOST_CONTEXT, GgufFile(file).config.max_position_embeddings)


def _rate(times: Sequence[float]) -> float:
    """Tokens a second between the first and the last."""
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


def _peak_megabytes() -> float:
    """Most memory that this process held, pages of mapped files among it."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def markdown(comparisons: Sequence[Sequence[Row]]) -> str:
    """A table; ratios above 1 say that this library is better than llama.cpp."""
    cells: list[list[Any]] = []
    for rows in comparisons:
        theirs = rows[-1].figures
        for row in rows:
            ratios = {k: (row.figures[k] / theirs[k]) ** (1 if k in MORE_IS_BETTER else -1) for k in FIGURES}
            figures = [f"{row.figures[k]:.3g}" + ("" if row is rows[-1] else f" ({ratios[k]:.2f}x)") for k in FIGURES]
            cells.append([row.file, row.threads, row.engine, *figures])
    head = f"{processor()}, {usable_cores()} cores; `{command_line()}`; medians of one interleaved run, both engines at their defaults.\n\n"
    return head + markdown_table(["file", "threads", "engine", *FIGURES.values()], cells)


def as_dicts(comparisons: Sequence[Sequence[Row]]) -> list[dict[str, Any]]:
    """For a JSON file."""
    return [asdict(row) for rows in comparisons for row in rows]
