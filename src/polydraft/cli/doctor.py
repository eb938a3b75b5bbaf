"""`polydraft doctor`: what this machine offers and which path the engine takes on it, and why; or the format of a model's calls; or compile everything."""

import json
from typing import Annotated, Any

import typer

from polydraft.cli.options import AsJson
from polydraft.cli.progress import Preparation
from polydraft.cli.start import quiet


def doctor(
    as_json: AsJson = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model whose format of tool calls and thoughts is shown, and nothing else.", metavar="NAME"
        ),
    ] = None,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm",
            help="Compilation of all that a run may call, and nothing else: minutes, once for this machine.",
        ),
    ] = False,
) -> None:
    """Show versions, threads, BLAS, memory bandwidth, and which compiled path is active and why; or how a model writes calls of tools."""
    if warm:
        with Preparation("compiling for this machine in two processes, some minutes ..."):
            from polydraft.cli.compile_all import compile_all

            quiet()
            compile_all()
        typer.echo("everything is compiled for this machine")
        return
    quiet()
    if model is None:
        from polydraft.bench.examine import examine

        report = examine()
    else:
        report = _of_model(model)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    for title, facts in report.items():
        typer.secho(title, bold=True)
        for name, value in facts.items():
            text = f"{value:.4g}" if isinstance(value, float) else value
            typer.echo(f"  {name if name.isupper() else name.replace('_', ' ')}: {text}")


def _of_model(name: str) -> dict[str, dict[str, Any]]:
    """The format that its chat template shows, and one call; of its files the tokenizer alone is read."""
    from polydraft.models.load import load_tokenizer
    from polydraft.models.tokens.chat_template import template_of
    from polydraft.server.formats.derive import format_of
    from polydraft.server.formats.history import shown

    templates = getattr(load_tokenizer(name), "chat_template", None)
    form = format_of(template_of(templates, tools=True) or "")
    facts = {**shown(form), "tools": form.tools or "in the system message"}
    return {"calls and thoughts": {"model": name, **facts}}
