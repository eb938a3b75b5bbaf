"""`polydraft tune`: what the policy knows of these models and prompts, and whether drafts pay."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polydraft.cli.downloads import Yes, agree_on_downloads
from polydraft.cli.files import check_output, prompt_texts, say_written
from polydraft.cli.options import AsJson, MeasurementOptions, Only, configured
from polydraft.cli.progress import bars
from polydraft.cli.start import build, use_threads
from polydraft.cli.tables import grid, output
from polydraft.config import EngineConfig

if TYPE_CHECKING:
    from polydraft.tune.tune import ShapeTrial, Tuning


@configured
def tune(
    *,
    config: Annotated[EngineConfig, Only("model", "draft_model", "drafter", "verifier", "threads")],
    measurement: Annotated[MeasurementOptions, Only(without=("threads",), repetitions=4)],
    save: Annotated[
        Path | None, typer.Option(help="File for the profile, for `generate --profile FILE`.")
    ] = None,
    as_json: AsJson = False,
    report_file: Annotated[Path | None, typer.Option("--report", help="File for all figures, JSON.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="File for a plot of speed over depth and paths, PNG.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Print seconds by rows, acceptance by confidence, predicted and measured speeds of draft shapes, and a recommendation."""
    check_output("--save", save)
    check_output("--report", report_file)
    check_output("--picture", picture, picture=True)
    use_threads(config.threads or 1)
    from polydraft.bench.speedup import repetitions
    from polydraft.core import SamplingParams
    from polydraft.policy.profile import remember
    from polydraft.tune import tune as tuning

    texts = prompt_texts(measurement.prompts, 6)
    agree_on_downloads([config], yes=yes)
    engine = build(config.with_(max_num_seqs=4))
    quick = measurement.quick
    texts = texts[:6] if quick else texts
    max_tokens = min(measurement.max_tokens, 24) if quick else measurement.max_tokens
    params = SamplingParams(temperature=measurement.temperature, max_tokens=max_tokens)
    with bars("running draft shapes", hidden=as_json) as step:
        report = tuning.tune(
            engine,
            [engine.encode(text) for text in texts],
            params=params,
            shapes=tuning.SHAPES[1:4] if quick else tuning.SHAPES,
            repetitions=repetitions(len(texts)) if quick else measurement.repetitions,
            progress=lambda number: step(number),
        )
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        _show(report)
    if not quick:
        remember(report.profile.about.get("identity"), report.profile)
    _write(report, save, report_file, picture)


def _write(report: "Tuning", save: Path | None, report_file: Path | None, picture: Path | None) -> None:
    if save is not None:
        report.profile.save(save)
    if report_file is not None:
        report_file.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    if picture is not None:
        from polydraft.tune.tune import picture as draw

        draw(report, picture)
    say_written(file for file in (save, report_file, picture) if file is not None)


def _show(report: "Tuning") -> None:
    """Seconds, acceptance rates, speeds of shapes and the recommendation, as tables."""
    console = output()
    console.print(grid(["cost of a", "milliseconds", "forward passes"], _cost_rows(report)))
    console.print(grid(["confidence from", "acceptance rate"], _acceptance_rows(report)))
    rows = [_trial_row(report, trial) for trial in report.trials]
    console.print(grid(["shape", "predicted", "measured", "error", "over plain", "tokens/step"], rows))
    console.print(
        "\n" + "\n".join(filter(None, (report.recommendation(), report.doubt()))) + "\n", highlight=False
    )


def _cost_rows(report: "Tuning") -> list[tuple[str, ...]]:
    costs = report.profile.costs
    passes = {
        f"forward pass of {n} rows" if n > 1 else "forward pass of 1 row": costs.rows(n)
        for n in (1, 2, 4, 8, 16)
    }
    drafts = {
        "draft of 1 token: a forward pass of its head or model": costs.first_draft,
        "each further draft step": costs.draft_step,
    }
    return [(name, f"{1e3 * s:.3f}", f"{s / costs.rows(1):.2f}") for name, s in (passes | drafts).items()]


def _acceptance_rows(report: "Tuning") -> list[tuple[str, ...]]:
    """By the log-odds of the draft model's probability, and of drafts without one."""
    from polydraft.core.confidence import BINS

    rates, _ = report.profile.known(report.greedy)
    odds = ["below 2%", "2%", "5%", "12%", "27%", "50%", "73%", "88%", "95%", "98%"]
    lanes = [
        *zip(odds, rates[:BINS], strict=True),
        ("first token", rates[BINS]),
        ("next tokens", rates[BINS + 1]),
    ]
    return [(name, f"{rate:.2f}") for name, rate in lanes]


def _trial_row(report: "Tuning", trial: "ShapeTrial") -> tuple[str, ...]:
    plain = report.trial("plain")
    predicted = report.predicted(trial)
    shown = "-" if predicted is None else f"{predicted:.0f}"
    error = "-" if predicted is None else f"{predicted / trial.measured - 1:+.0%}"
    over_plain = "1" if trial is plain else str(trial.speedup_over(plain))
    tokens_per_step = f"{trial.tokens / trial.steps:.2f}"
    return trial.name, shown, f"{trial.measured:.0f}", error, over_plain, tokens_per_step
