"""The training corpus: Python sources that are on every machine with this library.

The standard library and the installed run-time dependencies, without tests, generated tables and vendored copies. Some modules
are held out whole; a file that shares text with one of them is left out of the training part as well.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from polydraft.errors import InvalidInputError
from polydraft.files.schema import ListOf, Record, String, fault, read_json
from studies.embedded_pair.held_out import HELD_OUT as LIBRARY_HELD_OUT
from studies.embedded_pair.held_out import (
    STANDARD_LIBRARY,
    Document,
    fresh_documents,
    is_held_out,
    is_prose_like_code,
    read_tree,
    standard_library,
    windows,
)

RUNTIME_DEPENDENCIES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "numba",
    "scipy",
    "typer",
    "rich",
)
HELD_OUT = (
    *LIBRARY_HELD_OUT,
    "jinja2/lexer.py",
    "networkx/algorithms/dag.py",
    "rich/table.py",
    "scipy/optimize/_root_scalar.py",
    "transformers/generation/stopping_criteria.py",
)

_DOCUMENTS = ListOf(Record(dict.fromkeys(("package", "path", "text"), String())))
SCHEMA = Record(
    {
        "hash": String("[0-9a-f]{64}"),
        "packages": ListOf(Record(dict.fromkeys(("name", "version", "licence"), String()))),
        "train": _DOCUMENTS,
        "held_out": _DOCUMENTS,
    }
)
"""What `Corpus.save` writes."""


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    licence: str


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
            found = fault(record, SCHEMA)
        except (OSError, ValueError) as error:
            record = {}
            found = str(error)
        if found:
            raise InvalidInputError(
                f"{path.name} was given as a training corpus, but {found}; rebuild it with `corpus`."
            )
        corpus = cls(
            packages=tuple(Package(**p) for p in record["packages"]),
            train=tuple(Document(**d) for d in record["train"]),
            held_out=tuple(Document(**d) for d in record["held_out"]),
        )
        if corpus.hash() != record["hash"]:
            raise InvalidInputError(
                f"{path.name}: got contents that differ from the stored hash; rebuild it with `corpus`"
            )
        return corpus


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
        queue += [
            re.split(r"[^\w.-]", requirement)[0]
            for requirement in requirements
            if "extra ==" not in requirement
        ]
    return [found[name] for name in sorted(found)]


def licence_of(distribution: metadata.Distribution) -> str:
    """The licence that a distribution's metadata states: its SPDX expression, else its classifiers, else its free text."""
    fields = distribution.metadata
    classifiers = [
        c.split(" :: ")[-1] for c in fields.get_all("Classifier") or [] if c.startswith("License ::")
    ]
    stated = fields.get_all("License-Expression") or ["; ".join(classifiers)]
    return (stated[0] or (fields.get_all("License") or ["not stated"])[0]).splitlines()[0]


def installed_sources() -> Iterator[tuple[Package, list[Document]]]:
    """Each package with its source files: the standard library first, then the run-time dependencies."""
    yield Package(STANDARD_LIBRARY, ".".join(map(str, sys.version_info[:3])), "PSF-2.0"), standard_library()
    for distribution in requirement_closure(RUNTIME_DEPENDENCIES):
        name = distribution.metadata["Name"].lower()
        base = Path(str(distribution.locate_file("")))
        paths = [p.as_posix() for p in distribution.files or [] if ".." not in p.parts]
        yield (
            Package(name, distribution.version, licence_of(distribution)),
            list(read_tree(name, base, paths)),
        )


def select(sources: Iterable[tuple[Package, list[Document]]], *, max_package_bytes: int, seed: int) -> Corpus:
    """Split the sources into training and held-out documents.

    max_package_bytes: cap on the training text of one package; the standard library may take three times as much.
    """
    rng = random.Random(seed)
    packages = []
    candidates = []
    held_out = []
    for package, documents in sources:
        rng.shuffle(documents)
        kept = [d for d in documents if is_prose_like_code(d.text) or is_held_out(d.path, HELD_OUT)]
        held_out += [d for d in kept if is_held_out(d.path, HELD_OUT)]
        candidates.append((package, [d for d in kept if not is_held_out(d.path, HELD_OUT)]))
    forbidden = set().union(*(windows(d.text) for d in held_out))
    seen: set[int] = set()
    train: list[Document] = []
    for package, documents in candidates:
        room = max_package_bytes * (3 if package.name == STANDARD_LIBRARY else 1)
        before = len(train)
        train += fresh_documents(documents, forbidden, seen, room)
        if len(train) > before or any(d.package == package.name for d in held_out):
            packages.append(package)
    rng.shuffle(train)
    return Corpus(tuple(packages), tuple(train), tuple(sorted(held_out, key=lambda d: (d.package, d.path))))
