"""`polydraft methods`: every registered verifier, drafter and decoding method."""

import json
from typing import TYPE_CHECKING, Any

import typer

from polydraft.cli.method_commands import ShellCommand, of_decoding, of_drafter, of_verifier
from polydraft.cli.options import AsJson
from polydraft.cli.tables import grid, output
from polydraft.methods import registry

if TYPE_CHECKING:
    from polydraft.core import DecodingMethod, Method


def lossless(row: dict[str, Any]) -> str:
    if row["kind"] == "decoding":
        return f"to {row['lossless_to']}, with a lossless verifier"
    return {True: "yes", False: "no", None: "with a lossless verifier"}[row["lossless"]]


def _row(kind: str, info: "Method | DecodingMethod") -> dict[str, Any]:
    command = _command(kind, info)
    return {
        "kind": kind,
        "name": info.name,
        "title": info.title,
        "authors": info.authors,
        "year": info.year,
        "arxiv": info.arxiv,
        "draft_sampling": sorted(s.name for s in getattr(info, "draft_sampling", ())),
        "shapes": sorted(shape.name for shape in getattr(info, "shapes", ())),
        "lossless": getattr(info, "lossless", None) if kind == "verifier" else None,
        "lossless_to": getattr(
            info, "lossless_to", "the target distribution" if getattr(info, "lossless", True) else "nothing"
        ),
        "command": command.text,
        "needs": command.needs,
    }


def _command(kind: str, info: Any) -> ShellCommand:
    """That runs a method, see `method_commands`."""
    if kind == "verifier":
        return of_verifier(info)
    if kind == "drafter":
        return of_drafter(info.name)
    return of_decoding(info.name)


def table() -> list[dict[str, Any]]:
    """All methods as plain data, in the registry's order; a drafter has one row for each kind of draft it makes.

    Example:
        >>> table()[0]["name"], table()[0]["year"]
        ('speculative', 2023)
    """
    infos = {
        "verifier": [
            *(registry.verifier(name).info for name in registry.names("verifier")),
            *registry.made_verifiers(),
        ],
        "drafter": [info for name in registry.names("drafter") for info in registry.drafter(name).methods],
        "decoding": [registry.decoding(name).info for name in registry.names("decoding")],
    }
    return [_row(kind, info) for kind, methods in infos.items() for info in methods]


def methods(
    as_json: AsJson = False,
) -> None:
    """List verifiers, drafters and decoding methods: paper, year, which drafts they are exact for, whether they are lossless, and to what, and a command
    for each."""
    if as_json:
        typer.echo(json.dumps(table(), indent=2))
    else:
        _print()


def _print() -> None:
    console = output(160)
    head = ("name", "method", "year", "arXiv", "draft sampling", "shapes", "lossless")
    for kind in ("verifier", "drafter", "decoding"):
        rows = [
            (
                r["name"],
                r["title"],
                str(r["year"]),
                r["arxiv"] or "-",
                ", ".join(r["draft_sampling"]) or "any",
                ", ".join(r["shapes"]) or "any",
                lossless(r),
            )
            for r in table()
            if r["kind"] == kind
        ]
        console.print(grid(head, rows, left_aligned=head, title=f"{kind}s"))
    typer.echo("\nA command for each, on models that come with the package where it needs no others:")
    for row in table():
        typer.echo(f"  {row['command']}" + (f"\n    ({row['needs']})" if row["needs"] else ""))
