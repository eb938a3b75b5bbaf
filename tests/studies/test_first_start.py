"""The table of a first start counts what numba compiles, callees apart from their callers."""

import numba
from numba.core.event import register, unregister

from studies import first_start


def test_a_callee_is_counted_apart_from_its_caller():
    counter = first_start.Counter()
    register("numba:compile", counter)
    inner = numba.njit(lambda x: x + 1)
    numba.njit(lambda x: inner(x) * 2)(1.5)
    unregister("numba:compile", counter)
    ((name, (signatures, seconds)),) = counter.functions.items()
    assert name.startswith(f"{__name__}.") and signatures == 2 and seconds > 0 and not counter.open
