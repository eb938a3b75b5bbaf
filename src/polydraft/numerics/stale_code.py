"""Compiled code that outlived its source: numba knows when a function's own file changes, not when what it calls in another file does.

A compiled function is stamped with the source of all that it reaches by name: itself, functions, classes and constants of the package that it
mentions, what those mention, and what fills them in from elsewhere (`@overload(name)`, `TABLE[key] = ...`). Where the stamp is another than
last time, what numba stored of the function is deleted, and it is compiled anew when it is first called. Functions are compiled by what their
decorators lead to, numba or llvmlite, whatever their names.
"""

import ast
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

COMPILERS = "numba", "llvmlite"
Key = tuple[str, str]
"""Dotted name of a module, and a name at its top."""


class _Definition:
    """text: of all statements that define a name.  mentions: what they name, dotted.  function: whether numba may store code of it."""

    def __init__(self, function: bool, decorated: bool) -> None:
        self.text = ""
        self.function = function
        self.decorated = decorated
        self.mentions: set[str] = set()


class _Module(NamedTuple):
    """definitions: by name.  imports: what names at its top stand for, dotted.  fills: dotted names, and definitions that change them."""

    definitions: dict[str, _Definition]
    imports: dict[str, str]
    fills: list[tuple[str, str]]


def _mentions(node: ast.AST) -> Iterator[str]:
    """Names in a statement, with the attribute behind each, and what it imports."""
    owners = set[ast.expr]()
    for part in ast.walk(node):  # from above: an attribute before its owner
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            owners.add(part.value)
            yield f"{part.value.id}.{part.attr}"
        elif isinstance(part, ast.Name) and part not in owners:
            yield part.id
        elif isinstance(part, (ast.Import, ast.ImportFrom)):
            yield from _imported(part).values()


def _imported(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    if isinstance(node, ast.Import):
        return {
            alias.asname or alias.name.partition(".")[0]: alias.name
            if alias.asname
            else alias.name.partition(".")[0]
            for alias in node.names
        }
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}


def _read(text: str) -> _Module:
    module = _Module({}, {}, [])
    lines = text.splitlines()
    for number, node in enumerate(ast.parse(text).body):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module.imports.update(_imported(node))
            continue
        function = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        decorators = list[ast.expr]()
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound = {node.name}
            decorators = node.decorator_list
        else:
            bound = {
                part.id
                for part in ast.walk(node)
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            }
            for part in ast.walk(node):  # imports under a condition
                module.imports.update(
                    _imported(part) if isinstance(part, (ast.Import, ast.ImportFrom)) else {}
                )
        mentions = set(_mentions(node))
        filled = {
            name
            for call in decorators
            if isinstance(call, ast.Call)
            for arg in call.args
            for name in _mentions(arg)
        }
        if not bound:  # such as TABLE[key] = value
            bound = {f"<{number}>"}
            filled = mentions
        for name in bound:
            definition = module.definitions.setdefault(name, _Definition(function, bool(decorators)))
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            definition.text += "\n".join(lines[first - 1 : node.end_lineno]) + "\n"
            definition.mentions |= mentions
            module.fills.extend((mention, name) for mention in filled)
    return module


class _Sources:
    """Modules of a package, read when something in them is reached."""

    def __init__(self, root: Path) -> None:
        self.paths = {
            ".".join((root.name, *path.relative_to(root).with_suffix("").parts)): path
            for path in root.rglob("*.py")
        }
        self.paths = {name.removesuffix(".__init__"): path for name, path in self.paths.items()}
        self.texts = {name: path.read_text(encoding="utf-8") for name, path in self.paths.items()}
        self.modules: dict[str, _Module] = {}
        self.filled: dict[Key, set[Key]] = {}
        self._reached: dict[Key, set[Key]] = {}

    def module(self, name: str) -> _Module:
        if name not in self.modules:
            self.modules[name] = _read(self.texts[name])
            for mention, filling in self.modules[name].fills:
                for key in self.resolve(name, mention):
                    self.filled.setdefault(key, set()).add((name, filling))
        return self.modules[name]

    def resolve(self, module: str, mention: str) -> list[Key]:
        """What a name in a module stands for: definitions of the package, or of a compiler; nothing where it is another's."""
        head, _, attribute = mention.partition(".")
        here = self.module(module)
        if head in here.definitions:
            return [(module, head)]
        if head in here.imports:
            return self._resolve_dotted(".".join(filter(None, (here.imports[head], attribute))))
        return self._resolve_dotted(mention) if attribute else []

    def _resolve_dotted(self, dotted: str) -> list[Key]:
        if dotted.partition(".")[0] in COMPILERS:
            return [(dotted, "")]
        owner = dotted
        rest = ""
        while owner and owner not in self.texts:
            owner, _, last = owner.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
        if not owner:
            return []
        return (
            self.resolve(owner, rest) if rest else [(owner, name) for name in self.module(owner).definitions]
        )

    def reached(self, key: Key) -> set[Key]:
        """What a definition mentions, and what fills it in."""
        if key not in self._reached:
            module, name = key
            mentions = () if _is_compiler(key) else self.module(module).definitions[name].mentions
            self._reached[key] = {
                definition for mention in mentions for definition in self.resolve(module, mention)
            } | self.filled.get(key, set())
        return self._reached[key]

    def compiled(self) -> Iterator[Key]:
        """Functions that numba or llvmlite compile: they mention one of both, or what leads to them in whatever module, see `_makes`."""
        makers = set[Key]()
        words = set(COMPILERS)
        while True:
            mentioned = re.compile(rf"\b(?:{'|'.join(map(re.escape, words))})\b")
            names = [name for name, text in self.texts.items() if mentioned.search(text)]
            keys = [(name, definition) for name in names for definition in self.module(name).definitions]
            leading = {
                key
                for key in keys
                if any(
                    _is_compiler(mentioned_key) or mentioned_key in makers
                    for mentioned_key in self.reached(key)
                )
            }
            more = {
                key
                for key in leading
                if not self.module(key[0]).definitions[key[1]].decorated and self._makes(key)
            }
            if more <= makers:
                break
            makers |= more
            words |= {name for name, _ in more}
        self._reached.clear()  # modules that were read since fill in what others reach
        yield from (key for key in leading if self.module(key[0]).definitions[key[1]].function)

    def _makes(self, key: Key) -> bool:
        """Whether a definition without decorators may be a decorator: a name that was assigned, or a function that itself speaks of a compiler."""
        return not self.module(key[0]).definitions[key[1]].function or any(
            map(_is_compiler, self.reached(key))
        )

    def closure(self, key: Key) -> set[Key]:
        """All that a definition reaches, itself included."""
        reached = {key}
        waiting = [key]
        while waiting:
            more = self.reached(waiting.pop()) - reached
            reached |= more
            waiting += more
        return reached

    def digest(self, key: Key) -> str:
        keys = sorted(reached for reached in self.closure(key) if not _is_compiler(reached))
        texts = (self.module(module).definitions[name].text for module, name in keys)
        return sha256("\0".join(texts).encode()).hexdigest()[:20]


def _is_compiler(key: Key) -> bool:
    return key[0].partition(".")[0] in COMPILERS


def _stamps(root: Path) -> dict[str, str]:
    """Relative path and name of each compiled function -> digest of all sources that it is made of."""
    sources = _Sources(root)
    return {
        f"{sources.paths[module].relative_to(root).as_posix()}:{name}": sources.digest((module, name))
        for module, name in sorted(sources.compiled())
    }


def drop(root: Path) -> list[str]:
    """Delete what numba stored of functions whose sources changed since the last call; the files concerned, by relative path.

    root: the folder of a package. Where it cannot be written nothing is deleted; numba then has its code elsewhere.

    Example:
        >>> import tempfile
        >>> package = Path(tempfile.mkdtemp())
        >>> _ = (package / "kernel.py").write_text("from numba import njit\\n@njit\\ndef f(): ...")
        >>> drop(package), drop(package)
        (['kernel.py'], [])
    """
    stamp = root / "__pycache__" / "compiled_sources.json"
    stamps = sorted(
        (path.as_posix(), info.st_mtime_ns, info.st_size)
        for path in root.rglob("*.py")
        for info in [path.stat()]
    )
    quick = sha256(repr(stamps).encode()).hexdigest()
    before: dict[str, str] = {}
    with suppress(OSError, ValueError, RecursionError):
        stored = json.loads(stamp.read_text(encoding="utf-8"))
        before = stored if isinstance(stored, dict) else {}
    if before.get("all") == quick:
        return []
    now = _stamps(root)
    changed = [key for key, digest in now.items() if before.get(key) != digest]
    with suppress(OSError):
        for file, _, name in (key.partition(":") for key in changed):
            folder = (root / file).parent / "__pycache__"
            stem = f"{Path(file).stem}.{name}"
            for index in (*folder.glob(f"{stem}-*.nb[ic]"), *folder.glob(f"{stem}.*.nb[ic]")):
                index.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        written = stamp.with_suffix(".new")
        written.write_text(json.dumps({"all": quick, **now}), encoding="utf-8")
        written.replace(stamp)
    return sorted({key.partition(":")[0] for key in changed})
