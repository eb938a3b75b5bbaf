"""Helper threads: every unit is done once, by whoever is free; helpers wake without the interpreter, sleep when nothing is to do, and end."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from textwrap import dedent
from threading import enumerate as all_threads
from time import monotonic_ns, process_time, sleep

import numpy as np
import pytest
from numba import njit, types

from polydraft.numerics import processor, threads
from polydraft.numerics.shared_code import put_arguments, shared_code
from polydraft.numerics.threads import MAX_THREADS, Pool, default_threads, share, sync

pytestmark = pytest.mark.skipif(os.name != "posix", reason="helpers need POSIX threads")
MOST_TURNS = 20_000_000
"""Of a thread that waits for another one: at least ten seconds."""
_yield = types.ExternalFunction("sched_yield", types.int32())


@njit
def _mark(arguments, begin, end, thread):
    """Count each item, note who did it, and wait until as many units have begun as are to meet."""
    done, doers, begun, to_meet = arguments
    for i in range(begin, end):
        done[i] += 1
        doers[i] = thread
    begun[thread] = 1
    turns = 0
    while begun.sum() < to_meet and turns < MOST_TURNS:
        _yield()
        turns += 1


@njit(nogil=True)
def _run(sync, num_threads, done, doers, begun, to_meet, grain):
    share(sync, num_threads, shared_code(_mark, (done, doers, begun, to_meet)), len(done), grain)


@njit
def _run_with_the_lock(sync, num_threads, done, doers, begun, to_meet, grain):
    _run(sync, num_threads, done, doers, begun, to_meet, grain)


def shared(
    num_threads: int, count: int, grain: int, *, to_meet: int = 0, run: Callable[..., None] = _run
) -> tuple[np.ndarray, np.ndarray]:
    """How often each item was done, and by whom."""
    done = np.zeros(count, np.int64)
    doers = np.full(count, -1)
    begun = np.zeros(MAX_THREADS, np.int64)
    if to_meet:
        sync[threads._AT.until] = 0
    with Pool(num_threads):
        run(sync, num_threads, done, doers, begun, to_meet, grain)
    return done, doers


@pytest.mark.parametrize(
    ("num_threads", "count", "grain"), [(1, 9, 2), (2, 1, 1), (2, 100, 7), (3, 64, 1), (5, 40_000, 1)]
)
def test_every_item_is_done_once(num_threads, count, grain):
    for _ in range(50):
        done, doers = shared(num_threads, count, grain)
        assert (done == 1).all()
        assert set(doers) <= set(range(num_threads))


def test_helpers_that_sleep_wake_while_the_caller_holds_the_interpreters_lock():
    shared(3, 3, 1)
    sleep(0.1)
    _, doers = shared(3, 3, 1, to_meet=3, run=_run_with_the_lock)
    assert sorted(doers) == [0, 1, 2]


def test_helpers_without_work_take_no_time():
    shared(3, 3, 1)
    sleep(0.1)
    before = process_time()
    sleep(0.5)
    assert process_time() - before < 0.1


def test_callers_at_the_same_time_get_their_own_items_done():
    with ThreadPoolExecutor(3) as callers:
        results = list(callers.map(lambda k: [shared(3, 10 + k, 1 + k % 3)[0] for _ in range(100)], range(6)))
    assert all((done == 1).all() for each in results for done in each)


def test_while_several_passes_run_helpers_are_for_the_cores_that_remain():
    shared(3, 30, 1)
    total = int(sync[threads._AT.helpers]) + 1
    with ExitStack() as others:
        for team in range(total, 0, -1):
            done, doers = shared(total, total, 1, to_meet=team)
            assert (done == 1).all()
            assert len(set(doers)) == team
            others.enter_context(Pool(1))
        assert not shared(total, 30, 1)[1].any()


def test_a_caller_works_alone_for_a_while_only():
    sync[threads._AT.until] = 1 << 62
    assert not any(shared(2, 30, 1)[1].any() for _ in range(50))
    sync[threads._AT.until] = 1
    assert (shared(2, 30, 1)[0] == 1).all()
    assert sync[threads._AT.until] == 0


def test_a_caller_who_waited_for_a_helper_works_alone_sixteen_times_as_long():
    done = np.zeros(30, np.int64)
    doers = np.full(30, -1)
    begun = np.zeros(MAX_THREADS, np.int64)
    sync[threads._AT.until] = 0
    with Pool(2):
        begin = monotonic_ns()
        _run_late(sync, done[:2], doers[:2], begun)
        waited = monotonic_ns() - begin
        _run(sync, 2, done, doers, begun, 0, 1)
    assert not doers.any(), "the second phase was done alone"
    alone = sync[threads._AT.until] - begin - waited
    assert 2_000_000 < alone < 17 * waited + 1_000_000_000


@njit
def _mark_late(arguments, begin, end, thread):
    """As `_mark`; a helper is a hundredth of a second late."""
    done, doers, begun = arguments
    _mark((done, doers, begun, 2), begin, end, thread)
    for _ in range(20_000 if thread > 0 else 0):
        _yield()


@njit(nogil=True)
def _run_late(sync, done, doers, begun):
    share(sync, 2, shared_code(_mark_late, (done, doers, begun)), len(done), 1)


def test_the_process_ends_and_forks_with_helpers():
    """A fork has no threads but its own: it starts new ones."""
    code = """
        import os
        from tests.core.test_threads import shared
        assert sorted(shared(2, 2, 1, to_meet=2)[1]) == [0, 1]
        child = os.fork()
        assert sorted(shared(2, 2, 1, to_meet=2)[1]) == [0, 1]
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    run = subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_there_is_one_helper_of_a_number_in_a_process():
    for num_threads in (2, 3, 2):
        shared(num_threads, 5, 1)
    names = [thread.name for thread in all_threads() if re.fullmatch(r"polydraft-\d+", thread.name)]
    assert len(names) == len(set(names))
    assert names[:2] == ["polydraft-1", "polydraft-2"]


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 4),
        ({"topology": "{pair}"}, 2),
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "190000 100000\n"}, 1),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cfs_quota_us": "300000\n", "cfs_period_us": "100000\n"}, 3),
        ({"cfs_quota_us": "-1\n", "cfs_period_us": "100000\n"}, 4),
    ],
)
def test_a_large_model_takes_the_physical_cores_that_it_may_use(monkeypatch, files, cores):
    def content(path: str) -> str:
        text = next((text for name, text in files.items() if name in path), "")
        return text.format(pair="0-1" if "cpu0" in path or "cpu1" in path else "2-3")

    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(processor, "_content", content)
    assert default_threads(1 << 30) == cores
    assert default_threads(1 << 20) == 1


@njit
def _put(arguments, address):
    return put_arguments(arguments, address)


def test_arguments_that_last_have_arrays_without_owners():
    """An owner that is counted after the call that wrote it would be freed twice."""
    numbers = np.arange(3.0)
    place = np.full(64, 7, np.int64)
    size = _put((np.int64(5), numbers), place.ctypes.data)
    count, owner, made_by, length, _, data = place[:6].tolist()
    assert (count, owner, made_by, length, data) == (5, 0, 0, 3, numbers.ctypes.data)
    assert size < place.nbytes
