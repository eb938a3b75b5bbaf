"""`polydraft train`: from a checkpoint to a draft head for it."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from polydraft.cli import options as given
from polydraft.cli.progress import Preparation
from polydraft.cli.start import build, use_threads
from polydraft.errors import InvalidInputError, unknown_name

__all__ = ["train"]

KINDS = ("eagle",)


def train(
    kind: Annotated[str, typer.Argument(help="What is trained: eagle.")],
    model: given.Model = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Texts (.jsonl, plain, shards of .npz), or folders of them; without them the model writes its own."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Of writing, reading and training together.")] = 10.0,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of the head; its work folder keeps what can be taken up again.")
    ] = Path("head"),
    start: Annotated[Path | None, typer.Option(help="Folder of a head to begin with.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what the folder holds.")] = False,
    unroll: Annotated[int, typer.Option(help="Steps over the head's own output.")] = 3,
    draft_vocab: Annotated[int, typer.Option(help="Most tokens that the head can draft.")] = 8192,
    max_model_len: Annotated[int, typer.Option(help="Longest text, in tokens.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the texts and of the order in which they are read.")] = 0,
) -> None:
    """Train a draft head of kind KIND for a model: it writes texts, keeps its states along them, and a head learns to foretell it."""
    if kind not in KINDS:
        raise unknown_name("kind of head", kind, KINDS)
    if out.exists() and any(out.iterdir()) and not resume:
        raise InvalidInputError(
            f"--out {str(out)!r} holds something already. Give --resume to go on with it, or name another folder."
        )
    files = [file for path in data or () for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    for path in files:
        if not path.is_file():
            raise InvalidInputError(f"--data {str(path)!r} is no file. Name text files, or folders of them.")
    use_threads()
    from polydraft.train.eagle_run import Options, train_eagle

    with Preparation(f"loading {model or 'the embedded model'} ..."):
        engine = build(model, None, drafter=None, max_num_seqs=16, max_model_len=max_model_len)
        chosen = Options(minutes=minutes, unroll=unroll, draft_vocab=draft_vocab, seed=seed)
        out.mkdir(parents=True, exist_ok=True)
        card = train_eagle(
            engine,
            out,
            chosen,
            data=files,
            start=start,
            command=" ".join(["polydraft", *sys.argv[1:]]),
            report=partial(typer.echo, err=True),
        )
    typer.echo(
        f"{out}: a head of {card['tokens']:,} tokens; of its first drafts on texts it has not seen {card['acceptance'][0]:.0%} are kept at "
        f"temperature 1, {card['agreement'][0]:.0%} are the most likely token. Use it: polydraft generate --head {out}"
    )
