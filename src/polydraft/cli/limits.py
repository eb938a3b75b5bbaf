"""`polydraft limits`: how much every rule keeps on real text, against what any rule could keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft.cli.files import check_output, read_text, say_written
from polydraft.cli.options import Only, configured
from polydraft.cli.progress import bars
from polydraft.cli.start import quiet
from polydraft.config import Config, EngineConfig, setting


@dataclass(frozen=True, kw_only=True)
class LimitOptions(Config):
    """What is measured."""

    contexts: int = setting("Number of places in the texts where paths are drawn", int, 240, low=6)
    node_contexts: int = setting("Number of places where single nodes are measured", int, 60, low=0)
    rule: Sequence[str] = setting(
        "Verification method for paths; may be repeated; block and traversal come along", list, (), unset="all"
    )
    temperature: float = setting("Sampling temperature of the path tables", float, 1.0, low=0.01)
    top_p: float = setting("Top-p threshold of the path tables", float, 1.0, low=0.01, high=1.0)
    drafts: int = setting("Number of drafts of each kind at each context", int, 1, low=1)
    text: Path | None = setting("UTF-8 text file", Path, unset="modules the embedded pair never saw")
    seed: int = setting("Random seed of places and draws", int, 0)


@configured
def limits(
    *,
    config: Annotated[EngineConfig, Only("target", "draft", "head")],
    options: LimitOptions,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all figures, and beside it a .md.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few contexts: to see that it runs, not to compare.")] = False,
) -> None:
    """Measure acceptance and tokens per step of every rule against the optimum, on real text."""
    check_output("--json", json_file)
    quiet()
    from polydraft.bench.limits import Limits, tables
    from polydraft.bench.limits.contexts import LimitSettings

    names = ("contexts", "node_contexts", "temperature", "top_p", "drafts", "seed")
    chosen: dict[str, Any] = {name: getattr(options, name) for name in names} | {"rules": tuple(options.rule)}
    head, text = config.head, options.text
    if quick:
        chosen |= {"contexts": min(options.contexts, 6), "node_contexts": min(options.node_contexts, 3)}
    measurement = Limits(
        LimitSettings(**chosen),
        target=config.target,
        draft=config.draft,
        head=None if head is None else str(head),
        texts=None if text is None else [read_text("--text", text)],
    )
    with bars("measuring") as step:
        report = tables.as_dict(measurement.run(partial(step, measurement.steps)))
    typer.echo(tables.markdown(report))
    if json_file is not None:
        say_written(tables.write(report, json_file))
