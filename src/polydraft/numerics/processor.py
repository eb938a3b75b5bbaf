"""The machine: its processor by name and instructions, what of it this process may use, and its memory."""

import ctypes
import os
import platform
import sys
from pathlib import Path
from typing import Any

_HWCAP = 16
_HWCAP2 = 26
"""Of `getauxval`: where Linux says what an ARM processor has."""


def processor() -> str:
    """As far as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def has_gpu_driver() -> bool:
    """Whether a driver of NVIDIA or AMD is installed, without which no GPU can be used; whether there is a GPU is asked of torch, which takes a second.

    Example:
        >>> has_gpu_driver() in (False, True)
        True
    """
    if Path("/dev/kfd").exists():
        return True
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def unreported_features() -> str:
    """Instructions of this processor that LLVM does not report, as LLVM writes them: products of bytes on ARM64 Linux.

    Example:
        >>> unreported_features() in ("", "+dotprod", "+dotprod,+i8mm")
        True
    """
    if sys.platform != "linux" or platform.machine() != "aarch64":
        return ""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes = [ctypes.c_ulong]
    getauxval.restype = ctypes.c_ulong
    return arm_features(getauxval(_HWCAP), getauxval(_HWCAP2))


def arm_features(hwcap: int, hwcap2: int) -> str:
    """The same from the two words of bits.

    Example:
        >>> arm_features(1 << 20, 0), arm_features(1 << 20, 1 << 13)
        ('+dotprod', '+dotprod,+i8mm')
    """
    has = {"dotprod": hwcap >> 20 & 1, "i8mm": hwcap2 >> 13 & 1}
    return ",".join(f"+{name}" for name, bit in has.items() if bit)


def usable_processors() -> list[int]:
    """Numbers of those in the process's affinity mask; of all where the system has none.

    Example:
        >>> len(usable_processors()) > 0
        True
    """
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )


def usable_cores() -> int:
    """Physical cores that this process may use: those of its affinity mask, and no more than its control group's quota of time."""
    siblings = {
        _content(f"/sys/devices/system/cpu/cpu{k}/topology/thread_siblings_list") or str(k)
        for k in usable_processors()
    }
    return max(1, int(min(len(siblings), _quota())))


def _quota() -> float:
    """Cores' worth of time that the control group grants (versions 2 and 1)."""
    whole = _content("/sys/fs/cgroup/cpu.max").split() or [
        _content(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period")
    ]
    limited = len(whole) == 2 and whole[0].isdecimal() and whole[1].isdecimal() and int(whole[1]) > 0
    return int(whole[0]) / int(whole[1]) if limited else float("inf")


def available_memory() -> int:
    """Bytes of memory that can still be taken; on macOS, which does not say it, all that the machine has.

    Example:
        >>> available_memory() > 0
        True
    """
    # MemAvailable, unlike SC_AVPHYS_PAGES, counts what the system would give up on demand.
    lines = (line.split() for line in _content("/proc/meminfo").splitlines())
    kilobytes = next((int(words[1]) for words in lines if words[0] == "MemAvailable:"), None)
    if kilobytes is not None:
        return 1024 * kilobytes
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _windows_memory()


def _windows_memory() -> int:
    """The field ullAvailPhys of MEMORYSTATUSEX, which is 64 bytes long and begins with its length."""
    status = (ctypes.c_ulonglong * 8)(64)
    kernel: Any = ctypes.windll.kernel32  # pyright: ignore[reportAttributeAccessIssue]
    kernel.GlobalMemoryStatusEx(status)
    return status[2]


def _content(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""
