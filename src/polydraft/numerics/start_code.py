"""Compiled code that a start will call is loaded by a thread while weights are read.

After its first answers an engine notes, beside the code, which functions were called and with which types. The next start of the same kind loads
those in the same order. Without a note, or with a damaged one, each is loaded when it is first called. Nothing is compiled ahead: what is noted
and is not stored is passed over, and the next note leaves it out.

A process with several engines notes nothing: whose code was called cannot be told there, and a start would import what other engines needed.

The thread imports what it needs before it takes numba's lock. A module that is imported may want that lock itself, and would never get it.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from json import dumps
from threading import Thread
from typing import Any

from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from polydraft.errors import InvalidInputError
from polydraft.files.atomic import replacing
from polydraft.files.schema import ListOf, String, fault, read_json
from polydraft.numerics import compiled_code

PACKAGE = "polydraft."
NOTE = ListOf(String(r"[\w.]+ \w+ .*"))
"""Module, function and types of each."""


class StartCode:
    """What starts of one kind call. kind: such as the names of models and drafter."""

    num_made = 0
    """In this process."""

    def __init__(self, kind: str) -> None:
        StartCode.num_made += 1
        self.file = compiled_code.beside(f"start-{compiled_code.short_name(kind)}.json")
        self._found: list[str] = []
        self._before = len(compiled_code.used)
        self._is_noted = False
        self._thread: Thread | None = None

    def load(self) -> Thread:
        """Begin to load what the last such start noted. The process does not end before the thread."""
        self._thread = Thread(target=self._load, name="compiled code")
        self._thread.start()
        return self._thread

    def note(self) -> None:
        """Note what was called since this object was made, the first time that this is called, if it is the process's only one."""
        if self._is_noted:
            return
        self._is_noted = True
        if self._thread is not None:
            self._thread.join()
        if StartCode.num_made > 1:
            return
        called = [*self._found, *compiled_code.used[self._before :]]
        entries = list(dict.fromkeys(called))
        if entries != self._read():
            with suppress(OSError, InvalidInputError), replacing(self.file) as file:
                file.write(dumps(entries, indent=0).encode())

    def _read(self) -> list[str]:
        try:
            entries = read_json(self.file.read_bytes())
        except (OSError, ValueError):
            return []
        return [] if fault(entries, NOTE) else entries

    def _load(self) -> None:
        functions = list(_stored(self._read()))
        for entry, function, types in functions:
            if _loaded(function, types):
                self._found.append(entry)


def _stored(entries: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    """Of these entries, those whose code is stored: with the function, and its types as numba has them."""
    for entry in entries:
        module, name, types = entry.split(" ", 2)
        function = _function(module, name)
        cache = None if function is None else function._cache
        if isinstance(cache, compiled_code.Cache):
            signature = cache.stored_types().get(types)
            if signature is not None:
                yield entry, function, signature


def _function(module: str, name: str) -> Any:
    """A compiled function of this package; None where there is none of this name now."""
    if not module.startswith(PACKAGE):
        return None
    try:
        function = getattr(import_module(module), name, None)
    except ImportError:
        return None
    return function if isinstance(function, Dispatcher) else None


def _loaded(function: Any, types: Any) -> bool:
    """Whether there is code for these types, read from its file unless that was done. As `Dispatcher.compile` does, which would go on to compile."""
    with global_compiler_lock:
        if types in function.overloads:
            return True
        code = function._cache.load_overload(types, function.targetctx)
        if code is None:
            return False
        function._cache_hits[types] += 1
        function.targetctx.insert_user_function(code.entry_point, code.fndesc, [code.library])
        function.add_overload(code)
        return True
