"""Which drafter a folder with a draft head is for, by its configuration alone: each head says on its class what it reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polydraft.errors import ModelLoadError
from polydraft.files.schema import read_json
from polydraft.methods import registry


def settings_of(folder: str | Path) -> dict[str, Any]:
    """What a head's config.json says.

    Raises:
        ModelLoadError: no folder with a configuration that can be read.
    """
    path = Path(folder).expanduser() / "config.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{str(folder)!r} was given as a draft head and has no config.json; expected a folder that `polydraft train` wrote, or of a published head."
        )
    try:
        return dict(read_json(path.read_bytes()))
    except Exception as error:  # whatever the file holds
        raise ModelLoadError(
            f"{str(path)!r} was given as a head's configuration, and cannot be read: {error!r}."
        ) from error


def kind_of(folder: str | Path) -> str:
    """The drafter that a folder of weights is for: the one it names, the head that reads such a configuration, or "model" for a whole model.

    Raises:
        ModelLoadError: no folder with a configuration, or one that no head reads.
    """
    settings = settings_of(folder)
    try:
        kind = _kind(settings)
    except Exception as error:  # whatever the file holds
        raise ModelLoadError(
            f"the config.json of the head {str(folder)!r} cannot be read: {error!r}."
        ) from error
    if kind is not None:
        return kind
    raise ModelLoadError(
        f"{str(folder)!r} was given as a draft head of {said(settings)}, which no head reads; expected one of: "
        f"{', '.join(sorted(registry.heads()))}. Use another head, or train one: polydraft train."
    )


def _kind(settings: Mapping[str, Any]) -> str | None:
    if named := settings.get("polydraft_head"):
        return str(named)
    for name in registry.heads():
        checkpoint = getattr(registry.drafter(name), "checkpoint", None)
        if checkpoint is not None and checkpoint.reads(settings):
            return name
    whole = any(str(name).endswith("ForCausalLM") for name in settings.get("architectures") or ())
    return "model" if whole else None


def said(settings: Mapping[str, Any]) -> str:
    """What a configuration says that it is.

    Example:
        >>> said({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"})
        "architectures=['DFlashDraftModel'], model_type='qwen3'"
    """
    names = ("speculators_model_type", "architectures", "model_type")
    return ", ".join(f"{name}={settings[name]!r}" for name in names if name in settings) or "no architecture"
