"""Which drafter a folder with a draft head is for, by its configuration alone."""

from pathlib import Path

from polydraft.errors import ModelLoadError
from polydraft.schema import read_json

__all__ = ["kind_of"]

SIGNS = {"medusa_num_heads": "medusa"}
"""Names in a published configuration that say its kind."""


def kind_of(folder: str | Path) -> str:
    """The drafter that a folder of weights is for, by what its configuration says; default EAGLE-3, whose layouts name no kind.

    Raises:
        ModelLoadError: no folder with a configuration.
    """
    path = Path(folder).expanduser() / "config.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{str(folder)!r} was given as a draft head and has no config.json; expected a folder that `polydraft train` wrote, or of a published head."
        )
    try:
        settings = read_json(path.read_bytes())
        whole = any(str(name).endswith("ForCausalLM") for name in settings.get("architectures") or ())
        return settings.get("polydraft_head") or next(
            (kind for sign, kind in SIGNS.items() if sign in settings), "model" if whole else "eagle"
        )
    except Exception as error:  # whatever the file holds
        raise ModelLoadError(f"{str(path)!r} was given as a head's configuration, and cannot be read: {error!r}.") from error
