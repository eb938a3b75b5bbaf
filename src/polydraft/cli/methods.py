"""`polydraft methods`: every registered verifier, drafter and decoding method, and a command for each.

A command runs as printed, on the pair of small models inside the package, or with what it needs in its capitals.
"""

import json
from typing import TYPE_CHECKING, Any

import typer

from polydraft.cli.options import AsJson
from polydraft.cli.tables import grid, output
from polydraft.methods import registry

if TYPE_CHECKING:
    from polydraft.core import DecodingMethod, Method
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from polydraft.core import Method


EXAMPLE = 'polydraft generate "def f(x):" --model embedded --max-tokens 16'
ANY_MODEL = 'polydraft generate "Once upon a time" --model MODEL'
ON_THE_EMBEDDED_PAIR = (
    "model",
    "model:chain",
    "model:systematic",
    "model:listed",
    "model:without_replacement",
    "model:greedy_plus_one",
    "ngram",
    "amusd",
)
"""Drafters that need no more, in the order in which one is taken for a verifier."""


class ShellCommand(NamedTuple):
    """text: a line for a shell, "" where there is none.  needs: what its words in capitals stand for, "" where it runs as it is."""

    text: str
    needs: str = ""


def of_verifier(info: "Method") -> ShellCommand:
    """With a drafter that it is exact for.

    Example:
        >>> of_verifier(registry.verifier("flow").info).text.partition("16 ")[2]
        '--drafter model:systematic --verifier flow'
    """
    from polydraft.verifiers import pairing

    if info.name not in registry.names("verifier"):
        return ShellCommand(
            "polydraft images --help", "a verifier that is made for one model's data, by its module"
        )
    drafters = (*ON_THE_EMBEDDED_PAIR, *registry.names("drafter"))
    drafter = next(
        name
        for name in drafters
        if (drawn := registry.declared(name)) is not None and pairing.accepts(info, drawn)
    )
    command = of_drafter(drafter)
    return ShellCommand(f"{command.text} --verifier {info.name}", command.needs)


def of_drafter(name: str) -> ShellCommand:
    """By what it is built from.

    Example:
        >>> of_drafter("suffix").text.endswith("--drafter suffix"), of_drafter("eagle").needs
        (True, 'FOLDER: a head, `polydraft train eagle --model MODEL --out FOLDER`, or OWNER/NAME of a published one')
    """
    base = registry.name_and_kind(name)[0]
    kind = base.partition(":")[0]
    if kind in registry.heads() and kind in registry.names("recipe"):
        trained = f"`polydraft train {kind} --model MODEL --out FOLDER`"
        return ShellCommand(
            f"{ANY_MODEL} --head FOLDER --drafter {name}",
            f"FOLDER: a head, {trained}, or OWNER/NAME of a published one",
        )
    if kind in registry.heads():
        return ShellCommand(
            f"{ANY_MODEL} --head OWNER/NAME --drafter {name}", "OWNER/NAME: a published head of MODEL"
        )
    if registry.takes(base, "weights"):
        return ShellCommand(
            f"{ANY_MODEL} --head FOLDER --drafter {name}", "FOLDER: a network that was trained for MODEL"
        )
    if registry.takes(base, "index"):
        return ShellCommand(
            f"{EXAMPLE} --drafter {name} --index FILE",
            "FILE: `polydraft index build --tokenizer embedded --out FILE TEXTS`",
        )
    if name in registry.names("decoding"):  # whose passages it drafts from
        return of_decoding(name)
    if registry.takes(base, "models"):
        return ShellCommand(
            f"{ANY_MODEL} --draft-model A --draft-model B",
            "A, B: smaller models with the vocabulary of MODEL",
        )
    return ShellCommand(f"{EXAMPLE} --drafter {name}")


def of_decoding(name: str) -> ShellCommand:
    """By the options that the method takes."""
    if "passages" in registry.decoding_options(name):
        return ShellCommand(
            f"{ANY_MODEL} --decoding {name} --decoding-option passages=FILE",
            "FILE: `polydraft index build --kind passages --model MODEL --out FILE TEXTS`",
        )
    return ShellCommand(f"{EXAMPLE} --decoding {name}")


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
    """That runs a method."""
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
