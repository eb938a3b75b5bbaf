"""Compiled functions whose machine code is stored for the next process, wherever this one may write.

The first of these folders that can be written holds the code: `NUMBA_CACHE_DIR`, the package's own `__pycache__` folders, the user's cache folder,
a temporary one. Outside of the package a folder is for one state of its sources.

Numba writes an index first and the code later, under a number: another process that compiles meanwhile, or a full disk, leave an index that leads to
the code of other types. Here code is named by its checksum and written before the index. What cannot be read is compiled anew, and what cannot
be written is done without. Numba also numbers functions of one name from one in each process: of two that two processes compiled, a third would
call one in place of the other, as linked code is found by this name. Here the numbers are random.
"""

import hashlib
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from secrets import randbits
from typing import Any, NamedTuple

import numba
from numba.core import config as numba_config
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import (
    CacheImpl,
    CompileResultCacheImpl,
    FunctionCache,
    IndexDataCacheFile,
    _CacheLocator,
)
from numba.core.ccallback import CFunc
from numba.core.codegen import get_host_cpu_features
from numba.core.registry import cpu_target
from numba.core.sigutils import normalize_signature

from polydraft.files.cache_folder import COMPILED, cache_folder, temporary_folder
from polydraft.numerics import stale_code
from polydraft.numerics.processor import unreported_features

config: Any = numba_config
if config.CPU_FEATURES is None and (_more := unreported_features()):
    config.CPU_FEATURES = ",".join(filter(None, [get_host_cpu_features(), _more]))
numbered: Any = FunctionIdentity
numbered._unique_ids = iter(lambda: randbits(48), None)
WALKS = "walks without drafts"
"""For `mark`: how a token is taken from logits, which every first answer needs."""
EVERYTHING = "everything"
"""For `mark`: all that a run may call."""
_ROOT = Path(__file__).parents[1]
used: list[str] = []
"""Module, function and types of all code that this process has loaded or stored, in that order."""


class Place(NamedTuple):
    """Where code is stored. folder: None is the package's own.  lasting: it is not a temporary one."""

    folder: Path | None
    lasting: bool = True


def njit(function: Callable[..., Any] | None = None, *, cache: bool = False, **options: Any) -> Any:
    """`numba.njit`, whose cached code lies in `place()`; without the wrapper that only a pointer to a function needs, see `cfunc`."""

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher: Any = numba.njit(no_cfunc_wrapper=True, **options)(function)
        if cache and not config.DISABLE_JIT:
            dispatcher._cache = Cache(function)
        return dispatcher

    return compiled if function is None else compiled(function)


def cfunc(signature: Any, **options: Any) -> Callable[[Callable[..., Any]], CFunc]:
    """`numba.cfunc`, whose code is cached in `place()`."""

    def compiled(function: Callable[..., Any]) -> CFunc:
        pointer: Any = CFunc(function, normalize_signature(signature), locals={}, options=options)
        pointer._cache = Cache(function)
        pointer.compile()
        return pointer

    return compiled


@cache
def place() -> Place:
    """The folder of this process, by what can be written now; code of sources that changed is dropped."""
    if not config.CACHE_DIR and _writable(_ROOT / "__pycache__"):
        stale_code.drop(_ROOT)
        return Place(None)
    lasting = [Path(config.CACHE_DIR)] if config.CACHE_DIR else []
    lasting += [folder / COMPILED for folder in [cache_folder()] if folder is not None]
    base = next((folder for folder in lasting if _writable(folder)), None)
    chosen = (base or temporary_folder()) / f"polydraft-{_digest_of_sources()}"
    with suppress(OSError):
        if not chosen.exists():
            _forget_all_but(2, chosen.parent)  # of other sources or versions, some 30 MB each
        chosen.mkdir(exist_ok=True)
        os.utime(chosen)
    return Place(chosen, base is not None)


def mark(what: str) -> Path:
    """An empty file for whoever has compiled all code of something: it exists where these sources' code for this processor is stored."""
    context: Any = cpu_target.target_context
    processor = context.codegen().magic_tuple()
    name = short_name(repr((what, _digest_of_sources(), numba.__version__, processor)))
    return beside(f"compiled-{name}")


def beside(name: str) -> Path:
    """A file beside the code."""
    return (place().folder or _ROOT / "__pycache__") / name


def short_name(text: str) -> str:
    """Of a text, for a file's name."""
    return _checksum(text.encode())[:16]


def is_marked(what: str) -> bool:
    """Whether it is stored, here or in a package that came with compiled code."""
    return mark(what).exists() or _came_with_code()


@cache
def _came_with_code() -> bool:
    """Whether the package's own folders, which cannot be written, hold the code of these very sources."""
    return place().folder is not None and (_ROOT / "__pycache__" / mark(EVERYTHING).name).exists()


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


@cache
def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for file in sorted(_ROOT.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _forget_all_but(number: int, base: Path) -> None:
    """Remove code of other states of the sources; the last used ones stay."""
    for folder in sorted(base.glob("polydraft-*"), key=os.path.getmtime)[: -number or None]:
        shutil.rmtree(folder, ignore_errors=True)


class _Locator(_CacheLocator):
    """Where the code of a function of this package is; numba's own locators serve others."""

    def __init__(self, function: Any, file: str) -> None:
        self._function = function
        self._py_file = file

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "_Locator | None":
        return cls(py_func, py_file) if Path(py_file).is_relative_to(_ROOT) else None

    def get_cache_path(self) -> Any:
        folder = place().folder
        file = Path(self._py_file)
        return str(file.parent / "__pycache__" if folder is None else folder / file.parent.relative_to(_ROOT))

    def ensure_cache_path(self) -> None:
        os.makedirs(self.get_cache_path(), exist_ok=True)

    def get_source_stamp(self) -> Any:
        return _checksum(Path(self._py_file).read_bytes())

    def get_disambiguator(self) -> Any:
        return str(self._function.__code__.co_firstlineno)


class _Implementation(CompileResultCacheImpl):
    _locator_classes = [_Locator, *CacheImpl._locator_classes]  # noqa: RUF012 - as numba has it


class _Files(IndexDataCacheFile):
    """Index and code of a function, of which any may be missing, damaged, or written by another process now."""

    beside: "_Files | None" = None
    """Those that came with the package."""

    def load(self, key: Any) -> Any:
        """What was saved, or None."""
        saved = self._load(key)
        return self.beside.load(key) if saved is None and self.beside is not None else saved

    def _load(self, key: Any) -> Any:
        try:
            name = self._load_index()[key]
            data = Path(self._data_path(name)).read_bytes()
            return pickle.loads(data) if name == self._name_of(data) else None
        except Exception:  # what is damaged raises anything
            return None

    def saved_keys(self) -> list[Any]:
        """Of all that was saved."""
        try:
            own = list(self._load_index())
        except Exception:  # as above
            own = []
        return own if self.beside is None else [*self.beside.saved_keys(), *own]

    def save(self, key: Any, data: Any) -> None:
        code = self._dump(data)
        name = self._name_of(code)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(code)
        try:
            index = self._load_index()
        except Exception:
            index = {}
        superseded = index.get(key)
        self._save_index({**index, key: name})
        if superseded not in (None, name):
            Path(self._data_path(superseded)).unlink(missing_ok=True)

    def _name_of(self, code: bytes) -> str:
        return self._data_name_pattern.format(number=int(_checksum(code)[:12], 16))


class _Cache(FunctionCache):
    _impl_class = _Implementation

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        locator = self._impl.locator
        name = self._impl.filename_base
        self._cache_file = _Files(locator.get_cache_path(), name, locator.get_source_stamp())
        if isinstance(locator, _Locator) and _came_with_code():
            folder = str(Path(locator._py_file).parent / "__pycache__")
            self._cache_file.beside = _Files(folder, name, locator.get_source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            code = super().load_overload(sig, target_context)
        except Exception:  # it was written by another version of what it is made of
            return None
        if code is not None:
            self._note_use(sig)
        return code

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_not_stored(str(error.strerror))
        else:
            self._note_use(sig)
            if not place().lasting:
                _say_temporary()

    def stored_types(self) -> dict[str, Any]:
        """Types that there is code for, as numba has them, by their text."""
        return {str(types): types for types, *_ in self._cache_file.saved_keys()}

    def _note_use(self, sig: Any) -> None:
        used.append(f"{self._py_func.__module__} {self._py_func.__name__} {sig}")


class Cache:
    """Code of one function, by types; its files are looked for when the first is asked for, as most functions are not called in a run."""

    def __init__(self, function: Any) -> None:
        self._function = function

    @cached_property
    def _stored(self) -> _Cache:
        return _Cache(self._function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)


@cache
def _warn_not_stored(why: str) -> None:
    warnings.warn(
        f"compiled code could not be stored in {str(place().folder or _ROOT)!r} ({why}): each start compiles again, 10 to 40 s of processor time. "
        "Free some room, or name another folder in NUMBA_CACHE_DIR.",
        stacklevel=1,
    )


@cache
def _say_temporary() -> None:
    warnings.warn(
        f"compiled code is stored in {str(place().folder)!r}, as neither the package's folder nor a cache folder can be written: without it the next "
        "start compiles again, 10 to 40 s of processor time. Name a folder that lasts in POLYDRAFT_CACHE.",
        stacklevel=1,
    )


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
