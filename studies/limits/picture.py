"""The picture of `studies.limits`: six panels, every point with its error, legends beside the data.

Bars are two standard errors over contexts to either side: values whose bars overlap were not told apart.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[dict[str, Any]]

NODE_RULES = (
    ("optimum", "IID", "black"),
    ("greedy_traversal", "IID", "tab:orange"),
    ("transport", "IID", "tab:blue"),
    ("kseq", "IID", "tab:cyan"),
    ("recursive", "IID", "tab:green"),
    ("optimum", "WITHOUT_REPLACEMENT", "gray"),
    ("recursive_wor", "WITHOUT_REPLACEMENT", "tab:olive"),
    ("greedy_plus_one", "GREEDY_PLUS_ONE", "tab:red"),
    ("match", "POINT_MASS", "tab:pink"),
    ("race", "COUPLED", "tab:purple"),
)
"""Rule, distribution of its draws, colour."""
PATH_RULES = (
    "bound",
    "block",
    "greedy_traversal",
    "multipath",
    "traversal",
    "transport",
    "kseq",
    "recursive",
)
SHIFT = 0.008
"""Of the axis between the bars of two lines, so that none hides another."""


class _Panel:
    """One plot. Lines are drawn beside each other in the order in which they come, `count` of them."""

    def __init__(self, axis: Any, title: str, x: str, y: str, places: Sequence[float], count: int) -> None:
        self.axis = axis
        self.drawn = 0
        self.count = count
        self.shift = SHIFT * ((max(places) - min(places)) or 1)
        axis.set_title(title)
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.set_xticks(sorted(set(places)))
        axis.grid(alpha=0.3)

    def line(
        self, label: str, x: Sequence[float], y: Sequence[float], error: Sequence[float], **style: Any
    ) -> None:
        if not x:
            return
        moved = [value + (self.drawn - (self.count - 1) / 2) * self.shift for value in x]
        bars = [2 * e for e in error]
        self.axis.errorbar(
            moved,
            y,
            bars,
            label=label,
            **{"fmt": "o-", "markersize": 4, "capsize": 2, "linewidth": 1.2} | style,
        )
        self.drawn += 1

    def legend(self) -> None:
        if self.drawn:
            self.axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def draw(report: dict[str, Any]) -> Any:
    """The figure: acceptance by drafts and by temperature, tokens per step against the bound, gains by overlap, what relaxed rules cost.

    report: as `tables.as_dict` makes it.
    """
    from matplotlib import pyplot as plt

    s = report["settings"]
    figure, axes = plt.subplots(3, 2, figsize=(17, 15), layout="constrained")
    figure.suptitle(
        f"{s['contexts']} contexts for paths, {s['node_contexts']} for nodes; bars: two standard errors to either side",
        fontsize=10,
    )
    T = s["temperature"]
    n = s["drafts_by_temperature"]
    _acceptance(
        axes[0, 0],
        f"Acceptance of one of several drafts, temperature {T:g}",
        report,
        "drafts",
        "temperature",
        T,
    )
    _acceptance(
        axes[0, 1], f"Acceptance of one of {n} drafts, by temperature", report, "temperature", "drafts", n
    )
    _paths(axes[1, 0], report)
    _thirds(axes[1, 1], report)
    _relaxed(axes[2], report)
    return figure


def picture(report: dict[str, Any], path: Path) -> None:
    """Draw it into a PNG."""
    from matplotlib import pyplot as plt

    figure = draw(report)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _acceptance(axis: Any, title: str, report: dict[str, Any], column: str, fixed: str, value: float) -> None:
    given = [r for r in report["nodes"] if r[fixed] == value]
    panel = _Panel(axis, title, column, "acceptance rate", [r[column] for r in given] or [1], len(NODE_RULES))
    for rule, distribution, colour in NODE_RULES:
        rows = sorted(
            (r for r in given if (r["rule"], r["distribution"]) == (rule, distribution)),
            key=lambda r: r[column],
        )
        style = {"color": colour, "fmt": "--" if rule == "optimum" else "o-"}
        panel.line(f"{rule}, {distribution.lower()}", *_columns(rows, column, "acceptance"), **style)
    panel.legend()


def _columns(
    rows: Rows, x: str, y: str, error: str = "standard_error"
) -> tuple[list[float], list[float], list[float]]:
    return [r[x] for r in rows], [r[y] for r in rows], [r[error] for r in rows]


def _paths(axis: Any, report: dict[str, Any]) -> None:
    s = report["settings"]
    L = s["depths"][len(s["depths"]) // 2]
    places = [1, *s["num_paths"]]
    panel = _Panel(
        axis,
        f"Tokens per step by number of paths of {L} tokens",
        "iid paths",
        "tokens per step",
        places,
        len(PATH_RULES),
    )
    for rule in PATH_RULES:
        kind = "chain" if rule == "block" else "paths"
        rows = sorted(
            (r for r in report["paths"] if (r["rule"], r["drafts"], r["depth"]) == (rule, kind, L)),
            key=lambda r: r["paths"],
        )
        if not rows:
            continue  # the bound of few contexts
        style = (
            {"color": "black", "fmt": "--"}
            if rule == "bound"
            else {"color": "gray"}
            if rule == "block"
            else {}
        )
        label = {"bound": "no verifier exceeds", "block": "block, one path"}.get(rule, rule)
        panel.line(label, *_columns(rows, "paths", "tokens_per_step"), **style)
    panel.legend()


def _thirds(axis: Any, report: dict[str, Any]) -> None:
    K = max(report["settings"]["num_paths"])
    rules = ("traversal", "multipath", "greedy_traversal")
    title = f"{K} paths over block verification of one, by how well the draft fits"
    given = [r for r in report["by_overlap"] if r["paths"] == K]
    x = "overlap of draft and target at the root (thirds of the contexts)"
    y = "ratio of tokens per step"
    panel = _Panel(axis, title, x, y, [round(r["overlap"], 2) for r in given] or [1], len(rules))
    for rule in rules:
        rows = sorted((r for r in given if r["rule"] == rule), key=lambda r: r["overlap"])
        panel.line(rule, *_columns(rows, "overlap", "over_block"))
    axis.axhline(1, color="gray", linestyle=":")
    panel.legend()


def _relaxed(axes: Any, report: dict[str, Any]) -> None:
    rules = list(dict.fromkeys(r["rule"] for r in report["relaxed"]))
    places = report["settings"]["temperatures"]
    far = _Panel(
        axes[0],
        "Lossy verifiers: distance from the target distribution",
        "temperature",
        "total variation, one token",
        places,
        4,
    )
    kept = _Panel(
        axes[1], "Lossy verifiers: acceptance of one draft", "temperature", "acceptance rate", places, 5
    )
    for rule in rules:
        rows = [r for r in report["relaxed"] if r["rule"] == rule]
        far.line(rule, *_columns(rows, "temperature", "tv"))
        kept.line(rule, *_columns(rows, "temperature", "kept", "kept_error"))
    rows = [r for r in report["relaxed"] if r["rule"] == next(iter(rules), None)]
    style = {"color": "black", "fmt": "--"}
    kept.line(
        "any lossless verifier",
        *_columns(rows, "temperature", "kept_lossless", "kept_lossless_error"),
        **style,
    )
    far.legend()
    kept.legend()
