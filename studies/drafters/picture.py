"""The pictures of the comparison of drafters: tokens per step by workload, and how it grows in a long request."""

from pathlib import Path
from typing import Any

from studies.drafters.comparison import WAYS, WORKLOADS
from studies.labels import label


def pictures(report: dict[str, Any], folder: Path) -> list[Path]:
    """tokens_per_step.png and learning_curve.png in the folder."""
    _bars(report, folder / "tokens_per_step.png")
    _curves(report, folder / "learning_curve.png")
    return [folder / "tokens_per_step.png", folder / "learning_curve.png"]


def _bars(report: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(r["contender"] for r in report["rows"]))[::-1]
    figure, axes = plt.subplots(
        len(WAYS), figsize=(6.4, len(WAYS) * (0.8 + 0.36 * len(names))), layout="constrained"
    )
    for way, ax in zip(WAYS, axes, strict=True):
        for i, workload in enumerate(WORKLOADS):
            rows = {r["contender"]: r for r in report["rows"] if (r["way"], r["workload"]) == (way, workload)}
            y = [names.index(name) + 0.27 * (1 - i) for name in rows]
            values, errors = ([r[k] for r in rows.values()] for k in ("tokens_per_step", "error"))
            ax.barh(y, values, 0.26, xerr=errors, label=workload)
        ax.set_xlabel(f"tokens per step, {way}", fontsize=13)
        ax.set_xlim(left=1)
        ax.set_ylim(-0.6, len(names) - 0.4)
        ax.set_yticks(range(len(names)), [label(name) for name in names], fontsize=12)
        ax.tick_params(axis="x", labelsize=12)
    axes[0].legend(fontsize=12)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _curves(report: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(6.4, 4.8), layout="constrained")
    window = report["curve_window"]
    for name, curve in report["curves"].items():
        ax.plot(
            [(i + 0.5) * window for i in range(len(curve))],
            curve,
            marker="o",
            markersize=3,
            label=label(name),
        )
    ax.set_xlabel("tokens of the text so far", fontsize=13)
    ax.set_ylabel("tokens per step", fontsize=13)
    ax.tick_params(labelsize=12)
    ax.legend(fontsize=11)
    figure.savefig(path, dpi=120)
    plt.close(figure)
