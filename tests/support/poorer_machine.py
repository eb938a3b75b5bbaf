"""Python as on Windows and macOS, as far as Linux can play them: what these systems lack is taken away before polydraft is imported.

`python -m tests.support.poorer_machine MODULE ARGUMENTS...` runs a module so; `ask` answers a request of its own server.
"""

import builtins
import ctypes
import importlib.util
import io
import mmap
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "tty")
OF_OS = (
    "eventfd",
    "fork",
    "getloadavg",
    "getuid",
    "geteuid",
    "killpg",
    "nice",
    "posix_fadvise",
    "pread",
    "preadv",
    "register_at_fork",
    "sched_getaffinity",
    "sched_setaffinity",
    "setsid",
    "sysconf",
)
OF_SIGNAL = ("ITIMER_PROF", "SIGHUP", "SIGPROF", "SIGXCPU", "setitimer")
OF_MMAP = ("MADV_DONTNEED", "MADV_HUGEPAGE", "MADV_NOHUGEPAGE")
CHOOSING = ("torch", "psutil")
"""Packages that use what they find on their system when they are imported."""
FREE = 8 << 30
"""Bytes of memory that this Windows says."""
FOLDERS = ("/proc/", "/sys/")
OURS = "polydraft"


def take_away() -> None:
    """From now on, for this process; modules for importers of polydraft alone, as others choose by the system's name."""
    for name in CHOOSING:
        if importlib.util.find_spec(name):
            importlib.import_module(name)
    for place, names in ((os, OF_OS), (signal, OF_SIGNAL), (mmap, OF_MMAP), (time, ("CLOCK_BOOTTIME",))):
        for name in names:
            if hasattr(place, name):
                delattr(place, name)
    kernel = SimpleNamespace(GlobalMemoryStatusEx=_status)
    vars(ctypes)["windll"] = SimpleNamespace(kernel32=kernel)
    found: Callable[..., Any] = builtins.__import__

    def imported(name: str, *arguments: Any, **others: Any) -> Any:
        importer = (arguments[0] if arguments else others.get("globals")) or {}
        if name.partition(".")[0] in MODULES and str(importer.get("__name__", "")).startswith(OURS):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found(name, *arguments, **others)

    opened: Callable[..., Any] = io.open

    def absent(file: Any, *arguments: Any, **others: Any) -> Any:
        if isinstance(file, str | os.PathLike) and os.fspath(file).startswith(FOLDERS):
            raise FileNotFoundError(2, "No such file or directory", os.fspath(file))
        return opened(file, *arguments, **others)

    builtins.__import__ = imported
    builtins.open = io.open = absent


def _status(fields: Any) -> int:
    """GlobalMemoryStatusEx, by Microsoft's page on MEMORYSTATUSEX: 0, an error, where the length is not set."""
    assert ctypes.sizeof(fields) == 64
    if fields[0] & 0xFFFFFFFF != 64:
        return 0
    fields[1], fields[2] = 2 * FREE, FREE
    return 1


if __name__ == "__main__":
    take_away()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
