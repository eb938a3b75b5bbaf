"""`python -m studies.limits`: every rule on real text, as `polydraft limits` measures it, with the picture of docs/theory-results.md."""

from pathlib import Path

import typer

from polydraft.bench.limits import Limits, tables
from polydraft.bench.limits.contexts import Settings
from studies.limits.picture import picture
from studies.options import Out, Quick

__all__ = ["main"]


def main(out: Out = Path("build/limits"), quick: Quick = False) -> None:
    """Write limits.json, limits.md, three .csv and limits.png for the embedded pair."""
    settings = Settings(contexts=6, node_contexts=3) if quick else Settings()
    report = tables.as_dict(Limits(settings).run(), "python -m studies.limits")
    out.mkdir(parents=True, exist_ok=True)
    picture(report, out / "limits.png")
    for path in [*tables.write(report, out / "limits.json"), out / "limits.png"]:
        typer.echo(f"wrote {path}", err=True)


if __name__ == "__main__":
    typer.run(main)
