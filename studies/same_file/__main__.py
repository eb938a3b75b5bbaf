"""`python -m studies.same_file`: a GGUF file here, in llama.cpp and in transformers, prompt by prompt."""

from pathlib import Path
from typing import Annotated

import typer

from polydraft.bench.record import write_texts
from polydraft.cli.files import check_output, say_written
from polydraft.cli.progress import bars
from polydraft.errors import unknown_name
from polydraft.numerics.processor import usable_cores
from studies.question_files import QUESTIONS, questions
from studies.same_file.comparison import FileComparison
from studies.same_file.page import page
from studies.same_file.records import PEER_MODES


def main(
    model: Annotated[str, typer.Option(help="GGUF file, or a name of `polydraft models list` that is one.")],
    draft_model: Annotated[
        str | None, typer.Option(help="Draft model: a smaller model with the same vocabulary.")
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='.jsonl or .jsonl.gz of "prompt", or "turns", and "category"; may be repeated.',
        ),
    ] = None,
    categories: Annotated[
        list[str] | None, typer.Option(help="Category of prompts; may be repeated. Default: all.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts of each category.")] = 3,
    threads: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Number of CPU threads of both; may be repeated. Default: 1 and all cores."),
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0, help="Sampling temperature; may be repeated. Default: 0 and 1."),
    ] = None,
    chain: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Length of a fixed chain of drafts; may be repeated. Default 3."),
    ] = None,
    peer_mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Mode of llama.cpp: plain, draft, or an n-gram type such as ngram_mod; may be repeated. Default plain, draft, ngram_simple."
        ),
    ] = None,
    transformers: Annotated[
        bool,
        typer.Option(
            "--transformers", help="Run generate of transformers, too, plain and assisted by the draft model."
        ),
    ] = False,
    llama_server: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="llama.cpp's server, built by python -m studies.peers. Default: its wheel.",
        ),
    ] = None,
    ik_server: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="ik_llama.cpp's server, built by python -m studies.peers --peer ik_llama.cpp.",
        ),
    ] = None,
    openvino: Annotated[
        bool, typer.Option("--openvino", help="Run OpenVINO GenAI, too, plain and with its lookups.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=2, help="Number of new tokens of each continuation.")] = 64,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Number of measured repetitions of every prompt.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Markdown file for the page; a CSV file of every kind of prompt and the continuations lie beside it, and a cut-off run goes on.",
        ),
    ] = None,
) -> None:
    """Compare engines on a GGUF file, prompt by prompt: plain, with a draft model, and with each engine's own speculation."""
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
        ik_server=ik_server,
        openvino=openvino,
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
    texts = page(comparison, out or Path("same-file.md"))
    typer.echo(next(iter(texts.values())))
    if out is not None:
        say_written(write_texts(texts))


if __name__ == "__main__":
    typer.run(main)
