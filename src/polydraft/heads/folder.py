"""A draft head by its folder, and which drafter it is for, by its configuration alone: each head says on its class what it reads."""

from collections.abc import Mapping
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from polydraft.errors import ModelLoadError
from polydraft.methods import registry
from polydraft.models.store.folder import CONFIGURATION, FolderStore


class HeadFolder(PathLike[str]):
    """A draft head known by its files, each of which is read once; it is passed on wherever a folder's path may be.

    checkpoints: what was read of its weights, by the class that reads them.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.store = FolderStore(self.path)
        self.checkpoints = dict[type, Any]()

    @classmethod
    def of(cls, head: "str | PathLike[str]") -> "HeadFolder":
        """A head by its path, or as it is."""
        return head if isinstance(head, HeadFolder) else cls(Path(head))

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What its config.json says.

        Raises:
            ModelLoadError: no folder with a configuration that can be read.
        """
        if not (self.path / CONFIGURATION).is_file():
            raise ModelLoadError(
                f"{str(self)!r} was given as a draft head and has no config.json; expected a folder that `polydraft train` wrote, or of a published head."
            )
        return dict(self.store.settings)

    @cached_property
    def kind(self) -> str:
        """The drafter that it is for: the one it names, the head that reads such a configuration, or "model" for a whole model.

        Raises:
            ModelLoadError: no folder with a configuration, or one that no head reads.
        """
        try:
            kind = _kind(self.settings)
        except ModelLoadError:
            raise
        except Exception as error:  # whatever the file holds
            raise ModelLoadError(
                f"the config.json of the head {str(self)!r} cannot be read: {error!r}."
            ) from error
        if kind is not None:
            return kind
        raise ModelLoadError(
            f"{str(self)!r} was given as a draft head of {said(self.settings)}, which no head reads; expected one of: "
            f"{', '.join(sorted(registry.heads()))}. Use another head, or train one: polydraft train."
        )

    @property
    def checkpoint(self) -> Any:
        """Its weights, as its kind reads them. Raises as `HeadCheckpoint.load`."""
        return registry.drafter(self.kind).checkpoint.load(self)


def kind_of(folder: "str | PathLike[str]") -> str:
    """See `HeadFolder.kind`."""
    return HeadFolder.of(folder).kind


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
