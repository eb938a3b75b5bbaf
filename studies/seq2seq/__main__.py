"""`python -m studies.seq2seq train` makes the target and its Spec-Drafter, `figures` measures them; see `corpus` for the texts.

pip install -c constraints.txt '.[bench,translation]'
pip install --no-deps --target build/catalogues Django wagtail django-oscar django-allauth django-cms Mezzanine Sphinx
python -m studies.seq2seq train --catalogues build/catalogues && python -m studies.seq2seq figures --catalogues build/catalogues
"""

import argparse
import json
from pathlib import Path

import torch

from polydraft.papers.mask_query.network import MaskQueries
from studies.seq2seq import corpus, measure, teacher
from studies.seq2seq.drafter import train_drafter


def texts(catalogues: Path, quick: bool) -> tuple[list[corpus.Pair], list[corpus.Pair]]:
    """Training pairs, natural ones twice as there are fewer, and those held out of both kinds."""
    natural, kept = corpus.split(corpus.natural(catalogues), 30 if quick else 300)
    made, made_kept = corpus.split(corpus.made(400 if quick else 12_000, seed=0), 20 if quick else 200)
    return natural * 2 + made, kept + made_kept


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.seq2seq", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("stage", choices=("train", "figures"))
    parser.add_argument(
        "--catalogues", type=Path, default=Path("build/catalogues"), help="folder of installed packages"
    )
    parser.add_argument("--out", type=Path, default=Path("build/seq2seq"))
    parser.add_argument("--teacher-seconds", type=float, default=900.0, help="processor time")
    parser.add_argument("--drafter-seconds", type=float, default=400.0)
    parser.add_argument("--count", type=int, default=60, help="held-out pairs of each kind that are measured")
    parser.add_argument("--quick", action="store_true", help="shows in little time that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trained, kept = texts(args.catalogues, args.quick)
    if args.stage == "train":
        _train(args, trained)
    else:
        _figures(args, kept)


def _train(args: argparse.Namespace, pairs: list[corpus.Pair]) -> None:
    sides = [text for pair in dict.fromkeys(pairs) for text in (pair.source, pair.reference)]
    tokenizer = teacher.make_tokenizer(sides)
    seconds = (3.0, 3.0) if args.quick else (args.teacher_seconds, args.drafter_seconds)
    model = teacher.train_teacher(pairs, tokenizer, args.out / "target", seconds=seconds[0], report=print)
    chosen = [pair for pair in dict.fromkeys(pairs) if pair.task == "natural"] + [
        p for p in pairs if p.task == "made"
    ][:6000]
    sources = [tokenizer(pair.source)["input_ids"] for pair in chosen[: 64 if args.quick else None]]
    written = teacher.greedy(model, sources, 48)
    print(f"the target wrote {len(written)} texts, which the drafter learns from")
    train_drafter(
        model,
        list(zip(sources, written, strict=True)),
        args.out / "drafter",
        seconds=seconds[1],
        report=print,
    )


def _figures(args: argparse.Namespace, kept: list[corpus.Pair]) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = AutoModelForSeq2SeqLM.from_pretrained(args.out / "target").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.out / "target")
    count = 4 if args.quick else args.count
    some = [pair for task in ("made", "natural") for pair in [p for p in kept if p.task == task][:count]]
    rows = measure.measured(model, tokenizer, MaskQueries.load(args.out / "drafter"), some)
    (args.out / "figures.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (args.out / "figures.md").write_text(measure.table(rows) + "\n", encoding="utf-8")
    measure.picture(rows, args.out / "curves.png")
    print(measure.table(rows))


if __name__ == "__main__":
    main()
