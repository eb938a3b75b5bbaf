"""The comparison of drafters as JSON and as markdown tables; `studies.drafters` draws it."""

import json
import statistics
from pathlib import Path
from typing import Any

from polydraft.bench.drafters import MIXED, WAYS, WORKLOADS
from polydraft.bench.record import markdown_table, write_texts

__all__ = ["markdown", "write"]


def markdown(report: dict[str, Any]) -> str:
    """Tables with hardware, settings and command beside them."""
    s = report["settings"]
    lines = [
        f"{report['hardware']['processor']}, one thread; embedded target, temperature {s['temperature']:g}; {s['num_requests']} requests "
        f"x {s['num_tokens']} tokens of each workload; budget {s['nodes']} nodes, depth {s['depth']}, width {s['width']}; "
        f"indexes over {s['index_tokens']:,} tokens of the standard library without the held-out modules.",
        f"`{report['command']}`",
        "",
        "Tokens per call of the target, with the standard error over requests:",
        "",
    ]
    head = ["drafter", *(f"{way} {workload}" for way in WAYS for workload in WORKLOADS)]
    cells = {(r["contender"], r["way"], r["workload"]): r for r in report["rows"]}
    names = list(dict.fromkeys(r["contender"] for r in report["rows"]))
    rows: list[list[str]] = []
    for name in names:
        found = [cells.get((name, way, workload)) for way in WAYS for workload in WORKLOADS]
        rows.append([name, *("-" if r is None else f"{r['tokens_per_call']:.2f} ± {r['error']:.2f}" for r in found)])
    lines.append(markdown_table(head, rows))
    lines += _against_best(cells)
    lines += [
        "",
        "What drafting costs a step of the embedded target, in the drafter's own calls and with the engine's checks:",
        "",
    ]
    rows = []
    for name in names:
        steps = [r for r in report["rows"] if r["contender"] == name and r["way"] == "written"]
        if steps:
            own, drafting, step = (sum(r[k] for r in steps) / len(steps) for k in ("own_ms", "drafting_ms", "step_ms"))
            rows.append([name, f"{own:.2f}", f"{100 * own / step:.1f}%", f"{drafting:.2f}", f"{100 * drafting / step:.1f}%"])
    lines.append(
        markdown_table(["drafter", "own ms per step", "share of a step", "drafting ms per step", "share of a step"], rows)
    )
    sizes = report["megabytes_per_million_tokens"].items()
    lines += ["", "Memory per million tokens of history or corpus:", ""]
    lines.append(markdown_table(["structure", "MB"], [(name, f"{size:.0f}") for name, size in sizes]))
    return "\n".join(lines) + "\n"


def _against_best(cells: dict[tuple[str, str, str], dict[str, Any]]) -> list[str]:
    """The mixture of all against its best source, request by request on the same texts."""
    lines = ["", "The mixture of all less the best of its sources, tokens per call, mean of the requests' differences:", ""]
    rows: list[list[str]] = []
    for way in WAYS[1:]:
        for workload in WORKLOADS:
            found = {name: cells.get((name, way, workload)) for name in (*MIXED, "mixture of all")}
            known = {name: r for name, r in found.items() if r is not None}
            if len(known) <= len(MIXED):
                return []
            best = max(MIXED, key=lambda name: known[name]["tokens_per_call"])
            pairs = zip(known["mixture of all"]["by_request"], known[best]["by_request"], strict=True)
            gains = [a - b for a, b in pairs]
            error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
            rows.append([f"{way} {workload}", best, f"{statistics.mean(gains):+.2f} ± {error:.2f}"])
    return [*lines, markdown_table(["texts", "best source", "difference"], rows)]


def write(report: dict[str, Any], folder: Path) -> list[Path]:
    """The files that were written: drafters.json, drafters.md. An old text stays until the new one is complete."""
    folder.mkdir(exist_ok=True)
    texts = {folder / "drafters.json": json.dumps(report, indent=1) + "\n", folder / "drafters.md": markdown(report)}
    return write_texts(texts)
