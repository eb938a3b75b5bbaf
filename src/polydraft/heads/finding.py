"""The draft head that belongs to a model, where nobody names one, and heads of the Hugging Face hub by name.

Looked for, in this order: the module for multi-token prediction in the model's own folder; folders beside it, or repositories of the same owner, that
are called like the model and a kind of head, `NAME-DFlash...`; folders beside it whose `speculators_config` names the model. What is found is checked
against the model, of a repository by its config.json alone before anything else is downloaded, and one line says what was taken or why not.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polydraft.core import Target
from polydraft.errors import ModelLoadError, PolydraftError, first_line
from polydraft.files.schema import read_json
from polydraft.heads.checkpoint import flat, probe, shipped
from polydraft.methods import registry
from polydraft.methods.head_folders import kind_of, settings_of
from polydraft.models.loading.catalogue import hub_answers
from polydraft.models.loading.gguf import GgufFile
from polydraft.models.loading.gguf_parts import is_gguf
from polydraft.models.loading.hub import local, located

REPOSITORY = r"[\w.-]+/[\w.-]+(@[\w.-]+)?"
KINDS = r"dflash|dspark|eagle-?3|p-?eagle|speculator|mtp|medusa"
LOOKED_AT = 500
"""Folders beside a model, at most."""


def located_head(head: str | Path, model: str | Path | None = None) -> Path:
    """The folder of a head by its path, or by the name of a repository of the hub; its config.json is compared with the model's first, where that is here.

    Raises:
        ModelLoadError: no folder, and no repository of that name; or a head for another model.
    """
    path = Path(head).expanduser()
    if path.exists() or not re.fullmatch(REPOSITORY, str(head)):
        return path
    settings = _settings_of_repository(str(head))
    theirs = {} if model is None else _settings_of_model(str(model))
    if reason := _other(settings, theirs):
        raise ModelLoadError(
            f"the head {str(head)!r} is not for {str(model)!r}: {reason}. Use the head of this model."
        )
    return located(str(head))


def _settings_of_model(name: str) -> dict[str, Any]:
    """Of a folder or a repository; of what has no config.json, nothing."""
    place = local(name)
    if place is None and re.fullmatch(REPOSITORY, name):
        return _settings_of_repository(name)
    return {} if place is None else _settings_of_files(place)


def check_head(folder: str | Path, model: Path | None) -> None:
    """Refuse a head by its files, and by the model's settings where those are here, before the model is loaded. model: a folder or a GGUF file.

    Raises:
        ModelLoadError: a folder that is none, or of another model, by what differs.
    """
    kind = kind_of(folder)
    theirs = {} if model is None else _settings_of_files(model)
    if reason := _other(settings_of(folder), theirs):
        raise ModelLoadError(
            f"the head {str(folder)!r} is not for {str(model)!r}: {reason}. Use the head of this model."
        )
    ours = folder_tokens(Path(folder))
    models = None if model is None else folder_tokens(model)
    if ours and models and ours != models:
        raise ModelLoadError(
            f"the head {str(folder)!r} has a tokenizer.json with other tokens than that of {str(model)!r}. Use the head of this model."
        )
    if kind in registry.heads() and kind != "mtp":  # a module in a model's folder is as large as its layers
        head = registry.drafter(kind).checkpoint.load(folder)
        if reason := head.reads_beyond((theirs.get("text_config") or theirs).get("num_hidden_layers", 0)):
            raise ModelLoadError(
                f"the head {str(folder)!r} is not for {str(model)!r}: it {reason}. Use the head of this model."
            )


def _settings_of_files(model: Path) -> dict[str, Any]:
    """Sizes of a model by its files; of those that say none, nothing."""
    if is_gguf(model):
        try:
            config = GgufFile(model).config
        except ModelLoadError:  # whoever loads it has the words
            return {}
        return {name: getattr(config, name) for name in ("hidden_size", "vocab_size", "num_hidden_layers")}
    return settings_of(model) if (model / "config.json").is_file() else {}


def folder_tokens(folder: Path) -> Any:
    """The tokens that a folder's tokenizer.json lists, or None."""
    file = folder.expanduser() / "tokenizer.json"
    try:
        return read_json(file.read_bytes())["model"]["vocab"]
    except Exception:  # a head needs none
        return None


def _settings_of_repository(name: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download

    repository, _, revision = name.partition("@")
    try:
        return settings_of(Path(hf_hub_download(repository, "config.json", revision=revision or None)).parent)
    except Exception as error:
        raise ModelLoadError(
            f"{name!r} is no folder here, and its config.json could not be fetched from the Hugging Face hub: {first_line(error)[:200]}. "
            "Check the name and the network."
        ) from error


def _other(head: Mapping[str, Any], model: Mapping[str, Any]) -> str | None:
    """Why a head's configuration is for another model than the one of this configuration, or None."""
    inner = {**model, **(model.get("text_config") or {})}
    return _differs(head, inner.get("hidden_size"), inner.get("vocab_size"), inner.get("num_hidden_layers"))


def misfit(settings: Mapping[str, Any], target: Target) -> str | None:
    """Why a head with this configuration is not for a target, or None: by width, vocabulary and layers."""
    return _differs(settings, probe(target).shape[1], target.vocab_size, max(target.offers.hidden, default=0))


def _differs(settings: Mapping[str, Any], width: Any, vocab_size: Any, layers: Any) -> str | None:
    head = flat(settings)
    head = {**head, **(head.get("text_config") or {})}
    state_size = head.get("target_hidden_size") or head.get("hidden_size")
    if state_size is not None and width is not None and state_size != width:
        return f"its states have hidden_size={state_size} numbers, the model's {width}"
    if head.get("vocab_size") is not None and vocab_size is not None and head["vocab_size"] < vocab_size:
        return f"it knows vocab_size={head['vocab_size']} tokens, the model {vocab_size}"
    if head.get("num_target_layers") is not None and layers and head["num_target_layers"] != layers:
        return f"it is for num_target_layers={head['num_target_layers']}, the model has {layers}"
    return None


def candidates(model: str | Path) -> Iterator[str | Path]:
    """Heads that may belong to a model, by what they are called and say; see the module."""
    path = Path(model).expanduser()
    if path.is_dir():
        yield from _of_folder(path.resolve())
    elif not path.exists() and re.fullmatch(REPOSITORY, str(model)):
        yield from _own(located(str(model)))
        yield from _of_owner(str(model).partition("@")[0])


def _own(folder: Path) -> Iterator[Path]:
    if (folder / "config.json").is_file() and registry.drafter("mtp").checkpoint.reads(settings_of(folder)):
        yield folder


def _of_folder(folder: Path) -> Iterator[Path]:
    yield from _own(folder)
    beside = [place for place, _ in zip(sorted(folder.parent.iterdir()), range(LOOKED_AT), strict=False)]
    for place in beside:
        if (
            place != folder
            and (place / "config.json").is_file()
            and (_called_like(place.name, folder.name) or _names(place, folder))
        ):
            yield place


def _called_like(name: str, model: str) -> bool:
    """Whether a head is called after a model.

    Example:
        >>> _called_like("Qwen3-4B-DFlash-b16", "Qwen3-4B"), _called_like("Qwen3-4B-Instruct", "Qwen3-4B")
        (True, False)
    """
    return re.fullmatch(rf"(?i){re.escape(model)}[-_.](.*[-_.])?({KINDS})\b.*", name) is not None


def _names(head: Path, model: Path) -> bool:
    """Whether a folder of speculators names the model as its verifier."""
    try:
        named = settings_of(head)["speculators_config"]["verifier"]["name_or_path"]
        return Path(str(named)).name == model.name
    except Exception:  # whatever lies there is somebody else's
        return False


def _of_owner(name: str) -> list[str]:
    from huggingface_hub import HfApi

    owner, _, model = name.partition("/")
    try:
        repositories = HfApi().list_models(author=owner, search=model, limit=50) if hub_answers() else []
        return [info.id for info in repositories if _called_like(info.id.partition("/")[2], model)]
    except Exception:  # a hub that cannot be asked has no heads
        return []


def head_for(model: str | Path, target: Target) -> Path | None:
    """The head that is taken for a model that nobody named one for; one line says which, or why none of those that were found.

    None for a model whose own files have a layer that drafts without a line, see `heads.mtp`.
    """
    if getattr(target.checkpoint, "predictor", None) is not None:
        return None
    if (
        shipped(target) is not None
        or target.plain_reason is not None
        or not (target.offers.embeddings and target.offers.hidden)
    ):
        return None
    for head in candidates(model):
        try:
            settings = settings_of(head) if isinstance(head, Path) else _settings_of_repository(head)
            if reason := misfit(settings, target):
                raise ModelLoadError(reason)
            folder = head if isinstance(head, Path) else located(head)
            checkpoint = registry.drafter(kind_of(folder)).checkpoint.load(folder)
            checkpoint.check(target)
        except PolydraftError as error:
            warnings.warn(
                f"the draft head {str(head)!r} was found and is not used: {first_line(error)}", stacklevel=2
            )
            continue
        warnings.warn(
            f"the draft head {str(head)!r} was found and drafts; --drafter none, or another one, does without it.",
            stacklevel=2,
        )
        return folder
    return None
