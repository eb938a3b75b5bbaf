"""Compiling is nobody's working time, and it is told of."""

import gc
import threading
from time import perf_counter, thread_time

import numba
import pytest
from numba.core.event import Listener, register, unregister

from polydraft.numerics import compile_time


def new_function():
    """A function that nobody has compiled yet, and one that it calls."""
    inner = numba.njit(lambda x: x + 1)

    def outer(x):
        return inner(x) + 2

    return numba.njit(outer)


@pytest.mark.parametrize("clock", [perf_counter, thread_time])
def test_a_working_clock_stands_still_while_a_function_is_compiled(clock):
    now = compile_time.working(clock)
    call = new_function()
    start = now()
    whole = clock()
    assert call(1) == 4
    worked = now() - start
    passed = clock() - whole
    assert 0 <= worked < 0.5 * passed
    before = clock()
    start = now()
    after = clock()
    while clock() - after < 0.01:
        call(1)
    least = clock() - after
    worked = now() - start
    most = clock() - before
    assert least - 1e-4 <= worked <= most + 1e-4


def test_time_counts_once_where_a_function_calls_another():
    call = new_function()
    before = compile_time.seconds()
    start = perf_counter()
    call(1)
    assert 0 < compile_time.seconds() - before <= perf_counter() - start


def test_other_threads_go_on_working():
    now = compile_time.working(thread_time)
    start = now()
    lost = thread_time()
    thread = threading.Thread(target=new_function(), args=(1,))
    thread.start()
    thread.join()
    assert now() - start == pytest.approx(thread_time() - lost, abs=1e-3)


def test_each_function_that_is_called_is_told_of_once_when_it_is_compiled():
    call = new_function()
    names = []
    with compile_time.reporting(names.append):
        call(1)
        call(2)
        call(1.0)
    assert names == ["outer", "outer"]
    with compile_time.reporting(names.append):
        call(3)
    assert names == ["outer", "outer"]


def test_nothing_is_collected_while_a_function_is_compiled():
    collecting = []

    class Watch(Listener):
        def on_start(self, event):
            collecting.append(gc.isenabled())

        on_end = on_start

    watch = Watch()
    register("numba:compile", watch)
    try:
        assert gc.isenabled()
        assert new_function()(1) == 4
    finally:
        unregister("numba:compile", watch)
    assert len(collecting) == 4
    assert not any(collecting)
    assert gc.isenabled()
