"""Time that goes into compiling functions, or loading what was compiled before: nobody's work is charged with it.

Functions are compiled when they are first called, and only for what they are called with; numba stores the code for the next process.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter, thread_time

from numba.core.event import Event, Listener, register, unregister

from polydraft.numerics.compiled_code import njit
from polydraft.numerics.linked_code import LinkedCompiler

inner = partial(njit, no_cpython_wrapper=True, pipeline_class=LinkedCompiler)
"""Compiles a function that only compiled functions call: what unpacks a model's hundred arrays for Python takes LLVM longer than most functions themselves."""
unowned = inner(_nrt=False)
"""For what allocates nothing: a part of a forward pass is handed a hundred arrays, and counting who owns them takes half a microsecond, which is
5% of a forward pass of the embedded target."""
borrowed = inner(_nrt=False, error_model="numpy")
"""For arithmetic that cuts arrays out of others: they are owned by nobody that counts, which took three times what attention's arithmetic takes."""
inlined = inner(_nrt=False, error_model="numpy", forceinline=True)
"""For a step of another function, which becomes part of it: handing over a memory and a scratch, some hundred numbers, takes 0.15 us a call,
4% of a row of a gated delta net."""
_CLOCKS = (perf_counter, thread_time)


class _Here(threading.local):
    """What a thread has spent under the lock, on each clock, up to the last release."""

    depth = 0

    def __init__(self) -> None:
        self.lost = dict.fromkeys(_CLOCKS, 0.0)


class _Lock(Listener):
    """Numba holds its lock for as long as it loads or compiles; what a function calls is compiled within.

    Meanwhile no garbage is collected: a compiler makes millions of objects, and looking through all of a process with models for each few
    thousand of them takes a sixth of the time.
    """

    def __init__(self) -> None:
        self.here = _Here()
        self.total = 0.0
        self._guard = threading.Lock()
        self._num_compiling = 0
        self._collects = False

    def on_start(self, event: Event) -> None:
        self.here.depth += 1
        if self.here.depth == 1:
            self._count(1)
            self.here.began = [clock() for clock in _CLOCKS]

    def _count(self, change: int) -> None:
        """A thread begins to compile, or ends."""
        with self._guard:
            if self._num_compiling == 0:
                self._collects = gc.isenabled()
                gc.disable()
            self._num_compiling += change
            if self._num_compiling == 0 and self._collects:
                gc.enable()

    def on_end(self, event: Event) -> None:
        self.here.depth -= 1
        if self.here.depth == 0:
            spent = [clock() - began for clock, began in zip(_CLOCKS, self.here.began, strict=True)]
            for clock, more in zip(_CLOCKS, spent, strict=True):
                self.here.lost[clock] += more
            self.total += spent[0]
            self._count(-1)


class _Teller(Listener):
    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.depth = 0

    def on_start(self, event: Event) -> None:
        self.depth += 1
        if self.depth == 1:
            assert event.data is not None
            self.tell(event.data["dispatcher"].py_func.__name__.strip("_"))

    def on_end(self, event: Event) -> None:
        self.depth -= 1


_lock = _Lock()
register("numba:compiler_lock", _lock)


def seconds() -> float:
    """Seconds of the wall that this process has compiled and loaded compiled code for, all threads together."""
    return _lock.total


def working(clock: Callable[[], float] = perf_counter) -> Callable[[], float]:
    """The clock, standing still while its thread compiles or loads compiled code. clock: `perf_counter` or `thread_time`.

    Example:
        >>> import numba
        >>> now = working()
        >>> start, before, slow = now(), perf_counter(), numba.njit(lambda x: x + 1)(1)
        >>> now() - start < (perf_counter() - before) / 2
        True
    """
    here = _lock.here
    return lambda: clock() - here.lost.get(clock, 0.0)


@contextmanager
def reporting(tell: Callable[[str], None]) -> Iterator[None]:
    """While entered, `tell` is called with the name of each function that is about to be compiled, not of those that it calls."""
    teller = _Teller(tell)
    register("numba:compile", teller)
    try:
        yield
    finally:
        unregister("numba:compile", teller)
