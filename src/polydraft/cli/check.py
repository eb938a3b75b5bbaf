"""`polydraft check`: is the output of these models and settings the target's? Exit status 1 if not."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polydraft.cli.files import read_lines
from polydraft.cli.quiet import quiet
from polydraft.errors import InvalidInputError

if TYPE_CHECKING:
    from polydraft.check.check import Report
    from polydraft.core import SamplingParams
    from polydraft.engine.api import Engine

__all__ = ["check"]


def check(
    model: Annotated[str | None, typer.Option(help="Folder of the target; the embedded pair without it.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Folder of a smaller model.")] = None,
    drafter: Annotated[str, typer.Option(help="A name of `polydraft methods`, or auto.")] = "auto",
    verifier: Annotated[str, typer.Option(help="A name of `polydraft methods`, or auto.")] = "auto",
    depth: Annotated[int | None, typer.Option(help="Drafted tokens on a path; planned without it.")] = None,
    num_paths: Annotated[int | None, typer.Option(help="Drafted paths per step; planned without it.")] = None,
    dtype: Annotated[str | None, typer.Option(help="For example float32 or bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="For example cpu or cuda.")] = None,
    backend: Annotated[str, typer.Option(help="auto, compiled or transformers.")] = "auto",
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="In (0, 1].")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 switches it off.")] = 0,
    prompts: Annotated[Path | None, typer.Option(help="Text file, one prompt a line; default: held-out Python files.")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds to test: more find smaller faults.")] = 2000,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    self_test: Annotated[bool, typer.Option("--self-test", help="Show that the check finds every known mistake.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Test on real texts whether the output follows the target's law: every round's rule, its draws, and the final tokens."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    quiet()
    from polydraft.core import SamplingParams
    from polydraft.engine.api import Engine
    from polydraft.models import pair

    options: dict[str, Any] = {"drafter": drafter, "verifier": verifier, "depth": depth, "num_paths": num_paths}
    options |= {"dtype": dtype, "device": device, "backend": backend}
    if draft_model is not None:
        options["draft"] = draft_model
    engine = Engine.embedded(**options) if model is None else Engine.from_pretrained(model, **options)
    texts = _prompts(prompts)
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed)
    if self_test:
        _self_test(engine, texts, params, rounds, as_json)
        return
    from polydraft.check.check import check as run
    from polydraft.models.folder import load_module

    judge = load_module(model or str(pair.target_folder()), dtype=dtype, device=device)
    with _bar(f"checking {engine.summary()['drafter']} with {engine.summary()['verifier']}", as_json) as (bar, task):
        report = run(
            engine,
            texts,
            params,
            judge=judge,
            rounds=rounds,
            progress=lambda done, all_: bar.update(task, completed=done, total=all_),
        )
    if as_json:
        typer.echo(json.dumps({**report.to_dict(), "engine": engine.summary()}))
    else:
        _show(report, engine, params)
    if not report.passed:
        raise typer.Exit(1)


def _prompts(file: Path | None) -> list[str]:
    from polydraft.models import pair

    if file is None:
        return [prompt.text for prompt in pair.prompts()[:8]]
    return read_lines("--prompts", file)


class _bar:
    """A progress bar on the terminal's standard error."""

    def __init__(self, what: str, hidden: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), disable=hidden or not sys.stderr.isatty(), transient=True)
        self._what = what

    def __enter__(self) -> tuple[Any, Any]:
        self._bar.start()
        return self._bar, self._bar.add_task(self._what, total=None)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _show(report: "Report", engine: "Engine", params: "SamplingParams") -> None:
    from rich.console import Console
    from rich.table import Table

    built = engine.summary()
    console = Console() if sys.stdout.isatty() else Console(width=110)
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("test", "rounds or tokens", "effect", "p-value"):
        grid.add_column(title, justify="left" if title == "test" else "right")
    for f in report.findings:
        grid.add_row(f.what, str(f.count), f"{f.effect:.5f}", f"{f.p_value:.3g}")
    console.print(grid)
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
    with _bar("making known mistakes", as_json) as (bar, task):
        for name, report in self_test(engine, model, texts, params, rounds=rounds):
            found.append({"mistake": name, "caught": not report.passed, **report.to_dict()})
            bar.advance(task)
            if not as_json:
                how = (
                    f"caught after {report.rounds} rounds, p {report.p_value:.1e}"
                    if not report.passed
                    else f"NOT caught in {report.rounds} rounds"
                )
                typer.echo(f"{name}: {how}")
    missed = [row["mistake"] for row in found if not row["caught"]]
    if as_json:
        typer.echo(json.dumps({"caught": len(found) - len(missed), "missed": missed, "mistakes": found}))
    else:
        typer.echo(f"{len(found) - len(missed)} of {len(found)} known mistakes caught")
    if missed:
        raise typer.Exit(1)
