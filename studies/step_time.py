"""`python -m studies.step_time --model NAME`: where a step's time goes, by kind of text and temperature.

One request at a time, by turns of kinds and temperatures; milliseconds of a mean step, in processor time where one thread does all the work.

draft      drafts, and what the drafter is told of each outcome
forward    forward passes of the target
verify     sampling parameters and the verifier
other      all else: texts, statistics, outputs
over plain plain decoding's seconds a token over those with drafts, prompts aside
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from polydraft import Engine, SamplingParams
from polydraft.core import Budget, Request
from polydraft.policy.measuring import clock
from studies import question_files
from studies.options import Quick

PHASES = {"draft": "drafting", "forward": "scoring", "verify": "verifying", "other": "other"}
PLAIN = Budget.fixed((-1,))
TEMPERATURES = 0.0, 0.7, 1.0


class StepTime(NamedTuple):
    """Of some texts. milliseconds: of a step, by phase.  tokens: of a step.  speedup: over plain decoding of the same prompts, of the same engine."""

    milliseconds: dict[str, float]
    tokens: float
    speedup: float


def _taken(
    engine: Engine, prompts: Iterable[Sequence[int]], params: SamplingParams, budget: Budget | None
) -> Mapping[str, float]:
    """Seconds by phase, tokens and steps of all."""
    totals: dict[str, float] = {}
    for number, ids in enumerate(prompts):
        sample = engine.add_request(Request(f"{number}-{budget}", tuple(ids), params, number, budget=budget))
        while engine.has_unfinished_requests:
            engine.step()
        stats = sample.stats
        figures = {"tokens": stats.generated_tokens, "steps": stats.steps, **stats.seconds}
        totals = {name: totals.get(name, 0.0) + value for name, value in figures.items()}
    return totals


def measure(
    engine: Engine,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    temperatures: Sequence[float],
    max_tokens: int,
) -> dict[tuple[str, float], StepTime]:
    """By kind of text and temperature; an idle engine, whose costs are measured first."""
    engine._clocks.steps = clock(engine.target)
    engine.measure()
    times = dict[tuple[str, float], StepTime]()
    for kind, texts in prompts.items():
        for temperature in temperatures:
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
            plain, drafted = (_taken(engine, texts, params, budget) for budget in (PLAIN, None))
            seconds = {name: drafted[phase] / drafted["steps"] for name, phase in PHASES.items()}
            token, plain_token = (sum(t[p] for p in PHASES.values()) / t["tokens"] for t in (drafted, plain))
            milliseconds = {name: 1e3 * each for name, each in seconds.items()}
            times[kind, temperature] = StepTime(
                milliseconds, drafted["tokens"] / drafted["steps"], plain_token / token
            )
    return times


def table(title: str, times: Mapping[tuple[str, float], StepTime]) -> Table:
    """A row for each kind and temperature."""
    rows = Table(
        "text",
        "T",
        "tokens a step",
        *(f"{name}, ms (share)" for name in PHASES),
        "over plain",
        title=title,
        box=None,
    )
    for (kind, temperature), step in times.items():
        whole = sum(step.milliseconds.values())
        cells = (f"{each:.2f} ({each / whole:.0%})" for each in step.milliseconds.values())
        rows.add_row(kind, f"{temperature:g}", f"{step.tokens:.2f}", *cells, f"{step.speedup:.2f}")
    return rows


def main(
    model: Annotated[str, typer.Option(help="Model as of `polydraft generate`.")] = "embedded",
    prompts: Annotated[list[Path] | None, typer.Option(help=".jsonl of questions; may be repeated.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=2)] = 96,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    quick: Quick = False,
) -> None:
    """Print the table."""
    engine = Engine.from_pretrained(model, threads=threads, max_num_seqs=1)
    asked = question_files.questions(prompts, 1 << 16) if prompts else question_files.QUESTIONS
    texts: dict[str, Any] = {}
    for question in asked:
        chat = (
            engine.encode(question.text)
            if model == "embedded"
            else engine.encode_chat([{"role": "user", "content": question.text}])
        )
        texts.setdefault(question.category, []).append(chat)
    picked = {kind: each[: 1 if quick else count] for kind, each in texts.items()}
    Console(width=140).print(
        table(
            f"{model}, {threads} threads", measure(engine, picked, TEMPERATURES, 8 if quick else max_tokens)
        )
    )


if __name__ == "__main__":
    typer.run(main)
