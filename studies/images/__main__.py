"""`train` a model of pictures, digits or emoji; measure what LANTERN gains and costs: `figures`, `speed`; and guidance by its scale: `scales`."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from polydraft.bench.record import csv_table, markdown_table, write_texts
from polydraft.papers.lantern.comparison import ImageContender, compare, contenders, draw
from polydraft.papers.lantern.folder import ImageFolder, ImageSizes, digits_folder
from studies.images.data import Pictures, digits, emoji
from studies.images.quality import quality, train_classifier
from studies.images.training import Settings, error, next_code_loss, texts_of, train_folder
from studies.options import Out, Quick, write_json

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
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
DRAFTERS = (("model", 1), ("tree", 4), ("ngram", 4))
DELTAS = (0.05, 0.1, 0.2, 0.4)
FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)
SHOWN = ("without drafts", "exact", "LANTERN, mass 0.05", "LANTERN, mass 0.2", "LANTERN, mass 0.4", "LANTERN++, 1 times its own", "LANTERN++, 8 times its own")  # fmt: skip


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


@app.command()
def train(
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


@app.command()
def figures(
    out: Out = Path("build/images"),
    model: Annotated[
        Path | None, typer.Option(help="Folder that `train` wrote; the digits that come along without it.")
    ] = None,
    pictures: Source = None,
    samples: Annotated[int, typer.Option(min=2, help="Pictures of each class.")] = 60,
    seed: Seed = 0,
    quick: Quick = False,
) -> None:
    """Tables and pictures: tokens per step, total variation of a token, accuracy and Fréchet distance, by rule, budget and drafter."""
    torch.set_num_threads(1)
    seen, held_out, _ = _parts(pictures, seed)
    folder = ImageFolder.load(model or digits_folder())
    deltas, factors, samples = (DELTAS[-1:], FACTORS[-1:], 2) if quick else (DELTAS, FACTORS, samples)
    classifier = train_classifier(seen, steps=50 if quick else 1500, seed=seed)
    classes = list(range(len(folder.classes)))
    labels = torch.tensor(classes).repeat(samples)
    report: dict[str, Any] = {
        "command": " ".join(["python -m studies.images", *sys.argv[1:]]),
        "losses": _losses(folder, seen, held_out),
    }
    coded = folder.tokenizer.decode(folder.tokenizer.encode(held_out.pixels))
    rows = []
    for name, x, y in (
        ("held-out pictures", held_out.pixels, held_out.labels),
        ("the same, coded and decoded", coded, held_out.labels),
    ):
        rows.append(
            {"verifier": name, "drafter": "-"} | _judged(quality(classifier, x, y, seen.pixels, seed=seed))
        )
    made: list[ImageContender] = []
    for drafter, paths in DRAFTERS:
        own = contenders(folder, drafter, deltas, factors)[0 if drafter == "model" else 1 :]
        compare(folder, own, classes, samples=samples, seed=seed, num_paths=paths)
        for one in own:
            pixels = torch.cat([p.pixels for p in one.pictures])
            judged = _judged(quality(classifier, pixels, labels, seen.pixels, seed=seed))
            rows.append(one.row() | judged)
            typer.echo(f"{one.name}, {drafter}: {one.tokens_per_step:.2f} tokens per step", err=True)
        made += own
    report["rows"], report["greedy"] = rows, _greedy(folder, classes, deltas, factors)
    write_json(report, out / "images.json")
    page = _markdown(report, "images.csv")
    write_texts({out / "images.csv": _csv(report), out / "images.md": page})
    shown = [
        replace(one, pictures=one.pictures[:2])
        for one in made
        if one.drafter in ("model", "none") and one.name in SHOWN
    ]
    draw(shown, out / "samples.png")
    _curves(rows, out / "curves.png")
    typer.echo(page)


@app.command()
def speed(
    out: Out = Path("build/images"),
    model: Annotated[Path | None, typer.Option(help="As of `figures`.")] = None,
    samples: Annotated[
        int, typer.Option(min=2, help="Pictures of each class; the first ones do not count.")
    ] = 9,
    quick: Quick = False,
) -> None:
    """How many times faster than plain decoding each rule is, by drafter: processor time, by turns."""
    torch.set_num_threads(1)
    folder = ImageFolder.load(model or digits_folder())
    deltas, factors = (DELTAS[-1:], FACTORS[-1:]) if quick else (DELTAS, FACTORS)
    found = dict[str, dict[str, float]]()
    for drafter, paths in DRAFTERS:
        timed = contenders(folder, drafter, deltas, factors, measured=False)
        compare(folder, timed, range(len(folder.classes)), samples=2 if quick else samples, num_paths=paths)
        plain, *others = [sum(one.seconds[1:]) for one in timed]
        for one, seconds in zip(timed[1:], others, strict=True):
            found.setdefault(one.name, {})[drafter] = plain / seconds
    write_json(
        {"command": " ".join(["python -m studies.images", *sys.argv[1:]]), "rows": found}, out / "speed.json"
    )
    names = [drafter for drafter, _ in DRAFTERS]
    typer.echo(
        markdown_table(
            ["verifier", *names], [[name, *(f"{row[d]:.2f}" for d in names)] for name, row in found.items()]
        )
    )


@app.command()
def scales(
    out: Out = Path("build/images"),
    model: Annotated[Path | None, typer.Option(help="As of `figures`.")] = None,
    pictures: Source = None,
    samples: Annotated[int, typer.Option(min=2, help="Pictures of each class.")] = 40,
    seed: Seed = 0,
    quick: Quick = False,
) -> None:
    """Accuracy, Fréchet distance and tokens per step by scale of guidance, exactly; times are of the processor, of a code, without the first picture of each class."""
    torch.set_num_threads(1)
    seen, _, _ = _parts(pictures, seed)
    folder = ImageFolder.load(model or digits_folder())
    classes = list(range(len(folder.classes)))
    samples, labels = (
        (2, torch.tensor(classes).repeat(2)) if quick else (samples, torch.tensor(classes).repeat(samples))
    )
    classifier = train_classifier(seen, steps=50 if quick else 1500, seed=seed)
    rows = list[dict[str, Any]]()
    for scale in (1.0, 4.0) if quick else (1.0, 1.5, 2.0, 3.0, 4.0):
        made = [ImageContender("without drafts", "none"), ImageContender("exact")]
        compare(folder, made, classes, samples=samples, seed=seed, guidance=scale)
        found = _judged(
            quality(
                classifier, torch.cat([p.pixels for p in made[1].pictures]), labels, seen.pixels, seed=seed
            )
        )
        codes = len(labels) * folder.tokenizer.sizes.num_tokens * (samples - 1) / samples
        times = {
            name: 1000 * sum(one.seconds[1:]) / codes
            for name, one in zip(("plain_ms", "drafted_ms"), made, strict=True)
        }
        rows.append({"scale": scale, "tokens_per_step": made[1].tokens_per_step, **times, **found})
    write_json(
        {"command": " ".join(["python -m studies.images", *sys.argv[1:]]), "rows": rows}, out / "scales.json"
    )
    head = [
        "scale",
        "tokens per step",
        "plain, ms a code",
        "drafted, ms a code",
        "accuracy",
        "Fréchet distance",
    ]
    cells = [
        [
            f"{r['scale']:g}",
            *(f"{r[name]:.2f}" for name in ("tokens_per_step", "plain_ms", "drafted_ms")),
            f"{r['accuracy']:.3f} ± {r['accuracy_error']:.3f}",
            f"{r['distance']:.2f} ± {r['distance_error']:.2f}",
        ]
        for r in rows
    ]
    typer.echo(markdown_table(head, cells))


def _judged(found: Any) -> dict[str, float]:
    return found.accuracy.to_dict("accuracy", "accuracy_error") | found.distance.to_dict(
        "distance", "distance_error"
    )


@torch.no_grad()
def _losses(folder: ImageFolder, seen: Pictures, held_out: Pictures) -> dict[str, float]:
    """Nats per code, conditional, without guidance."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(folder.target, dtype=torch.float32)
    parts = {"training": seen, "held_out": held_out}
    return {
        name: float(next_code_loss(target, texts_of(folder.tokenizer, x.pixels, x.labels)))
        for name, x in parts.items()
    }


def _greedy(folder: ImageFolder, classes: list[int], deltas: Any, factors: Any) -> list[dict[str, Any]]:
    """Tokens per step, and how many codes are not those of greedy decoding."""
    from polydraft.papers.lantern.engine import ImageEngine, neighbourhoods

    plain = ImageEngine(folder, drafter="none").generate(classes, temperature=0)
    exact = ImageEngine(folder, drafter="tree", num_paths=4).generate(classes, temperature=0)
    rows = [{"verifier": "exact", **_agreement(exact, plain)}]
    for budget in (*({"delta": d} for d in deltas), *({"factor": f} for f in factors)):
        rule = neighbourhoods(folder, greedy=True, **budget)
        found = ImageEngine(folder, drafter="tree", num_paths=4, verifier=rule).generate(classes)
        rows.append(
            {"verifier": ", ".join(f"{name} {x:g}" for name, x in budget.items()), **_agreement(found, plain)}
        )
    return rows


def _agreement(found: Any, plain: Any) -> dict[str, float]:
    ours, theirs = (torch.tensor([r.token_ids for r in x.results]) for x in (found, plain))
    stats = [r.stats for r in found.results]
    calls = sum(s.generated_tokens for s in stats) / sum(s.steps for s in stats)
    return {"tokens_per_step": calls, "codes_that_differ": float((ours != theirs).double().mean())}


def _csv(report: dict[str, Any]) -> str:
    """Every rule and drafter, and greedy decoding behind them."""
    names = (
        "tokens_per_step",
        "total_variation",
        "accuracy",
        "accuracy_error",
        "distance",
        "distance_error",
        "codes_that_differ",
    )
    rows = report["rows"] + [row | {"drafter": "tree, greedily"} for row in report["greedy"]]
    numbers = ([None if row.get(name) is None else f"{row[name]:.4g}" for name in names] for row in rows)
    return csv_table(
        ["verifier", "drafter", *names],
        ([row["verifier"], row["drafter"], *n] for row, n in zip(rows, numbers, strict=True)),
    )


def _markdown(report: dict[str, Any], csv_name: str) -> str:
    """The rules of `SHOWN` with drafts of the draft model, beside real pictures."""

    def cell(row: dict[str, Any], name: str, form: str) -> str:
        return format(row[name], form) if row.get(name) is not None else "-"

    lines = [
        [
            r["verifier"],
            cell(r, "tokens_per_step", ".2f"),
            cell(r, "total_variation", ".3f"),
            f"{r['accuracy']:.3f} ± {r['accuracy_error']:.3f}",
            f"{r['distance']:.2f} ± {r['distance_error']:.2f}",
        ]
        for r in report["rows"]
        if r["drafter"] == "-" or (r["drafter"] in ("model", "none") and r["verifier"] in SHOWN)
    ]
    head = ["verifier", "tokens per step", "TV of a token", "accuracy", "Fréchet distance"]
    losses = ", ".join(f"{name.replace('_', ' ')} {x:.3f}" for name, x in report["losses"].items())
    return (
        f"{markdown_table(head, lines)}\n\n[Every budget and drafter]({csv_name}), greedy decoding too.\n\n"
        f"Nats per code: {losses}. Command: `{report['command']}`\n"
    )


def _curves(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    names = {
        "total_variation": "total variation of a token",
        "accuracy": "accuracy",
        "distance": "Fréchet distance",
    }
    for axis, (name, said) in zip(axes, names.items(), strict=True):
        for drafter, colour in zip(("model", "tree", "ngram"), ("C0", "C1", "C2"), strict=True):
            for kind, mark in (("exact", "*"), ("LANTERN,", "o"), ("LANTERN++", "s")):
                chosen = [r for r in rows if r["drafter"] == drafter and r["verifier"].startswith(kind)]
                if not chosen:
                    continue
                x = [r["tokens_per_step"] for r in chosen]
                y = [r[name] for r in chosen]
                errors = [r.get(f"{name}_error", 0.0) for r in chosen]
                style = "--" if kind == "LANTERN++" else "-"
                axis.errorbar(
                    x,
                    y,
                    errors,
                    marker=mark,
                    color=colour,
                    linestyle=style,
                    label=f"{kind.rstrip(',')}, {drafter}",
                )
        axis.set_xlabel("tokens per step")
        axis.set_ylabel(said)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    app()
