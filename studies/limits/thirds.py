"""Path rules in thirds of the contexts by how well the draft fits, and the tables of `python -m studies.limits` as CSV."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.bench.record import csv_table, markdown_table, write_texts
from studies.limits.paths import Paths
from studies.limits.tables import percent
from studies.theory import efficiency

RULES = ("traversal", "multipath", "greedy_traversal")


def by_overlap(paths: Paths) -> list[dict[str, Any]]:
    """GBV, GTV and traversal over block verification, in thirds of the contexts by the overlap at the root."""
    overlap = np.array(paths.overlaps)
    s = paths.pair.settings
    found = list[dict[str, Any]]()
    L = s.depths[len(s.depths) // 2]
    for third, at in enumerate(np.array_split(np.argsort(overlap, kind="stable"), 3)):
        block = np.array(paths.values["block", "chain", 1, L])[at]
        for K, rule in itertools.product(s.num_paths, [rule for rule in RULES if rule in paths.wanted]):
            e = efficiency.paired(np.array(paths.values[rule, "paths", K, L])[at], block)
            row = {"third": third, "overlap": float(overlap[at].mean()), "rule": rule, "paths": K, "depth": L}
            found.append(row | e.to_dict("over_block"))
    return found


def markdown(report: dict[str, Any]) -> str:
    """The thirds as a table."""
    thirds = sorted({(r["third"], r["overlap"]) for r in report["by_overlap"]})
    cell = {(r["rule"], r["paths"], r["third"]): r for r in report["by_overlap"]}
    lines = [
        [
            rule,
            str(K),
            *(percent((r["over_block"], r["standard_error"])) for t, _ in thirds if (r := cell[rule, K, t])),
        ]
        for K, rule in itertools.product(report["settings"]["num_paths"], RULES)
        if (rule, K, 0) in cell
    ]
    head = ["rule", "paths", *(f"% at overlap {overlap:.2f}" for _, overlap in thirds)]
    title = "Over block verification of one path, by how well the draft fits at the root (thirds of the contexts):"
    return f"\n{title}\n\n{markdown_table(head, lines)}\n"


def _csv(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    return csv_table(
        list(rows[0]), ((v[0] if isinstance(v, list) else v for v in row.values()) for row in rows)
    )


def write_csv(report: dict[str, Any], folder: Path) -> list[Path]:
    """A file for each table: of nodes, of paths, of trees, of verifiers that are not lossless, and of thirds of the contexts."""
    return write_texts(
        {
            folder / f"limits-{name}.csv": _csv(report[name])
            for name in ("nodes", "paths", "trees", "relaxed", "by_overlap")
        }
    )
