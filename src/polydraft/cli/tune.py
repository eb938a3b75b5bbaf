"""`polydraft tune`: what the policy knows of these models and prompts, and whether drafts pay."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polydraft.cli.downloads import Yes, agree_on_downloads
from polydraft.cli.files import check_output, read_lines, say_written
from polydraft.cli.options import AsJson, MeasurementOptions, Only, configured
from polydraft.cli.progress import bars
from polydraft.cli.start import build, use_threads
from polydraft.cli.tables import grid, output
from polydraft.config import EngineConfig

if TYPE_CHECKING:
    from polydraft.tune.tune import Tuning


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
    from polydraft.models import pair
    from polydraft.policy.profile import remember
    from polydraft.tune import tune as tuning

    texts = (
        [p.text for p in pair.prompts()[:6]]
        if measurement.prompts is None
        else read_lines("--prompts", measurement.prompts)
    )
    agree_on_downloads([config], yes=yes)
    engine = build(config.with_(max_num_seqs=4))
    quick = measurement.quick
    max_tokens = measurement.max_tokens
    texts = texts[:6] if quick else texts
    with bars("running draft shapes", hidden=as_json) as step:
        report = tuning.tune(
            engine,
            [engine.encode(text) for text in texts],
            params=SamplingParams(
                temperature=measurement.temperature, max_tokens=min(max_tokens, 24) if quick else max_tokens
            ),
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
    if save is not None:
        report.profile.save(save)
    if report_file is not None:
        report_file.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    if picture is not None:
        from polydraft.tune.picture import picture as draw

        draw(report, picture)
    say_written(file for file in (save, report_file, picture) if file is not None)


def _show(report: "Tuning") -> None:
    """Seconds, acceptance rates, speeds of shapes and the recommendation, as tables."""
    from polydraft.core.confidence import BINS

    console = output()
    costs = report.profile.costs
    plain = report.trial("plain")
    rates, _ = report.profile.known(report.greedy)
    passes = {
        f"forward pass of {n} rows" if n > 1 else "forward pass of 1 row": costs.rows(n)
        for n in (1, 2, 4, 8, 16)
    }
    drafts = {
        "draft of 1 token: a forward pass of its head or model": costs.first_draft,
        "each further draft step": costs.draft_step,
    }
    cells = [(name, f"{1e3 * s:.3f}", f"{s / costs.rows(1):.2f}") for name, s in (passes | drafts).items()]
    console.print(grid(["cost of a", "milliseconds", "forward passes"], cells))
    odds = ["below 2%", "2%", "5%", "12%", "27%", "50%", "73%", "88%", "95%", "98%"]
    lanes = [
        *zip(odds, rates[:BINS], strict=True),
        ("first token", rates[BINS]),
        ("next tokens", rates[BINS + 1]),
    ]
    console.print(
        grid(["confidence from", "acceptance rate"], [(name, f"{rate:.2f}") for name, rate in lanes])
    )
    rows = list[tuple[str, ...]]()
    for t in report.trials:
        predicted = report.predicted(t)
        error = None if predicted is None else predicted / t.measured - 1
        cells = ("-", "-") if error is None else (f"{predicted:.0f}", f"{error:+.0%}")
        over_plain = "1" if t is plain else str(t.speedup_over(plain))
        rows.append(
            (t.name, cells[0], f"{t.measured:.0f}", cells[1], over_plain, f"{t.tokens / t.steps:.2f}")
        )
    console.print(grid(["shape", "predicted", "measured", "error", "over plain", "tokens/step"], rows))
    console.print(
        "\n" + "\n".join(filter(None, (report.recommendation(), report.doubt()))) + "\n", highlight=False
    )
