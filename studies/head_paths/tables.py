"""Means over contexts by case, with standard errors over answers, and the shape that wins for each number of paths."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from polydraft.bench.record import markdown_table
from studies.head_paths.contexts import MAX_PATHS
from studies.head_paths.costs import HeadCosts
from studies.head_paths.values import BOUND, Case, Values
from studies.theory.efficiency import Estimate, paired

__all__ = ["Row", "best", "farthest_above", "opening", "put_into", "rows_of", "shares", "small_table", "write_csv"]

MARKS = "<!-- studies.head_paths -->", "<!-- end -->"
"""Of the page, around what is written."""
PARTS = 10
"""Of the answers, each compared by what was chosen on the others."""


class Row(NamedTuple):
    """One case on one kind of text. tokens, seconds: of every answer.  nodes: verified, drafted ones, of a step.  plain: seconds of a step without drafts."""

    text: str
    case: Case
    tokens: np.ndarray
    seconds: np.ndarray
    nodes: float
    plain: float

    @property
    def speed(self) -> float:
        """Over plain decoding."""
        return float(self.tokens.sum() / self.seconds.sum() * self.plain)


def rows_of(values: Sequence[Values], costs: HeadCosts) -> list[Row]:
    """All cases, the bounds among them at the seconds of a step of their paths."""
    found = list[Row]()
    for text in dict.fromkeys(value.text for value in values):
        answers: dict[int, list[Values]] = {}
        for value in values:
            if value.text == text:
                answers.setdefault(value.answer, []).append(value)
        for case in values[0].tokens:
            shape = case.temperature, "chain" if case.paths == 1 else case.kind, case.paths
            tokens = np.array([np.mean([v.tokens[case] for v in some]) for some in answers.values()])
            steps = [[costs.step(case.kind, v.nodes[shape], case.depth) for v in some] for some in answers.values()]
            nodes = [sum(v.nodes[shape][1 : case.depth + 1]) for some in answers.values() for v in some]
            found.append(Row(text, case, tokens, np.array([np.mean(s) for s in steps]), float(np.mean(nodes)), costs.plain))
    return found


def shares(rows: Sequence[Row]) -> dict[tuple[str, Case], Estimate]:
    """Share of the bound that each case reaches, both on the same drafts; the error is over answers."""
    bounds = {(row.text, row.case): row.tokens for row in rows if row.case.verifier == BOUND}
    return {(row.text, row.case): paired(row.tokens, bounds[row.text, row.case._replace(verifier=BOUND)]) for row in rows}


def farthest_above(rows: Sequence[Row]) -> str:
    """The case that exceeds its bound by most standard errors, of all."""
    estimates = {key: share for key, share in shares(rows).items() if share.standard_error > 1e-9}
    (text, case), share = max(estimates.items(), key=lambda entry: (entry[1].mean - 1) / entry[1].standard_error)
    return f"Of {len(estimates)} cases the farthest above its bound: {text}, {case}, {share} of it."


def write_csv(rows: Sequence[Row], file: Path) -> None:
    """One line a case."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as out:
        table = csv.writer(out, lineterminator="\n")
        names = "text", "temperature", "drafts", "paths", "depth", "verifier"
        table.writerow([*names, "tokens", "error", "of_bound", "of_bound_error", "nodes", "milliseconds", "speed"])
        estimates = shares(rows)
        for row in rows:
            share = estimates[row.text, row.case]
            error = row.tokens.std(ddof=1) / np.sqrt(len(row.tokens))
            figures = row.tokens.mean(), error, share.mean, share.standard_error, row.nodes, 1e3 * row.seconds.mean(), row.speed
            formats = ("{:.3f}", "{:.3f}", "{:.3f}", "{:.3f}", "{:.1f}", "{:.2f}", "{:.3f}")
            table.writerow([row.text, *row.case, *(f.format(x) for f, x in zip(formats, figures, strict=True))])


def best(rows: Sequence[Row], part: np.ndarray | slice = slice(None)) -> Row:
    """The fastest on some of the answers."""
    return max(rows, key=lambda row: row.tokens[part].sum() / row.seconds[part].sum())


def over(rows: Sequence[Row], others: Sequence[Row]) -> Estimate:
    """Ratio of the speeds of the fastest of each, on each part of the answers of those that are fastest on all other parts."""
    count = len(rows[0].tokens)
    tokens, seconds = np.zeros((2, count)), np.zeros((2, count))
    for part in range(min(PARTS, count)):
        compared = np.arange(count) % PARTS == part
        for side, group in enumerate((rows, others)):
            row = best(group, ~compared)
            tokens[side, compared], seconds[side, compared] = row.tokens[compared], row.seconds[compared]
    ratio = float(tokens[0].sum() / seconds[0].sum() * seconds[1].sum() / tokens[1].sum())
    return Estimate(ratio, ratio * paired(tokens[0] / tokens[0].mean() - seconds[0] / seconds[0].mean() + 1.0, tokens[1] / tokens[1].mean() - seconds[1] / seconds[1].mean() + 1.0).standard_error)  # fmt: skip


def named(row: Row) -> str:
    """Its shape and verifier."""
    kind = "" if row.case.kind == "chain" else f" {row.case.kind.replace('_', ' ')},"
    size = f"{row.case.depth}" if row.case.kind == "chain" else f"{row.case.paths} x {row.case.depth}"
    return f"{size}{kind} {row.case.verifier.replace('_', ' ')}"


def small_table(rows: Sequence[Row]) -> str:
    """By text and temperature: the best chain, the best several drafts, the best spares."""
    lines = list[list[str]]()
    for text, temperature in dict.fromkeys((row.text, row.case.temperature) for row in rows):
        some = [row for row in rows if (row.text, row.case.temperature) == (text, temperature)]
        real = [row for row in some if row.case.verifier != BOUND]
        groups: Mapping[str, list[Row]] = {
            "chain": [row for row in real if row.case.kind == "chain"],
            "paths": [row for row in real if row.case.kind not in ("chain", "distinct spares")],
            "spares": [row for row in real if row.case.kind == "distinct spares"],
        }
        chain, cells = best(groups["chain"]), list[str]()
        for name in ("paths", "spares"):
            row, gain = best(groups[name]), over(groups[name], groups["chain"])
            percent = f"{100 * (gain.mean - 1):+.1f}±{100 * gain.standard_error:.1f}%"
            cells.append(f"{row.speed:.2f} ({named(row)}; {percent})")
        lines.append([text, f"{temperature:g}", f"{chain.speed:.2f} ({named(chain)})", *cells])
    return markdown_table(["text", "T", "one chain", f"2 to {MAX_PATHS} paths", "chain with spares"], lines)


def in_words(timed: Sequence[Row], free: Sequence[Row]) -> str:
    """What several drafts gain over the best chain, over all texts and temperatures, at both prices."""
    parts = list[str]()
    for rows, prices in ((timed, "at measured prices"), (free, "if rows were free")):
        gains = list[float]()
        for setting in dict.fromkeys((row.text, row.case.temperature) for row in rows):
            some = [r for r in rows if (r.text, r.case.temperature) == setting and r.case.verifier != BOUND]
            gain = over([r for r in some if r.case.kind != "chain"], [r for r in some if r.case.kind == "chain"])
            gains.append(100 * (gain.mean - 1))
        parts.append(f"{min(gains):+.0f} to {max(gains):+.0f}% {prices}")
    return f"**When do several drafts of a head pay?** Over the best chain they gain {' and '.join(parts)}."


def opening(model: str, timed: Sequence[Row], free: Sequence[Row]) -> str:
    """What opens the section of docs/choosing.md on several drafts: the plot, what it says, and a small table."""
    answers = sum(len(row.tokens) for row in timed if row.case == timed[0].case)
    return "\n\n".join(
        [
            "![Tokens per step and speed of one to eight paths of a head](pictures/head-paths.png)",
            f"{in_words(timed, free)} `python -m studies.head_paths` compares one to eight paths of one to seven tokens, all ways of drawing them and all lossless "
            f"verifiers, on {answers} answers of {model} with its head. Speed is over plain decoding, by measured seconds of passes on one thread; in brackets shape and verifier, and the gain over "
            "the best chain, each chosen on nine tenths of the answers and compared on the last. [All cases, and what no verifier exceeds (dotted)](results/head-paths.csv).",
            small_table(timed),
        ]
    )


def put_into(page: Path, text: str) -> None:
    """Between the marks of a page."""
    begin, end = MARKS
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")
