"""Python sources of the standard library: modules held out of the embedded pair's training, and others for indexes.

window        three consecutive code lines (stripped, no blank or comment lines), hashed
near copy     a file that shares at least `MAX_SHARED_WITH_HELD_OUT` windows with the held-out modules
duplicate     a file most of whose windows were already seen in another file
"""

import hashlib
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

STANDARD_LIBRARY = "python"
HELD_OUT = (
    "argparse.py",
    "bisect.py",
    "graphlib.py",
    "heapq.py",
    "json/",
    "sched.py",
    "shutil.py",
    "textwrap.py",
)
"""Modules of the standard library that the embedded pair was not trained on; a folder ends with a slash."""
SKIPPED_FOLDERS = frozenset((
    "test", "tests", "testing", "_test", "_tests", "idle_test", "turtledemo", "template", "templates",
    "site-packages", "__pycache__", "pydoc_data", "encodings", "lib2to3", "ensurepip",
    "vendor", "_vendor", "vendored", "_vendored", "third_party", "extern", "externals",
))  # fmt: skip
MAX_FILE_BYTES = 200_000
MAX_SHARED_WITH_HELD_OUT = 10
MAX_SHARE_SEEN = 0.5
GENERATED = re.compile(r"(automatically|auto-?)\s*generated|generated (by|from)|do not edit", re.IGNORECASE)


@dataclass(frozen=True)
class Document:
    """One source file. `path` is relative to its installation root, with forward slashes."""

    package: str
    path: str
    text: str


def is_held_out(path: str, names: Iterable[str] = HELD_OUT) -> bool:
    """Whether an installation-relative path is one of the held-out modules.

    >>> is_held_out("json/decoder.py"), is_held_out("jsonschema.py")
    (True, False)
    """
    return any(path == name or (name.endswith("/") and path.startswith(name)) for name in names)


def windows(text: str) -> set[int]:
    """Hashes of every three consecutive code lines that have at least 30 characters together.

    >>> len(windows("from os import path\\n# note\\nhere = path.curdir\\n\\nthere = path.pardir\\nboth = here + there"))
    2
    """
    lines = [
        stripped for line in text.splitlines() if (stripped := line.strip()) and not stripped.startswith("#")
    ]
    joined = ("\n".join(lines[i : i + 3]) for i in range(len(lines) - 2))
    return {
        int.from_bytes(hashlib.blake2b(w.encode(), digest_size=8).digest(), "big")
        for w in joined
        if len(w) >= 30
    }


def is_prose_like_code(text: str) -> bool:
    """False for empty files, generated files, and tables of data in Python clothing."""
    if not 200 <= len(text) <= MAX_FILE_BYTES or GENERATED.search(text[:2000]):
        return False
    lines = text.splitlines()
    letters = sum(map(str.isalpha, text)) / len(text)
    digits = sum(map(str.isdigit, text)) / len(text)
    return (
        letters >= 0.35 and digits <= 0.12 and len(text) / len(lines) <= 100 and max(map(len, lines)) <= 400
    )


def read_tree(package: str, root: Path, paths: Iterable[str]) -> Iterator[Document]:
    """The Python sources among `paths`, relative to `root`; files that are missing or not UTF-8 are passed over."""
    for path in sorted(paths):
        *folders, name = PurePosixPath(path).parts
        if (
            not name.endswith(".py")
            or name.startswith(("test_", "conftest"))
            or SKIPPED_FOLDERS.intersection(folders)
        ):
            continue
        try:
            text = (root / path).read_bytes().decode("utf-8").replace("\r\n", "\n")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        yield Document(package, path, text)


def standard_library() -> list[Document]:
    """Every source file of this Python's standard library that `read_tree` takes."""
    root = Path(sysconfig.get_path("stdlib"))
    return list(
        read_tree(STANDARD_LIBRARY, root, (p.relative_to(root).as_posix() for p in root.rglob("*.py")))
    )


def fresh_documents(
    documents: Iterable[Document], forbidden: Set[int], seen_windows: set[int], max_bytes: int
) -> Iterator[Document]:
    """The documents in order, without near copies of forbidden windows and without duplicates, as long as there is room.

    seen: windows of documents that were taken before; those of new ones are added.
    """
    room = max_bytes
    for document in documents:
        own_windows = windows(document.text)
        if len(own_windows & forbidden) >= MAX_SHARED_WITH_HELD_OUT or len(
            own_windows & seen_windows
        ) > MAX_SHARE_SEEN * len(own_windows):
            continue
        if len(document.text) > room:
            continue
        seen_windows |= own_windows
        room -= len(document.text)
        yield document


def library_texts(max_bytes: int, *, seed: int = 0) -> tuple[list[str], list[str]]:
    """(texts to make indexes of, in a random order; texts of the held-out modules) of the standard library."""
    rng = random.Random(seed)
    documents = standard_library()
    rng.shuffle(documents)
    held_out = [d for d in documents if is_held_out(d.path)]
    forbidden = set[int]().union(*(windows(d.text) for d in held_out))
    others = (d for d in documents if not is_held_out(d.path) and is_prose_like_code(d.text))
    chosen = list(fresh_documents(others, forbidden, set(), max_bytes))
    rng.shuffle(chosen)
    return [d.text for d in chosen], [d.text for d in sorted(held_out, key=lambda d: d.path)]
