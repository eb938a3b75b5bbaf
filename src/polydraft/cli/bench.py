"""`polydraft bench`: this library and its peers on the same models and prompts, in one interleaved run."""

import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polydraft.cli.commands import CommandGroup
from polydraft.cli.downloads import Yes, agree_on_downloads
from polydraft.cli.files import check_output, read_lines, say_written
from polydraft.cli.options import AsJson, MeasurementOptions, Only, configured
from polydraft.cli.progress import bars
from polydraft.cli.start import check, use_threads
from polydraft.config import Config, EngineConfig, setting
from polydraft.errors import InvalidInputError, unknown_name

if TYPE_CHECKING:
    from polydraft.bench.suite import Bench

app = typer.Typer(cls=CommandGroup, invoke_without_command=True)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Config):
    """What is measured beside plain decoding."""

    batch: int = setting("Number of sequences in a batch", int, 1, low=1)
    head: Sequence[Path] = setting("Folder of a trained drafter; may be repeated", list, (), items=Path)
    way: Sequence[str] = setting(
        "DRAFTER[+VERIFIER][@PATHSxDEPTH] to measure, a trained DRAFTER by its folder's name; may be repeated",
        list,
        (),
        unset="those of --head, else a good set",
    )
    peers: bool = setting("Measurement of transformers and llama.cpp too, where installed", bool, True)


@app.callback()
@configured
def bench(
    context: typer.Context,
    *,
    config: Annotated[EngineConfig, Only("model", "draft_model", "device", "dtype", "backend")],
    measurement: MeasurementOptions,
    options: BenchOptions,
    as_json: AsJson = False,
    report_file: Annotated[
        Path | None, typer.Option("--report", help="File for all figures, JSON, and beside it a .md table.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Measure this library against its peers: same models, prompts and threads, one interleaved run, outputs checked."""
    if (below := context.invoked_subcommand) is not None:
        _check_alone(context, below)
        return
    check_output("--report", report_file)
    texts = None if measurement.prompts is None else read_lines("--prompts", measurement.prompts)
    check(config)
    use_threads(measurement.threads)
    from polydraft.bench.ways import check_way

    heads = {head.name: head for head in options.head}
    for way in options.way:
        check_way(way, heads)
    agree_on_downloads([config], yes=yes)
    from polydraft.bench import report as reports
    from polydraft.bench import speedup

    suite = _suite(config, measurement, options)
    with closing(suite), bars("measuring", hidden=as_json) as step:
        ids = suite.prompts(6) if texts is None else suite.encoded(texts)
        repetitions = speedup.repetitions(len(ids)) if measurement.quick else measurement.repetitions
        total = len(suite.contenders) * (1 + len(ids) * repetitions)
        figures = suite.run(
            ids, max_tokens=measurement.max_tokens, repetitions=repetitions, progress=partial(step, total)
        )
    report = reports.as_dict(figures)
    typer.echo(json.dumps(report) if as_json else reports.markdown(report))
    if report_file is not None:
        say_written(reports.write(report, report_file))


def _suite(config: EngineConfig, measurement: MeasurementOptions, options: BenchOptions) -> "Bench":
    from polydraft.bench.suite import Bench

    return Bench(
        target=config.model,
        draft=config.draft_model,
        device=config.device,
        dtype=config.dtype,
        backend=config.backend,
        ways=options.way,
        heads=options.head,
        temperature=measurement.temperature,
        num_threads=measurement.threads,
        batch_size=options.batch,
        peers=options.peers,
    )


def _check_alone(context: typer.Context, below: str) -> None:
    """Options of `bench` say nothing to a command below it."""
    options = [
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if options:
        option = f"--{options[0].replace('_', '-')}"
        raise InvalidInputError(
            f"{option} was given before {below!r}, to which it says nothing. Give the options of {below!r} behind it."
        )


@dataclass(frozen=True, kw_only=True)
class StartOptions(Config):
    """What is started, and how often."""

    repetitions: int = setting("Number of starts of each kind", int, 3, low=1)
    row: Sequence[str] = setting(
        "Kind of start to measure: warm, cold, first, llama.cpp, llama.cpp-cold; may be repeated",
        list,
        (),
        unset="all",
    )
    llama_server: str | None = setting(
        "Program llama-server to start in place of llama.cpp's wheel, such as one that was built for this processor",
        str,
        None,
    )


@app.command()
@configured
def start(
    *,
    config: Annotated[EngineConfig, Only("model", "draft_model", "threads")],
    options: StartOptions,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Measure seconds from the shell to the first token: warm, with a cold file cache, with nothing compiled, beside llama.cpp's."""
    from polydraft.bench import start as starts

    for row in options.row:
        if row not in starts.ROWS:
            raise unknown_name("kind of start", row, starts.ROWS)
    check(config)
    server = None if options.llama_server is None else Path(options.llama_server)
    if server is not None and not os.access(server, os.X_OK):
        raise InvalidInputError(
            f"--llama-server {server} was given, which is no program. Build one: `python -m studies.peers`."
        )
    agree_on_downloads([config], yes=yes)
    with bars("starting", hidden=as_json) as step:
        contenders, absent = starts.contenders(str(config.model), config.draft_model, config.threads, server)
        rows = {row: start for row, start in contenders.items() if row in (options.row or contenders)}
        starts.prepare(contenders["warm"])
        measured = starts.measure(rows, options.repetitions, absent, progress=step)
    report = starts.as_dict(str(config.model), measured, absent)
    typer.echo(json.dumps(report) if as_json else starts.markdown(report))
