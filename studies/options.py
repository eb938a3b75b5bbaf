"""What every study is asked on the command line, and how it writes what it found."""

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

Row = TypeVar("Row")

Out = Annotated[Path, typer.Option(help="Folder that is written; it is made.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Little of everything: to see that it runs, not to read the figures.")
]


def write_json(report: dict[str, Any], file: Path) -> None:
    """The report as a file, whose folder is made, and its name on standard error."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    typer.echo(f"wrote {file}", err=True)


def append_rows(rows: Iterable[Any], file: Path) -> None:
    """Rows of one data class or named tuple at the end of a CSV file, which is begun with the names of their fields."""
    file.parent.mkdir(parents=True, exist_ok=True)
    is_new = not file.exists()
    with file.open("a", encoding="utf-8", newline="") as out:
        lines = csv.writer(out, lineterminator="\n")
        for row in rows:
            names = list(get_type_hints(type(row)))
            if is_new:
                lines.writerow(names)
            is_new = False
            lines.writerow([getattr(row, name) for name in names])


def read_rows(kind: type[Row], file: Path) -> list[Row]:
    """What `append_rows` wrote, of fields that are texts or numbers; nothing where there is no file."""
    if not file.exists():
        return []
    types = get_type_hints(kind)
    with file.open(encoding="utf-8", newline="") as lines:
        return [kind(**{name: types[name](line[name]) for name in types}) for line in csv.DictReader(lines)]
