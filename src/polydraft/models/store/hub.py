"""Where the name of a model leads: a folder or a GGUF file that is here, one of a small table, or a repository of the Hugging Face hub."""

import os
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

from polydraft.errors import ModelLoadError, first_line
from polydraft.models import pair
from polydraft.models.store.catalogue import MODELS, cached, fetch, hub_answers
from polydraft.models.store.downloading import bytes_below, downloading
from polydraft.models.store.gguf_parts import is_gguf, model_files, model_title, parts_of

FILES_OF_A_MODEL = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""That are fetched from a repository: no code and nothing that is unpickled."""
FILE_OF_REPOSITORY = r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?:(?P<file>[^\\:]+)"


def located(name: str | os.PathLike[str]) -> Path:
    """The folder or GGUF file that a model's name leads to; what is not here is fetched.

    name: a folder (in which safetensors come before a GGUF file), a GGUF file or any of its parts, a name of `MODELS`, or `OWNER/NAME`,
        perhaps with `@REVISION`, of the Hugging Face hub; `OWNER/NAME:FILE.gguf` or `OWNER/NAME:Q4_K_M` is a GGUF file there.

    Raises:
        ModelLoadError: nothing is there, or it cannot be fetched; says what to do.

    Example:
        >>> from polydraft.models import pair
        >>> located(pair.draft_folder()).name
        'draft'
    """
    text = str(name)
    if (path := local(name)) is not None:
        return path
    if text in MODELS:
        return fetch(MODELS[text])
    if match := None if isinstance(name, os.PathLike) else re.fullmatch(FILE_OF_REPOSITORY, text):
        return _gguf_of_repository(match["repository"], match["revision"], match["file"])
    return _snapshot(text)


def local(name: str | os.PathLike[str]) -> Path | None:
    """What `located` gives where it is here already; None where it has to be fetched, which this does not try.

    Raises:
        ModelLoadError: nothing is there that could be fetched.

    Example:
        >>> local("owner/name") is None
        True
    """
    text = str(name)
    path = Path(os.path.expanduser(name))
    if not text:
        raise ModelLoadError(
            "an empty name of a model was given; expected a folder, FILE.gguf, a name of `polydraft models list` or OWNER/NAME."
        )
    if text == pair.EMBEDDED:
        return pair.target_folder()
    if path.is_dir():
        return _in_folder(path)
    if path.is_file() and not is_gguf(path):
        raise ModelLoadError(
            f"the file {text!r} was given; expected a model folder, or a GGUF file, which begins with GGUF. Give the folder that it lies in, or another file."
        )
    if path.exists():
        return parts_of(path)[0]
    if text in MODELS:
        return cached(MODELS[text])
    nearest = get_close_matches(text.lower(), MODELS, n=1, cutoff=0.6)
    if nearest and "/" not in text:
        raise ModelLoadError(
            f"there is no model {text!r}; did you mean {nearest[0]!r}? `polydraft models list` shows the names."
        )
    of_repository = not isinstance(name, os.PathLike) and re.fullmatch(FILE_OF_REPOSITORY, text)
    if not of_repository and (isinstance(name, os.PathLike) or _is_path(text)):
        kind = "GGUF file" if is_gguf(text) else "model folder"
        raise ModelLoadError(
            f"{kind} {text!r} does not exist. Check the path; a folder of `save_pretrained` or a GGUF file is expected."
        )
    return None


def _is_path(name: str) -> bool:
    return is_gguf(name) or name.startswith((".", "~", os.sep)) or name.count("/") > 1 or "\\" in name


def _in_folder(folder: Path) -> Path:
    """The folder, or the GGUF file in it, or the first of its parts, where there is nothing else."""
    files = model_files(folder.iterdir())
    tensors = any(folder.glob("*.safetensors"))
    if files and tensors:
        warning = f"{str(folder)!r} has safetensors and the GGUF file {files[0].name}: the safetensors are taken. Give the file for the other."
        warnings.warn(warning, stacklevel=2)
    if not files or tensors or (folder / "config.json").is_file():
        return folder
    if len(files) > 1:
        raise ModelLoadError(
            f"{str(folder)!r} has {len(files)} GGUF files ({files[0].name}, {files[1].name} ...). Give the one that is meant."
        )
    return files[0]


def _snapshot(name: str) -> Path:
    """All files of one commit of a repository, in the cache of `huggingface_hub`."""
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    try:
        with _downloading(repository, revision or None, FILES_OF_A_MODEL):
            return Path(
                snapshot_download(
                    repository, revision=revision or None, allow_patterns=list(FILES_OF_A_MODEL)
                )
            )
    except Exception as error:
        raise ModelLoadError(
            f"{name!r} is no folder here, no name of `polydraft models list`, and could not be fetched from the Hugging Face hub: "
            f"{first_line(error)[:300]}. Check the name and the network; without one give a folder, or a GGUF file."
        ) from error


def _downloading(
    repository: str, revision: str | None, patterns: Sequence[str]
) -> AbstractContextManager[None]:
    """While entered, a terminal shows how much of these files of a repository is in the cache of `huggingface_hub`."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.hf_api import RepoFile

    def total() -> int:
        try:
            files = HfApi().list_repo_tree(repository, recursive=True, revision=revision)
            return sum(
                file.size
                for file in files
                if isinstance(file, RepoFile) and any(fnmatch(file.path, x) for x in patterns)
            )
        except Exception:  # whoever fetches them says what is wrong
            return 0

    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model") / "blobs"
    return downloading(repository, total, lambda: bytes_below(blobs))


def _gguf_of_repository(repository: str, revision: str | None, file: str) -> Path:
    """A GGUF file of a repository, in the cache of `huggingface_hub`; file: its name, or the tag at its end, such as Q4_K_M."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        if hub_answers() and not is_gguf(file):
            file = _tagged(HfApi().list_repo_files(repository, revision=revision), repository, file)
        if is_gguf(file):
            return fetched_file(repository, revision, file)
        folder = Path(
            snapshot_download(repository, revision=revision, allow_patterns="*.gguf", local_files_only=True)
        )
        return folder / _tagged(
            [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")], repository, file
        )
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"{file!r} of {repository!r} could not be fetched from the Hugging Face hub: {first_line(error)[:300]}. "
            "Check the names and the network; without one give the path of a GGUF file."
        ) from error


def fetched_file(repository: str, revision: str | None, file: str) -> Path:
    """A GGUF file of a repository in the cache of `huggingface_hub`, with all of its parts; errors are those of that package."""
    from huggingface_hub import hf_hub_download

    parts = [part.as_posix() for part in parts_of(Path(file))]
    with _downloading(repository, revision, parts):
        first, *_ = [hf_hub_download(repository, part, revision=revision) for part in parts]
    return Path(first)


def _tagged(names: list[str], repository: str, tag: str) -> str:
    """The GGUF file whose name ends with a tag."""
    files = [path.as_posix() for path in model_files(map(Path, names))]
    files.sort(key=lambda name: (len(name), name))
    chosen = [
        name for name in files if re.search(rf"(?i)(^|[-._]){re.escape(tag)}$", model_title(Path(name)))
    ]
    if not chosen:
        listing = (
            f"it has {', '.join(files[:8])}{' ...' if len(files) > 8 else ''}"
            if files
            else "it has no GGUF file"
        )
        raise ModelLoadError(
            f"no file of {repository!r} ends with {tag}.gguf; {listing}. Give one as {repository}:FILE.gguf."
        )
    return chosen[0]
