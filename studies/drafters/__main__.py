"""`python -m studies.drafters`: the drafters that need no training, at one node budget, in tables and pictures."""

from pathlib import Path

import typer

from studies.drafters import learning, tables
from studies.drafters.comparison import DrafterBench, compare
from studies.drafters.picture import pictures
from studies.options import Out, Quick


def main(out: Out = Path("build/drafters"), quick: Quick = False) -> None:
    """Write drafters.json, drafters.md, tokens_per_step.png and learning_curve.png."""
    bench = (
        DrafterBench(num_tokens=32, num_requests=2, index_bytes=200_000)
        if quick
        else DrafterBench(num_tokens=160)
    )
    report = compare(bench, program="python -m studies.drafters") | learning.further(
        bench, *((400, 100) if quick else (8000, 500))
    )
    out.mkdir(parents=True, exist_ok=True)
    written = [*tables.write(report, out), *pictures(report, out)]
    with (out / "drafters.md").open("a", encoding="utf-8") as page:
        page.write(learning.markdown(report))
    for path in written:
        typer.echo(f"wrote {path}", err=True)


if __name__ == "__main__":
    typer.run(main)
