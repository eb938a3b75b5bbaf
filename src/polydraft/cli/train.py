"""`polydraft train`: from a checkpoint to a draft head for it."""

import ctypes
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from polydraft import registry
from polydraft.cli import options as given
from polydraft.cli.progress import Preparation
from polydraft.cli.start import build, use_threads
from polydraft.errors import InvalidInputError

__all__ = ["train"]


def train(
    kind: Annotated[str, typer.Argument(help=f"What is trained: {', '.join(registry.RECIPES)}.")],
    model: given.Model = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Texts (.jsonl, .parquet, plain, shards of .npz), or folders of them; without them the model writes its own."
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Of writing, reading and training together.")] = 10.0,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of the head; its work folder keeps what can be taken up again.")
    ] = Path("head"),
    start: Annotated[Path | None, typer.Option(help="Folder of a head to begin with.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what the folder holds.")] = False,
    unroll: Annotated[int | None, typer.Option(help="Depths that are trained.")] = None,
    draft_vocab: Annotated[int | None, typer.Option(help="Most tokens that can be drafted.")] = None,
    sizes: Annotated[
        list[str] | None, typer.Option("--size", help="NAME=NUMBER: a size of a fresh network that the kind lets choose.")
    ] = None,
    max_model_len: Annotated[int, typer.Option(help="Longest text, in tokens.")] = 1024,
    quantization: Annotated[
        str | None, typer.Option(help="Of the target while it writes and is read: int8 reads twice as fast as bfloat16.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the texts and of the order in which they are read.")] = 0,
) -> None:
    """Train a drafter of kind KIND for a model: it writes texts, keeps its states along them, and the drafter learns to foretell it."""
    if out.exists() and any(out.iterdir()) and not resume:
        raise InvalidInputError(
            f"--out {str(out)!r} holds something already. Give --resume to go on with it, or name another folder."
        )
    files = [file for path in data or () for file in (_in_folder(path) if path.is_dir() else [path])]
    for path in files:
        if not path.is_file():
            raise InvalidInputError(f"--data {str(path)!r} is no file. Name text files, or folders of them.")
    use_threads()
    _keep_memory()
    from polydraft.train.conversations import check_file
    from polydraft.train.run import Options, train_drafter

    for path in files:
        check_file(path)
    chosen = Options.of(
        kind, minutes=minutes, unroll=unroll, draft_vocab=draft_vocab, seed=seed, sizes=dict(map(_size, sizes or ()))
    )
    with Preparation(f"loading {model or 'the embedded model'} ..."):
        options = {"max_model_len": max_model_len, "quantization": quantization}
        engine = build(model, None, drafter=None, max_num_seqs=16, **options)
        out.mkdir(parents=True, exist_ok=True)
        card = train_drafter(
            engine,
            kind,
            out,
            chosen,
            data=files,
            start=start,
            command=" ".join(["polydraft", *sys.argv[1:]]),
            report=partial(typer.echo, err=True),
        )
    typer.echo(
        f"{out}: {kind} of {card['tokens']:,} tokens; of its first drafts on texts it has not seen {card['acceptance'][0]:.0%} are kept at "
        f"temperature 1, {card['agreement'][0]:.0%} are the most likely token. Use it: polydraft generate {registry.recipe(kind).option} {out}"
    )


def _in_folder(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _size(said: str) -> tuple[str, int]:
    name, _, number = said.partition("=")
    if not number.isdigit():
        raise InvalidInputError(f"--size {said!r} was given; expected NAME=NUMBER, such as layers=2.")
    return name, int(number)


def _keep_memory() -> None:
    """Have glibc keep what is given back: a step's tables are as large as the last one's, and clearing new pages for them takes a tenth of it."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        no_maps, no_trim = (-4, 0), (-1, 2**31 - 1)
        for number, value in (no_maps, no_trim):
            mallopt(number, value)
