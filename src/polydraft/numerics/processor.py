"""The processor: its name, by which measurements are told apart, and what of it this process may use."""

import os
import platform
from pathlib import Path


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


def usable_cores() -> int:
    """Physical cores that this process may use: those of its affinity mask, and no more than its control group's quota of time."""
    siblings = {_content(f"/sys/devices/system/cpu/cpu{k}/topology/thread_siblings_list") or str(k) for k in usable_processors()}
    return max(1, int(min(len(siblings), _quota())))


def _quota() -> float:
    """Cores' worth of time that the control group grants (versions 2 and 1)."""
    whole = _content("/sys/fs/cgroup/cpu.max").split() or [
        _content(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period")
    ]
    limited = len(whole) == 2 and whole[0].isdecimal() and whole[1].isdecimal() and int(whole[1]) > 0
    return int(whole[0]) / int(whole[1]) if limited else float("inf")


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""
