"""The plot of the study: what several paths gain by how often one drafted token is accepted, with a target's measured passes and with free rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from studies.several_drafts.comparison import Comparison, comparisons
from studies.several_drafts.verified import Values

__all__ = ["picture"]

COLOURS = {"2 paths": "tab:blue", "3 paths": "tab:green", "4 paths": "tab:red", "chain with spares": "tab:gray"}


def picture(values: Sequence[Values], passes: Mapping[str, Sequence[float]], file: Path) -> None:
    """Draw it into a PNG."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.6), layout="constrained", sharey=True)
    titles = "CPU: forward passes as measured", "Free rows: a forward pass of many rows costs as one"
    for axis, title, free in zip(axes, titles, (False, True), strict=True):
        _gains(axis, comparisons(values, passes, free))
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("how often one drafted token is accepted")
    axes[0].set_ylabel("speed over the best single path, % (bars: two standard errors)")
    axes[0].legend(fontsize=9, frameon=False, loc="upper left")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _gains(axis: object, compared: Sequence[Comparison]) -> None:
    for shift, (name, colour) in enumerate(COLOURS.items()):
        points = list[tuple[float, float, float]]()
        for one in compared:
            fits = dict(one.families())[name]
            gain = one.best(fits).over_chain
            points.append((one.overlap + 0.004 * (shift - 1.5), 100 * (gain.mean - 1), 200 * gain.standard_error))
        x, y, error = zip(*sorted(points), strict=True)
        axis.errorbar(x, y, error, fmt="o", color=colour, label=name, markersize=4, capsize=2, linewidth=1.2)  # type: ignore[attr-defined]
    axis.axhline(0, color="black", linestyle=":", linewidth=1.2)  # type: ignore[attr-defined]
    axis.grid(alpha=0.3)  # type: ignore[attr-defined]
