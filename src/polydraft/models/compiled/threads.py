"""Threads that help with a pass: each claims the units of its own share one after the other, then those that are left of others', and no
one is waited for but those that have claimed one. Whatever is computed is computed by one thread, so bits do not depend on how many
there are. Units of a share lie behind one another in memory, so that the processor's look-ahead loads what the same core will need.

ticket   of a share: phase, end and next unit in one word; a unit belongs to who moves the word on, and to the phase that it read
helper   a Python thread in compiled code without the GIL: it spins, then yields, then sleeps in Python until the next pass
"""

import os
import platform
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "HELPERS",
    "JOB",
    "Pool",
    "claim",
    "default_threads",
    "finish",
    "finished",
    "new_sync",
    "publish",
    "starved",
    "stopped",
]

_LINE = 8
"""Numbers in a cache line: what different threads write lies in different ones."""
DONE, STOP, LATE, HELPERS, JOB, TICKETS = (k * _LINE for k in range(6))
_SPINS, _PATIENCE = 8000, 30_000
"""Turns of a loop: before a thread yields, some 150 microseconds; before a helper sleeps, some milliseconds."""


_MOST_LATE = 1000
"""Late turns of a pass, each a call of the system, after which it goes on alone, and is a bad one."""
_SMALL = 64 << 20
"""Bytes of weights below which a pass is over before helpers are of use."""


def default_threads(weight_bytes: int) -> int:
    """Threads for a model of this size: one if it is small, else the physical cores that nobody else keeps busy, at least one.

    The system's load of the last minute counts, but for one that may be this process's own.

    Example:
        >>> default_threads(1 << 20)
        1
    """
    if weight_bytes < _SMALL:
        return 1
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = {_read(f"/sys/devices/system/cpu/cpu{k}/topology/thread_siblings_list") or str(k) for k in usable}
    busy = round(max(0.0, os.getloadavg()[0] - 1)) if hasattr(os, "getloadavg") else 0
    return max(1, len(siblings) - busy)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


def new_sync(threads: int) -> np.ndarray:
    return np.zeros(TICKETS + threads * _LINE, np.int64)


def _pointer(context, builder, signature, args):
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


@intrinsic
def _load(typingctx, array, i):
    def emit(context, builder, signature, args):
        return builder.load_atomic(_pointer(context, builder, signature, args), "acquire", 8)

    return types.int64(array, types.intp), emit


@intrinsic
def _store(typingctx, array, i, value):
    def emit(context, builder, signature, args):
        builder.store_atomic(args[2], _pointer(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), emit


@intrinsic
def _add(typingctx, array, i, value):
    def emit(context, builder, signature, args):
        return builder.atomic_rmw("add", _pointer(context, builder, signature, args), args[2], "acq_rel")

    return types.int64(array, types.intp, types.int64), emit


@intrinsic
def _swap(typingctx, array, i, old, new):
    """Whether array[i] was `old` and now is `new`."""

    def emit(context, builder, signature, args):
        found = builder.cmpxchg(_pointer(context, builder, signature, args), args[2], args[3], "acq_rel", "monotonic")
        return builder.extract_value(found, 1)

    return types.boolean(array, types.intp, types.int64, types.int64), emit


@intrinsic
def _pause(typingctx):
    """Tell the processor that this is a waiting loop, where it has a word for that."""

    def emit(context, builder, signature, args):
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), emit


_yield = types.ExternalFunction("sched_yield", types.int32()) if hasattr(os, "sched_yield") else _pause


@njit
def publish(sync, units):
    """Open a phase of so many units; what it is lies in sync[JOB:] by now."""
    threads = sync[HELPERS] + 1
    _store(sync, DONE, 0)
    for thread in range(threads):
        ticket = TICKETS + thread * _LINE
        begin, end = thread * units // threads, (thread + 1) * units // threads
        _store(sync, ticket, ((_load(sync, ticket) >> 32) + 1) << 32 | end << 16 | begin)


@njit
def claim(sync, thread):
    """The next unit of the thread's share, or of another's, or -1 if all are claimed."""
    threads = (len(sync) - TICKETS) // _LINE
    for turn in range(threads):
        place = TICKETS + (thread + turn) % threads * _LINE
        ticket = _load(sync, place)
        while ticket & 0xFFFF < (ticket >> 16) & 0xFFFF:
            if _swap(sync, place, ticket, ticket + 1):
                return ticket & 0xFFFF
            ticket = _load(sync, place)
    return -1


@njit
def finish(sync):
    """One more unit is done."""
    _add(sync, DONE, 1)


@njit
def finished(sync, units):
    """Wait until all units are done; turns of a wait so long that somebody must have lost his core are counted."""
    turns = 0
    while _load(sync, DONE) < units:
        turns += 1
        if turns < _SPINS:
            _pause()
        else:
            _add(sync, LATE, 1)
            _yield()


@njit
def starved(sync):
    """Whether this pass has waited so long for helpers that they must have lost their cores: the rest of it is better done alone."""
    return _load(sync, LATE) > _MOST_LATE


@njit
def stopped(sync, turns):
    """Wait a little before the next claim, the more turns there were; whether it is time to sleep."""
    if turns < _SPINS:
        _pause()
    else:
        _yield()
    return turns > _PATIENCE or _load(sync, STOP) != 0


_SHORTEST_PAUSE, _LONGEST_PAUSE = 32, 2048
"""Passes that run alone after bad ones."""
_LOST, _MOST_BAD = 0.1, 1.5
"""What makes a pass bad, beside late turns: the share of it without a core; how many bad ones, the older the less, there may be."""


class Pool:
    """Helpers of one model; a context, entered around each pass.

    helper: compiled, called with the number of the thread; it returns when there was nothing to do for a while.
    A pass that waited for helpers that lost their core goes on alone. It is a bad one, as one that lost its own core to them: after some,
    the next passes run alone, the more the oftener that happens.
    """

    def __init__(self, sync: np.ndarray, num_threads: int, helper: Callable[[int], Any]) -> None:
        self.num_threads, self._sync, self._helper = num_threads, sync, helper
        self._asleep = [False] * num_threads
        self._wake = [threading.Semaphore(0) for _ in self._asleep]
        self._started, self._alone, self._bad, self._pause, self._start = False, 0, 0.0, _SHORTEST_PAUSE, (0.0, 0.0)
        self._threads = list[threading.Thread]()
        weakref.finalize(self, _stop, sync, self._wake, self._threads)

    def __enter__(self) -> None:
        if self.num_threads == 1:
            return
        helps = self.num_threads > 1 and self._alone == 0
        self._sync[HELPERS], self._sync[LATE] = self.num_threads - 1 if helps else 0, 0
        if not helps:
            return
        if not self._started:
            self._helper(0)  # compiles it; there is nothing to do yet
        for thread in range(1, self.num_threads):
            if not self._started:
                arguments = self._helper, self._sync, thread, self._wake, self._asleep
                self._threads.append(threading.Thread(target=_serve, args=arguments, daemon=True, name=f"polydraft-{thread}"))
                self._threads[-1].start()
            elif self._asleep[thread]:
                self._asleep[thread] = False
                self._wake[thread].release()
        self._started, self._start = True, (perf_counter(), thread_time())

    def __exit__(self, *_: object) -> None:
        if self.num_threads == 1:
            return
        if self._sync[HELPERS] == 0:
            self._alone = max(0, self._alone - 1)
            return
        wall, own = perf_counter() - self._start[0], thread_time() - self._start[1]
        self._bad = 0.9 * self._bad + bool(self._sync[LATE] > _MOST_LATE or wall - own > _LOST * wall)
        if self._bad > _MOST_BAD:
            self._alone, self._pause, self._bad = self._pause, min(2 * self._pause, _LONGEST_PAUSE), 1.0
        elif self._bad < 0.01:
            self._pause = _SHORTEST_PAUSE


def _serve(
    helper: Callable[[int], Any], sync: np.ndarray, thread: int, wake: list[threading.Semaphore], asleep: list[bool]
) -> None:
    while not sync[STOP]:
        helper(thread)
        asleep[thread] = True
        wake[thread].acquire()


def _stop(sync: np.ndarray, wake: list[threading.Semaphore], threads: list[threading.Thread]) -> None:
    """End helpers, and wait for them: one that comes back from compiled code while the interpreter ends would abort the process."""
    sync[STOP] = 1
    for semaphore in wake:
        semaphore.release()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=1.0)
