"""`polydraft methods`: every registered verifier and drafter."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from polydraft.core import Method

__all__ = ["markdown", "methods", "table"]

_ANSWER = {True: "yes", False: "no", None: "with a lossless verifier"}


def _row(kind: str, info: "Method") -> dict[str, Any]:
    return {
        "kind": kind,
        "name": info.name,
        "title": info.title,
        "authors": info.authors,
        "year": info.year,
        "arxiv": info.arxiv,
        "laws": sorted(law.name for law in info.laws),
        "shapes": sorted(shape.name for shape in info.shapes | info.on_request),
        "lossless": info.lossless if kind == "verifier" else None,
    }


def table() -> list[dict[str, Any]]:
    """All methods as plain data, in the registry's order; a drafter has one row for each kind of draft it makes.

    Example:
        >>> table()[0]["name"], table()[0]["year"]
        ('speculative', 2023)
    """
    from polydraft import registry

    infos = {
        "verifier": [registry.verifier(name).info for name in registry.names("verifier")],
        "drafter": [info for name in registry.names("drafter") for info in registry.drafter(name).methods],
    }
    return [_row(kind, info) for kind, methods in infos.items() for info in methods]


def _paper(row: dict[str, Any]) -> str:
    link = f" ([{row['arxiv']}](https://arxiv.org/abs/{row['arxiv']}))" if row["arxiv"] else ""
    return f"{row['title']}, {row['authors']}{link}"


def markdown() -> str:
    """The table of docs/methods.md: method, year, paper, lossless."""
    lines = ["| method | year | paper | lossless |", "|---|---|---|---|"]
    for row in table():
        lossless = _ANSWER[row["lossless"]]
        lines.append(f"| `{row['name']}` ({row['kind']}) | {row['year']} | {_paper(row)} | {lossless} |")
    return "\n".join(lines)


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/methods.md.")] = False,
) -> None:
    """List verifiers and drafters: paper, year, which drafts they are exact for, whether they are lossless."""
    if as_json:
        typer.echo(json.dumps(table(), indent=2))
    elif as_markdown:
        typer.echo(markdown())
    else:
        _print()


def _print() -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=160)
    for kind in ("verifier", "drafter"):
        grid = Table(title=f"{kind}s", title_justify="left", box=None, header_style="bold", pad_edge=False)
        grid.add_column("name", no_wrap=True)
        for title in ("method", "year", "arXiv", "sibling laws", "shapes", "lossless"):
            grid.add_column(title)
        for row in table():
            if row["kind"] == kind:
                words = (row["name"], row["title"], str(row["year"]), row["arxiv"] or "-")
                laws, shapes = (", ".join(row[key]) for key in ("laws", "shapes"))
                grid.add_row(*words, laws, shapes, _ANSWER[row["lossless"]])
        console.print(grid)
