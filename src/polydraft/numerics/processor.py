"""The processor: its name, by which measurements are told apart, and what of it this process may use."""

import os
import platform


def processor() -> str:
    """As far as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def usable_processors() -> list[int]:
    """Numbers of those in the process's affinity mask; of all where the system has none.

    Example:
        >>> len(usable_processors()) > 0
        True
    """
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
