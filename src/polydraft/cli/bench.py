"""`polydraft bench`: this library and its peers on the same models and prompts, in one interleaved run."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli.files import check_output, read_lines, say_written
from polydraft.cli.options import MeasurementOptions, Only, configured
from polydraft.cli.progress import bars
from polydraft.cli.start import use_threads
from polydraft.config import Config, EngineConfig, setting
from polydraft.errors import InvalidInputError

app = typer.Typer(invoke_without_command=True)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Config):
    """What is measured beside plain decoding."""

    batch: int = setting("Number of sequences in a batch", int, 1, low=1)
    way: Sequence[str] = setting("DRAFTER[+VERIFIER][@PATHSxDEPTH] to measure; may be repeated", list, (), unset="a good set")
    peers: bool = setting("Measurement of transformers and llama.cpp too, where installed", bool, True)


@app.callback()
@configured
def bench(
    context: typer.Context,
    *,
    config: Annotated[EngineConfig, Only("target", "draft", "device", "dtype", "backend")],
    measurement: MeasurementOptions,
    options: BenchOptions,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for all figures, and beside it a .md table and a .png.")
    ] = None,
) -> None:
    """Measure this library against its peers: same models, prompts and threads, one interleaved run, outputs checked."""
    if context.invoked_subcommand is not None:
        return
    check_output("--json", json_file, picture=True)
    use_threads(measurement.threads)
    from polydraft.bench import report as reports
    from polydraft.bench.suite import Bench, Way

    for text in options.way:
        Way.parse(text)
    suite = Bench(
        target=config.target,
        draft=config.draft,
        device=config.device,
        dtype=config.dtype,
        backend=config.backend,
        ways=options.way,
        temperature=measurement.temperature,
        num_threads=measurement.threads,
        batch_size=options.batch,
        peers=options.peers,
    )
    with closing(suite), bars("measuring") as step:
        prompts = measurement.prompts
        ids = suite.prompts(3 if measurement.quick else 6) if prompts is None else suite.encoded(read_lines("--prompts", prompts))
        repetitions = 1 if measurement.quick else measurement.repetitions
        total = len(suite.contenders) * (1 + len(ids) * repetitions)
        figures = suite.run(ids, max_tokens=measurement.max_tokens, repetitions=repetitions, progress=partial(step, total))
    report = reports.as_dict(figures)
    typer.echo(reports.markdown(report))
    if json_file is not None:
        say_written(reports.write(report, json_file))


@dataclass(frozen=True, kw_only=True)
class DrafterOptions(Config):
    """Which drafters are compared, and on what."""

    out: Path | None = setting("Folder for the tables and all numbers", Path, flag="--out -o")
    quick: bool = setting("Two requests of 16 tokens", bool, False, flag="--quick")
    temperature: Sequence[float] = setting("Sampling temperature; may be repeated", list, (), items=float, unset="0, 0.7 and 1")
    num_tokens: int = setting("Number of new tokens of each continuation", int, 200, low=1)
    num_requests: int = setting("Number of requests", int, 8, low=1)
    head: Sequence[Path] = setting("Folder of a trained drafter; may be repeated", list, (), items=Path)
    way: Sequence[str] = setting("DRAFTER or folder's name, [:KIND][+VERIFIER][@PATHSxDEPTH]; may be repeated", list, ())
    prompts: Path | None = setting('.jsonl file of "prompt", or "turns", and "category"', Path)
    repetitions: int = setting("Number of measured repetitions of all prompts", int, 1, low=1)


@app.command()
@configured
def drafters(*, config: Annotated[EngineConfig, Only("target")], options: DrafterOptions) -> None:
    """Compare any drafters of one model, trained ones among them, with plain decoding."""
    check_output("--out", options.out, folder=True, picture=True)
    for flag, value in (("--model", config.target), ("--prompts", options.prompts)):
        if value is None:
            raise InvalidInputError(f"{flag} was not given; expected a model and a .jsonl file of questions. Name both.")
    use_threads()
    import json

    from polydraft.bench.questions import questions
    from polydraft.bench.record import write_texts
    from polydraft.bench.yardstick import Yardstick, markdown, picture

    assert config.target is not None and options.prompts is not None
    count = 2 if options.quick else options.num_requests
    prompts = questions([options.prompts], count)[:count]
    yardstick, out = Yardstick(config.target, list(options.head), list(options.way)), options.out
    temperatures, num_tokens = list(options.temperature) or [0.0, 0.7, 1.0], 16 if options.quick else options.num_tokens
    with bars("measuring") as step:
        figures = yardstick.run(prompts, temperatures, max_tokens=num_tokens, repetitions=options.repetitions, progress=step)
    text = markdown(figures)
    typer.echo(text)
    if out is not None:
        out.mkdir(exist_ok=True)
        say_written(write_texts({out / "yardstick.json": json.dumps(figures, indent=1) + "\n", out / "yardstick.md": text}))
        picture(figures, out / "yardstick.png")
