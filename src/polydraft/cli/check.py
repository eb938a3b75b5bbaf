"""`polydraft check`: is the output of these models and settings the target's? Exit status 1 if not, 3 if too little was tested."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from polydraft.cli.audit import EXIT_STATUS, audit_server
from polydraft.cli.downloads import Yes, agree_on_downloads
from polydraft.cli.files import read_lines
from polydraft.cli.options import JSON_HELP, MeasurementOptions, Only, configured
from polydraft.cli.progress import bars
from polydraft.cli.start import build, use_threads
from polydraft.cli.tables import grid, output
from polydraft.config import Config, EngineConfig, setting
from polydraft.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polydraft.check.check import Report
    from polydraft.check.finding import Finding
    from polydraft.core import SamplingParams
    from polydraft.engine.api import Engine

LOOKS = {
    "walk": "the engine's tokens with those that the verdict samples on the same noise; effect: share that differs",
    "verifier": "the verdict's distribution of a step's tokens with the target's, for each position and four statistics",
    "draws": "the accepted tokens with the target's distribution, alike",
    "noise": "the accepted tokens with the verdict's distribution, alike",
    "verifier beside": "the verdict with that of another lossless verifier on the same drafts, alike",
    "noise again": "draws for a position that is drafted again with the draws before",
    "steps without drafts": "their tokens with the target's distribution",
    "text": "tokens of finished texts with a forward pass of transformers, by their position in a step",
}
"""Kinds of tests, in words."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Config):
    """Of the check."""

    url: str | None = setting(
        "Address of an OpenAI-compatible server to test from outside, against --model",
        str,
        unset="the engine of these options",
    )
    name: str | None = setting("Name of the model on that server", str, unset="its first")
    top_p: float = setting("Top-p threshold, above 0, at most 1", float, 1.0, panel="Sampling")
    top_k: int = setting("Top-k; 0 switches it off", int, 0, panel="Sampling")
    steps: int = setting(
        "Number of tested steps, or tokens of a server; more find smaller faults", int, 2000, low=30
    )
    seed: int = setting("First random seed", int, 0, low=0)
    self_test: bool = setting(
        "Search for known mistakes, which the check has to find", bool, False, flag="--self-test"
    )
    as_json: bool = setting(JSON_HELP, bool, False, flag="--json", panel="Output")


@configured
def check(
    *,
    config: Annotated[
        EngineConfig,
        Only(
            "model", "draft_model", "drafter", "verifier", "depth", "num_paths", "dtype", "device", "backend"
        ),
    ],
    measurement: Annotated[MeasurementOptions, Only("temperature", "prompts", "max_tokens", max_tokens=32)],
    options: CheckOptions,
    yes: Yes = False,
) -> None:
    """Test on real texts whether the output follows the target distribution: every step's verifier, its draws, and the final tokens.

    Exit status: 0 passed, 1 failed, 3 inconclusive.
    """
    use_threads()
    if options.url is not None:
        agree_on_downloads([config], yes=yes)
        audit_server(
            options.url,
            options.name,
            config,
            measurement,
            steps=options.steps,
            seed=options.seed,
            as_json=options.as_json,
        )
        return
    from polydraft.check.check import check as run
    from polydraft.core import SamplingParams
    from polydraft.models import pair
    from polydraft.models.loading.folder import load_module

    texts = (
        [p.text for p in pair.prompts()[:8]]
        if measurement.prompts is None
        else read_lines("--prompts", measurement.prompts)
    )
    agree_on_downloads([config], yes=yes)
    engine = build(config)
    as_json = options.as_json
    sampling = {"temperature": measurement.temperature, "max_tokens": measurement.max_tokens}
    params = SamplingParams(**sampling, top_p=options.top_p, top_k=options.top_k, seed=options.seed)
    if options.self_test:
        _self_test(engine, texts, params, options.steps, as_json)
        return
    judge = load_module(config.model or str(pair.target_folder()), dtype=config.dtype, device=config.device)
    what = f"checking {engine.summary()['drafter']} with {engine.summary()['verifier']}"
    with bars(what, hidden=as_json) as step:
        report = run(
            engine,
            texts,
            params,
            judge=judge,
            steps=options.steps,
            progress=lambda done, total: step(total, done),
        )
    if as_json:
        typer.echo(json.dumps({**report.to_dict(), "engine": engine.summary()}))
    else:
        _show(report, engine, params)
    if not report.passed:
        raise typer.Exit(EXIT_STATUS[report.status])


def _show(report: "Report", engine: "Engine", params: "SamplingParams") -> None:
    from polydraft.check.check import DOUBTFUL, IMPLAUSIBLE
    from polydraft.check.finding import POWER

    summary = engine.summary()
    console = output(110)
    columns = ("look", "compares", "tests", "steps or tokens", "effect", "p-value")
    console.print(
        grid(
            columns, [_row(look, findings) for look, findings in _by_look(report)], left_aligned=("compares",)
        )
    )
    for f in sorted(report.findings, key=lambda f: f.p_value)[:5]:
        if f.p_value * len(report.findings) <= DOUBTFUL:
            console.print(f"  {f.what}: effect {f.effect:.5f} in {f.count}, p-value {f.p_value:.3g}")
    for line in (*report.differing, *report.failures):
        console.print(f"  {line}", soft_wrap=True, highlight=False)
    status, reason = report.verdict
    console.print(
        f"\n{status if report.passed else status.upper()}: {reason}. Worst p-value {report.p_value:.3g} after correction for "
        f"{len(report.findings)} tests; it fails at {IMPLAUSIBLE:g}. With probability {POWER:g} these {report.steps} steps find a "
        f"verifier whose first token is off by {report.detectable:.2g} (total variation). {report.spares} steps had spare siblings. {report.tokens} tokens of requests without a seed; drafter "
        f"{summary['drafter']}, verifier {summary['verifier']}, temperature {params.temperature:g}."
    )
    if report.passed and not summary["lossless"]:
        console.print(
            f"{summary['verifier']} is not lossless by its own account: these are too few steps to see it."
        )


def _by_look(report: "Report") -> "Iterator[tuple[str, list[Finding]]]":
    """Tests of one kind together."""
    looks = dict.fromkeys(f.look for f in report.findings)
    for look in looks:
        yield look, [f for f in report.findings if f.look == look]


def _row(look: str, findings: "list[Finding]") -> tuple[str, ...]:
    worst = min(findings, key=lambda f: f.p_value)
    compares = LOOKS["verifier beside"] if look.startswith("verifier beside") else LOOKS[look]
    count = max(f.count for f in findings)
    return look, compares, str(len(findings)), str(count), f"{worst.effect:.5f}", f"{worst.p_value:.3g}"


def _self_test(
    engine: "Engine", texts: list[str], params: "SamplingParams", steps: int, as_json: bool
) -> None:
    """Every known mistake on the user's own pair, at distributions cut to few tokens, where each of them shows."""
    from polydraft.check.check import self_test

    model = None if engine.drafter is None else engine.drafter.offers.model
    if model is None:
        raise InvalidInputError(
            "--self-test was asked for without a draft model; give --draft-model: the mistakes need one."
        )
    rows = []
    with bars("making known mistakes", hidden=as_json) as step:
        for name, report in self_test(engine, model, texts, params, steps=steps):
            rows.append({"mistake": name, "caught": report.status == "failed", **report.to_dict()})
            step()
            if as_json:
                continue
            if report.status == "failed":
                typer.echo(f"{name}: caught after {report.steps} steps, p {report.p_value:.1e}")
            else:
                typer.echo(f"{name}: NOT caught in {report.steps} steps")
    missed = [row["mistake"] for row in rows if not row["caught"]]
    if as_json:
        typer.echo(json.dumps({"caught": len(rows) - len(missed), "missed": missed, "mistakes": rows}))
    else:
        typer.echo(f"{len(rows) - len(missed)} of {len(rows)} known mistakes caught")
    if missed:
        raise typer.Exit(1)
