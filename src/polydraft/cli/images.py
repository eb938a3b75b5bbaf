"""`polydraft images`: pictures by class, plainly, with exact drafts and with LANTERN, side by side in a PNG."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from polydraft.cli import options as given
from polydraft.cli.files import check_output, say_written
from polydraft.cli.progress import bars
from polydraft.cli.start import quiet
from polydraft.cli.tables import grid, output


def images(
    out: Annotated[Path, given.output("The PNG.", "--out")] = Path("images.png"),
    model: Annotated[
        str | None, given.models("Folder that `python -m studies.images` wrote; without it the digits that come along.")
    ] = None,
    classes: Annotated[str | None, given.sampling("By name, with commas between; all, or the first ten, without it.")] = None,
    samples: Annotated[int, given.sampling("Pictures of each class.", min=1, max=64)] = 1,
    guidance: Annotated[
        float | None, given.sampling("Scale of classifier-free guidance; 1 is none; the folder's own without it.")
    ] = None,
    temperature: Annotated[float, given.sampling("Above 0.", min=0.01)] = 1.0,
    top_k: Annotated[int, given.sampling("Keep the k most probable codes; 0: all.", min=0)] = 0,
    drafter: Annotated[
        str, given.drafts("model, tree (its most probable codes), or ngram (those of training pictures).")
    ] = "model",
    depth: Annotated[int, given.drafts("Drafted codes on a path.", min=1)] = 5,
    delta: Annotated[
        list[float] | None,
        given.drafts("Additive budget of LANTERN; may be repeated; without any 0.1 and 0.4, and factors 1 and 4."),
    ] = None,
    factor: Annotated[
        list[float] | None, given.drafts("Multiplicative budget, lambda - 1 of LANTERN++; may be repeated.")
    ] = None,
    neighbours: Annotated[int | None, given.drafts("Nearest codes that are looked at; half of them without it.")] = None,
    seed: Annotated[int, given.sampling("Of all pictures.")] = 0,
    as_json: given.AsJson = False,
) -> None:
    """Make pictures of each class: without drafts, with an exact rule, with LANTERN at each budget."""
    check_output("--out", out, picture=True)
    quiet()
    from polydraft.bench.images import compare, contenders, draw
    from polydraft.models.images import ImageFolder, digits_folder

    folder = ImageFolder.load(model or digits_folder())
    wanted = list(folder.classes[:10]) if classes is None else [c.strip() for c in classes.split(",")]
    for name in wanted:
        folder.class_token(name)
    if not delta and not factor:
        delta, factor = [0.1, 0.4], [1.0, 4.0]
    made = contenders(folder, drafter, delta or (), factor or (), num_neighbours=neighbours)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "guidance": guidance, "depth": depth}
    with bars("drawing") as step:
        compare(folder, made, wanted, samples=samples, seed=seed, step=lambda: step(len(made) * samples), **options)
    draw(made, out)
    rows = [one.row() for one in made]
    if as_json:
        typer.echo(json.dumps({"classes": wanted, "picture": str(out), "rows": rows}, indent=2))
        return
    head = ("rule", "tokens per step", "total variation of a token", "lossless to")
    cells = [
        (
            r["rule"],
            f"{r['tokens_per_step']:.2f}",
            f"{r['total_variation']:.3f}",
            r["lossless_to"] or "nothing: its distribution is its own",
        )
        for r in rows
    ]
    output().print(grid(head, cells, left=("lossless to",)))
    say_written([out])
