"""What a process has started, and what each of these has used of a processor."""

import os
from pathlib import Path
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """Its command line, and processor seconds so far."""

    name: str
    seconds: float


def processes(root: int) -> dict[int, Process]:
    """By process id: those below this one, children of children too; of this machine, by Linux' /proc.

    Example:
        >>> import subprocess, sys
        >>> with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        ...     child.pid in processes(os.getpid())
        True
    """
    parents = dict[int, int]()
    found = dict[int, Process]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            name = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = int(fields[1])
        found[int(folder.name)] = Process(name, (int(fields[11]) + int(fields[12])) / TICKS)

    def below(pid: int) -> bool:
        while pid > 1 and parents.get(pid) != root:
            pid = parents.get(pid, 0)
        return pid > 1

    return {pid: told for pid, told in found.items() if below(pid)}
