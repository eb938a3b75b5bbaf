"""A bench's findings as JSON and as a markdown table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polydraft.bench.record import markdown_table, provenance, write_texts
from polydraft.bench.speedup import Speedup
from polydraft.bench.suite import Findings


def as_dict(findings: Findings) -> dict[str, Any]:
    """Everything as plain data, with what the run was made on and with."""
    speedups = findings.speedups()
    return {
        **provenance(),
        "settings": findings.settings,
        "num_parameters": findings.num_parameters,
        "rows": findings.rows(),
        "ratios": {
            name: {against: s.ratio for against, s in over.items()} for name, over in speedups.items()
        },
        "intervals": {
            name: {against: s.interval for against, s in over.items()} for name, over in speedups.items()
        },
        "absent": findings.absent,
    }


def _check(check: dict[str, Any]) -> str:
    if check["kind"] == "own":
        return "its own"
    if check["kind"] == "texts":
        return (
            "equal to its plain texts"
            if check["passed"]
            else f"{check['wrong']} of {check['texts']} plain texts differ"
        )
    if check["kind"] == "greedy":
        text = (
            f"equal{check.get('to', '')}"
            if check["passed"]
            else f"{check['wrong']} of {check['tokens']} differ"
        )
        return f"{text}, {check['near_ties']} near ties" if check["near_ties"] else text
    return f"p = {check['p_value']:.2g}" if check["passed"] else f"FAILED, p = {check['p_value']:.1g}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows, the fastest first."""
    against = list(
        dict.fromkeys(
            title
            for row in report["rows"]
            for title, name in row["compared"].items()
            if name in report["ratios"]
        )
    )
    bits = any(row["bits_per_weight"] for row in report["rows"])
    head = [
        "contender",
        *(["bits per weight"] if bits else []),
        "tokens/s",
        "quartiles",
        *(f"over {name}" for name in against),
        "tokens/step",
        "per CPU s",
        "first token ms",
        "between ms p50",
        "p99",
        "memory MiB",
        "prepared s",
        "equal distribution?" if bits else "distribution",
    ]
    fastest_first = sorted(report["rows"], key=lambda r: -r["tokens_per_second"])
    return head, [_cells(report, row, against, bits) for row in fastest_first]


def _cells(report: dict[str, Any], row: dict[str, Any], against: Sequence[str], bits: bool) -> list[str]:
    """Of one contender. against: titles of what it is compared with.  bits: whether bits per weight are shown."""
    return [
        row["contender"],
        *([f"{row['bits_per_weight']:.3g}"] if bits else []),
        f"{row['tokens_per_second']:.0f}",
        f"{row['spread'][0]:.0f}-{row['spread'][1]:.0f}",
        *(_over(report, row["contender"], row["compared"].get(title)) for title in against),
        f"{row['tokens_per_step']:.2f}" if row["verifier"] else "-",
        f"{row['tokens_per_cpu_second']:.0f}",
        *(_milliseconds(row[k]) for k in ("time_to_first_token", "inter_token_p50", "inter_token_p99")),
        f"{row['peak_memory'] / 2**20:.0f}",
        f"{row['seconds_to_prepare']:.1f}",
        _check(row["distribution_check"]),
    ]


def _over(report: dict[str, Any], contender: str, other: str | None) -> str:
    """Its speed over another's, with its interval."""
    ratios = report["ratios"].get(contender, {})
    if other in ratios:
        return str(Speedup(ratios[other], report["intervals"][contender][other]))
    return "1" if contender == other else "-"


def heading(report: dict[str, Any]) -> str:
    """Hardware, models, settings and command."""
    sizes = ", ".join(f"{name} {count / 1e6:.2f}M" for name, count in report["num_parameters"].items())
    return (
        f"{report['hardware']['processor']}, {report['settings']['threads']} thread(s); {sizes}; "
        f"temperature {report['settings']['temperature']:g}, batch {report['settings']['batch']}, "
        f"{report['settings']['num_prompts']} prompts x {report['settings']['max_tokens']} tokens x "
        f"{report['settings']['repetitions']} repetitions, interleaved, medians; in brackets 95% intervals over repetitions.\n`{report['command']}`"
    )


def markdown(report: dict[str, Any]) -> str:
    """The table, with hardware, models, settings and command beside it."""
    absent = "".join(f"\nNot in the run: {name} ({reason})." for name, reason in report["absent"].items())
    return f"{heading(report)}\n\n{markdown_table(*table(report))}\n{absent}"


def write(report: dict[str, Any], path: Path) -> list[Path]:
    """The JSON file, and beside it a markdown table. An old text stays until the new one is complete."""
    return write_texts(
        {path: json.dumps(report, indent=1) + "\n", path.with_suffix(".md"): markdown(report) + "\n"}
    )
