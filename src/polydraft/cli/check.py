"""`polydraft check`: is the output of these models and settings the target's? Exit status 1 if not."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polydraft.cli import options as given
from polydraft.cli.files import read_lines
from polydraft.cli.progress import bars
from polydraft.cli.start import build, use_threads
from polydraft.cli.tables import grid, output
from polydraft.errors import InvalidInputError

if TYPE_CHECKING:
    from polydraft.check.check import Report
    from polydraft.core import SamplingParams
    from polydraft.engine.api import Engine


def check(
    model: given.Model = None,
    draft_model: given.DraftModel = None,
    drafter: given.Drafter = "auto",
    verifier: given.Verifier = "auto",
    depth: given.Depth = None,
    num_paths: given.NumPaths = None,
    dtype: given.Dtype = None,
    device: given.Device = None,
    backend: given.Backend = "auto",
    temperature: given.Temperature = 1.0,
    top_p: given.TopP = 1.0,
    top_k: Annotated[int, typer.Option(help="0 switches it off.")] = 0,
    prompts: given.Prompts = None,
    rounds: Annotated[int, typer.Option(help="Rounds to test: more find smaller faults.")] = 2000,
    max_tokens: given.MaxTokens = 32,
    seed: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    self_test: Annotated[bool, typer.Option("--self-test", help="Show that the check finds every known mistake.")] = False,
    as_json: given.AsJson = False,
) -> None:
    """Test on real texts whether the output follows the target's law: every round's rule, its draws, and the final tokens."""
    use_threads()
    from polydraft.check.check import check as run
    from polydraft.core import SamplingParams
    from polydraft.models import pair
    from polydraft.models.folder import load_module

    of_models: dict[str, Any] = {"dtype": dtype, "device": device}
    sizes = {"depth": depth, "num_paths": num_paths}
    engine = build(model, draft_model, drafter=drafter, verifier=verifier, backend=backend, **of_models, **sizes)
    texts = [p.text for p in pair.prompts()[:8]] if prompts is None else read_lines("--prompts", prompts)
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed)
    if self_test:
        _self_test(engine, texts, params, rounds, as_json)
        return
    judge = load_module(model or str(pair.target_folder()), **of_models)
    what = f"checking {engine.summary()['drafter']} with {engine.summary()['verifier']}"
    with bars(what, hidden=as_json) as step:
        report = run(engine, texts, params, judge=judge, rounds=rounds, progress=lambda done, total: step(total, done))
    if as_json:
        typer.echo(json.dumps({**report.to_dict(), "engine": engine.summary()}))
    else:
        _show(report, engine, params)
    if not report.passed:
        raise typer.Exit(1)


def _show(report: "Report", engine: "Engine", params: "SamplingParams") -> None:
    built, console = engine.summary(), output(110)
    rows = [(f.what, str(f.count), f"{f.effect:.5f}", f"{f.p_value:.3g}") for f in report.findings]
    console.print(grid(["test", "rounds or tokens", "effect", "p-value"], rows))
    verdict = "passed: nothing beyond chance" if report.passed else "FAILED: the output does not follow the target's law"
    console.print(
        f"\n{verdict}. Worst p-value {report.p_value:.3g} after correction for {len(report.findings)} tests; "
        f"{report.rounds} rounds, {report.tokens} tokens; drafter {built['drafter']}, verifier {built['verifier']}, "
        f"temperature {params.temperature:g}."
    )
    if report.passed and not built["lossless"]:
        console.print(f"{built['verifier']} is not lossless by its own account: these are too few rounds to see it.")


def _self_test(engine: "Engine", texts: list[str], params: "SamplingParams", rounds: int, as_json: bool) -> None:
    """Every known mistake on the user's own pair, at laws cut to few tokens, where each of them shows."""
    from polydraft.check.check import self_test

    model = getattr(engine.drafter, "model", None)
    if model is None:
        raise InvalidInputError("--self-test was asked for without a draft model; give --draft-model: the mistakes need one.")
    found = []
    with bars("making known mistakes", hidden=as_json) as step:
        for name, report in self_test(engine, model, texts, params, rounds=rounds):
            found.append({"mistake": name, "caught": not report.passed, **report.to_dict()})
            step()
            if as_json:
                continue
            if report.passed:
                typer.echo(f"{name}: NOT caught in {report.rounds} rounds")
            else:
                typer.echo(f"{name}: caught after {report.rounds} rounds, p {report.p_value:.1e}")
    missed = [row["mistake"] for row in found if not row["caught"]]
    if as_json:
        typer.echo(json.dumps({"caught": len(found) - len(missed), "missed": missed, "mistakes": found}))
    else:
        typer.echo(f"{len(found) - len(missed)} of {len(found)} known mistakes caught")
    if missed:
        raise typer.Exit(1)
