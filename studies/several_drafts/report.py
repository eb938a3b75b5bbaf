"""The page of the study: what a second path buys, by draft model, temperature and text."""

from collections.abc import Mapping, Sequence
from datetime import date

import numpy as np

from polydraft.bench.record import command_line, markdown_table, processor
from studies.several_drafts.comparison import BOUND, Choice, Comparison, comparisons
from studies.several_drafts.costs import NUM_ROWS, TARGET
from studies.several_drafts.rows import KEPT_TOKENS
from studies.several_drafts.verified import Case, Values
from studies.theory.efficiency import Estimate

__all__ = ["markdown"]

DEPTHS = (4, 8)
"""Of the tables of tokens per step."""


def markdown(values: Sequence[Values], passes: Mapping[str, Sequence[float]], target: str) -> str:
    """The whole page."""
    timed, free = comparisons(values, passes), comparisons(values, passes, free_rows=True)
    answers = ", ".join(f"{one.num_answers} answers ({one.setting.text})" for one in timed[:2])
    contexts = len(values) / len({value.answer for value in values})
    parts = [
        "# Several drafts on a real pair",
        f"`{command_line('python -m studies.several_drafts')}`; {date.today()}; {processor()}, one thread. Target: {target}. "
        f"{answers}, {contexts:g} contexts in each, {len(values)} in all. Drafts are sampled, their verification is integrated. "
        "± is a standard error over answers. `bound`: no verifier of so many iid paths accepts more on the mean. Rows hold the "
        f"{KEPT_TOKENS} most probable tokens, others are joined, which changes an acceptance on the mean by {_lost(values)}.",
        "## Where does the second path pay?",
        "The fastest depth and verifier for each number of paths; speed over plain decoding, from the seconds below. In brackets: over the best "
        "chain, each chosen on nine tenths of the answers and compared on the last one.",
        _choices(timed),
        "The same if a forward pass of many rows took no longer than one of a single row, as on a GPU at small batches:",
        _choices(free),
        "## Seconds of a forward pass, in ms",
        "The processor's, the fastest of nine, all models by turns. Shapes are compared with costs that do not fall with rows.",
        markdown_table(
            ["model", *(f"{n} row{'s' * (n > 1)}" for n in NUM_ROWS)],
            [[target if name == TARGET else name, *(f"{1e3 * s:.0f}" for s in passes[name])] for name in passes],
        ),
        "## Tokens per step",
        "Chains: `block`; % over it at the same depth, where verifiers draft as deep.",
    ]
    for one in timed:
        parts += [_title(one), _tokens(one)]
    return "\n\n".join(parts) + "\n"


def _lost(values: Sequence[Values]) -> str:
    names = [name for name in values[0].lost if " + " not in name]
    return ", ".join(f"{np.mean([v.lost[name] for v in values]):.4f} ({name})" for name in names)


def _title(one: Comparison) -> str:
    return f"### {one.setting.draft}, T = {one.setting.temperature:g}, {one.setting.text}: one drafted token is accepted {one.overlap:.2f}"


def _short(value: Estimate) -> str:
    return f"{value.mean:.2f} ± {value.standard_error:.2f}"


def _percent(value: Estimate) -> str:
    return f"{100 * (value.mean - 1):+.1f} ± {100 * value.standard_error:.1f}%"


def _choice(choice: Choice) -> str:
    case = choice.case
    width = "" if case.kind in ("chain", "independent") else f"{case.paths} x "
    shape = f"{width}{case.depth} {case.kind if case.kind != 'chain' else ''} {case.verifier}".replace("_", " ")
    return f"{choice.speed.mean:.2f} ({shape}{'' if case.kind == 'chain' else '; ' + _percent(choice.over_chain)})"


def _choices(compared: Sequence[Comparison]) -> str:
    names = list(dict.fromkeys(name for one in compared for name, _ in one.families()))
    lines = list[list[str]]()
    for one in compared:
        cells = {name: _choice(one.best(fits)) for name, fits in one.families()}
        s = one.setting
        lines.append([s.draft, f"{s.temperature:g}", s.text, f"{one.overlap:.2f}", *(cells.get(name, "-") for name in names)])
    return markdown_table(["draft", "T", "text", "accepted", *names], lines)


def _tokens(one: Comparison) -> str:
    rows = dict.fromkeys((case.draft, case.kind, case.verifier) for case in one.cases)
    order = sorted(rows, key=lambda row: (row[1] != BOUND, row[1] != "chain", row[0], row[1], row[2]))
    columns = [(L, K) for L in DEPTHS for K in (1, 2, 3, 4)]
    lines = list[list[str]]()
    known = set(one.cases)
    for draft, kind, verifier in order:
        cells = [Case(draft, one.setting.temperature, kind, K, L, verifier) for L, K in columns]
        name = kind.replace("_", " ") if kind != "independent" else draft
        lines.append([name, verifier, *(_cell(one, case) if case in known else "" for case in cells)])
    return markdown_table(["drafts", "verifier", *(f"{L} deep, K = {K}" for L, K in columns)], lines)


def _cell(one: Comparison, case: Case) -> str:
    block = Case(one.setting.draft, case.temperature, "chain", 1, case.depth, "block")
    gain = "" if case.kind in ("chain", BOUND) else f" ({_percent(one.over(case, block))})"
    return _short(one.tokens(case)) + gain
