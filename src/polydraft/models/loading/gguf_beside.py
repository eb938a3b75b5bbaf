"""The GGUF file with a model's further layers alone, which llama.cpp's converter writes beside that of the model as `mtp-NAME.gguf`."""

import re
import warnings
from collections.abc import Callable
from http.client import PARTIAL_CONTENT
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from polydraft.errors import ModelLoadError, first_line
from polydraft.models.loading.catalogue import hub_answers
from polydraft.models.loading.gguf import GgufFile
from polydraft.models.loading.gguf_parts import FURTHER_LAYERS, first_parts, model_title
from polydraft.models.loading.gguf_roles import TOKENS
from polydraft.models.loading.hub import FILE_OF_REPOSITORY, fetched_file, located

Predictor = TypeVar("Predictor")


def predictor_beside(
    file: GgufFile, predictor_of: Callable[[GgufFile], Predictor | None]
) -> Predictor | None:
    """What predicts a further token in the first file beside a model's that is for it, by its header; a line says what was taken, or why not.

    Files of other architectures are passed over in silence. predictor_of: a file's, or None.
    """
    beside = first_parts(file.path.parent.glob(f"{FURTHER_LAYERS}*.gguf"))
    title = FURTHER_LAYERS + model_title(file.path)
    for path in sorted(beside, key=lambda path: (model_title(path) != title, path.name)):
        if path.samefile(file.path):
            continue
        predictor = None
        try:
            candidate = GgufFile(path)
            if candidate.architecture != file.architecture:
                continue
            reason = _differs(candidate, file)
            predictor = None if reason else predictor_of(candidate)
        except ModelLoadError as error:
            reason = first_line(error)
        if predictor is not None:
            warnings.warn(
                f"the draft head {str(path)!r} was found and drafts; --drafter none does without it.",
                stacklevel=2,
            )
            return predictor
        reason = reason or "it has no layer that predicts a further token and is run"
        warnings.warn(f"the draft head {str(path)!r} was found and is not used: {reason}.", stacklevel=2)
    return None


def _differs(file: GgufFile, model: GgufFile) -> str | None:
    """By what a file is not of a model, or None."""
    for name in (
        "num_hidden_layers",
        "hidden_size",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
    ):
        ours, theirs = (getattr(x.config, name) for x in (file, model))
        if ours != theirs:
            return f"it is for {name}={ours}, the model has {theirs}"
    tokens, theirs = (x.raw_strings(TOKENS) for x in (file, model))
    return None if tokens == theirs else "its tokens are others than the model's"


def fetch_predictor(name: str) -> None:
    """Of a model that is a GGUF file of the hub, fetch the file with its further layers, where it has none itself.

    It is compared with the model first, by its header alone; a line says why one is not fetched. What cannot be had is left out.
    """
    match = re.fullmatch(FILE_OF_REPOSITORY, name)
    if match is None or not hub_answers():
        return
    repository = match["repository"]
    revision = match["revision"]
    try:
        model = GgufFile(located(name))
        if (
            model.setting("nextn_predict_layers")
            or (file := _listed(repository, revision, model.path)) is None
        ):
            return
        header = _header(repository, revision, file)
        reason = (
            "it is of another architecture"
            if header.architecture != model.architecture
            else _differs(header, model)
        )
        if reason is None:
            fetched_file(repository, revision, file)
        else:
            warnings.warn(
                f"the draft head {repository + ':' + file!r} was found and is not used: {reason}.",
                stacklevel=2,
            )
    except Exception:  # a hub that cannot be asked has no further layers
        return


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


def _header(repository: str, revision: str | None, file: str) -> GgufFile:
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
        return GgufFile(path)
