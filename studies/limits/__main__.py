"""`python -m studies.limits`: acceptance and tokens per step of every verifier on real text, against what any verifier could accept."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft.cli.files import read_text
from polydraft.cli.options import Only, configured
from polydraft.cli.progress import bars
from polydraft.cli.start import quiet
from polydraft.config import Config, EngineConfig, setting
from studies.limits import tables
from studies.limits.contexts import LimitSettings
from studies.limits.measurement import Limits
from studies.limits.picture import picture
from studies.limits.relaxed import markdown as lossy_table
from studies.limits.relaxed import relaxed
from studies.limits.thirds import by_overlap, write_csv
from studies.limits.thirds import markdown as thirds_table


@dataclass(frozen=True, kw_only=True)
class LimitOptions(Config):
    """What is measured."""

    out: Path = setting("Folder that is written; it is made", Path, Path("build/limits"))
    quick: bool = setting("Few contexts: to see that it runs, not to compare", bool, False, flag="--quick")
    contexts: int = setting("Number of places in the texts where paths are drawn", int, 240, low=6)
    node_contexts: int = setting("Number of places where single nodes are measured", int, 60, low=0)
    tree_contexts: int = setting(
        "Number of places where draft trees of 32 nodes are measured, with single nodes", int, 60, low=0
    )
    rule: Sequence[str] = setting(
        "Verification method for paths; may be repeated; block and traversal come along",
        list,
        (),
        unset="all",
    )
    temperature: float = setting("Sampling temperature of the path tables", float, 1.0, low=0.01)
    top_p: float = setting("Top-p threshold of the path tables", float, 1.0, low=0.01, high=1.0)
    drafts: int = setting("Number of drafts of each kind at each context", int, 1, low=1)
    text: Path | None = setting("UTF-8 text file", Path, unset="modules the embedded pair never saw")
    seed: int = setting("Random seed of places and draws", int, 0)


@configured
def main(
    *,
    config: Annotated[EngineConfig, Only("model", "draft_model", "head", model=None)],
    options: LimitOptions,
) -> None:
    """Write limits.json, limits.md, five .csv and limits.png: for the embedded pair, or for a pair of your own."""
    quiet()
    names = ("contexts", "node_contexts", "tree_contexts", "temperature", "top_p", "drafts", "seed")
    chosen: dict[str, Any] = {name: getattr(options, name) for name in names} | {"rules": tuple(options.rule)}
    if options.quick:
        chosen |= {"contexts": min(options.contexts, 6)}
        chosen |= {name: min(chosen[name], 3) for name in ("node_contexts", "tree_contexts")}
    limits = Limits(
        LimitSettings(**chosen),
        target=config.model,
        draft=config.draft_model,
        head=None if config.head is None else str(config.head),
        texts=None if options.text is None else [read_text("--text", options.text)],
    )
    with bars("measuring") as step:
        report = tables.as_dict(limits.run(lambda: step(limits.steps)), "python -m studies.limits")
    report |= {"relaxed": relaxed(limits), "by_overlap": by_overlap(limits.paths)}
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    picture(report, out / "limits.png")
    written = [*tables.write(report, out / "limits.json"), *write_csv(report, out), out / "limits.png"]
    with (out / "limits.md").open("a", encoding="utf-8") as page:
        page.write((lossy_table(report) if report["relaxed"] else "") + thirds_table(report))
    for path in written:
        typer.echo(f"wrote {path}", err=True)


app = typer.Typer(pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
