"""`polydraft methods`: every registered verifier, drafter and decoding method."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polydraft.cli.tables import grid, output

if TYPE_CHECKING:
    from polydraft.core import DecodingMethod, Method

_ANSWER = {True: "yes", False: "no", None: "with a lossless verifier"}


def _lossless(row: dict[str, Any]) -> str:
    return f"to {row['lossless_to']}, with a lossless verifier" if row["kind"] == "decoding" else _ANSWER[row["lossless"]]


def _row(kind: str, info: "Method | DecodingMethod") -> dict[str, Any]:
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
        "lossless_to": getattr(info, "lossless_to", "the target distribution" if getattr(info, "lossless", True) else "nothing"),
    }


def table() -> list[dict[str, Any]]:
    """All methods as plain data, in the registry's order; a drafter has one row for each kind of draft it makes.

    Example:
        >>> table()[0]["name"], table()[0]["year"]
        ('speculative', 2023)
    """
    from polydraft import registry

    infos = {
        "verifier": [*(registry.verifier(name).info for name in registry.names("verifier")), *registry.made_rules()],
        "drafter": [info for name in registry.names("drafter") for info in registry.drafter(name).methods],
        "decoding": [registry.decoding(name).info for name in registry.names("decoding")],
    }
    return [_row(kind, info) for kind, methods in infos.items() for info in methods]


def _short(authors: str) -> str:
    """Of each paper at most three names, else the first one and et al.

    Example:
        >>> _short("Li, Wei, Zhang & Zhang; Sun et al.")
        'Li et al.; Sun et al.'
    """
    papers = [names.strip() for names in authors.split(";")]
    return "; ".join(names if names.count(",") < 2 else f"{names.split(',')[0]} et al." for names in papers)


def _paper(row: dict[str, Any]) -> str:
    link = f" ([{row['arxiv']}](https://arxiv.org/abs/{row['arxiv']}))" if row["arxiv"] else ""
    return f"{row['title']}, {_short(row['authors'])}{link}"


_HEADS = {
    "verifier": ("Verifiers", "lossless"),
    "drafter": ("Drafters", ""),
    "decoding": ("Decoding methods", "outputs are lossless to"),
}


def markdown() -> str:
    """The tables of docs/methods.md: method, year, paper, lossless."""
    parts: list[str] = []
    for kind, (title, claim) in _HEADS.items():
        head = ["method", "year", "paper", *([claim] if claim else [])]
        lines = [f"## {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for row in table():
            if row["kind"] == kind:
                claims = {"verifier": [_lossless(row)], "drafter": [], "decoding": [row["lossless_to"]]}[kind]
                cells = [f"`{row['name']}`", str(row["year"]), _paper(row), *claims]
                lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="JSON list.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Tables of docs/methods.md.")] = False,
) -> None:
    """List verifiers, drafters and decoding methods: paper, year, which drafts they are exact for, whether they are lossless, and to what."""
    if as_json:
        typer.echo(json.dumps(table(), indent=2))
    elif as_markdown:
        typer.echo(markdown())
    else:
        _print()


def _print() -> None:
    console, head = output(160), ("name", "method", "year", "arXiv", "draft sampling", "shapes", "lossless")
    for kind in ("verifier", "drafter", "decoding"):
        rows = [
            (
                r["name"],
                r["title"],
                str(r["year"]),
                r["arxiv"] or "-",
                ", ".join(r["draft_sampling"]) or "any",
                ", ".join(r["shapes"]) or "any",
                _lossless(r),
            )
            for r in table()
            if r["kind"] == kind
        ]
        console.print(grid(head, rows, left=head, title=f"{kind}s"))
