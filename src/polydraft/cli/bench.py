"""`polydraft bench`: this library and its peers on the same models and prompts, in one interleaved run."""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft.cli import options as given
from polydraft.cli.files import check_output, read_lines, say_written
from polydraft.cli.progress import bars
from polydraft.cli.start import use_threads
from polydraft.errors import InvalidInputError, unknown_name

app = typer.Typer(invoke_without_command=True)


@app.callback()
def bench(
    context: typer.Context,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write FILE, and beside it a .md table and a .png.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three prompts, one repetition.")] = False,
    inflate: Annotated[int, typer.Option(min=0, help="Append N layers to the target that cost and change nothing.")] = 0,
    threads: given.Threads = 1,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    prompts: given.Prompts = None,
    model: given.Model = None,
    draft_model: given.DraftModel = None,
    way: Annotated[
        list[str] | None,
        typer.Option(help="DRAFTER[+VERIFIER][@PATHSxDEPTH] to measure; may be repeated; a good set without it."),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format", help="bfloat16, int8, int4: against peers of the same bits; may be repeated; all for a model by name."
        ),
    ] = None,
    temperature: given.Temperature = 1.0,
    max_tokens: given.MaxTokens = 64,
    repetitions: given.Repetitions = 2,
    peers: Annotated[bool, typer.Option(help="Measure transformers, llama.cpp and vLLM too, where installed.")] = True,
    device: given.Device = None,
    dtype: given.Dtype = None,
    backend: Annotated[str, typer.Option(help="Of ours: compiled, transformers, or auto: transformers on a GPU.")] = "auto",
) -> None:
    """Measure this library against its peers: same models, prompts and threads, one interleaved run, outputs checked."""
    if context.invoked_subcommand is not None:
        return
    check_output("--json", json_file, picture=True)
    use_threads(threads)
    from polydraft.bench import report as reports
    from polydraft.bench.formats import FORMATS, AtEqualBits
    from polydraft.bench.suite import Bench, Way
    from polydraft.models.hub import MODELS

    for text in way or ():
        Way.parse(text)
    options: dict[str, Any] = {
        "draft": draft_model,
        "ways": way or (),
        "temperature": temperature,
        "inflate_layers": inflate,
        "num_threads": threads,
        "batch_size": batch,
        "peers": peers,
    }
    elsewhere = {"device": device, "dtype": dtype, "backend": backend}
    chosen = formats or (FORMATS if model in MODELS and elsewhere == {"device": None, "dtype": None, "backend": "auto"} else ())
    if formats and (device or dtype or backend != "auto"):
        raise InvalidInputError(
            "--format was given beside --device, --dtype or --backend; formats are of the compiled path. Leave one out."
        )
    options |= {} if chosen else elsewhere
    made = AtEqualBits(target=model, formats=tuple(chosen), **options) if model and chosen else Bench(target=model, **options)
    with closing(made), bars("measuring") as step:
        ids = made.prompts(3 if quick else 6) if prompts is None else made.encoded(read_lines("--prompts", prompts))
        repetitions = 1 if quick else repetitions
        total = len(made.contenders) * (1 + len(ids) * repetitions)
        found = made.run(ids, max_tokens=max_tokens, repetitions=repetitions, progress=partial(step, total))
    report = reports.as_dict(found)
    typer.echo(reports.markdown(report))
    if json_file is not None:
        say_written(reports.write(report, json_file))


@app.command()
def drafters(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the tables and all numbers.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two requests of 32 tokens.")] = False,
    drafter: Annotated[list[str] | None, typer.Option(help="Name in the table; may be repeated; all without it.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Drafted tokens of a step.")] = 16,
    depth: Annotated[int, typer.Option(min=1, help="Longest path of a draft.")] = 8,
    width: Annotated[int, typer.Option(min=1, help="Most paths of a draft.")] = 4,
    temperature: Annotated[
        list[float] | None, typer.Option(help="0 is greedy; may be repeated with --model. Default 1, with --model 0, 0.7 and 1.")
    ] = None,
    num_tokens: Annotated[int, typer.Option(min=1, max=480, help="Tokens of each continuation.")] = 200,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of each workload.")] = 8,
    index_bytes: Annotated[int, typer.Option(min=1, help="Text that the indexes are made of.")] = 2_000_000,
    model: given.Model = None,
    head: Annotated[list[Path] | None, typer.Option(help="With --model: a folder that was trained; may be repeated.")] = None,
    way: Annotated[
        list[str] | None, typer.Option(help="With --model: DRAFTER or folder's name, [:KIND][+VERIFIER][@PATHSxDEPTH].")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help='With --model: .jsonl of "prompt", or "turns", and "category".')] = None,
    repetitions: given.Repetitions = 1,
) -> None:
    """Compare the drafters that need no training, at one node budget, on code, edits and chat-like text; or, with --model, any drafters of one
    model, trained ones among them, against plain decoding.
    """
    check_output("--out", out, folder=True, picture=model is not None)
    use_threads()
    if model is not None:
        _yardstick(
            model,
            head or [],
            way or [],
            prompts,
            temperature or [0.0, 0.7, 1.0],
            out,
            quick,
            num_requests,
            num_tokens,
            repetitions,
        )
        return
    from polydraft.bench import drafters_table as reports
    from polydraft.bench.drafters import CONTENDERS, Bench, compare

    known = {c.name: c for c in CONTENDERS}
    for name in drafter or ():
        if name not in known:
            raise unknown_name("drafter of this benchmark", name, known)
    chosen = [c for c in CONTENDERS if not drafter or c.name in drafter]
    made = Bench(
        nodes=nodes,
        depth=depth,
        width=width,
        temperature=temperature[0] if temperature else 1.0,
        num_tokens=32 if quick else num_tokens,
        num_requests=2 if quick else num_requests,
        index_bytes=200_000 if quick else index_bytes,
    )
    with bars("measuring") as step:
        found = compare(made, chosen, progress=step)
    typer.echo(reports.markdown(found))
    if out is not None:
        say_written(reports.write(found, out))


@app.command()
def serve(
    model: given.Model = None,
    streams: Annotated[list[int] | None, typer.Option(min=1, help="At a time; may be repeated. Default 1, 4, 16 and 64.")] = None,
    max_tokens: given.MaxTokens = 64,
    peer: Annotated[bool, typer.Option(help="Measure llama.cpp's server too.")] = True,
    vllm: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="An interpreter that has vLLM, whose server is measured too.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Of `polydraft serve`, as --option=--drafter=ngram; may be repeated.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to FILE.")] = None,
) -> None:
    """Measure a server under load: first tokens, gaps and throughput of many streams, plain and with drafts, beside llama.cpp's and vLLM's."""
    check_output("--json", json_file)
    use_threads()
    import json

    from polydraft.bench import serving
    from polydraft.bench.record import write_texts

    found = serving.run(
        model, streams=streams or serving.STREAMS, max_tokens=max_tokens, peer=peer, vllm=vllm, options=option or ()
    )
    typer.echo(serving.markdown(found))
    if json_file is not None:
        say_written(write_texts({json_file: json.dumps([each.figures() for each in found], indent=1) + "\n"}))


@app.command()
def file(
    model: Annotated[str, typer.Option(help="GGUF file, or a name of `polydraft models list` that is one.")],
    draft_model: given.DraftModel = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True, dir_okay=False, help='.jsonl or .jsonl.gz of "prompt", or "turns", and "category"; may be repeated.'
        ),
    ] = None,
    categories: Annotated[list[str] | None, typer.Option(help="Category of prompts; may be repeated. Default all.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts of each category.")] = 3,
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="Threads of both; may be repeated. Default 1 and all cores.")
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="May be repeated. Default 0 and 1.")] = None,
    chain: Annotated[
        list[int] | None, typer.Option(min=1, help="Length of a fixed chain of drafts; may be repeated. Default 3.")
    ] = None,
    peer_mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Of llama.cpp: plain, draft, or an n-gram type such as ngram_mod; may be repeated. Default plain, draft, ngram_simple."
        ),
    ] = None,
    max_tokens: Annotated[int, given.sampling("Tokens of each continuation.", min=2)] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Measured repetitions of every prompt.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Markdown FILE of the tables; continuations are kept beside it, and a cut-off run goes on."
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


def _yardstick(
    model: str,
    heads: list[Path],
    ways: list[str],
    prompts: Path | None,
    temperatures: list[float],
    out: Path | None,
    quick: bool,
    num_questions: int,
    num_tokens: int,
    repetitions: int,
) -> None:
    import json

    from polydraft.bench.questions import questions
    from polydraft.bench.record import write_texts
    from polydraft.bench.yardstick import Yardstick, markdown, picture

    if prompts is None:
        raise InvalidInputError("--model was given without --prompts; expected a .jsonl file of questions. Name one.")
    num_questions = 2 if quick else num_questions
    max_tokens = 16 if quick else num_tokens
    yardstick = Yardstick(model, heads, ways)
    with bars("measuring") as step:
        report = yardstick.run(
            questions([prompts], num_questions)[:num_questions],
            temperatures,
            max_tokens=max_tokens,
            repetitions=repetitions,
            progress=step,
        )
    typer.echo(markdown(report))
    if out is not None:
        out.mkdir(exist_ok=True)
        say_written(
            write_texts({out / "yardstick.json": json.dumps(report, indent=1) + "\n", out / "yardstick.md": markdown(report)})
        )
        picture(report, out / "yardstick.png")
