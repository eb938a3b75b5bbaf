"""`polydraft images`: pictures by class, plainly, with exact drafts and with LANTERN, side by side in a PNG."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from polydraft.cli.files import check_output, say_written
from polydraft.cli.options import AsJson, configured
from polydraft.cli.progress import bars
from polydraft.cli.start import quiet
from polydraft.cli.tables import grid, output
from polydraft.config import Config, setting


@dataclass(frozen=True, kw_only=True)
class ImageOptions(Config):
    """What is drawn, and how."""

    out: Path = setting("File of the picture, PNG", Path, Path("images.png"), flag="--out", panel="Output")
    model: str | None = setting(
        "Folder that `python -m studies.images` wrote",
        str,
        unset="the digits that come along",
        panel="Models",
    )
    classes: str | None = setting(
        "Names of classes, with commas between", str, unset="the first ten", panel="Sampling"
    )
    samples: int = setting("Number of pictures of each class", int, 1, low=1, high=64, panel="Sampling")
    guidance: float | None = setting(
        "Scale of classifier-free guidance; 1 switches it off",
        float,
        unset="the folder's own",
        panel="Sampling",
    )
    temperature: float = setting("Sampling temperature", float, 1.0, low=0.01, panel="Sampling")
    top_k: int = setting("Top-k of the codes; 0 switches it off", int, 0, low=0, panel="Sampling")
    drafter: str = setting(
        "Drafter: model, tree (its most probable codes), or ngram (those of training pictures)",
        str,
        "model",
        panel="Speculation",
    )
    depth: int = setting(
        "Speculation length: drafted codes along a path", int, 5, low=1, unit="codes", panel="Speculation"
    )
    delta: Sequence[float] = setting(
        "Additive budget of LANTERN; may be repeated",
        list,
        (),
        items=float,
        unset="0.1 and 0.4, and factors 1 and 4",
        panel="Speculation",
    )
    factor: Sequence[float] = setting(
        "Multiplicative budget, lambda - 1 of LANTERN++; may be repeated",
        list,
        (),
        items=float,
        panel="Speculation",
    )
    neighbours: int | None = setting(
        "Number of nearest codes of LANTERN", int, unset="half of them", panel="Speculation"
    )
    seed: int = setting("Random seed of all pictures", int, 0, panel="Sampling")


@configured
def images(
    *,
    options: ImageOptions,
    as_json: AsJson = False,
) -> None:
    """Make pictures of each class: without drafts, with an exact verifier, with LANTERN at each budget."""
    check_output("--out", options.out, picture=True)
    quiet()
    from polydraft.papers.lantern.comparison import compare, contenders, draw
    from polydraft.papers.lantern.folder import ImageFolder, digits_folder

    folder = ImageFolder.load(options.model or digits_folder())
    names = (
        list(folder.classes[:10])
        if options.classes is None
        else [c.strip() for c in options.classes.split(",")]
    )
    for name in names:
        folder.class_token(name)
    delta, factor = (
        (options.delta, options.factor) if options.delta or options.factor else ((0.1, 0.4), (1.0, 4.0))
    )
    ways = contenders(folder, options.drafter, delta, factor, num_neighbours=options.neighbours)
    sampling = {
        name: getattr(options, name)
        for name in ("samples", "seed", "temperature", "top_k", "guidance", "depth")
    }
    with bars("drawing") as step:
        compare(folder, ways, names, step=lambda: step(len(ways) * options.samples), **sampling)
    draw(ways, options.out)
    rows = [way.row() for way in ways]
    if as_json:
        typer.echo(json.dumps({"classes": names, "picture": str(options.out), "rows": rows}, indent=2))
        return
    head = ("verifier", "tokens per step", "total variation of a token", "lossless to")
    cells = [
        (
            r["verifier"],
            f"{r['tokens_per_step']:.2f}",
            f"{r['total_variation']:.3f}",
            r["lossless_to"] or "nothing: its distribution is its own",
        )
        for r in rows
    ]
    output().print(grid(head, cells, left_aligned=("lossless to",)))
    say_written([options.out])
