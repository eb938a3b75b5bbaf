"""The plot of the study: tokens per step and speed by the number of paths, for every way of drawing them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.head_paths.tables import Row, best
from studies.head_paths.values import BOUND

__all__ = ["picture"]

STYLES = {
    "iid": ("tab:blue", "-"),
    "without_replacement": ("tab:green", "-"),
    "systematic": ("tab:red", "-"),
    "distinct spares": ("tab:gray", "-"),
}
DEPTH = 4
"""Of the paths whose tokens per step are drawn."""


def picture(timed: Sequence[Row], free: Sequence[Row], file: Path) -> None:
    """Draw it into a PNG. timed, free: rows at measured prices, and where those of a pass cost nothing."""
    from matplotlib import pyplot as plt

    settings = list(dict.fromkeys((row.text, row.case.temperature) for row in timed))
    figure, axes = plt.subplots(
        3, len(settings), figsize=(3.4 * len(settings), 8.4), layout="constrained", sharey="row", squeeze=False
    )
    for column, setting in enumerate(settings):
        some, others = ([r for r in rows if (r.text, r.case.temperature) == setting] for rows in (timed, free))
        axes[0][column].set_title(f"{setting[0]}, T = {setting[1]:g}", fontsize=11)
        _tokens(axes[0][column], some)
        _speeds(axes[1][column], some)
        _speeds(axes[2][column], others)
        axes[2][column].set_xlabel("number of paths K")
        for axis in axes[:, column]:
            axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"tokens per step, depth {DEPTH}")
    axes[1][0].set_ylabel("speed over plain, as measured")
    axes[2][0].set_ylabel("speed over plain, rows free")
    axes[0][-1].legend(fontsize=8, frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _chain(rows: Sequence[Row], depth: int | None = None) -> list[Row]:
    return [r for r in rows if r.case.kind == "chain" and r.case.verifier != BOUND and depth in (None, r.case.depth)]


def _tokens(axis: Any, rows: Sequence[Row]) -> None:
    """The best verifier of each kind at one depth, and what none exceeds."""
    for kind, (colour, line) in STYLES.items():
        points = {1: max(r.tokens.mean() for r in _chain(rows, DEPTH))}
        most = {r.case.paths: r.tokens.mean() for r in rows if r.case[1] in (kind, "chain") and r.case[3:] == (DEPTH, BOUND)}
        for row in rows:
            if row.case.kind == kind and row.case.depth == DEPTH and row.case.verifier != BOUND:
                points[row.case.paths] = max(points.get(row.case.paths, 0.0), row.tokens.mean())
        axis.plot(list(points), list(points.values()), line, color=colour, marker="o", markersize=3, label=kind.replace("_", " "))
        label = "no verifier exceeds" if kind == "iid" else None
        axis.plot(sorted(most), [most[paths] for paths in sorted(most)], ":", color=colour, linewidth=1.2, label=label)


def _speeds(axis: Any, rows: Sequence[Row]) -> None:
    """The fastest depth and verifier of each kind and number of paths."""
    for kind, (colour, line) in STYLES.items():
        points = {1: best(_chain(rows)).speed}
        for paths in sorted({r.case.paths for r in rows if r.case.kind == kind and r.case.paths > 1}):
            points[paths] = best([r for r in rows if r.case[1:3] == (kind, paths) and r.case.verifier != BOUND]).speed
        axis.plot(list(points), list(points.values()), line, color=colour, marker="o", markersize=3)
    axis.axhline(1.0, color="black", linestyle=":", linewidth=1)
