"""Which models a server offers: those that are named, and those of a folder, each with a draft model of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from polydraft.errors import InvalidInputError
from polydraft.models.store.gguf_parts import model_files, model_title

__all__ = ["ModelChoice", "model_choices"]


class ModelChoice(NamedTuple):
    """name: that clients give.  place: as of `Engine.from_pretrained`.  draft: of its draft model."""

    name: str
    place: str
    draft: str | None = None


def model_choices(
    models: Sequence[str], models_dir: Path | None, draft_models: Sequence[str]
) -> list[ModelChoice]:
    """Those of the options --model, --models-dir and --draft-model.

    Raises:
        InvalidInputError: two models of one name, a folder without models, or a draft model of no model.

    Example:
        >>> model_choices(["small=a.gguf", "b/Big.gguf"], None, ["Big=draft.gguf"])
        [ModelChoice(name='small', place='a.gguf', draft=None), ModelChoice(name='Big', place='b/Big.gguf', draft='draft.gguf')]
    """
    named = [_named(text) for text in models] + ([] if models_dir is None else _in_folder(models_dir))
    names = [name for name, _ in named]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidInputError(
            f"two models are named {twice!r}; expected different names. Give one as --model NAME=MODEL."
        )
    drafts = dict(_draft(text, names) for text in draft_models)
    return [ModelChoice(name, place, drafts.get(name)) for name, place in named]


def model_name(place: str) -> str:
    """What clients call a model of this place.

    Example:
        >>> model_name("models/Qwen2.5-0.5B.gguf"), model_name("owner/name")
        ('Qwen2.5-0.5B', 'name')
    """
    return model_title(Path(place)) or place


def _named(text: str) -> tuple[str, str]:
    name, separator, place = text.partition("=")
    if not separator or "/" in name or Path(text).exists():
        return model_name(text), text
    if not name or not place:
        raise InvalidInputError(f"--model {text!r} was given; expected NAME=MODEL, or the model alone.")
    return name, place


def _draft(text: str, names: Sequence[str]) -> tuple[str, str]:
    name, separator, place = text.partition("=")
    if not separator or name not in names:
        if len(names) == 1:
            return names[0], text
        raise InvalidInputError(
            f"--draft-model {text!r} was given beside the models {', '.join(names)}; expected NAME=MODEL with the name of one of them."
        )
    return name, place


def _in_folder(folder: Path) -> list[tuple[str, str]]:
    """GGUF files of a folder, and folders in it with a model of transformers."""
    if not folder.is_dir():
        raise InvalidInputError(
            f"--models-dir {str(folder)!r} was given, which is no folder; expected one with models."
        )
    paths = list(folder.iterdir())
    places = sorted([*model_files(paths), *(path for path in paths if (path / "config.json").is_file())])
    if not places:
        raise InvalidInputError(
            f"--models-dir {str(folder)!r} was given, which has no models; expected .gguf files, or folders with a config.json."
        )
    return [(model_name(str(place)), str(place)) for place in places]
