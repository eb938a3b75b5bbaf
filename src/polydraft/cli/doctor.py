"""`polydraft doctor`: what this machine offers and which path the engine takes on it, and why; or compile everything for it."""

import json
from typing import Annotated

import typer

from polydraft.cli.options import AsJson
from polydraft.cli.progress import Preparation
from polydraft.cli.start import quiet


def doctor(
    as_json: AsJson = False,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm",
            help="Compilation of all that a run may call, and nothing else: minutes, once for this machine.",
        ),
    ] = False,
) -> None:
    """Show versions, threads, BLAS, memory bandwidth, and which compiled path is active and why."""
    if warm:
        with Preparation("compiling for this machine in two processes, some minutes ..."):
            from polydraft.cli.compile_all import compile_all

            quiet()
            compile_all()
        typer.echo("everything is compiled for this machine")
        return
    quiet()
    from polydraft.bench.examine import examine

    report = examine()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    for title, facts in report.items():
        typer.secho(title, bold=True)
        for name, value in facts.items():
            text = f"{value:.4g}" if isinstance(value, float) else value
            typer.echo(f"  {name if name.isupper() else name.replace('_', ' ')}: {text}")
