"""`polydraft limits`: how much every rule keeps on real text, against what any rule could keep."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli.doctor import machine
from polydraft.cli.files import check_output
from polydraft.cli.quiet import quiet
from polydraft.errors import InvalidInputError

__all__ = ["limits"]


def limits(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write FILE, and beside it a .md and three .csv.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few contexts: to see that it runs, not to compare rules.")] = False,
    contexts: Annotated[int, typer.Option(min=6, help="Places in the texts where paths are drawn.")] = 240,
    node_contexts: Annotated[int, typer.Option(min=0, help="Places where single nodes are measured; 0: none.")] = 60,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="Path rule to measure; may be repeated; all without it. block and traversal come along."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the path tables.")] = 1.0,
    model: Annotated[str | None, typer.Option(help="Folder of the target; the embedded pair without it.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Folder of a smaller model with the same vocabulary.")] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 file to read; default: modules the embedded pair never saw.")] = None,
    seed: Annotated[int, typer.Option(help="Of the places and the draws.")] = 0,
) -> None:
    """Measure acceptance and tokens per call of every rule against the optimum, on real text; tables and CSV."""
    check_output("--json", json_file)
    quiet()
    from rich.progress import Progress

    from polydraft.bench.limits import Limits, tables
    from polydraft.bench.limits.contexts import Settings

    if quick:
        contexts, node_contexts = min(contexts, 6), min(node_contexts, 3)
    settings = Settings(
        contexts=contexts, node_contexts=node_contexts, temperature=temperature, seed=seed, rules=tuple(rule or ())
    )
    made = Limits(settings, target=model, draft=draft_model, texts=None if text is None else [_read(text)])
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("measuring", total=made.steps)
        found = made.run(lambda: bar.advance(task))
    report = tables.as_dict(found, machine(), " ".join(["polydraft", *sys.argv[1:]]))
    typer.echo(tables.markdown(report))
    if json_file is not None:
        for path in tables.write(report, json_file):
            typer.echo(f"wrote {path}", err=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{str(path)!r} could not be read ({error}); expected a file of UTF-8 text.") from error
