"""A GGUF file in this library, in llama.cpp and in transformers, on the same prompts: every mode by turns, each engine in a process of its own.

modes     polydraft plain, auto and fixed chains; llama.cpp plain, with the same draft model, and with its own n-gram lookups,
          from its wheel, or with `--llama-server` from a build for this processor (`python -m studies.peers`), whose prompts are twice as fast;
          with `--transformers` its `generate`, plain and assisted by the same draft model, of the file's weights in bfloat16
speed     tokens after those of the first step, over the seconds since then, of all prompts together
interval  95%, bootstrap over prompts

Every continuation is appended to a file as soon as it ends: the same call goes on where an earlier one was cut off.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from polydraft.bench.record import command_line, markdown_table, processor, write_texts
from polydraft.cli.files import check_output, say_written
from polydraft.cli.progress import bars
from polydraft.core import SamplingParams
from polydraft.errors import IncompatibleError, InvalidInputError, unknown_name
from polydraft.models import load
from polydraft.models.loading.catalogue import default_draft
from polydraft.models.loading.gguf import GgufFile
from polydraft.models.loading.hub import located
from polydraft.numerics.threads import usable_cores
from studies.peers import LlamaServer, flags
from studies.question_files import QUESTIONS, Question, questions

__all__ = ["PEER_MODES", "Continuation", "FileComparison", "Speeds", "main", "markdown"]

CONTEXT = 2048
WARM_UP_TOKENS = 8
DRAFT_LENGTH = 4
"""Tokens that llama.cpp drafts with a draft model; its own default is 3."""
PEER_MODES = ("plain", "draft", "ngram_simple", "ngram_map_k", "ngram_map_k4v", "ngram_mod", "ngram_cache")
"""What llama.cpp offers: no drafts, the draft model, and lookups in the text so far."""
PROGRAM = "python -m studies.same_file"
OURS, PEER, TRANSFORMERS = "polydraft", "llama.cpp", "transformers"
RESAMPLES = 2000
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Continuation:
    """One answer. mode: engine and mode.  first_tokens: that came with the first step, whose speed is the prompt's."""

    mode: str
    threads: int
    temperature: float
    category: str
    prompt: int
    repetition: int
    first_token_seconds: float
    seconds: float
    first_tokens: int
    num_tokens: int

    @property
    def cell(self) -> tuple[str, int, float, int, int]:
        """What there is one of."""
        return self.mode, self.threads, self.temperature, self.prompt, self.repetition


@dataclass(frozen=True)
class Start:
    """Of one engine: seconds until it answers, and the most memory that its process held, in MB."""

    engine: str
    threads: int
    start_seconds: float
    memory_mb: float


class Job(NamedTuple):
    """What a worker is sent."""

    mode: str
    token_ids: list[int]
    num_tokens: int
    temperature: float
    seed: int


class FileComparison:
    """Modes of all engines on one file.

    model, draft: names as of `hub.located`; without a draft model, that of the file's entry in `polydraft models list`.
    chains: lengths of fixed chains of drafts.  peer_modes: of `PEER_MODES`.  transformers: whether its modes run, too.
    server: program of a llama.cpp that was built for this processor; None is the wheel.  results: file of continuations; those that are in it are not measured again.

    Raises:
        IncompatibleError: llama.cpp is not installed.
        InvalidInputError: a file of other settings.
    """

    def __init__(
        self,
        model: str,
        draft: str | None = None,
        *,
        chains: Sequence[int] = (3,),
        peer_modes: Sequence[str] = PEER_MODES[:3],
        transformers: bool = False,
        server: Path | None = None,
        num_tokens: int = 64,
        results: Path | None = None,
    ) -> None:
        if server is None and find_spec("xllamacpp") is None:
            raise IncompatibleError("llama.cpp is not installed. Install polydraft[bench].")
        draft = draft or default_draft(model)
        self.file, self.draft = located(model), located(draft) if draft else None
        self.num_tokens, self._results, self.server = num_tokens, results, server
        ours = ["plain", "auto", *(f"chain of {n}" for n in chains if self.draft)]
        peers = [mode for mode in peer_modes if mode != "draft" or self.draft]
        assisted = ["plain", *(["assisted"] if self.draft else [])] if transformers else []
        by_engine = {OURS: ours, PEER: peers, TRANSFORMERS: assisted}
        self.modes = [f"{engine}, {mode}" for engine, modes in by_engine.items() for mode in modes]
        self.settings = {
            "file": self.file.name,
            "draft": self.draft and self.draft.name,
            "tokens": num_tokens,
            "llama.cpp": server and server.name,
        }
        self.continuations, self.starts = list[Continuation](), list[Start]()
        self._read_results()
        self.tokenizer = load.load_tokenizer(str(self.file))

    def _read_results(self) -> None:
        if self._results is None:
            return
        if not self._results.exists():
            self._append({"settings": self.settings})
            return
        first, *lines = map(json.loads, self._results.read_text(encoding="utf-8").splitlines())
        if first != {"settings": self.settings}:
            raise InvalidInputError(
                f"{str(self._results)!r} holds continuations of {first.get('settings')}; expected those of {self.settings}. Name another file, or delete it."
            )
        for line in lines:
            if "engine" in line:
                self.starts.append(Start(**line))
            else:
                self.continuations.append(Continuation(**line))

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._results is not None:
            self._results.parent.mkdir(parents=True, exist_ok=True)
            with self._results.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")

    def run(
        self,
        questions: Sequence[Question],
        *,
        threads: Sequence[int] = (1,),
        temperatures: Sequence[float] = (0.0, 1.0),
        repetitions: int = 1,
        say: Callable[[str], object] = lambda line: None,
        progress: Progress | None = None,
    ) -> None:
        """Measure what is missing, prompt by prompt. say: is told how long it will take, after each engine's first answer."""
        prompts = [_prompt_ids(self.tokenizer, question.text) for question in questions]
        measured = {continuation.cell for continuation in self.continuations}
        cells = [
            (mode, count, T, number, repetition)
            for count in threads
            for repetition in range(repetitions)
            for number in range(len(questions))
            for T in temperatures
            for mode in self._turned(number)
        ]
        missing = [cell for cell in cells if cell not in measured]
        done = len(cells) - len(missing)
        for count in threads:
            part = [cell for cell in missing if cell[1] == count]
            if not part:
                continue
            with self._workers(count) as workers:
                self._estimate(workers, part, missing, prompts, say)
                for mode, _, T, number, repetition in part:
                    job = Job(mode.partition(", ")[2], prompts[number], self.num_tokens, T, repetition)
                    first, seconds, first_tokens = workers[mode](job)
                    where = mode, count, T, questions[number].category, number, repetition
                    continuation = Continuation(*where, first, seconds, first_tokens, self.num_tokens)
                    self.continuations.append(continuation)
                    self._append(asdict(continuation))
                    done += 1
                    if progress:
                        progress(len(cells), done)

    def _turned(self, number: int) -> list[str]:
        """The modes, another one first for each prompt."""
        turn = number % len(self.modes)
        return self.modes[turn:] + self.modes[:turn]

    def _estimate(
        self,
        workers: Mapping[str, Callable[[Job], tuple[float, float, int]]],
        cells: Sequence[tuple[str, int, float, int, int]],
        missing: Sequence[Any],
        prompts: Sequence[list[int]],
        say: Callable[[str], object],
    ) -> None:
        """A short answer of every mode, which warms up, and what all cells will take at that speed."""
        total, shortest = 0.0, min(prompts, key=len)
        for mode in dict.fromkeys(cell[0] for cell in cells):
            job = Job(mode.partition(", ")[2], shortest, WARM_UP_TOKENS, 1.0, 0)
            workers[mode](job)
            first, seconds, first_tokens = workers[mode](job)
            token = seconds / max(WARM_UP_TOKENS - first_tokens, 1)
            lengths = [len(prompts[cell[3]]) for cell in cells if cell[0] == mode]
            total += len(lengths) * self.num_tokens * token + first / len(shortest) * sum(lengths)
        total *= len(missing) / len(cells)
        say(f"{len(missing)} continuations of {self.num_tokens} tokens: about {max(total / 60, 1):.0f} minutes")

    @contextmanager
    def _workers(self, threads: int) -> Iterator[dict[str, Callable[[Job], tuple[float, float, int]]]]:
        """By mode, what answers jobs: one process of this library for all of its modes, one of transformers, one of llama.cpp for each of its own."""
        options, names = (str(self.file), threads, self.draft), [mode.partition(", ") for mode in self.modes]
        engines: dict[str, tuple[Any, ...]] = {OURS: (_ours, *options, [mode for engine, _, mode in names if engine == OURS])}
        for engine, _, mode in names:
            if engine == PEER:
                engines[f"{engine}, {mode}"] = (_llama_cpp, *options, mode, self.server)
            elif engine == TRANSFORMERS:
                engines[engine] = (_transformers, *options)
        with ExitStack() as stack:
            pipes = {name: stack.enter_context(_worker(threads, *engine)) for name, engine in engines.items()}
            of_mode = {mode: pipes.get(mode) or pipes[mode.partition(", ")[0]] for mode in self.modes}
            yield {mode: lambda job, pipe=pipe: _answered(pipe, job) for mode, (pipe, _) in of_mode.items()}
            for name, (pipe, seconds) in pipes.items():
                pipe.send(None)
                start = Start(name, threads, seconds, pipe.recv())
                self.starts.append(start)
                self._append(asdict(start))


def _answered(pipe: Any, job: Job) -> tuple[float, float, int]:
    pipe.send(job)
    return pipe.recv()


@contextmanager
def _worker(threads: int, build: Any, *options: Any) -> Iterator[tuple[Any, float]]:
    """A process with an engine, and the seconds from its start until it answers."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(build, options, threads, there), daemon=True)
    begin = perf_counter()
    process.start()
    there.close()
    try:
        here.recv()
        yield here, perf_counter() - begin
    except EOFError as error:
        raise IncompatibleError(
            f"{build.__name__.strip('_')} ended on {options[0]!r}; its message is above. Try another file."
        ) from error
    finally:
        process.terminate()
        process.join()


def _serve(build: Any, options: Sequence[Any], threads: int, pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    generate = build(*options)
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        pipe.send(generate(job))
    pipe.send(generate.peak_megabytes() if isinstance(generate, _NativeLlama) else _peak_megabytes())


def _ours(file: str, threads: int, draft: Path | None, modes: Sequence[str]) -> Any:
    """Engines of all modes on one pair of models."""
    from polydraft.engine.api import Engine
    from polydraft.engine.parts import limit_draft_vocabulary

    options: dict[str, Any] = {"threads": threads, "max_model_len": _context(file), "max_num_seqs": 1}
    model, tokenizer = load.load_model(file, **options), load.load_tokenizer(file)
    small = load.load_model(str(draft), as_draft=True, **options) if draft else None
    if small is not None:
        model.vocab_size = small.vocab_size = load.num_token_ids(tokenizer, min(model.vocab_size, small.vocab_size))
        limit_draft_vocabulary(small, tokenizer, None)
    drafts: dict[str, Any] = {"draft_model": small, "draft_tokenizer": tokenizer}
    ways: dict[str, dict[str, Any]] = {"plain": {"drafter": None}, "auto": {"drafter": "auto", **drafts}}
    for mode in modes:
        if mode not in ways:
            ways[mode] = {"drafter": "model:chain", "depth": int(mode.rpartition(" ")[2]), **drafts}
    engines = {mode: Engine.of(model, tokenizer=tokenizer, **ways[mode]) for mode in modes}  # whose slots keep no prompt

    def generate(job: Job) -> tuple[float, float, int]:
        times, begin = list[tuple[float, int]](), perf_counter()
        params = SamplingParams(temperature=job.temperature, max_tokens=job.num_tokens, ignore_eos=True, seed=job.seed)
        for step in engines[job.mode].stream(job.token_ids, params):
            times.append((perf_counter(), len(step.token_ids)))
        return times[0][0] - begin, times[-1][0] - times[0][0], times[0][1]

    return generate


def _llama_cpp(file: str, threads: int, draft: Path | None, mode: str, program: Path | None) -> Any:
    if program is not None:
        return _NativeLlama(program, flags(Path(file), threads, _context(file), draft, mode, DRAFT_LENGTH))
    from polydraft.bench.llama_cpp import LlamaCpp

    drafts: dict[str, Any] = {"plain": {}, "draft": {"draft": draft}}.get(mode, {"lookup": mode.upper()})
    server = LlamaCpp(Path(file), exact=False, num_threads=threads, context=_context(file), draft_length=DRAFT_LENGTH, **drafts)

    def generate(job: Job) -> tuple[float, float, int]:
        times, begin = list[float](), perf_counter()
        params = SamplingParams(temperature=job.temperature, max_tokens=job.num_tokens, seed=job.seed)
        server.stream(job.token_ids, params, lambda: times.append(perf_counter()))
        return times[0] - begin, times[-1] - times[0], 1

    return generate


class _NativeLlama:
    """A llama-server as what answers jobs."""

    def __init__(self, program: Path, arguments: Sequence[str]) -> None:
        self._server = LlamaServer(program, arguments)
        self.peak_megabytes = self._server.peak_megabytes

    def __call__(self, job: Job) -> tuple[float, float, int]:
        times, begin = list[tuple[float, int]](), perf_counter()
        self._server.stream(job.token_ids, job.num_tokens, job.temperature, job.seed, lambda n: times.append((perf_counter(), n)))
        return times[0][0] - begin, times[-1][0] - times[0][0], times[0][1]


def _transformers(file: str, threads: int, draft: Path | None) -> Any:
    """`generate` of the files' weights in bfloat16, plain and assisted."""
    from transformers.generation.streamers import BaseStreamer

    from polydraft.models.loading.folder import load_module

    torch.set_num_threads(threads)
    model = load_module(file, dtype=torch.bfloat16, device="cpu")
    small = load_module(draft, dtype=torch.bfloat16, device="cpu") if draft else None

    class Deliveries(BaseStreamer):
        """When tokens came, and how many; the first delivery is the prompt."""

        def __init__(self) -> None:
            self.times = list[tuple[float, int]]()

        def put(self, value: torch.Tensor) -> None:
            self.times.append((perf_counter(), value.numel()))

        def end(self) -> None:
            pass

    def generate(job: Job) -> tuple[float, float, int]:
        T, ids, deliveries = job.temperature, torch.tensor([job.token_ids]), Deliveries()
        sampling = {"do_sample": True, "temperature": T, "top_k": 0, "top_p": 1.0} if T else {"do_sample": False}
        torch.manual_seed(job.seed)
        begin = perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=job.num_tokens,
                eos_token_id=None,
                pad_token_id=0,
                streamer=deliveries,
                assistant_model=small if job.mode == "assisted" else None,
                **sampling,
            )
        (first, count), last = deliveries.times[1], deliveries.times[-1][0]
        return first - begin, last - first, count

    return generate


def _prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """A question as the model's chat template puts it, where it has one."""
    if not getattr(tokenizer, "chat_template", None):
        return load.encode(tokenizer, text)
    turn = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(whole, add_special_tokens=False)["input_ids"])


def _context(file: str) -> int:
    return min(CONTEXT, GgufFile(file).config.max_position_embeddings)


def _peak_megabytes() -> float:
    """Most memory that this process held, pages of mapped files among it."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Speeds:
    """Tokens per second of one number of threads and temperature, whose prompts are resampled alike for all modes."""

    def __init__(self, continuations: Sequence[Continuation], threads: int, temperature: float) -> None:
        self._by_mode: dict[str, dict[int, list[Continuation]]] = {}
        self.categories: dict[str, list[int]] = {}
        for continuation in continuations:
            if (continuation.threads, continuation.temperature) == (threads, temperature):
                self._by_mode.setdefault(continuation.mode, {}).setdefault(continuation.prompt, []).append(continuation)
        complete = set.intersection(*(set(by_prompt) for by_prompt in self._by_mode.values())) if self._by_mode else set()
        for continuation in continuations:
            prompts = self.categories.setdefault(continuation.category, [])
            if continuation.prompt in complete and continuation.prompt not in prompts:
                prompts.append(continuation.prompt)

    @property
    def modes(self) -> list[str]:
        return list(self._by_mode)

    @property
    def prompts(self) -> list[int]:
        """Those that every mode has continued."""
        return [prompt for prompts in self.categories.values() for prompt in prompts]

    def _totals(self, mode: str, prompts: Sequence[int]) -> np.ndarray:
        """[prompts, 2] tokens and seconds."""
        by_prompt = self._by_mode[mode]
        return np.array(
            [[sum(c.num_tokens - c.first_tokens for c in by_prompt[p]), sum(c.seconds for c in by_prompt[p])] for p in prompts]
        )

    def speed(self, mode: str, prompts: Sequence[int]) -> float:
        tokens, seconds = self._totals(mode, prompts).sum(0)
        return float(tokens / seconds)

    def interval(self, mode: str, prompts: Sequence[int], over: str | None = None) -> tuple[float, float]:
        """95% of the speed, or of its ratio to another mode's."""
        chosen = np.random.default_rng(0).integers(len(prompts), size=(RESAMPLES, len(prompts)))
        ours = self._totals(mode, prompts)[chosen].sum(1)
        rates = ours[:, 0] / ours[:, 1]
        if over is not None:
            theirs = self._totals(over, prompts)[chosen].sum(1)
            rates = rates * theirs[:, 1] / theirs[:, 0]
        low, high = np.quantile(rates, (0.025, 0.975))
        return float(low), float(high)

    def first_token(self, mode: str) -> float:
        """Median seconds."""
        return median(c.first_token_seconds for by_prompt in self._by_mode[mode].values() for c in by_prompt)


def markdown(comparison: FileComparison) -> str:
    """A table for each number of threads and temperature."""
    settings = comparison.settings
    pair = f"{settings['file']}, draft model {settings['draft']}" if settings["draft"] else settings["file"]
    parts = [
        f"{pair}; {date.today()}; {processor()}, {usable_cores()} cores; `{command_line(PROGRAM)}`; {settings['tokens']} tokens a prompt. Tokens per second; in "
        "brackets 95% intervals, bootstrap over prompts. All modes by turns, prompt by prompt, with all engines loaded."
    ]
    if comparison.server:
        peers = [mode.partition(", ")[2] for mode in comparison.modes if mode.startswith(PEER)]
        parts += [
            "llama.cpp is built for this processor (`python -m studies.peers`); its flags, beside the file, threads and context: "
            + _flags(peers)
        ]
    cells = sorted({(c.threads, c.temperature) for c in comparison.continuations})
    for threads, temperature in cells:
        speeds = Speeds(comparison.continuations, threads, temperature)
        if len(speeds.prompts) > 0:
            parts += [f"### {threads} thread{'s' * (threads > 1)}, T = {temperature:g}", _table(speeds)]
    if comparison.starts:
        lines = [[s.engine, s.threads, f"{s.start_seconds:.1f}", f"{s.memory_mb:.0f}"] for s in comparison.starts]
        parts.append(markdown_table(["engine", "threads", "start, s", "peak memory, MB"], lines))
    return "\n\n".join(parts) + "\n"


def _flags(modes: Sequence[str]) -> str:
    plain = flags(Path("FILE"), 1, CONTEXT, None, "plain", DRAFT_LENGTH)
    own = {mode: flags(Path("FILE"), 1, CONTEXT, Path("DRAFT"), mode, DRAFT_LENGTH)[len(plain) :] for mode in modes}
    return ", ".join(f"{mode} `{' '.join(given)}`" if given else f"{mode} none" for mode, given in own.items()) + "."


def _table(speeds: Speeds) -> str:
    every = speeds.prompts
    peers = [mode for mode in speeds.modes if mode.startswith(PEER)]
    fastest = max(peers, key=lambda mode: speeds.speed(mode, every), default=None)
    plain = f"{OURS}, plain"
    categories = {name: prompts for name, prompts in speeds.categories.items() if prompts}
    lines = list[list[str]]()
    for mode in sorted(speeds.modes, key=lambda mode: (not mode.startswith(OURS), mode)):
        line = [mode + (" (fastest of its modes)" if mode == fastest else "")]
        line += [_with_interval(speeds.speed(mode, prompts), speeds.interval(mode, prompts)) for prompts in categories.values()]
        line.append(_with_interval(speeds.speed(mode, every), speeds.interval(mode, every)))
        for baseline in (plain, fastest):
            is_comparable = baseline is not None and baseline in speeds.modes and baseline != mode
            ratio = speeds.speed(mode, every) / speeds.speed(baseline, every) if is_comparable and baseline else 1.0
            line.append(_with_interval(ratio, speeds.interval(mode, every, baseline), "x") if is_comparable else "-")
        lines.append([*line, f"{speeds.first_token(mode):.2f}"])
    heads = [f"{name} ({len(prompts)})" for name, prompts in categories.items()]
    return markdown_table(
        ["engine, mode", *heads, f"all ({len(every)})", "over own plain", f"over {PEER}'s fastest", "first token, s"], lines
    )


def _with_interval(value: float, interval: tuple[float, float], unit: str = "") -> str:
    low, high = interval
    return f"{value:.3g}{unit}" + (f" [{low:.3g}, {high:.3g}]" if low < high else "")  # a single prompt has no spread


def main(
    model: Annotated[str, typer.Option(help="GGUF file, or a name of `polydraft models list` that is one.")],
    draft_model: Annotated[str | None, typer.Option(help="Draft model: a smaller model with the same vocabulary.")] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, dir_okay=False, help='.jsonl or .jsonl.gz of "prompt", or "turns", and "category"; may be repeated.'
        ),
    ] = None,
    categories: Annotated[list[str] | None, typer.Option(help="Category of prompts; may be repeated. Default: all.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts of each category.")] = 3,
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of CPU threads of both; may be repeated. Default: 1 and all cores.")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="Sampling temperature; may be repeated. Default: 0 and 1.")
    ] = None,
    chain: Annotated[
        list[int] | None, typer.Option(min=1, help="Length of a fixed chain of drafts; may be repeated. Default 3.")
    ] = None,
    peer_mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Mode of llama.cpp: plain, draft, or an n-gram type such as ngram_mod; may be repeated. Default plain, draft, ngram_simple."
        ),
    ] = None,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Run generate of transformers, too, plain and assisted by the draft model.")
    ] = False,
    llama_server: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="llama.cpp's server, built by python -m studies.peers. Default: its wheel."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Number of new tokens of each continuation.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Number of measured repetitions of every prompt.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Markdown file for the tables; continuations are kept beside it, and a cut-off run goes on."
        ),
    ] = None,
) -> None:
    """Compare a GGUF file with llama.cpp, prompt by prompt: plain, with a draft model, and with each engine's own speculation."""
    check_output("--out", out)
    for name in peer_mode or ():
        if name not in PEER_MODES:
            raise unknown_name("mode of llama.cpp", name, PEER_MODES)
    comparison = FileComparison(
        model,
        draft_model,
        chains=chain or (3,),
        peer_modes=peer_mode or PEER_MODES[:3],
        transformers=transformers,
        server=llama_server,
        num_tokens=max_tokens,
        results=out and out.with_suffix(".jsonl"),
    )
    with bars("measuring") as step:
        comparison.run(
            questions(prompts, count, categories or ()) if prompts else QUESTIONS,
            threads=threads or sorted({1, usable_cores()}),
            temperatures=temperature or (0.0, 1.0),
            repetitions=repetitions,
            say=lambda line: typer.echo(line, err=True),
            progress=step,
        )
    typer.echo(markdown(comparison))
    if out is not None:
        say_written(write_texts({out: markdown(comparison)}))


if __name__ == "__main__":
    typer.run(main)
