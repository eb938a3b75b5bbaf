"""Compiled code that outlived its source: numba knows when a function's own file changes, not when one that it calls does.

A file is stamped with its own text, that of the package's files that it imports, directly or not, and that of those that fill in
(`overload`) a function of theirs. Where the stamp is another than last time, what numba kept of the file's functions is deleted, and they are
compiled anew when they are first called.
"""

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

_OVERLOADED = re.compile(r"^@overload\((\w+)", re.MULTILINE)
_COMPILED = re.compile(r"^\s*(?:@|\w+ = )(?:numba\.)?(?:njit|compiled|intrinsic)\b", re.MULTILINE)


def _imports(text: str, package: str) -> set[str]:
    """Dotted names inside the package that a file imports; some of them name what is in a module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.startswith(f"{package}.")}


def _stamps(root: Path) -> dict[str, str]:
    """Relative path of each file with compiled functions -> digest of all sources that they are made of."""
    texts = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    compiled = {path: text for path, text in texts.items() if _COMPILED.search(text)}
    named = {".".join((root.name, *path.relative_to(root).with_suffix("").parts)): path for path in compiled}
    below = {path: {named[name] for name in _imports(text, root.name) if name in named} for path, text in compiled.items()}
    for path, text in compiled.items():
        filled = [f"\ndef {name}(" for name in _OVERLOADED.findall(text)]
        for caller in [caller for caller in below[path] if any(name in compiled[caller] for name in filled)]:
            below[caller].add(path)
    return {path.relative_to(root).as_posix(): _digest(path, compiled, below) for path in compiled}


def _digest(path: Path, texts: Mapping[Path, str], below: Mapping[Path, set[Path]]) -> str:
    reached, waiting = {path}, [path]
    while waiting:
        waiting += [callers for callers in below[waiting.pop()] if callers not in reached and not reached.add(callers)]
    return sha256("\0".join(texts[callers] for callers in sorted(reached)).encode()).hexdigest()


def drop(root: Path) -> list[str]:
    """Delete what numba keeps of functions whose sources changed since the last call; the files concerned, by relative path.

    root: the folder of a package. Where it cannot be written nothing is deleted; numba then keeps its code elsewhere.

    Example:
        >>> import tempfile
        >>> package = Path(tempfile.mkdtemp())
        >>> _ = (package / "kernel.py").write_text("@njit\\ndef f(): ...")
        >>> drop(package), drop(package)
        (['kernel.py'], [])
    """
    stamp = root / "__pycache__" / "compiled_sources.json"
    stamps = sorted((path.as_posix(), info.st_mtime_ns, info.st_size) for path in root.rglob("*.py") for info in [path.stat()])
    quick = sha256(repr(stamps).encode()).hexdigest()
    before: dict[str, str] = {}
    with suppress(OSError, ValueError, RecursionError):
        stored = json.loads(stamp.read_text(encoding="utf-8"))
        before = stored if isinstance(stored, dict) else {}
    if before.get("all") == quick:
        return []
    now = _stamps(root)
    changed = sorted(name for name, digest in now.items() if before.get(name) != digest)
    with suppress(OSError):
        for name in changed:
            for index in (root / name).parent.glob(f"__pycache__/{Path(name).stem}.*.nb[ic]"):
                index.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        written = stamp.with_suffix(".new")
        written.write_text(json.dumps({"all": quick, **now}), encoding="utf-8")
        written.replace(stamp)
    return changed
