"""`polydraft bench`: this library and its peers on the same models and prompts, in one interleaved run."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft.cli.files import check_output, read_lines, say_written
from polydraft.cli.options import Measurement, Only, configured
from polydraft.cli.progress import bars
from polydraft.cli.start import use_threads
from polydraft.config import Config, EngineConfig, setting
from polydraft.errors import InvalidInputError, unknown_name

app = typer.Typer(invoke_without_command=True)


@dataclass(frozen=True, kw_only=True)
class Options(Config):
    """What is measured beside this library's default."""

    inflate: int = setting("Number of layers that are added to the target, which cost and change nothing", int, 0, low=0)
    batch: int = setting("Number of sequences in a batch", int, 1, low=1)
    way: Sequence[str] = setting("DRAFTER[+VERIFIER][@PATHSxDEPTH] to measure; may be repeated", list, (), unset="a good set")
    formats: Sequence[str] = setting(
        "Weight format (bfloat16, int8, int4), against peers of the same bits; may be repeated",
        list,
        (),
        flag="--format",
        unset="all for a model by name",
    )
    peers: bool = setting("Measurement of transformers, llama.cpp and vLLM too, where installed", bool, True)


@app.callback()
@configured
def bench(
    context: typer.Context,
    *,
    config: Annotated[EngineConfig, Only("target", "draft", "device", "dtype", "backend")],
    measurement: Measurement,
    options: Options,
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
    from polydraft.bench.formats import FORMATS, AtEqualBits
    from polydraft.bench.suite import Bench, Way
    from polydraft.models.hub import MODELS

    for text in options.way:
        Way.parse(text)
    shared: dict[str, Any] = {
        "target": config.target,
        "draft": config.draft,
        "ways": options.way,
        "temperature": measurement.temperature,
        "inflate_layers": options.inflate,
        "num_threads": measurement.threads,
        "batch_size": options.batch,
        "peers": options.peers,
    }
    elsewhere = {name: getattr(config, name) for name in ("device", "dtype", "backend")}
    if options.formats and elsewhere.keys() & config.chosen():
        raise InvalidInputError(
            "--format was given beside --device, --dtype or --backend; formats are of the compiled path. Leave one out."
        )
    by_name = config.target in MODELS and not elsewhere.keys() & config.chosen()
    formats = options.formats or (FORMATS if by_name else ())
    suite = AtEqualBits(formats=tuple(formats), **shared) if config.target and formats else Bench(**shared, **elsewhere)
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
class Comparison(Config):
    """Which drafters are compared, and on what."""

    out: Path | None = setting("Folder for the tables and all numbers", Path, flag="--out -o")
    quick: bool = setting("Two requests of 32 tokens", bool, False, flag="--quick")
    drafter: Sequence[str] = setting("Name in the table; may be repeated", list, (), unset="all")
    nodes: int = setting("Draft shape: number of drafted tokens a step", int, 16, low=1)
    depth: int = setting("Draft shape: depth", int, 8, low=1)
    width: int = setting("Draft shape: number of paths", int, 4, low=1)
    temperature: Sequence[float] = setting(
        "Sampling temperature; may be repeated with --model", list, (), items=float, unset="1, with --model 0, 0.7 and 1"
    )
    num_tokens: int = setting("Number of new tokens of each continuation", int, 200, low=1, high=480)
    num_requests: int = setting("Number of requests of each workload", int, 8, low=1)
    index_bytes: int = setting("Size of the text for the indexes", int, 2_000_000, unit="bytes", low=1)
    head: Sequence[Path] = setting("With --model: folder of a trained drafter; may be repeated", list, (), items=Path)
    way: Sequence[str] = setting(
        "With --model: DRAFTER or folder's name, [:KIND][+VERIFIER][@PATHSxDEPTH]; may be repeated", list, ()
    )
    prompts: Path | None = setting('With --model: .jsonl file of "prompt", or "turns", and "category"', Path)
    repetitions: int = setting("Number of measured repetitions of all prompts", int, 1, low=1)


@app.command()
@configured
def drafters(*, config: Annotated[EngineConfig, Only("target")], options: Comparison) -> None:
    """Compare the drafters that need no training, at one node budget, on code, edits and chat-like text; or, with --model, any drafters of one
    model, trained ones among them, against plain decoding.
    """
    check_output("--out", options.out, folder=True, picture=config.target is not None)
    use_threads()
    if config.target is not None:
        _yardstick(config.target, options)
        return
    from polydraft.bench import drafters_table as reports
    from polydraft.bench.drafters import CONTENDERS, Bench, compare

    contenders, quick = {c.name: c for c in CONTENDERS}, options.quick
    for name in options.drafter:
        if name not in contenders:
            raise unknown_name("drafter of this benchmark", name, contenders)
    suite = Bench(
        nodes=options.nodes,
        depth=options.depth,
        width=options.width,
        temperature=options.temperature[0] if options.temperature else 1.0,
        num_tokens=32 if quick else options.num_tokens,
        num_requests=2 if quick else options.num_requests,
        index_bytes=200_000 if quick else options.index_bytes,
    )
    with bars("measuring") as step:
        rows = compare(suite, [c for c in CONTENDERS if not options.drafter or c.name in options.drafter], progress=step)
    typer.echo(reports.markdown(rows))
    if options.out is not None:
        say_written(reports.write(rows, options.out))


@app.command()
def file(
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
    from polydraft.bench.questions import QUESTIONS, questions
    from polydraft.bench.record import write_texts
    from polydraft.bench.same_file import PEER_MODES, FileComparison, markdown
    from polydraft.threads import usable_cores

    check_output("--out", out)
    for name in peer_mode or ():
        if name not in PEER_MODES:
            raise unknown_name("mode of llama.cpp", name, PEER_MODES)
    comparison = FileComparison(
        model,
        draft_model,
        chains=chain or (3,),
        peer_modes=peer_mode or PEER_MODES[:3],
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


def _yardstick(model: str, options: Comparison) -> None:
    import json

    from polydraft.bench.questions import questions
    from polydraft.bench.record import write_texts
    from polydraft.bench.yardstick import Yardstick, markdown, picture

    if options.prompts is None:
        raise InvalidInputError("--model was given without --prompts; expected a .jsonl file of questions. Name one.")
    count = 2 if options.quick else options.num_requests
    prompts = questions([options.prompts], count)[:count]
    yardstick, out = Yardstick(model, list(options.head), list(options.way)), options.out
    temperatures, num_tokens = list(options.temperature) or [0.0, 0.7, 1.0], 16 if options.quick else options.num_tokens
    with bars("measuring") as step:
        figures = yardstick.run(prompts, temperatures, max_tokens=num_tokens, repetitions=options.repetitions, progress=step)
    typer.echo(markdown(figures))
    if out is not None:
        out.mkdir(exist_ok=True)
        text = markdown(figures)
        say_written(write_texts({out / "yardstick.json": json.dumps(figures, indent=1) + "\n", out / "yardstick.md": text}))
        picture(figures, out / "yardstick.png")
