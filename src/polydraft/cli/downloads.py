"""What a command downloads, said before the first byte: a question in a terminal, elsewhere nothing without --yes."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from polydraft.config import EngineConfig
from polydraft.errors import InvalidInputError

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Download without a question.")]


def agree_on_downloads(configs: Sequence[EngineConfig], *, yes: bool = False) -> None:
    """Say which listed models of these configurations are not here, how large they are and where they come from.

    yes: without a question.

    Raises:
        typer.Exit: the answer is no.
        InvalidInputError: nobody can be asked.
    """
    from polydraft.models.store.catalogue import MODELS, cached, models_folder

    names = dict.fromkeys(name for config in configs for name in listed_models(config))
    missing = [MODELS[name] for name in names if cached(MODELS[name]) is None]
    if not missing:
        return
    size = sum(model.num_bytes for model in missing)
    models = " and ".join(f"{model.name} ({model.about}; {model.licence})" for model in missing)
    text = f"{models}: {_size(size)} from {missing[0].source}, into {str(models_folder())!r}"
    if yes:
        typer.echo(f"downloading {text}", err=True)
    elif not _asks():
        gets = " and ".join(f"`polydraft models get {model.name}`" for model in missing)
        raise InvalidInputError(
            f"a model was given that is not downloaded yet: {text}; without a terminal nobody can be asked. "
            f"Give --yes to download, or run {gets} first."
        )
    elif not typer.confirm(f"Download {text}?", default=True, err=True):
        raise typer.Exit


def _asks() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def listed_models(config: EngineConfig) -> list[str]:
    """Listed models that a configuration names, and the draft model that is listed with its target."""
    from polydraft.models.store.catalogue import MODELS, default_draft

    drafter = config.drafter if isinstance(config.drafter, str) else ""
    drafts = drafter == "auto" or drafter.startswith("model")
    draft = config.draft_model or (default_draft(str(config.model)) if drafts else None)
    return [str(name) for name in (config.model, draft, *config.further_draft_models) if name in MODELS]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
