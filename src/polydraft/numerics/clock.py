"""The clock by which steps are priced."""

from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Any


def clock(target: Any) -> Callable[[], float]:
    """CPU time where one thread does all the work, so that a busy machine does not count; else the wall's."""
    return thread_time if target.device.type == "cpu" and target.num_threads == 1 else perf_counter
