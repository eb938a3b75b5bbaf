"""`polydraft train`: from a checkpoint to a draft head for it."""

import ctypes
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft.cli.downloads import Yes, agree_on_downloads
from polydraft.cli.options import Only, configured
from polydraft.cli.progress import Preparation
from polydraft.cli.start import build, use_threads
from polydraft.config import Config, EngineConfig, setting
from polydraft.errors import InvalidInputError
from polydraft.methods import registry
from polydraft.models.pair import EMBEDDED


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Config):
    """How a drafter is trained."""

    data: Sequence[Path] = setting(
        "Text (.jsonl, .parquet, plain, shards of .npz), or a folder of texts; may be repeated",
        list,
        (),
        items=Path,
        unset="texts that the model generates",
    )
    minutes: float = setting(
        "Duration of generation, reading and training together", float, 10.0, unit="minutes"
    )
    out: Path = setting(
        "Folder of the head; its work folder has what a later run continues",
        Path,
        Path("head"),
        flag="--out -o",
    )
    start: Path | None = setting("Folder of a head to start from", Path, unset="a fresh head")
    resume: bool = setting("Continuation of what the folder holds", bool, False, flag="--resume")
    unroll: int | None = setting("Number of trained depths", int, unset="the kind's own")
    draft_vocab: int | None = setting(
        "Maximum number of tokens that can be drafted", int, unset="the kind's own"
    )
    sizes: dict[str, Any] | None = setting(
        "Size of a fresh network, NAME=NUMBER; may be repeated", dict, flag="--size", unset="the kind's own"
    )
    loss: str = setting(
        "Loss; mixed is kl, and in the second half tv with it",
        str,
        "mixed",
        choices=("ce", "kl", "lk", "mixed", "tv"),
    )
    decay: float | None = setting(
        "Weight of a depth in the loss over that of the one before", float, unset="the kind's own"
    )
    piece: float | None = setting(
        "Duration after which a run ends; --resume trains the next piece",
        float,
        unset="everything at once",
        unit="minutes",
    )
    max_model_len: int = setting("Maximum length of a text", int, 1024, unit="tokens")
    quantization: str | None = setting(
        "Weight quantization of the target while it generates; int8 is twice as fast as bfloat16",
        str,
        unset="the format of the checkpoint",
    )
    seed: int = setting("Random seed of the texts and of their order", int, 0)


@configured
def train(
    kind: Annotated[str, typer.Argument(help=f"Kind of drafter: {', '.join(registry.names('recipe'))}.")],
    *,
    config: Annotated[EngineConfig, Only("model")],
    options: TrainOptions,
    yes: Yes = False,
) -> None:
    """Train a drafter of kind KIND for a model: it generates texts, and the drafter learns to predict its tokens from its hidden states."""
    out = options.out
    _check_out(out, options.resume)
    files = _files(options.data)
    sizes = {name: _whole(name, number) for name, number in (options.sizes or {}).items()}
    use_threads()
    keep_memory()
    from polydraft.train.conversations import check_file
    from polydraft.train.loop import TrainingOptions
    from polydraft.train.run import train_drafter

    for path in files:
        check_file(path)
    chosen = {
        name: getattr(options, name)
        for name in ("minutes", "unroll", "draft_vocab", "seed", "loss", "decay", "piece")
    }
    training = TrainingOptions.of(kind, sizes=sizes, **chosen)
    agree_on_downloads([config.with_(drafter=None)], yes=yes)
    with Preparation(f"loading {config.model or 'the embedded model'} ..."):
        model = {"max_model_len": options.max_model_len, "quantization": options.quantization}
        engine = build(config.with_(drafter=None, max_num_seqs=16, **model))
        out.mkdir(parents=True, exist_ok=True)
        card = train_drafter(
            engine,
            kind,
            out,
            training,
            data=files,
            start=options.start,
            command=" ".join(["polydraft", *sys.argv[1:]]),
            report=partial(typer.echo, err=True),
        )
    typer.echo(
        f"{out}: {kind} of {card['tokens']:,} tokens; of its first drafts on texts it has not seen {card['acceptance'][0]:.0%} are accepted at "
        f"temperature 1, {card['agreement'][0]:.0%} are the most likely token. Use it: polydraft generate --model {shlex.quote(config.model or EMBEDDED)} {registry.recipe(kind).option} {out}"
    )


def _check_out(out: Path, resume: bool) -> None:
    """Refuse a folder that holds something else, or nothing to go on with."""
    holds = out.exists() and any(out.iterdir())
    if holds and not resume:
        raise InvalidInputError(
            f"--out {str(out)!r} holds something already. Give --resume to go on with it, or name another folder."
        )
    if resume and not holds:
        raise InvalidInputError(
            f"--resume was given and --out {str(out)!r} holds nothing to go on with. Drop --resume, or name that folder."
        )


def _files(data: Sequence[Path]) -> list[Path]:
    """Files of texts, those in folders among them."""
    files = [file for path in data for file in (_in_folder(path) if path.is_dir() else [path])]
    for path in files:
        if not path.is_file():
            raise InvalidInputError(f"--data {str(path)!r} is no file. Name text files, or folders of them.")
    return files


def _in_folder(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _whole(name: str, number: Any) -> int:
    if not isinstance(number, int) or number < 0:
        raise InvalidInputError(f"--size {name}={number} was given; expected NAME=NUMBER, such as layers=2.")
    return number


def keep_memory() -> None:
    """Have glibc reuse what is given back: a step's tables are as large as the last one's, and clearing new pages for them takes a tenth of it."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        no_maps = (-4, 0)
        no_trim = (-1, 2**31 - 1)
        for number, value in (no_maps, no_trim):
            mallopt(number, value)
