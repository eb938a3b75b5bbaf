"""`python -m studies.limits`: every rule on real text, as `polydraft limits` measures it, with the picture of docs/theory-results.md."""

from pathlib import Path
from typing import Annotated

import typer

from polydraft.bench.limits import Limits, tables
from polydraft.bench.limits.contexts import LimitSettings
from studies.limits.picture import picture
from studies.limits.relaxed import markdown as lossy_table
from studies.limits.relaxed import relaxed
from studies.limits.thirds import by_overlap, write_csv
from studies.limits.thirds import markdown as thirds_table
from studies.options import Out, Quick

__all__ = ["main"]


def main(
    out: Out = Path("build/limits"),
    quick: Quick = False,
    contexts: Annotated[int, typer.Option(help="Places in the texts where paths are drawn.")] = 240,
    node_contexts: Annotated[int, typer.Option(help="Places where single nodes are measured; 0: none.")] = 60,
    rule: Annotated[list[str] | None, typer.Option(help="Path rule to measure; may be repeated; all without it.")] = None,
) -> None:
    """Write limits.json, limits.md, three .csv and limits.png for the embedded pair."""
    if quick:
        contexts, node_contexts = 6, 3
    settings = LimitSettings(contexts=contexts, node_contexts=node_contexts, rules=tuple(rule or ()))
    limits = Limits(settings)
    report = tables.as_dict(limits.run(), "python -m studies.limits") | {
        "relaxed": relaxed(limits),
        "by_overlap": by_overlap(limits.paths),
    }
    out.mkdir(parents=True, exist_ok=True)
    picture(report, out / "limits.png")
    written = [*tables.write(report, out / "limits.json"), *write_csv(report, out), out / "limits.png"]
    with (out / "limits.md").open("a", encoding="utf-8") as page:
        page.write((lossy_table(report) if report["relaxed"] else "") + thirds_table(report))
    for path in written:
        typer.echo(f"wrote {path}", err=True)


if __name__ == "__main__":
    typer.run(main)
