"""`polydraft check`: is the output of these models and settings the target's? Exit status 1 if not, 3 if too little was tested."""

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polydraft.cli.downloads import Yes, agree_on_downloads
from polydraft.cli.files import prompt_texts
from polydraft.cli.options import JSON_HELP, MeasurementOptions, Only, configured
from polydraft.cli.progress import bars
from polydraft.cli.start import build, use_threads
from polydraft.cli.tables import grid, output
from polydraft.config import Config, EngineConfig, setting
from polydraft.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from polydraft.check.audit import Audit
    from polydraft.check.check import CheckReport
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
    from polydraft.core import SamplingParams

    texts = prompt_texts(measurement.prompts, 8)
    agree_on_downloads([config], yes=yes)
    engine = build(config)
    sampling = {"temperature": measurement.temperature, "max_tokens": measurement.max_tokens}
    params = SamplingParams(**sampling, top_p=options.top_p, top_k=options.top_k, seed=options.seed)
    if options.self_test:
        _self_test(engine, texts, params, options.steps, options.as_json)
    else:
        _check(engine, texts, params, config, options)


def _check(
    engine: "Engine",
    texts: list[str],
    params: "SamplingParams",
    config: EngineConfig,
    options: CheckOptions,
) -> None:
    from polydraft.check.check import check as run
    from polydraft.models import pair
    from polydraft.models.torch.module import load_module

    judge = load_module(config.model or str(pair.target_folder()), dtype=config.dtype, device=config.device)
    what = f"checking {engine.summary()['drafter']} with {engine.summary()['verifier']}"
    with bars(what, hidden=options.as_json) as step:
        report = run(
            engine,
            texts,
            params,
            judge=judge,
            steps=options.steps,
            progress=lambda done, total: step(total, done),
        )
    if options.as_json:
        typer.echo(json.dumps({**report.to_dict(), "engine": engine.summary()}))
    else:
        _show(report, engine, params)
    if not report.passed:
        raise typer.Exit(EXIT_STATUS[report.status])


def _show(report: "CheckReport", engine: "Engine", params: "SamplingParams") -> None:
    from polydraft.check.check import DOUBTFUL

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
    console.print(_summary(report, summary, params.temperature))
    if report.passed and not summary["lossless"]:
        console.print(
            f"{summary['verifier']} is not lossless by its own account: these are too few steps to see it."
        )


def _summary(report: "CheckReport", summary: dict[str, Any], temperature: float) -> str:
    from polydraft.check.check import IMPLAUSIBLE
    from polydraft.check.finding import POWER

    status, reason = report.verdict
    return (
        f"\n{status if report.passed else status.upper()}: {reason}. Worst p-value {report.p_value:.3g} after correction for "
        f"{len(report.findings)} tests; it fails at {IMPLAUSIBLE:g}. With probability {POWER:g} these {report.steps} steps find a "
        f"verifier whose first token is off by {report.detectable:.2g} (total variation). {report.spares} steps had spare siblings. {report.tokens} tokens of requests without a seed; drafter "
        f"{summary['drafter']}, verifier {summary['verifier']}, temperature {temperature:g}."
    )


def _by_look(report: "CheckReport") -> "Iterator[tuple[str, list[Finding]]]":
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


EXIT_STATUS = {"failed": 1, "inconclusive": 3}
WORST = 8
"""Tests and texts that are shown one by one."""


def audit_server(
    url: str,
    name: str | None,
    config: EngineConfig,
    measurement: MeasurementOptions,
    *,
    steps: int,
    seed: int,
    as_json: bool,
) -> None:
    """Test a server's texts, and end with the status of what was found."""
    from polydraft.check.audit import audit
    from polydraft.check.remote import Completions
    from polydraft.check.suspects import Suspects, setting_of
    from polydraft.models.load import encode, load_tokenizer
    from polydraft.models.slots import special_ids
    from polydraft.models.torch.module import load_module

    texts = prompt_texts(measurement.prompts, 8)
    tokenizer = load_tokenizer(str(config.model))
    server = Completions(url, tokenizer, name, os.environ.get("POLYDRAFT_API_KEY"))
    judge = load_module(str(config.model), dtype=config.dtype, device=config.device)
    draft = None
    suspects = Suspects(None)
    if config.draft_model:
        draft = load_module(str(config.draft_model), dtype=config.dtype, device=config.device)
        suspects = Suspects(*setting_of(str(config.drafter or "model"), config.depth, config.num_paths))
    with bars(f"asking {server.name} at {url}", hidden=as_json) as step:
        options: dict[str, Any] = {
            "temperature": measurement.temperature,
            "max_tokens": measurement.max_tokens,
            "tokens": steps,
        }
        prompts = [encode(tokenizer, text) for text in texts]
        end_ids = special_ids(judge)[0]
        report = audit(
            server,
            judge,
            prompts,
            eos_token_ids=end_ids,
            seed=seed,
            draft=draft,
            suspects=suspects,
            progress=lambda n, of: step(of, n),
            **options,
        )
    if as_json:
        typer.echo(json.dumps({"url": url, "model": server.name, **options, **report.to_dict()}))
    else:
        _show_audit(report, server.name, measurement.temperature, tokenizer)
    if report.verdict[0] != "passed":
        raise typer.Exit(EXIT_STATUS[report.verdict[0]])


def _show_audit(report: "Audit", name: str, temperature: float, tokenizer: Any) -> None:
    console = output(110)
    if report.findings:
        worst = sorted(report.findings, key=lambda f: (not f.what.startswith("all"), f.p_value))[:WORST]
        rows = [(f.what, str(f.count), f"{f.effect:.4f}", f"{f.p_value:.3g}") for f in worst]
        console.print(grid(("test", "tokens", "deviation", "p-value"), rows))
    for d in report.differences[:WORST]:
        token, best = (tokenizer.decode([token]) for token in (d.token, d.best))
        console.print(
            f"  text {d.text + 1} differs first at token {d.position}: {token!r}, {d.margin:.3f} logits below {best!r}",
            highlight=False,
        )
    console.print(_audit_summary(report, name, temperature))
    verdicts = {"tokens": report.tokens_verdict, "log-probabilities": report.logprobs_verdict}
    for what, (verdict, why) in verdicts.items():
        console.print(f"  {what:<17} {verdict}: {why}", highlight=False)


def _audit_summary(report: "Audit", name: str, temperature: float) -> str:
    from polydraft.check.finding import POWER

    status, reason = report.verdict
    power = (
        f"with probability {POWER:g} a deviation of {report.detectable:.2g} would have been found"
        if report.findings
        else f"{report.ties} near ties within {report.margin:.2g} logits"
    )
    guessed = f" Token ids of {report.guessed} texts were guessed." if report.guessed else ""
    return (
        f"\n{status if status == 'passed' else status.upper()}: {reason}. {name} at temperature {temperature:g}: {report.tokens} tokens of {report.texts} texts, "
        f"worst p-value {report.p_value:.3g} after correction for {max(len(report.findings), 1)} tests; {power}.{guessed}"
    )
