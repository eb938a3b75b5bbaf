"""A model known by its files, opened once: settings, tokens, context, chat template, what its tensors are. Nothing here imports torch.

A folder of `save_pretrained` and a GGUF file say the same things in other places. Whoever wants to know something of a model before it is
loaded, or while it is, asks its store: `opened` gives the same one as long as the files are the same.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from polydraft.core.params import SamplingParams
from polydraft.errors import InvalidInputError, ModelLoadError
from polydraft.models.store.folder import CONFIGURATION, GENERATION, TOKENIZER, FolderStore
from polydraft.models.store.gguf import GgufStore
from polydraft.models.store.gguf_parts import is_gguf, parts_of
from polydraft.models.store.hub import located
from polydraft.models.store.mapped import stamp

STORES = 16
"""That are remembered, with their weights: those of a target, its draft model, heads of both."""
Store = GgufStore | FolderStore
"""place: a folder or a GGUF file.  settings: by the names of transformers' configurations; of a file, its sizes.  context: longest sequence, or None.  vocab_size: or None.
raw_tokens: the list of tokens as it lies in the file, b"" without one.  tokens: ids by token, none where the files do not say them all.
has_template: whether its tokenizer may have a chat template.  sampling: fields of `SamplingParams` that the model's authors set, or None.
"""
Kind = TypeVar("Kind")
_in_use: dict[tuple[Any, ...], Any] = {}
"""The last stores that were opened, by class, and path, size and time of change of each file that is remembered."""


def opened(place: Path) -> Store:
    """The store of a folder or a GGUF file, the same one as long as its files are the same.

    Raises:
        ModelLoadError: a GGUF file that is missing or damaged.

    Example:
        >>> from polydraft.models import pair
        >>> store = opened(pair.draft_folder())
        >>> store.context, store.vocab_size, len(store.tokens), store is opened(pair.draft_folder())
        (1024, 2048, 2048, True)
    """
    return opened_file(place) if is_gguf(place) else opened_folder(place)


def opened_folder(place: Path) -> FolderStore:
    """The store of a folder."""
    files = [
        *(place / name for name in (CONFIGURATION, GENERATION, TOKENIZER)),
        *sorted(place.glob("*.safetensors*")),
    ]
    return remembered(FolderStore, place, files)


def opened_file(place: Path) -> GgufStore:
    """The store of a GGUF file."""
    return remembered(GgufStore, place, parts_of(place))


def remembered(kind: Callable[[Path], Kind], place: Path, files: Iterable[Path]) -> Kind:
    """What is made of a place, the same as long as its files are. kind: makes it."""
    key = (kind, *map(stamp, files))
    store = _in_use.pop(key, None) or kind(place)
    _in_use[key] = store  # the last one
    for oldest in list(_in_use)[:-STORES]:
        _in_use.pop(oldest, None)
    return store


def sampling_defaults(name: str) -> dict[str, Any]:
    """Fields of `SamplingParams` that a model's authors set; its name is as in `hub.located`.

    Raises:
        ModelLoadError: a value outside its range.

    Example:
        >>> from polydraft.models import pair
        >>> sampling_defaults(str(pair.target_folder()))
        {}
    """
    store = opened(located(name))
    defaults = {field: value for field, value in store.sampling.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except InvalidInputError as error:
        file = store.place / GENERATION if isinstance(store, FolderStore) else store.place
        raise ModelLoadError(
            f"the sampling defaults of {str(file)!r} cannot be used: {error} Correct them there."
        ) from error
    return defaults
