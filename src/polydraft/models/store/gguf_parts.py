"""Which files a GGUF model lies in: one, or the parts that `gguf-split` makes of it, NAME-00001-of-00003.gguf and so on."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

MAGIC = b"GGUF"
SUFFIX = ".gguf"
FURTHER_LAYERS = "mtp-"
"""How names of files begin that hold, beside a model's, the layers that predict further tokens."""
PROJECTOR = "mmproj"
"""What is in the name of a file that makes embeddings of pictures for a model."""
PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)?$", re.IGNORECASE)


def is_gguf(name: str | os.PathLike[str]) -> bool:
    """Whether a name is that of a GGUF file: by its end, where there need not be one, or by the first bytes of the file that is there.

    Example:
        >>> is_gguf("model.Q4_1.gguf"), is_gguf("MODEL.GGUF"), is_gguf("model")
        (True, True, False)
    """
    path = Path(os.path.expanduser(name))
    if path.suffix.lower() == SUFFIX:
        return not path.is_dir()
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def parts_of(path: Path) -> list[Path]:
    """The files of a model, the first one first; path: any of them, or a link to one.

    Example:
        >>> [part.name for part in parts_of(Path("m-00002-of-00002.gguf"))], [part.name for part in parts_of(Path("m.gguf"))]
        (['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf'], ['m.gguf'])
    """
    match = PART.search(path.name)
    if match is None and path.is_symlink() and PART.search(path.resolve().name):
        return parts_of(path.resolve())
    if match is None:
        return [path]
    begin = path.name[: match.start()]
    end = match[3] or ""
    return [
        path.with_name(f"{begin}-{number:05}-of-{match[2]}{end}") for number in range(1, int(match[2]) + 1)
    ]


def first_parts(paths: Iterable[Path]) -> list[Path]:
    """Of the files of a folder those that are GGUF by their names, sorted, one for each model.

    Example:
        >>> [path.name for path in first_parts(map(Path, ["b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "a.GGUF", "c.json"]))]
        ['a.GGUF', 'b-00001-of-00002.gguf']
    """
    return sorted(
        {parts_of(path)[0] for path in paths if path.suffix.lower() == SUFFIX and not path.is_dir()}
    )


def model_files(paths: Iterable[Path]) -> list[Path]:
    """As `first_parts`, without what lies beside models: their further layers, and projectors of pictures where there is another file.

    Example:
        >>> [path.name for path in model_files(map(Path, ["mmproj-F16.gguf", "mtp-a.gguf", "a.gguf"]))]
        ['a.gguf']
    """
    files = [path for path in first_parts(paths) if not path.name.startswith(FURTHER_LAYERS)]
    return [path for path in files if PROJECTOR not in path.name.lower()] or files


def model_title(path: Path) -> str:
    """Name of a file without what says that it is one, or a part.

    Example:
        >>> model_title(Path("models/Qwen-00001-of-00003.gguf")), model_title(Path("Qwen2.5-0.5B.gguf")), model_title(Path("Qwen2.5"))
        ('Qwen', 'Qwen2.5-0.5B', 'Qwen2.5')
    """
    name = PART.sub("", path.name)
    return name[: -len(SUFFIX)] if name.lower().endswith(SUFFIX) else name
