"""The comparison of drafters as JSON and as markdown tables; `studies.drafters` draws it."""

import json
from pathlib import Path
from typing import Any

from polydraft.bench.record import markdown_table, write_texts
from studies.drafters.comparison import WAYS, WORKLOADS


def markdown(report: dict[str, Any]) -> str:
    """Tables with hardware, settings and command beside them."""
    s = report["settings"]
    lines = [
        f"{report['hardware']['processor']}, one thread; embedded target, temperature {s['temperature']:g}; {s['num_requests']} requests "
        f"x {s['num_tokens']} tokens of each workload; budget {s['nodes']} nodes, depth {s['depth']}, width {s['width']}; "
        f"indexes over {s['index_tokens']:,} tokens of the standard library without the held-out modules.",
        f"`{report['command']}`",
        "",
        "Tokens per step of the target, with the standard error over requests:",
        "",
    ]
    head = ["drafter", *(f"{way} {workload}" for way in WAYS for workload in WORKLOADS)]
    cells = {(r["contender"], r["way"], r["workload"]): r for r in report["rows"]}
    names = list(dict.fromkeys(r["contender"] for r in report["rows"]))
    rows: list[list[str]] = []
    for name in names:
        row_cells = [cells.get((name, way, workload)) for way in WAYS for workload in WORKLOADS]
        rows.append(
            [
                name,
                *("-" if r is None else f"{r['tokens_per_step']:.2f} ± {r['error']:.2f}" for r in row_cells),
            ]
        )
    lines.append(markdown_table(head, rows))
    lines += [
        "",
        "What drafting costs a step of the embedded target, in the drafter's own calls and with the engine's checks:",
        "",
    ]
    rows = []
    for name in names:
        steps = [r for r in report["rows"] if r["contender"] == name and r["way"] == "written"]
        if steps:
            own_ms, drafting, step = (
                sum(r[k] for r in steps) / len(steps) for k in ("own_ms", "drafting_ms", "step_ms")
            )
            rows.append(
                [
                    name,
                    f"{own_ms:.2f}",
                    f"{100 * own_ms / step:.1f}%",
                    f"{drafting:.2f}",
                    f"{100 * drafting / step:.1f}%",
                ]
            )
    lines.append(
        markdown_table(
            ["drafter", "own ms per step", "share of a step", "drafting ms per step", "share of a step"], rows
        )
    )
    return "\n".join(lines) + "\n"


def write(report: dict[str, Any], folder: Path) -> list[Path]:
    """The files that were written: drafters.json, drafters.md. An old text stays until the new one is complete."""
    folder.mkdir(exist_ok=True)
    texts = {
        folder / "drafters.json": json.dumps(report, indent=1) + "\n",
        folder / "drafters.md": markdown(report),
    }
    return write_texts(texts)
