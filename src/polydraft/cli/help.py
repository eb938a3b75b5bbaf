"""Help in two lengths: the ten options that people use first, and with --help-all all of them by panels."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

FIRST_OPTIONS = {
    "generate": [
        "--model",
        "--draft-model",
        "--drafter",
        "--threads",
        "--max-tokens",
        "--temperature",
        "--seed",
        "--chat",
        "--show",
        "--json",
    ],
    "chat": [
        "--model",
        "--draft-model",
        "--drafter",
        "--threads",
        "--max-model-len",
        "--max-tokens",
        "--temperature",
        "--top-p",
        "--seed",
        "--system",
    ],
    "serve": [
        "--model",
        "--draft-model",
        "--drafter",
        "--threads",
        "--max-model-len",
        "--max-num-seqs",
        "--host",
        "--port",
        "--api-key-file",
        "--served-model-name",
    ],
}
"""By command, in the order of the help."""
SHOWS_ALL = "polydraft.help_all"


def _show_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[SHOWS_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all", callback=_show_all, is_eager=True, help="Help with all options.", show_default=False
    ),
]


def write_help(context: Any, formatter: Any, parameters: Sequence[Any]) -> None:
    """Plain text by panels: the library that draws boxes takes longer to import than all the rest."""
    records = [(parameter, parameter.get_help_record(context)) for parameter in parameters]
    shown = [(parameter, record) for parameter, record in records if record]
    first = () if SHOWS_ALL in context.meta else FIRST_OPTIONS.get(context.command.name, ())
    panels = _panels(shown, first)
    for title, lines in panels.items():
        with formatter.section(title):
            formatter.write_dl(lines)
    if first:
        formatter.write_paragraph()
        formatter.write_text(
            f"{len(shown) - sum(map(len, panels.values()))} more options: {context.command_path} --help-all"
        )


def _panels(
    shown: Sequence[tuple[Any, tuple[str, str]]], first: Sequence[str]
) -> dict[str, list[tuple[str, str]]]:
    """Lines by the title of their panel; of the options those of `first` alone, if there are any."""
    panels = dict[str, list[tuple[str, str]]]()
    for parameter, record in shown:
        if parameter.param_type_name == "argument":
            panels.setdefault("Arguments", []).append(record)
    if first:
        by_flag = {flag: record for parameter, record in shown for flag in parameter.opts}
        panels["Options"] = [by_flag[flag] for flag in (*first, "--help-all", "--help")]
    else:
        for parameter, record in shown:
            if parameter.param_type_name != "argument":
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
    return panels
