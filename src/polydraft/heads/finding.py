"""The draft head that belongs to a model, where nobody names one, and heads of the Hugging Face hub by name.

Looked for, in this order: the module for multi-token prediction in the model's own folder; folders beside it, or repositories of the same owner, that
are called like the model and a kind of head, `NAME-DFlash...`; folders beside it whose `speculators_config` names the model. What is found is checked
against the model, of a repository by its config.json alone before anything else is downloaded, and one line says what was taken or why not.
"""

import re
import warnings
from collections.abc import Iterator
from http.client import PARTIAL_CONTENT
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from polydraft.core import Target
from polydraft.errors import ModelLoadError, first_line
from polydraft.heads.checkpoint import own_predictor, shipped, sizes_of_target
from polydraft.heads.fit import ModelSizes, misfit
from polydraft.heads.folder import HeadFolder
from polydraft.methods import registry
from polydraft.models.loading.companions import check_beside, first_that_fits, not_used
from polydraft.models.loading.gguf import GgufWeights, weights_of_file
from polydraft.models.store.catalogue import hub_answers
from polydraft.models.store.folder import FolderStore
from polydraft.models.store.gguf_parts import FURTHER_LAYERS, first_parts, model_title
from polydraft.models.store.hub import FILE_OF_REPOSITORY, fetched_file, local, located
from polydraft.models.store.store import opened

REPOSITORY = r"[\w.-]+/[\w.-]+(@[\w.-]+)?"
KINDS = r"dflash|dspark|eagle-?3|p-?eagle|speculator|mtp|medusa|assistant"
LOOKED_AT = 500
"""Folders beside a model, at most."""


def located_head(head: str | Path, model: str | Path | None = None) -> HeadFolder:
    """A head by its path, or by the name of a repository of the hub; its config.json is compared with the model's first, where that is here.

    Raises:
        ModelLoadError: no folder, and no repository of that name; or a head for another model.
    """
    folder = HeadFolder(head)
    if folder.path.exists() or not re.fullmatch(REPOSITORY, str(head)):
        return folder
    sizes = ModelSizes.of_settings({} if model is None else _settings_of_model(str(model)))
    if reason := misfit(_settings_of_repository(str(head)), sizes):
        raise ModelLoadError(
            f"the head {str(head)!r} is not for {str(model)!r}: {reason}. Use the head of this model."
        )
    return HeadFolder(located(str(head)))


def _settings_of_model(name: str) -> dict[str, Any]:
    """Of a folder or a repository; of what has no config.json, nothing."""
    place = local(name)
    if place is None and re.fullmatch(REPOSITORY, name):
        return _settings_of_repository(name)
    return {} if place is None else dict(opened(place).settings)


def check_head(head: HeadFolder, model: Path | None) -> None:
    """Refuse a head by its files, and by the model's settings where those are here, before the model is loaded. model: a folder or a GGUF file.

    Raises:
        ModelLoadError: a folder that is none, or of another model, by what differs.
    """
    kind = head.kind
    store = None if model is None else opened(model)
    sizes = ModelSizes.of_settings({} if store is None else store.settings)
    reason = misfit(head.settings, sizes)
    reads_states = kind in registry.heads() and kind != "mtp"  # whose layer may be as large as a model's
    if reason is None and reads_states:
        reason = misfit({}, sizes, head.checkpoint.layers)
    if reason:
        raise ModelLoadError(
            f"the head {str(head)!r} is not for {str(model)!r}: {reason}. Use the head of this model."
        )
    ours = head.store.vocabulary
    models = store.vocabulary if isinstance(store, FolderStore) else None
    if ours and models and ours != models:
        raise ModelLoadError(
            f"the head {str(head)!r} has a tokenizer.json with other tokens than that of {str(model)!r}. Use the head of this model."
        )


def _settings_of_repository(name: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download

    repository, _, revision = name.partition("@")
    try:
        file = hf_hub_download(repository, "config.json", revision=revision or None)
        return HeadFolder(Path(file).parent).settings
    except Exception as error:
        raise ModelLoadError(
            f"{name!r} is no folder here, and its config.json could not be fetched from the Hugging Face hub: {first_line(error)[:200]}. "
            "Check the name and the network."
        ) from error


def candidates(model: str | Path) -> Iterator[str | HeadFolder]:
    """Heads that may belong to a model, by what they are called and say; see the module."""
    path = Path(model).expanduser()
    if path.is_dir():
        folder = path.resolve()
        yield from _own(folder)
        yield from _beside(folder)
    elif not path.exists() and re.fullmatch(REPOSITORY, str(model)):
        yield from _own(located(str(model)))
        yield from _of_owner(str(model).partition("@")[0])


def _own(folder: Path) -> Iterator[HeadFolder]:
    head = HeadFolder(folder)
    if (folder / "config.json").is_file() and registry.drafter("mtp").checkpoint.reads(head.settings):
        yield head


def _beside(folder: Path) -> Iterator[HeadFolder]:
    for place in islice(sorted(folder.parent.iterdir()), LOOKED_AT):
        if place == folder or not (place / "config.json").is_file():
            continue
        head = HeadFolder(place)
        if _called_like(place.name, folder.name) or _names(head, folder):
            yield head


def _called_like(name: str, model: str) -> bool:
    """Whether a head is called after a model.

    Example:
        >>> _called_like("Qwen3-4B-DFlash-b16", "Qwen3-4B"), _called_like("Qwen3-4B-Instruct", "Qwen3-4B")
        (True, False)
    """
    return re.fullmatch(rf"(?i){re.escape(model)}[-_.](.*[-_.])?({KINDS})\b.*", name) is not None


def _names(head: HeadFolder, model: Path) -> bool:
    """Whether a folder of speculators names the model as its verifier."""
    try:
        named = head.settings["speculators_config"]["verifier"]["name_or_path"]
        return Path(str(named)).name == model.name
    except Exception:  # whatever lies there is somebody else's
        return False


def _of_owner(name: str) -> list[str]:
    from huggingface_hub import HfApi

    owner, _, model = name.partition("/")
    try:
        repositories = HfApi().list_models(author=owner, search=model, limit=50) if hub_answers() else []
        return [info.id for info in repositories if _called_like(info.id.partition("/")[2], model)]
    except Exception as error:  # whatever the hub answers
        _not_searched(name, error)
        return []


def _not_searched(name: str, error: Exception) -> None:
    warnings.warn(
        f"the hub was not searched for a draft head of {name!r}: {first_line(error)[:200]}", stacklevel=3
    )


def head_for(model: str | Path, target: Target) -> HeadFolder | None:
    """The head that is taken for a model that nobody named one for; one line says which, or why none of those that were found.

    Without a line it is the one that comes with the package, and none for a model whose own files have a layer that drafts, see `heads.mtp`.
    """
    if own_predictor(target) is not None:
        return None
    if target.plain_reason is not None or not (target.offers.embeddings and target.offers.hidden):
        return None
    if own := shipped(target):
        return own

    def opened(candidate: str | HeadFolder) -> HeadFolder:
        named = isinstance(candidate, str)
        settings = _settings_of_repository(candidate) if named else candidate.settings
        if reason := misfit(settings, sizes_of_target(target)):
            raise ModelLoadError(reason)
        head = HeadFolder(located(candidate)) if named else candidate
        head.checkpoint.check(target)
        return head

    return first_that_fits(candidates(model), opened)


def fetch_predictor(name: str) -> None:
    """Of a model that is a GGUF file of the hub, fetch the file with its further layers, where it has none itself.

    It is compared with the model first, by its header alone; a line says why one is not fetched.
    """
    match = re.fullmatch(FILE_OF_REPOSITORY, name)
    if match is None or not hub_answers():
        return
    repository = match["repository"]
    revision = match["revision"]
    model = weights_of_file(located(name))
    if model.store.setting("nextn_predict_layers"):
        return
    try:
        file = _listed(repository, revision, model.store.path)
        header = None if file is None else _header(repository, revision, file)
    except Exception as error:  # whatever the hub answers
        _not_searched(name, error)
        return
    if file is None or header is None:
        return
    try:
        if header.store.architecture != model.store.architecture:
            raise ModelLoadError("it is of another architecture.")
        check_beside(header, model)
        fetched_file(repository, revision, file)
    except ModelLoadError as error:
        not_used(f"{repository}:{file}", first_line(error))


def _listed(repository: str, revision: str | None, model: Path) -> str | None:
    """The file with further layers in the folder of a model's file, the one that is called like it where there are several."""
    from huggingface_hub import HfApi

    names = [Path(name) for name in HfApi().list_repo_files(repository, revision=revision)]
    title = model_title(model)
    folder = next(name.parent for name in names if name.name == model.name)
    beside = [
        name for name in first_parts(names) if name.parent == folder and name.name.startswith(FURTHER_LAYERS)
    ]
    beside.sort(key=lambda name: (model_title(name) != FURTHER_LAYERS + title, len(name.name), name.name))
    return beside[0].as_posix() if beside else None


def _header(repository: str, revision: str | None, file: str) -> GgufWeights:
    """A file of a repository whose tensors are all zero: its first bytes alone are fetched.

    Raises:
        ValueError: a server that gives no parts of files.
    """
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    # these bytes hold a header with the longest vocabulary
    headers = build_hf_headers() | {"Range": f"bytes=0-{(1 << 25) - 1}"}
    with get_session().stream(
        "GET", hf_hub_url(repository, file, revision=revision), headers=headers
    ) as response:
        if response.status_code != PARTIAL_CONTENT:
            raise ValueError(f"{response.status_code} for a part of {file}")
        begin = response.read()
        size = int(response.headers["Content-Range"].rpartition("/")[2])
    with TemporaryDirectory() as folder:
        path = Path(folder) / Path(file).name
        with open(path, "wb") as written:
            written.write(begin)
            written.truncate(size)
        return GgufWeights.of(path)
