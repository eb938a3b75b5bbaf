"""Make an encoder-decoder and its Spec-Drafter; see `corpus` for the texts.

pip install -c constraints.txt '.[bench,translation]'
pip install --no-deps --target build/catalogues Django wagtail django-oscar django-allauth django-cms Mezzanine Sphinx
python -m studies.seq2seq --catalogues build/catalogues
"""

from pathlib import Path
from typing import Annotated

import torch
import typer

from studies.options import Out, Quick
from studies.seq2seq import corpus, teacher
from studies.seq2seq.drafter import train_drafter


def training_pairs(catalogues: Path, quick: bool) -> list[corpus.Pair]:
    """Natural ones twice, as there are fewer; those that are held out are not among them."""
    natural, _ = corpus.split(corpus.natural(catalogues), 30 if quick else 300)
    made, _ = corpus.split(corpus.made(400 if quick else 12_000, seed=0), 20 if quick else 200)
    return natural * 2 + made


def main(
    catalogues: Annotated[Path, typer.Option(help="Folder of installed packages.")] = Path(
        "build/catalogues"
    ),
    out: Out = Path("build/seq2seq"),
    teacher_seconds: Annotated[float, typer.Option(help="Processor time of the target's training.")] = 900.0,
    drafter_seconds: Annotated[float, typer.Option(help="That of the drafter's.")] = 400.0,
    quick: Quick = False,
) -> None:
    """Write the target's and the drafter's folder."""
    torch.set_num_threads(1)
    if quick:
        teacher_seconds = 3.0
        drafter_seconds = 3.0
    pairs = training_pairs(catalogues, quick)
    once = list(dict.fromkeys(pairs))
    tokenizer = teacher.make_tokenizer([text for pair in once for text in (pair.source, pair.reference)])
    model = teacher.train_teacher(pairs, tokenizer, out / "target", seconds=teacher_seconds, report=print)
    natural = [pair for pair in once if pair.task == "natural"]
    made = [pair for pair in pairs if pair.task == "made"][:6000]
    sources = [tokenizer(pair.source)["input_ids"] for pair in (natural + made)[: 64 if quick else None]]
    written = teacher.greedy(model, sources, 48)
    print(f"the target wrote {len(written)} texts, which the drafter learns from")
    rows = list(zip(sources, written, strict=True))
    train_drafter(model, rows, out / "drafter", seconds=drafter_seconds, report=print)


if __name__ == "__main__":
    typer.run(main)
