"""The findings of `polydraft limits` as JSON, CSV tables, markdown and a picture."""

import csv
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polydraft.bench.limits_places import Findings

__all__ = ["as_dict", "markdown", "picture", "write"]

LAWS = ("IID", "WITHOUT_REPLACEMENT", "GREEDY_PLUS_ONE", "POINT_MASS", "COUPLED", "LISTED")


def as_dict(found: Findings, hardware: dict[str, Any], command: str) -> dict[str, Any]:
    """Everything as plain data. hardware, command: what the run was made on and with."""
    return {
        "hardware": hardware,
        "command": command,
        "settings": asdict(found.settings),
        "mean_overlap": found.mean_overlap,
        "nodes": found.nodes,
        "paths": found.paths,
        "by_overlap": found.by_overlap,
        "relaxed": found.relaxed,
    }


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)])


def _acceptance(report: dict[str, Any], column: str, values: Sequence[float], where: dict[str, float]) -> str:
    cells = {
        (r["law"], r["rule"], r[column]): f"{r['acceptance']:.3f}"
        for r in report["nodes"]
        if all(r[k] == v for k, v in where.items())
    }
    rows = sorted({(law, rule) for law, rule, _ in cells}, key=lambda x: (LAWS.index(x[0]), x[1] != "optimum", x[1]))
    lines = [[rule, law, *(cells.get((law, rule, value), "-") for value in values)] for law, rule in rows]
    return _grid(["rule", "draws", *(f"{value:g}" for value in values)], lines)


def _efficiency(report: dict[str, Any], K: int, depths: Sequence[int]) -> str:
    """One table for K paths, best first by the deepest column; one path and one long chain for comparison."""
    cells: dict[tuple[str, str, int], dict[str, Any]] = {}
    for r in report["paths"]:
        if r["drafts"] == "chain of K L":
            for L in depths:
                if r["nodes"] == K * L:
                    cells[r["rule"], "one chain of the same nodes", L] = r
        elif r["paths"] == K or (r["paths"] == 1 and r["drafts"] == "chain"):
            cells[r["rule"], "one path" if r["paths"] == 1 else r["drafts"], r["depth"]] = r
    names = {(rule, drafts) for rule, drafts, _ in cells}
    last = depths[-1]
    order = sorted(names, key=lambda x: (x[0] != "bound", -cells[x[0], x[1], last]["tokens_per_call"]))
    lines: list[list[str]] = []
    for rule, drafts in order:
        row = [rule, drafts]
        for L in depths:
            r = cells[rule, drafts, L]
            row.append(f"{r['tokens_per_call']:.2f} ± {r['standard_error']:.2f}")
        for against in ("over_traversal", "over_block"):
            row += [_percent(cells[rule, drafts, L][against]) for L in depths]
        lines.append(row)
    over = [f"% over {name}, {L}" for name in ("traversal", "block") for L in depths]
    return _grid(["rule", "drafts", *(f"L = {L}" for L in depths), *over], lines)


def _percent(value: Sequence[float] | None) -> str:
    return f"{100 * (value[0] - 1):+.1f} ± {100 * value[1]:.1f}" if value else "-"


def _relaxed(report: dict[str, Any], temperatures: Sequence[float]) -> str:
    """Total variation (largest of any context in brackets), then how often the draft is kept."""
    cell = {(r["rule"], r["temperature"]): r for r in report["relaxed"]}
    lines: list[list[str]] = []
    for rule in dict.fromkeys(r["rule"] for r in report["relaxed"]):
        rows = [cell[rule, T] for T in temperatures]
        tv = [f"{r['tv']:.3f} ± {r['standard_error']:.3f} ({r['largest']:.2f})" for r in rows]
        lines.append([rule, *tv, *(f"{r['kept']:.3f}" for r in rows)])
    lossless = {r["temperature"]: r["kept_lossless"] for r in report["relaxed"]}
    lines.append(["lossless", *["0"] * len(temperatures), *(f"{lossless[T]:.3f}" for T in temperatures)])
    return _grid(["rule", *(f"TV, T = {T:g}" for T in temperatures), *(f"kept, T = {T:g}" for T in temperatures)], lines)


def markdown(report: dict[str, Any]) -> str:
    """All tables, with settings and command."""
    s = report["settings"]
    T, n = s["temperature"], s["drafts_by_temperature"]
    parts = [
        f"`{report['command']}`: {s['contexts']} contexts for paths and {s['node_contexts']} for nodes, seed {s['seed']}; one draft "
        f"overlaps with the target by {report['mean_overlap']:.3f} on average. ± is a standard error over contexts.",
    ]
    if report["nodes"]:
        parts += [
            f"Acceptance at one node by number of drafts, temperature {T:g}:",
            _acceptance(report, "drafts", s["num_drafts"], {"temperature": T}),
            f"Acceptance at one node by temperature, {n} drafts:",
            _acceptance(report, "temperature", s["temperatures"], {"drafts": n}),
        ]
    if report["relaxed"]:
        parts += [
            "Rules that are not lossless: total variation of the next token from the target's law for one draft (largest of any "
            "context in brackets), and how often the draft is kept:",
            _relaxed(report, s["temperatures"]),
        ]
    for K in s["num_paths"]:
        parts += [f"Tokens per call, {K} paths of L tokens, temperature {T:g}:", _efficiency(report, K, s["depths"])]
    parts += ["Over block verification of one path, by how well the draft fits at the root (thirds of the contexts):"]
    thirds = sorted({(r["third"], r["overlap"]) for r in report["by_overlap"]})
    cell = {(r["rule"], r["paths"], r["third"]): r for r in report["by_overlap"]}
    lines = [
        [rule, str(K), *(_percent((r["over_block"], r["standard_error"])) for t, _ in thirds if (r := cell[rule, K, t]))]
        for K in s["num_paths"]
        for rule in ("traversal", "multipath", "greedy_traversal")
        if (rule, K, 0) in cell
    ]
    parts.append(_grid(["rule", "paths", *(f"% at overlap {overlap:.2f}" for _, overlap in thirds)], lines))
    return "\n\n".join(parts) + "\n"


def _csv(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    out = io.StringIO()
    flat = [{k: v[0] if isinstance(v, list) else v for k, v in row.items()} for row in rows]
    writer = csv.DictWriter(out, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def picture(report: dict[str, Any], path: Path) -> None:
    """Panels: acceptance by drafts and by temperature, tokens per call against the bound, gains by overlap, what relaxed rules cost."""
    from matplotlib import pyplot as plt

    s = report["settings"]
    figure, axes = plt.subplots(3, 2, figsize=(14, 15), layout="constrained")
    shown = [
        ("optimum", "IID", "black"),
        ("transport", "IID", "tab:blue"),
        ("kseq", "IID", "tab:cyan"),
        ("recursive", "IID", "tab:green"),
        ("optimum", "WITHOUT_REPLACEMENT", "gray"),
        ("recursive_wor", "WITHOUT_REPLACEMENT", "tab:olive"),
        ("greedy_plus_one", "GREEDY_PLUS_ONE", "tab:red"),
        ("match", "POINT_MASS", "tab:pink"),
        ("race", "COUPLED", "tab:purple"),
    ]
    for axis, column, where in (
        (axes[0, 0], "drafts", ("temperature", s["temperature"])),
        (axes[0, 1], "temperature", ("drafts", s["drafts_by_temperature"])),
    ):
        for rule, law, colour in shown:
            rows = sorted(
                (r for r in report["nodes"] if (r["rule"], r["law"]) == (rule, law) and r[where[0]] == where[1]),
                key=lambda r: r[column],
            )
            style = "--" if rule == "optimum" else "-"
            axis.plot(
                [r[column] for r in rows], [r["acceptance"] for r in rows], style, color=colour, label=f"{rule}, {law.lower()}"
            )
        axis.set_xlabel(f"{column} ({where[0]} {where[1]:g})")
        axis.set_ylabel("acceptance at one node")
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    _draw_paths(axes[1, 0], report)
    _draw_thirds(axes[1, 1], report)
    _draw_relaxed(axes[2], report)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_paths(axis: Any, report: dict[str, Any]) -> None:
    L = report["settings"]["depths"][len(report["settings"]["depths"]) // 2]
    for rule in ("bound", "greedy_traversal", "multipath", "traversal", "transport", "kseq", "recursive"):
        rows = sorted(
            (r for r in report["paths"] if (r["rule"], r["drafts"], r["depth"]) == (rule, "paths", L)), key=lambda r: r["paths"]
        )
        if not rows:
            continue
        axis.errorbar(
            [r["paths"] for r in rows],
            [r["tokens_per_call"] for r in rows],
            [r["standard_error"] for r in rows],
            fmt="--" if rule == "bound" else "o-",
            color="black" if rule == "bound" else None,
            label=rule,
        )
    block = next(r for r in report["paths"] if (r["rule"], r["drafts"], r["depth"]) == ("block", "chain", L))
    axis.axhline(block["tokens_per_call"], color="gray", linestyle=":", label="block, one path")
    axis.set_xticks([1, *report["settings"]["num_paths"]])
    axis.set_xlabel(f"paths of {L} tokens")
    axis.set_ylabel("tokens per call")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _draw_thirds(axis: Any, report: dict[str, Any]) -> None:
    K = max(report["settings"]["num_paths"])
    for rule in ("traversal", "multipath", "greedy_traversal"):
        rows = sorted((r for r in report["by_overlap"] if (r["rule"], r["paths"]) == (rule, K)), key=lambda r: r["overlap"])
        if not rows:
            continue
        axis.errorbar(
            [r["overlap"] for r in rows],
            [r["over_block"] for r in rows],
            [r["standard_error"] for r in rows],
            fmt="o-",
            label=rule,
        )
    axis.axhline(1, color="gray", linestyle=":")
    axis.set_xlabel("overlap of draft and target at the root (thirds of the contexts)")
    axis.set_ylabel(f"tokens per call over block verification, {K} paths")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _draw_relaxed(axes: Any, report: dict[str, Any]) -> None:
    rules = dict.fromkeys(r["rule"] for r in report["relaxed"])
    for rule in rules:
        rows = [r for r in report["relaxed"] if r["rule"] == rule]
        x = [r["temperature"] for r in rows]
        axes[0].errorbar(x, [r["tv"] for r in rows], [r["standard_error"] for r in rows], fmt="o-", label=rule)
        axes[1].plot(x, [r["kept"] for r in rows], "o-", label=rule)
    rows = [r for r in report["relaxed"] if r["rule"] == next(iter(rules), None)]
    axes[1].plot([r["temperature"] for r in rows], [r["kept_lossless"] for r in rows], "--", color="black", label="lossless")
    for axis, label in zip(axes, ("total variation from the target's law, one token", "one draft is kept"), strict=True):
        axis.set_xlabel("temperature")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if rules:
            axis.legend(fontsize=8)


def write(report: dict[str, Any], path: Path) -> list[Path]:
    """The JSON file, and beside it the tables (.md, three .csv) and the picture. Renamed into place: an old file survives a stop."""
    stem = path.with_suffix("")
    texts = {
        path: json.dumps(report, indent=1) + "\n",
        path.with_suffix(".md"): markdown(report),
        stem.with_name(f"{stem.name}-nodes.csv"): _csv(report["nodes"]),
        stem.with_name(f"{stem.name}-paths.csv"): _csv(report["paths"]),
        stem.with_name(f"{stem.name}-relaxed.csv"): _csv(report["relaxed"]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, content in texts.items():
        partial = file.with_name(file.name + ".partial")
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, file)
    picture(report, path.with_suffix(".png"))
    return [*texts, path.with_suffix(".png")]
