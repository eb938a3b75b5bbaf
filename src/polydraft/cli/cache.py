"""`polydraft cache`: what is stored between runs beside models, and can be found out again."""

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli.commands import PluggedGroup
from polydraft.cli.options import AsJson
from polydraft.files.cache_folder import COMPILED, COSTS, PACKED, cache_folder

app = typer.Typer(
    cls=PluggedGroup,
    help="Packed weights, costs and compiled code, stored for the next start.",
    no_args_is_help=True,
)


class StoredKind(str, Enum):
    """What is stored."""

    PACKED = "packed"
    COSTS = "costs"
    COMPILED = "compiled"


ABOUT = {
    StoredKind.PACKED: "weights as they are multiplied, by model",
    StoredKind.COSTS: "seconds of steps, by models and machine",
    StoredKind.COMPILED: "compiled code, by version",
}


def _files_of(kind: StoredKind) -> list[Path]:
    """Files, and of compiled code folders, that were used last first."""
    base = cache_folder()
    if base is None or not base.is_dir():
        return []
    files_of = {
        StoredKind.PACKED: lambda: (base / PACKED).glob("*"),
        StoredKind.COSTS: lambda: (path for path in base.glob("*.json") if COSTS.fullmatch(path.name)),
        StoredKind.COMPILED: lambda: (base / COMPILED).glob("polydraft-*"),
    }
    return sorted(files_of[kind](), key=_last_use, reverse=True)


def _last_use(path: Path) -> int:
    about = path.stat()
    return max(about.st_atime_ns, about.st_mtime_ns)


def _size(path: Path) -> int:
    """Bytes of a file, or of all in a folder."""
    return sum(
        file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()
    )


def _model(file: Path) -> str:
    """Which model's weights are packed in a file, "" where it does not say."""
    try:
        with open(file, "rb") as opened:
            return Path(json.loads(opened.readline())["about"]["files"][-1][0]).name
    except (OSError, ValueError, LookupError, TypeError):
        return ""


@app.command("list")
def list_cached(as_json: AsJson = False) -> None:
    """Show what is stored, and where."""
    files_by_kind = {kind: [(path, _size(path)) for path in _files_of(kind)] for kind in StoredKind}
    if as_json:
        rows = [
            {"kind": kind.value, "path": str(path), "bytes": size}
            for kind in StoredKind
            for path, size in files_by_kind[kind]
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    typer.echo(str(cache_folder() or "no cache folder: this user has no home"))
    for kind, files in files_by_kind.items():
        typer.echo(f"  {kind.value:9} {sum(size for _, size in files) / 1e6:6.0f} MB  {ABOUT[kind]}")
        for path, size in files if kind is StoredKind.PACKED else []:
            typer.echo(f"    {_model(path) or path.name}  {size / 1e6:.0f} MB")


@app.command()
def clear(
    kinds: Annotated[
        list[StoredKind] | None, typer.Argument(help="What to delete; all of them where none is named.")
    ] = None,
) -> None:
    """Delete what is stored: the next start packs, measures and compiles anew. Models stay, see `polydraft models rm`."""
    typer.echo(f"{sum(map(_delete, map(_files_of, kinds or StoredKind))) / 1e6:.0f} MB deleted")


def _delete(paths: Sequence[Path]) -> int:
    """Returns how many bytes are free again."""
    sizes = [_size(path) for path in paths]
    for path in paths:
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return sum(size for path, size in zip(paths, sizes, strict=True) if not path.exists())
