"""Train a model of pictures, digits or emoji: a folder for `polydraft images --model`."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from polydraft.papers.lantern.folder import ImageSizes
from studies.images.data import Pictures, digits, emoji
from studies.images.training import Settings, error, train_folder
from studies.options import Out, Quick

Seed = Annotated[int, typer.Option(help="Of weights, batches, the split and the pictures.")]
Source = Annotated[
    Path | None,
    typer.Option(
        "--emoji", help="Folder of an npm package such as emoji-datasource-google; digits without it."
    ),
]
DIGITS = ImageSizes()
LARGER = ImageSizes(channels=3, size=32, halvings=2, width=48, num_codes=256)
HELD_OUT = 0.2


def _parts(source: Path | None, seed: int) -> tuple[Pictures, Pictures, Settings]:
    """Training part, held-out part, and sizes."""
    pictures = digits() if source is None else emoji(source, LARGER.size)
    settings = Settings(DIGITS, seed=seed)
    if source is not None:
        steps = {"target_steps": 1200, "draft_steps": 800}
        settings = replace(
            settings, sizes=LARGER, target=(4, 128), draft=(1, 96), copies=10, samples=1024, batch=32, **steps
        )
    return *pictures.split(HELD_OUT, seed), settings


def main(
    out: Out = Path("build/images"), pictures: Source = None, seed: Seed = 0, quick: Quick = False
) -> None:
    """Tokenizer, transformer and draft model, into a folder for `polydraft images --model`."""
    torch.set_num_threads(1)
    seen, held_out, settings = _parts(pictures, seed)
    if quick:
        settings = replace(
            settings, tokenizer_steps=60, target_steps=20, draft_steps=20, copies=1, samples=64
        )
    began = time.monotonic()
    folder = train_folder(settings, seen, out / "work", out / "model", typer.echo)
    typer.echo(
        f"{time.monotonic() - began:.0f} s; a held-out pixel is off by {error(folder.tokenizer, held_out):.4f}"
    )


if __name__ == "__main__":
    typer.run(main)
