"""The clock by which steps are priced."""

from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Any

import torch


def clock(target: Any) -> Callable[[], float]:
    """CPU time where one thread does all the work, so that a busy machine does not count; else the wall's."""
    on_cpu = str(getattr(target, "device", "cpu")).startswith("cpu")
    return thread_time if on_cpu and getattr(target, "num_threads", torch.get_num_threads()) == 1 else perf_counter
