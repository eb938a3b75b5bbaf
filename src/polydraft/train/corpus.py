"""The training corpus: Python sources that are on every machine with this library.

The standard library and the installed run-time dependencies, without tests, generated tables and vendored copies. Some modules
are held out whole; a file that shares text with one of them is left out of the training part as well.

    window        three consecutive code lines (stripped, no blank or comment lines), hashed
    near copy     a file that shares at least `MAX_SHARED_WITH_HELD_OUT` windows with the held-out modules
    duplicate     a file most of whose windows were already seen in a training file
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from polydraft.errors import InvalidInputError
from polydraft.schema import CORPUS, fault, read_json

STANDARD_LIBRARY = "python"
RUNTIME_DEPENDENCIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "scipy", "typer", "rich")
HELD_OUT = (
    "argparse.py", "bisect.py", "graphlib.py", "heapq.py", "json/", "sched.py", "shutil.py", "textwrap.py",
    "jinja2/lexer.py", "networkx/algorithms/dag.py", "rich/table.py", "scipy/optimize/_root_scalar.py",
    "transformers/generation/stopping_criteria.py",
)  # fmt: skip
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
class Package:
    name: str
    version: str
    licence: str


@dataclass(frozen=True)
class Document:
    """One source file. `path` is relative to its installation root, with forward slashes."""

    package: str
    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    packages: tuple[Package, ...]
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]

    def hash(self) -> str:
        """SHA-256 of the training and held-out texts, in order."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            for document in part:
                digest.update(f"{document.path}\0{len(document.text)}\0".encode())
                digest.update(document.text.encode())
            digest.update(b"\1")
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        record = {"hash": self.hash(), **asdict(self)}
        path.write_text(json.dumps(record), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read what `save` wrote.

        Raises:
            InvalidInputError: a file that cannot be read, is no corpus, or does not have its hash.
        """
        try:
            record = read_json(path.read_bytes())
            found = fault(record, CORPUS)
        except (OSError, ValueError) as error:
            record, found = {}, str(error)
        if found:
            raise InvalidInputError(f"{path.name} was given as a training corpus, but {found}; rebuild it with `corpus`.")
        corpus = cls(
            packages=tuple(Package(**p) for p in record["packages"]),
            train=tuple(Document(**d) for d in record["train"]),
            held_out=tuple(Document(**d) for d in record["held_out"]),
        )
        if corpus.hash() != record["hash"]:
            raise InvalidInputError(f"{path.name}: got contents that differ from the stored hash; rebuild it with `corpus`")
        return corpus


def is_held_out(path: str) -> bool:
    """Whether an installation-relative path is one of the held-out modules.

    >>> is_held_out("json/decoder.py"), is_held_out("jsonschema.py")
    (True, False)
    """
    return any(path == name or (name.endswith("/") and path.startswith(name)) for name in HELD_OUT)


def windows(text: str) -> set[int]:
    """Hashes of every three consecutive code lines that have at least 30 characters together.

    >>> len(windows("from os import path\\n# note\\nhere = path.curdir\\n\\nthere = path.pardir\\nboth = here + there"))
    2
    """
    lines = [stripped for line in text.splitlines() if (stripped := line.strip()) and not stripped.startswith("#")]
    joined = ("\n".join(lines[i : i + 3]) for i in range(len(lines) - 2))
    return {int.from_bytes(hashlib.blake2b(w.encode(), digest_size=8).digest(), "big") for w in joined if len(w) >= 30}


def is_prose_like_code(text: str) -> bool:
    """False for empty files, generated files, and tables of data in Python clothing."""
    if not 200 <= len(text) <= MAX_FILE_BYTES or GENERATED.search(text[:2000]):
        return False
    lines = text.splitlines()
    letters = sum(map(str.isalpha, text)) / len(text)
    digits = sum(map(str.isdigit, text)) / len(text)
    return letters >= 0.35 and digits <= 0.12 and len(text) / len(lines) <= 100 and max(map(len, lines)) <= 400


def requirement_closure(names: Iterable[str]) -> list[metadata.Distribution]:
    """The named distributions and everything they need at run time, as far as it is installed, sorted by name."""
    found: dict[str, metadata.Distribution] = {}
    queue = list(names)
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        requirements = found[name].requires or []
        queue += [re.split(r"[^\w.-]", requirement)[0] for requirement in requirements if "extra ==" not in requirement]
    return [found[name] for name in sorted(found)]


def licence_of(distribution: metadata.Distribution) -> str:
    """The licence that a distribution's metadata states: its SPDX expression, else its classifiers, else its free text."""
    fields = distribution.metadata
    classifiers = [c.split(" :: ")[-1] for c in fields.get_all("Classifier") or [] if c.startswith("License ::")]
    stated = fields.get_all("License-Expression") or ["; ".join(classifiers)]
    return (stated[0] or (fields.get_all("License") or ["not stated"])[0]).splitlines()[0]


def read_tree(package: str, root: Path, paths: Iterable[str]) -> Iterator[Document]:
    """The Python sources among `paths`, relative to `root`; files that are missing or not UTF-8 are passed over."""
    for path in sorted(paths):
        *folders, name = PurePosixPath(path).parts
        if not name.endswith(".py") or name.startswith(("test_", "conftest")) or SKIPPED_FOLDERS.intersection(folders):
            continue
        try:
            text = (root / path).read_bytes().decode("utf-8").replace("\r\n", "\n")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        yield Document(package, path, text)


def installed_sources() -> Iterator[tuple[Package, list[Document]]]:
    """Each package with its source files: the standard library first, then the run-time dependencies."""
    root = Path(sysconfig.get_path("stdlib"))
    standard = Package(STANDARD_LIBRARY, ".".join(map(str, sys.version_info[:3])), "PSF-2.0")
    yield standard, list(read_tree(STANDARD_LIBRARY, root, (p.relative_to(root).as_posix() for p in root.rglob("*.py"))))
    for distribution in requirement_closure(RUNTIME_DEPENDENCIES):
        name = distribution.metadata["Name"].lower()
        base = Path(str(distribution.locate_file("")))
        paths = [p.as_posix() for p in distribution.files or [] if ".." not in p.parts]
        yield Package(name, distribution.version, licence_of(distribution)), list(read_tree(name, base, paths))


def select(sources: Iterable[tuple[Package, list[Document]]], *, max_package_bytes: int, seed: int) -> Corpus:
    """Split the sources into training and held-out documents.

    max_package_bytes: cap on the training text of one package; the standard library may take three times as much.
    """
    rng = random.Random(seed)
    packages, candidates, held_out = [], [], []
    for package, documents in sources:
        rng.shuffle(documents)
        kept = [d for d in documents if is_prose_like_code(d.text) or is_held_out(d.path)]
        held_out += [d for d in kept if is_held_out(d.path)]
        candidates.append((package, [d for d in kept if not is_held_out(d.path)]))
    forbidden = set().union(*(windows(d.text) for d in held_out))
    seen: set[int] = set()
    train: list[Document] = []
    for package, documents in candidates:
        room = max_package_bytes * (3 if package.name == STANDARD_LIBRARY else 1)
        before = len(train)
        for document in documents:
            own = windows(document.text)
            if len(own & forbidden) >= MAX_SHARED_WITH_HELD_OUT or len(own & seen) > MAX_SHARE_SEEN * len(own):
                continue
            if len(document.text) > room:
                continue
            seen |= own
            room -= len(document.text)
            train.append(document)
        if len(train) > before or any(d.package == package.name for d in held_out):
            packages.append(package)
    rng.shuffle(train)
    return Corpus(tuple(packages), tuple(train), tuple(sorted(held_out, key=lambda d: (d.package, d.path))))
