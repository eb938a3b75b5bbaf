"""What every study is asked on the command line, and what it says of its run."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["Out", "Quick", "command_line", "write_json"]

Out = Annotated[Path, typer.Option(help="Folder that is written; it is made.")]
Quick = Annotated[bool, typer.Option("--quick", help="Little of everything: to see that it runs, not to read the figures.")]


def command_line(study: str) -> str:
    """How this run was called."""
    return " ".join([f"python -m studies.{study}", *sys.argv[1:]])


def write_json(report: dict[str, Any], file: Path) -> None:
    """The report as a file, whose folder is made, and its name on standard error."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    typer.echo(f"wrote {file}", err=True)
