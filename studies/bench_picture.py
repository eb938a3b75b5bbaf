"""`python -m studies.bench_picture REPORT.json`: the picture of what `polydraft bench --report REPORT.json` measured, beside it."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from studies.labels import PEERS, label


def picture(report: dict[str, Any], path: Path) -> None:
    """Tokens per second of each contender, fastest on top, with quartiles; ours in colour, what failed its check hatched."""
    from matplotlib import pyplot as plt

    rows = sorted(report["rows"], key=lambda r: r["tokens_per_second"])
    figure, axes = plt.subplots(figsize=(6.4, 1 + 0.55 * len(rows)), layout="constrained")
    for y, row in enumerate(rows):
        low, high = row["spread"]
        rate = row["tokens_per_second"]
        axes.barh(
            y,
            rate,
            color="tab:gray" if row["contender"].startswith(PEERS) else "tab:blue",
            hatch=None if row["distribution_check"]["passed"] else "//",
            xerr=[[max(rate - low, 0)], [max(high - rate, 0)]],
        )
        axes.text(max(rate, high), y, f" {rate:.0f}", va="center", fontsize=13)
    axes.set_yticks(range(len(rows)), [label(r["contender"]) for r in rows], fontsize=12)
    axes.tick_params(axis="x", labelsize=12)
    axes.set_xlim(right=1.3 * max(max(row["tokens_per_second"], row["spread"][1]) for row in rows))
    axes.set_xlabel(f"tokens per second, temperature {report['settings']['temperature']:g}", fontsize=13)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(report: Annotated[Path, typer.Argument(help="File of `polydraft bench --report`.")]) -> None:
    """Draw tokens per second of every contender into a PNG of the same name."""
    out = report.with_suffix(".png")
    picture(json.loads(report.read_text(encoding="utf-8")), out)
    typer.echo(f"wrote {out}", err=True)


if __name__ == "__main__":
    typer.run(main)
