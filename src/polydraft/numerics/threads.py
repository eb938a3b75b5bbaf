"""Helper threads of the process: compiled code cuts its work into units, and whoever is free claims the next one.

Helpers are Python threads in one compiled function that they leave when the process ends: they need no lock of the interpreter, neither to
work nor to wake. A helper that finds nothing to do spins for some 100 microseconds, then sleeps until units are published. Each thread claims
the units of its own share one after the other, then those that are left of others', so that a thread that loses its core to another
process costs one unit; whoever waits for that unit sleeps, too, which gives the unit's thread a core.
A unit is computed by one thread, whoever that is: results have the same bits whatever the number of threads.

phase    the units that one call of `share` publishes; phases of several callers never overlap: a caller that finds another's works alone
ticket   of a share: phase, end and next unit in one word; a unit belongs to who moves the word on, and to the phase that it read
While several forward passes run (see `Pool`), each has its caller's thread, and helpers are for the cores that remain.
"""

import atexit
import os
import threading
import time
from typing import NamedTuple

import numpy as np
from numba import types

from polydraft.numerics.atomics import add, load, pause, store, swap
from polydraft.numerics.compile_time import inner
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.processor import usable_cores
from polydraft.numerics.shared_code import call_units

MAX_THREADS = 64
"""Of a process; a ticket has 8 bits for them."""
_LINE = 8
"""Numbers in a cache line."""


class _Places(NamedTuple):
    """Of numbers in `sync`. What different threads write lies in different lines.

    clock: two numbers of `clock_gettime`.  until, window, worked: see `_is_alone`.  code .. threads: of the phase.
    mutex, wake, ended: of POSIX systems, in two lines each.  tickets: a line for each thread.
    """

    done: int = 0 * _LINE
    owner: int = 1 * _LINE
    phase: int = 2 * _LINE
    waiting: int = 3 * _LINE
    stop: int = 4 * _LINE
    helpers: int = 5 * _LINE
    passes: int = 6 * _LINE
    clock: int = 7 * _LINE
    until: int = 7 * _LINE + 2
    window: int = 7 * _LINE + 3
    worked: int = 7 * _LINE + 4
    code: int = 8 * _LINE
    arguments: int = 8 * _LINE + 1
    size: int = 8 * _LINE + 2
    grain: int = 8 * _LINE + 3
    units: int = 8 * _LINE + 4
    threads: int = 8 * _LINE + 5
    mutex: int = 9 * _LINE
    wake: int = 11 * _LINE
    ended: int = 13 * _LINE
    tickets: int = 15 * _LINE


_AT = _Places()
_ASLEEP = 1
"""Behind a thread's ticket: whether it sleeps."""
_HELPER_TURNS = 6000
_CALLER_TURNS = 1000
"""Turns of a loop before a thread sleeps, some 20 nanoseconds each: a helper without work, and a caller who waits for the last unit."""
_WINDOW_LENGTH = 2_000_000
_PAYS = 16
"""Nanoseconds of a forward pass after which a caller looks how long it had no core, and how many times as long it then works alone: what helpers
lose, on a machine where others want the cores, is at most a seventeenth of the time."""
_BITS = 14
_MASK = (1 << _BITS) - 1
"""Of a ticket: the next unit, the end, 8 bits for the number of threads, the phase."""


def _new_sync() -> np.ndarray:
    room = np.zeros(_AT.tickets + (MAX_THREADS + 1) * _LINE, np.int64)
    return room[-room.ctypes.data // 8 % _LINE :][: _AT.tickets + MAX_THREADS * _LINE]


sync = _new_sync()
"""What the threads of the process have in common; compiled code takes it as an argument."""


_init_mutex, _init_condition = (
    types.ExternalFunction(f"pthread_{kind}_init", types.int32(types.int64, types.int64))
    for kind in ("mutex", "cond")
)
_lock, _unlock, _broadcast = (
    types.ExternalFunction(f"pthread_{name}", types.int32(types.int64))
    for name in ("mutex_lock", "mutex_unlock", "cond_broadcast")
)
_sleep = types.ExternalFunction("pthread_cond_wait", types.int32(types.int64, types.int64))
_read_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_WALL, _WORK = (np.int32(getattr(time, name, 0)) for name in ("CLOCK_MONOTONIC", "CLOCK_THREAD_CPUTIME_ID"))


@njit(cache=True)
def _reset(sync):
    """No helpers, no forward passes, nobody waits."""
    sync[:] = 0
    at = sync.ctypes.data
    _init_mutex(at + 8 * _AT.mutex, 0)
    _init_condition(at + 8 * _AT.wake, 0)
    _init_condition(at + 8 * _AT.ended, 0)


@inner
def _rouse(sync, condition):
    """Wake who sleeps until this condition."""
    at = sync.ctypes.data
    _lock(at + 8 * _AT.mutex)
    _broadcast(at + 8 * condition)
    _unlock(at + 8 * _AT.mutex)


@inner
def _is_due(sync, thread, last):
    """Whether there is a phase after the last that this thread may help with, or it is to end."""
    return load(sync, _AT.stop) != 0 or (load(sync, _AT.phase) != last and thread < load(sync, _AT.threads))


@inner
def _await_phase(sync, thread, last):
    """Wait until a phase after the last is due, or the end; returns its number."""
    turns = 0
    while not _is_due(sync, thread, last):
        turns += 1
        if turns < _HELPER_TURNS:
            pause()
            continue
        at = sync.ctypes.data
        asleep = _AT.tickets + thread * _LINE + _ASLEEP
        _lock(at + 8 * _AT.mutex)
        add(sync, asleep, 1)
        while not _is_due(sync, thread, last):
            _sleep(at + 8 * _AT.wake, at + 8 * _AT.mutex)
        add(sync, asleep, -1)
        _unlock(at + 8 * _AT.mutex)
    return load(sync, _AT.phase)


@inner
def _nanoseconds(sync, clock):
    """clock: of POSIX systems."""
    _read_clock(clock, sync.ctypes.data + 8 * _AT.clock)
    return 1_000_000_000 * load(sync, _AT.clock) + load(sync, _AT.clock + 1)


@inner
def _await_units(sync, units):
    """Wait until all units of the phase are done."""
    turns = 0
    while load(sync, _AT.done) < units:
        turns += 1
        if turns < _CALLER_TURNS:
            pause()
            continue
        at = sync.ctypes.data
        _lock(at + 8 * _AT.mutex)
        add(sync, _AT.waiting, 1)
        while load(sync, _AT.done) < units:
            _sleep(at + 8 * _AT.ended, at + 8 * _AT.mutex)
        add(sync, _AT.waiting, -1)
        _unlock(at + 8 * _AT.mutex)


@inner
def _publish(sync, threads, units):
    """Open a phase of so many units; what they are lies in sync[_JOB:] by now."""
    store(sync, _AT.done, 0)
    for thread in range(threads):
        ticket = _AT.tickets + thread * _LINE
        begin = thread * units // threads
        end = (thread + 1) * units // threads
        phase = (load(sync, ticket) >> (2 * _BITS + 8)) + 1
        store(sync, ticket, ((phase << 8 | threads) << _BITS | end) << _BITS | begin)
    add(sync, _AT.phase, 1)
    for thread in range(1, threads):
        if load(sync, _AT.tickets + thread * _LINE + _ASLEEP):
            _rouse(sync, _AT.wake)
            break


@inner
def _claim(sync, thread, threads):
    """The next unit of the thread's share, or of another's, or -1 if all are claimed."""
    for turn in range(threads):
        place = _AT.tickets + (thread + turn) % threads * _LINE
        ticket = load(sync, place)
        while ticket & _MASK < (ticket >> _BITS) & _MASK and thread < (ticket >> 2 * _BITS) & 0xFF:
            if swap(sync, place, ticket, ticket + 1):
                return ticket & _MASK
            ticket = load(sync, place)
    return -1


@inner
def _take(sync, thread, threads):
    """Do units until all are claimed; returns whether the phase then ended."""
    ended = False
    unit = _claim(sync, thread, threads)
    while unit >= 0:
        count = load(sync, _AT.size)
        grain = load(sync, _AT.grain)
        units = load(sync, _AT.units)
        call_units(
            load(sync, _AT.code),
            load(sync, _AT.arguments),
            unit * grain,
            min(count, (unit + 1) * grain),
            thread,
        )
        ended = add(sync, _AT.done, 1) == units
        unit = _claim(sync, thread, threads)
    return ended


@njit(cache=True, nogil=True)
def _help(sync, thread):
    """Do units of all phases until the process ends."""
    phase = np.int64(-1)
    while True:
        phase = _await_phase(sync, thread, phase)
        if load(sync, _AT.stop):
            return
        if _take(sync, thread, load(sync, _AT.threads)) and load(sync, _AT.waiting):
            _rouse(sync, _AT.ended)


@inner
def _is_alone(sync):
    """Whether the caller has waited so long for a core, its own or a helper's, that it works alone for a while."""
    now = _nanoseconds(sync, _WALL)
    until = load(sync, _AT.until)
    begin = load(sync, _AT.window)
    if now < until:
        return True
    if begin == 0 or now > begin + _WINDOW_LENGTH:
        worked = _nanoseconds(sync, _WORK)
        lost = now - begin - (worked - load(sync, _AT.worked))
        alone = begin > 0 and lost > _WINDOW_LENGTH // 32
        store(sync, _AT.until, now + _PAYS * lost if alone else 0)
        store(sync, _AT.window, 0 if alone else now)
        store(sync, _AT.worked, worked)
        return alone
    return False


@inner
def share(sync, threads, code, count, grain):
    """Do items 0 .. count-1, `grain` of them a unit, on at most so many threads. code: of `shared_code`."""
    function, arguments = code
    grain = max(grain, count // _MASK + 1)
    units = (count + grain - 1) // grain
    team = min(threads, units, load(sync, _AT.helpers) + 2 - max(1, load(sync, _AT.passes)))
    if team <= 1 or not swap(sync, _AT.owner, 0, 1):
        call_units(function, arguments, 0, count, 0)
        return
    if _is_alone(sync):
        call_units(function, arguments, 0, count, 0)
        store(sync, _AT.owner, 0)
        return
    store(sync, _AT.code, function)
    store(sync, _AT.arguments, arguments)
    store(sync, _AT.size, count)
    store(sync, _AT.grain, grain)
    store(sync, _AT.units, units)
    store(sync, _AT.threads, team)
    _publish(sync, team, units)
    if not _take(sync, np.int64(0), team):
        _await_units(sync, units)
    store(sync, _AT.owner, 0)


class Pool:
    """The threads of a model's forward passes; a context, entered around each forward pass. Helpers start with the first."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def __enter__(self) -> None:
        with _HELPERS_OF_PROCESS.guard:
            sync[_AT.passes] += 1
            sync[_AT.window] = 0
            _HELPERS_OF_PROCESS.start(self.num_threads - 1)

    def __exit__(self, *_: object) -> None:
        with _HELPERS_OF_PROCESS.guard:
            sync[_AT.passes] -= 1


PIECE = 1 << 14
"""Tokens of a row of logits that a thread takes at a time. Bounds of pieces are the same whatever the number of threads: so are the bits of their sums."""
ROWS = Pool(1)
"""Entered around work on rows of a vocabulary, which takes the helpers that forward passes have started."""


@inner(error_model="numpy")
def num_pieces(size):
    """Of a row."""
    return -(-size // PIECE)


@inner
def share_row(sync, code, arguments, size):
    """Do all tokens of a row, on the threads of the process; one call of the function may be for several pieces. arguments: those of the code; they live until it is done."""
    share(sync, np.int64(MAX_THREADS), code, np.int64(size), np.int64(PIECE))


class _Helpers:
    """The helper threads of the process. guard: of what is not changed in compiled code."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.threads = list[threading.Thread]()
        if os.name == "posix":
            _reset(sync)

    def start(self, count: int) -> None:
        """Have at least so many; elsewhere than on POSIX systems there are none."""
        while len(self.threads) < count and os.name == "posix" and not sync[_AT.stop]:
            if not self.threads:  # compiled before the first begins, not in it
                _help.compile((types.int64[::1], types.int64))
                _end.compile((types.int64[::1],))
            number = len(self.threads) + 1
            self.threads.append(
                threading.Thread(target=_help, args=(sync, number), daemon=True, name=f"polydraft-{number}")
            )
            self.threads[-1].start()
            sync[_AT.helpers] = number

    def stop(self) -> None:
        """End all, and wait for them: one that comes back from compiled code while the interpreter ends would abort the process."""
        if self.threads:
            _end(sync)
        for thread in self.threads:
            thread.join(timeout=1.0)


@njit(cache=True)
def _end(sync):
    store(sync, _AT.helpers, 0)
    store(sync, _AT.stop, 1)
    _rouse(sync, _AT.wake)


_HELPERS_OF_PROCESS = _Helpers()
atexit.register(_HELPERS_OF_PROCESS.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_HELPERS_OF_PROCESS.__init__)


def default_threads(weight_bytes: int) -> int:
    """Threads for a model of this size: one if it is small, else the physical cores that this process may use.

    Example:
        >>> default_threads(1 << 20)
        1
    """
    is_small = weight_bytes < 64 << 20  # a forward pass is over before helpers are of use
    return 1 if is_small else min(MAX_THREADS, usable_cores())
