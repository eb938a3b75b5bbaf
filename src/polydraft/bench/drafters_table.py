"""The comparison of drafters as JSON and as markdown tables; `studies.drafters` draws it."""

import json
import statistics
from pathlib import Path
from typing import Any

from polydraft.atomic import replacing
from polydraft.bench.drafters import MIXED, WAYS, WORKLOADS

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
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    cells = {(r["contender"], r["way"], r["workload"]): r for r in report["rows"]}
    names = list(dict.fromkeys(r["contender"] for r in report["rows"]))
    for name in names:
        found = [cells.get((name, way, workload)) for way in WAYS for workload in WORKLOADS]
        shown = ["-" if r is None else f"{r['tokens_per_call']:.2f} ± {r['error']:.2f}" for r in found]
        lines.append("| " + " | ".join([name, *shown]) + " |")
    lines += _against_best(cells)
    lines += [
        "",
        "What drafting costs a step of the embedded target, in the drafter's own calls and with the engine's checks:",
        "",
    ]
    lines += ["| drafter | own ms per step | share of a step | drafting ms per step | share of a step |", "|---|---|---|---|---|"]
    for name in names:
        rows = [r for r in report["rows"] if r["contender"] == name and r["way"] == "written"]
        if rows:
            own, drafting, step = (sum(r[k] for r in rows) / len(rows) for k in ("own_ms", "drafting_ms", "step_ms"))
            lines.append(f"| {name} | {own:.2f} | {100 * own / step:.1f}% | {drafting:.2f} | {100 * drafting / step:.1f}% |")
    lines += ["", "Memory per million tokens of history or corpus:", "", "| structure | MB |", "|---|---|"]
    lines += [f"| {name} | {size:.0f} |" for name, size in report["megabytes_per_million_tokens"].items()]
    return "\n".join(lines) + "\n"


def _against_best(cells: dict[tuple[str, str, str], dict[str, Any]]) -> list[str]:
    """The mixture of all against its best source, request by request on the same texts."""
    lines = ["", "The mixture of all less the best of its sources, tokens per call, mean of the requests' differences:", ""]
    lines += ["| texts | best source | difference |", "|---|---|---|"]
    for way in WAYS[1:]:
        for workload in WORKLOADS:
            found = {name: cells.get((name, way, workload)) for name in (*MIXED, "mixture of all")}
            rows = {name: r for name, r in found.items() if r is not None}
            if len(rows) <= len(MIXED):
                return []
            best = max(MIXED, key=lambda name: rows[name]["tokens_per_call"])
            pairs = zip(rows["mixture of all"]["by_request"], rows[best]["by_request"], strict=True)
            gains = [a - b for a, b in pairs]
            error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
            lines.append(f"| {way} {workload} | {best} | {statistics.mean(gains):+.2f} ± {error:.2f} |")
    return lines


def write(report: dict[str, Any], folder: Path) -> list[Path]:
    """The files that were written: drafters.json, drafters.md. An old text stays until the new one is complete."""
    folder.mkdir(exist_ok=True)
    texts = {"drafters.json": json.dumps(report, indent=1) + "\n", "drafters.md": markdown(report)}
    for name, content in texts.items():
        with replacing(folder / name) as out:
            out.write(content.encode())
    return [folder / name for name in texts]
