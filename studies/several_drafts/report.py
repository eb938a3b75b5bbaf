"""The page of the study, and its tables as CSV: what a second path buys, by draft model, temperature and text."""

from collections.abc import Mapping, Sequence
from datetime import date

import numpy as np

from polydraft.bench.record import command_line, markdown_table, processor
from studies.several_drafts.comparison import BOUND, Choice, Comparison, comparisons
from studies.several_drafts.costs import NUM_ROWS, TARGET
from studies.several_drafts.rows import KEPT_TOKENS
from studies.several_drafts.verified import Case, Values
from studies.theory.efficiency import Estimate

__all__ = ["markdown", "second_rows", "speed_rows", "token_rows"]

DEPTHS = (4, 8)
"""Of the table of tokens per step."""
SHOWN = 0.7
"""Temperature of the page's table; the others are in the CSV files."""
HIDDEN = "3 paths"
"""Family of shapes that is in the CSV file alone."""
SHOWN_ROWS = (1, 8, 16)
"""Of the table of seconds."""


def markdown(values: Sequence[Values], passes: Mapping[str, Sequence[float]], target: str, tables: Sequence[str]) -> str:
    """The whole page. tables: names of the CSV files beside it, as `speed_rows`, `token_rows` and `second_rows` fill them."""
    timed = comparisons(values, passes)
    answers = ", ".join(f"{one.num_answers} answers ({one.setting.text})" for one in timed[:2])
    contexts = len(values) / len({value.answer for value in values})
    shown = [one for one in timed if one.setting.temperature == SHOWN] or timed
    parts = [
        "# Several drafts on a real pair",
        f"`{command_line('python -m studies.several_drafts')}`; {date.today()}; {processor()}, one thread. Target: {target}. "
        f"{answers}, {contexts:g} contexts in each, {len(values)} in all. Drafts are sampled, their verification is integrated. "
        "± is a standard error over answers. `bound`: no verifier of so many iid paths accepts more on the mean. Rows hold the "
        f"{KEPT_TOKENS} most probable tokens, others are joined, which changes an acceptance on the mean by {_lost(values)}.",
        "## Where does the second path pay?",
        f"Temperature {shown[0].setting.temperature:g}. One path: the speed of the best chain over plain decoding, from the seconds below, and its depth. Others: what their "
        "fastest shape and verifier gain over that chain, each chosen on nine tenths of the answers and compared on the last one.",
        _choices(shown),
        f"[The shapes and verifiers, three paths, every temperature]({tables[0]}), also where a forward pass of many rows takes no longer than one of a single row, as "
        f"on a GPU at small batches. [Tokens per step]({tables[1]}) of every kind of drafts and every verifier, {DEPTHS[0]} and {DEPTHS[1]} deep.",
        "## Seconds of a forward pass, in ms",
        f"The processor's, the fastest of nine, all models by turns; [all numbers of rows]({tables[2]}). Shapes are compared with costs that do not fall with rows.",
        markdown_table(
            ["model", *(f"{n} row{'s' * (n > 1)}" for n in SHOWN_ROWS)],
            [
                [target if name == TARGET else name, *(f"{1e3 * seconds[NUM_ROWS.index(n)]:.0f}" for n in SHOWN_ROWS)]
                for name, seconds in passes.items()
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def speed_rows(values: Sequence[Values], passes: Mapping[str, Sequence[float]]) -> list[list[object]]:
    """The fastest of every family of shapes, with a head. rows: "measured" costs, or "free" ones as where memory alone costs."""
    head = "draft", "temperature", "text", "accepted", "rows", "family", "kind", "paths", "depth", "verifier"
    lines: list[list[object]] = [[*head, "speed", "speed_error", "over_chain", "over_chain_error"]]
    for rows in ("measured", "free"):
        for one in comparisons(values, passes, free_rows=rows == "free"):
            for family, fits in one.families():
                choice, s = one.best(fits), one.setting
                shape = choice.case.kind, choice.case.paths, choice.case.depth, choice.case.verifier
                lines.append(
                    [
                        s.draft,
                        s.temperature,
                        s.text,
                        f"{one.overlap:.3f}",
                        rows,
                        family,
                        *shape,
                        *_pair(choice.speed),
                        *_pair(choice.over_chain),
                    ]
                )
    return lines


def token_rows(values: Sequence[Values], passes: Mapping[str, Sequence[float]]) -> list[list[object]]:
    """Tokens per step of every kind of drafts, verifier and number of paths at `DEPTHS`, and their ratio to block verification of a chain as deep."""
    head = "draft", "temperature", "text", "accepted", "drafts", "verifier", "depth", "paths"
    lines: list[list[object]] = [[*head, "tokens", "tokens_error", "over_block", "over_block_error"]]
    for one in comparisons(values, passes):
        for case in (case for case in one.cases if case.depth in DEPTHS and case.paths <= 4):
            block = Case(one.setting.draft, case.temperature, "chain", 1, case.depth, "block")
            ratio = ("", "") if case.kind in ("chain", BOUND) else _pair(one.over(case, block))
            drafts, s = case.kind if case.kind != "independent" else case.draft, one.setting
            shape = drafts, case.verifier, case.depth, case.paths
            lines.append([s.draft, s.temperature, s.text, f"{one.overlap:.3f}", *shape, *_pair(one.tokens(case)), *ratio])
    return lines


def second_rows(values: Sequence[Values], passes: Mapping[str, Sequence[float]]) -> list[list[object]]:
    """Seconds of a forward pass by model and number of rows."""
    rows = [[name, n, f"{s:.6f}"] for name, seconds in passes.items() for n, s in zip(NUM_ROWS, seconds, strict=True)]
    return [["model", "rows", "seconds"], *rows]


def _pair(value: Estimate) -> tuple[str, str]:
    return f"{value.mean:.4f}", f"{value.standard_error:.4f}"


def _lost(values: Sequence[Values]) -> str:
    means = [np.mean([v.lost[name] for v in values]) for name in values[0].lost if " + " not in name]
    return f"{min(means):.4f} to {max(means):.4f} by draft model"


def _percent(value: Estimate) -> str:
    return f"{100 * (value.mean - 1):+.1f} ± {100 * value.standard_error:.1f}%"


def _choice(choice: Choice) -> str:
    return f"{choice.speed.mean:.2f} ({choice.case.depth})" if choice.case.kind == "chain" else _percent(choice.over_chain)


def _choices(compared: Sequence[Comparison]) -> str:
    names = list(dict.fromkeys(name for one in compared for name, _ in one.families() if name != HIDDEN))
    lines = list[list[str]]()
    for one in compared:
        cells = {name: _choice(one.best(fits)) for name, fits in one.families()}
        s = one.setting
        lines.append([s.draft, s.text, f"{one.overlap:.2f}", *(cells.get(name, "-") for name in names)])
    return markdown_table(["draft", "text", "accepted", *names], lines)
