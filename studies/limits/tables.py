"""The findings of `python -m studies.limits` as JSON and markdown; `studies.limits` draws them."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polydraft.bench.record import markdown_table, provenance, write_texts
from studies.limits.contexts import BOUND_CONTEXTS
from studies.limits.measurement import LimitFindings

DISTRIBUTIONS = ("IID", "WITHOUT_REPLACEMENT", "GREEDY_PLUS_ONE", "POINT_MASS", "COUPLED", "LISTED")


def as_dict(found: LimitFindings, program: str = "polydraft") -> dict[str, Any]:
    """Everything as plain data. program: how the run was called."""
    return {**provenance(program), **asdict(found)}


def _acceptance(report: dict[str, Any], column: str, values: Sequence[float], where: dict[str, float]) -> str:
    cells = {
        (r["distribution"], r["rule"], r[column]): f"{r['acceptance']:.3f}"
        for r in report["nodes"]
        if all(r[k] == v for k, v in where.items())
    }
    rows = sorted(
        {(distribution, rule) for distribution, rule, _ in cells},
        key=lambda x: (DISTRIBUTIONS.index(x[0]), x[1] != "optimum", x[1]),
    )
    lines = [
        [rule, distribution, *(cells.get((distribution, rule, value), "-") for value in values)]
        for distribution, rule in rows
    ]
    return markdown_table(["rule", "draws", *(f"{value:g}" for value in values)], lines)


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
    beside = [
        name
        for name in ("traversal", "greedy_traversal", "block")
        if any(r[f"over_{name}"] for r in cells.values())
    ]
    order = sorted(names, key=lambda x: (x[0] != "bound", -cells[x[0], x[1], last]["tokens_per_step"]))
    lines: list[list[str]] = []
    for rule, drafts in order:
        row = [rule, drafts]
        for L in depths:
            r = cells[rule, drafts, L]
            row.append(f"{r['tokens_per_step']:.2f} ± {r['standard_error']:.2f}")
        for name in beside:
            row += [percent(cells[rule, drafts, L][f"over_{name}"]) for L in depths]
        lines.append(row)
    over = [f"% over {name}, {L}" for name in beside for L in depths]
    return markdown_table(["rule", "drafts", *(f"L = {L}" for L in depths), *over], lines)


def _trees(report: dict[str, Any]) -> str:
    """Rules on draft trees of equal size, best first."""
    rows = sorted(report["trees"], key=lambda r: -r["tokens_per_step"])
    lines = [
        [
            r["rule"],
            r["drafts"],
            r["tree"],
            str(r["nodes"]),
            str(r["depth"]),
            f"{r['tokens_per_step']:.2f} ± {r['standard_error']:.2f}",
            percent(r["over_paths"]) if r["tree"] != "paths" else "-",
        ]
        for r in rows
    ]
    return markdown_table(["rule", "drafts", "tree", "nodes", "depth", "tokens", "% over paths"], lines)


def percent(value: Sequence[float] | None) -> str:
    """A ratio and its error, as what it is over 1."""
    return f"{100 * (value[0] - 1):+.1f} ± {100 * value[1]:.1f}" if value else "-"


def markdown(report: dict[str, Any]) -> str:
    """All tables, with settings and command."""
    s = report["settings"]
    T = s["temperature"]
    n = s["drafts_by_temperature"]
    parts = [
        f"`{report['command']}`: {s['contexts']} contexts for paths, {s['drafts']} draft{'s' * (s['drafts'] > 1)} "
        f"of each kind at each, and {s['node_contexts']} for nodes, seed {s['seed']}, top_p {s['top_p']:g}; one draft "
        f"overlaps with the target by {report['mean_overlap']:.3f} on average. ± is a standard error over contexts."
    ]
    if report["nodes"]:
        parts += [
            f"Acceptance at one node by number of drafts, temperature {T:g}:",
            _acceptance(report, "drafts", s["num_drafts"], {"temperature": T}),
            f"Acceptance at one node by temperature, {n} drafts:",
            _acceptance(report, "temperature", s["temperatures"], {"drafts": n}),
        ]
    if (
        not any(r["rule"] == "bound" for r in report["paths"])
        and s["contexts"] * s["drafts"] < BOUND_CONTEXTS
    ):
        parts.append(
            f"No bound: it is a mean over texts of its own, which rules exceed by chance below {BOUND_CONTEXTS} contexts "
            f"(`--contexts {BOUND_CONTEXTS}`). Rules saw the same drafts: compare them by the columns in %."
        )
    for K in s["num_paths"]:
        parts += [
            f"Tokens per step, {K} paths of L tokens, temperature {T:g}:",
            _efficiency(report, K, s["depths"]),
        ]
    if report["trees"]:
        parts += [
            f"Tokens per step on draft trees of equal size, {s['tree_contexts']} contexts:",
            _trees(report),
        ]
    return "\n\n".join(parts) + "\n"


def write(report: dict[str, Any], path: Path) -> list[Path]:
    """The JSON file, and beside it the tables (.md). An old text stays until the new one is complete."""
    return write_texts({path: json.dumps(report, indent=1) + "\n", path.with_suffix(".md"): markdown(report)})
