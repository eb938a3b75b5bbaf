"""Compiled code that outlived its source: numba knows when a function's own file changes, not when what it calls in another file does.

Code is stale where the digest of what it was made from is another than last time: its own file, those of the package that this imports names from,
and so on, and those that fill in what one of them defines (`@overload(name)`, `TABLE[key] = ...`). What numba stored of such a file's functions is deleted, and they are
compiled anew when they are first called. That a whole file counts costs a developer some recompiling, and needs no notion of what a function reads.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

IMPORT = re.compile(
    r"^[ \t]*(?:from ([\w.]+) import (\([^)]*\)|[^\n]*)|import ([\w.]+)(?: as (\w+))?)", re.MULTILINE
)
FILLED_IN = re.compile(r"^(?:@overload\(\s*(\w+)|(\w+)\[.+\] = )", re.MULTILINE)


def _imports(text: str) -> Iterator[tuple[str, str]]:
    """Names in a file, and what they stand for, dotted."""
    for owner, names, module, alias in IMPORT.findall(text):
        if module:
            yield alias or module, module
        for name, own_name in re.findall(r"(\w+)(?: as (\w+))?", re.sub(r"#.*", "", names)):
            yield own_name or name, f"{owner}.{name}"


class Sources:
    """The files of a package, by dotted name.

    Example:
        >>> sources = Sources(Path(__file__).parents[1])
        >>> sorted(sources.made_from("polydraft.numerics.stale_code"))
        ['polydraft.numerics.stale_code']
    """

    def __init__(self, root: Path) -> None:
        self.paths = dict[str, Path]()
        for path in root.rglob("*.py"):
            dotted = ".".join((root.name, *path.relative_to(root).with_suffix("").parts))
            self.paths[dotted.removesuffix(".__init__")] = path
        self.texts = {name: path.read_text(encoding="utf-8") for name, path in self.paths.items()}
        self.imports = {name: dict(_imports(text)) for name, text in self.texts.items()}
        self.filled_in_by: dict[str, set[str]] = {}
        for name, text in self.texts.items():
            for function, table in FILLED_IN.findall(text):
                owner = self._owner(self.imports[name].get(function or table, ""))
                self.filled_in_by.setdefault(owner, set()).add(name)

    def _owner(self, dotted: str) -> str:
        """The file that defines a name; "" outside of the package, and for a package as a whole: what is used of it is imported by name somewhere."""
        owner = dotted
        while owner and owner not in self.texts:
            owner = owner.rpartition(".")[0]
        name = dotted[len(owner) + 1 :].partition(".")[0]
        if not owner or (not name and self.paths[owner].name == "__init__.py"):
            return ""
        through = self.imports[owner].get(name, dotted)
        return owner if through == dotted else self._owner(through)

    def made_from(self, name: str) -> set[str]:
        """All files that the code of a file's functions is made from."""
        found = {name}
        waiting = [name]
        while waiting:
            file = waiting.pop()
            owners = {self._owner(dotted) for dotted in self.imports[file].values()}
            more = (owners | self.filled_in_by.get(file, set())) - found - {""}
            found |= more
            waiting += more
        return found

    def digest(self, name: str) -> str:
        """Of all these files."""
        texts = (self.texts[file] for file in sorted(self.made_from(name)))
        return sha256("\0".join(texts).encode()).hexdigest()[:20]


def drop(root: Path) -> list[str]:
    """Delete what numba stored of functions whose sources changed since the last call; the files that are made from others now, by relative path.

    root: the folder of a package. Where it cannot be written nothing is deleted; numba then has its code elsewhere.

    Example:
        >>> import tempfile
        >>> package = Path(tempfile.mkdtemp())
        >>> _ = (package / "kernel.py").write_text("from numba import njit\\n@njit\\ndef f(): ...")
        >>> drop(package), drop(package)
        (['kernel.py'], [])
    """
    stamp = root / "__pycache__" / "compiled_sources.json"
    stats = [(path.as_posix(), path.stat()) for path in sorted(root.rglob("*.py"))]
    quick = sha256(
        repr([(path, info.st_mtime_ns, info.st_size) for path, info in stats]).encode()
    ).hexdigest()
    before: dict[str, str] = {}
    with suppress(OSError, ValueError, RecursionError):
        stored = json.loads(stamp.read_text(encoding="utf-8"))
        before = stored if isinstance(stored, dict) else {}
    if before.get("all") == quick:
        return []
    sources = Sources(root)
    now = {path.relative_to(root).as_posix(): sources.digest(name) for name, path in sources.paths.items()}
    changed = sorted(file for file, digest in now.items() if before.get(file) != digest)
    with suppress(OSError):
        for file in changed:
            path = root / file
            for code in (path.parent / "__pycache__").glob(f"{path.stem}.*.nb[ic]"):
                code.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        written = stamp.with_suffix(".new")
        written.write_text(json.dumps({"all": quick, **now}), encoding="utf-8")
        written.replace(stamp)
    return changed
