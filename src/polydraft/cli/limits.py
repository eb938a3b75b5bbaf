"""`polydraft limits`: how much every rule keeps on real text, against what any rule could keep."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli import options as given
from polydraft.cli.files import check_output, read_text, say_written
from polydraft.cli.progress import bars
from polydraft.cli.start import quiet


def limits(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write FILE, and beside it a .md.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few contexts: to see that it runs, not to compare rules.")] = False,
    contexts: Annotated[int, typer.Option(min=6, help="Places in the texts where paths are drawn.")] = 240,
    node_contexts: Annotated[int, typer.Option(min=0, help="Places where single nodes are measured; 0: none.")] = 60,
    rule: Annotated[
        list[str] | None,
        typer.Option(help="Path rule to measure; may be repeated; all without it. block and traversal come along."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the path tables.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Of the path tables.")] = 1.0,
    drafts: Annotated[int, typer.Option(min=1, help="Drafts of each kind at each context.")] = 1,
    model: given.Model = None,
    draft_model: given.DraftModel = None,
    head: given.Head = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 file to read; default: modules the embedded pair never saw.")] = None,
    seed: Annotated[int, typer.Option(help="Of the places and the draws.")] = 0,
) -> None:
    """Measure acceptance and tokens per step of every rule against the optimum, on real text."""
    check_output("--json", json_file)
    quiet()
    from polydraft.bench.limits import Limits, tables
    from polydraft.bench.limits.contexts import Settings

    if quick:
        contexts, node_contexts = min(contexts, 6), min(node_contexts, 3)
    settings = Settings(
        contexts=contexts,
        node_contexts=node_contexts,
        temperature=temperature,
        seed=seed,
        rules=tuple(rule or ()),
        top_p=top_p,
        drafts=drafts,
    )
    made = Limits(
        settings,
        target=model,
        draft=draft_model,
        head=None if head is None else str(head),
        texts=None if text is None else [read_text("--text", text)],
    )
    with bars("measuring") as step:
        report = tables.as_dict(made.run(partial(step, made.steps)))
    typer.echo(tables.markdown(report))
    if json_file is not None:
        say_written(tables.write(report, json_file))
