"""What every study is asked on the command line, and how it writes what it found."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

Out = Annotated[Path, typer.Option(help="Folder that is written; it is made.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Little of everything: to see that it runs, not to read the figures.")
]


def write_json(report: dict[str, Any], file: Path) -> None:
    """The report as a file, whose folder is made, and its name on standard error."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    typer.echo(f"wrote {file}", err=True)
