"""Packed weights of a model's files, kept in the cache folder: the next start maps them, where packing takes seconds.

    file     a line of JSON, `about`; then the panels of each matrix as they are in memory, each from a page on
    about    what they follow from (the model's files by path, size and time of change, how they are packed, the code that packs), sums, figures
    sums     of each matrix, its bytes added as numbers of 64 bits: a file that is damaged is not used

While they are packed the file is the memory that they are packed into, under a name of its own: room on the disk is reserved first, and what is
unfinished is found by nobody. Without room, or a folder that can be written, panels lie in memory alone.
"""

import hashlib
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import time
from typing import Any

import numpy as np

from polydraft.cache_folder import PACKED, kept_folder
from polydraft.threads import usable_cores

__all__ = ["LEAST_BYTES", "MOST_BYTES", "PackedFile", "code_digest", "folder"]

LEAST_BYTES, MOST_BYTES = 32 << 20, 8 << 30
"""Smaller models are packed at once; of all files those that were used last stay."""
PAGE = 4096
HEADER = 4 * PAGE
SUFFIX = ".weights"
ABANDONED = 3600.0
"""Seconds after which an unfinished file is that of a process that ended."""
TOGETHER = 16 << 20
"""Bytes that a thread sums at a time."""


def folder() -> Path | None:
    """Where files are; None where nothing is kept."""
    base = kept_folder()
    return None if base is None else base / PACKED


@cache
def code_digest() -> str:
    """Of the sources that say how weights are packed."""
    here, digest = Path(__file__).parent, hashlib.sha256()
    for name in ("decoding", "formats", "products", "vectors", "weights", "packed_file"):
        digest.update((here / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


class PackedFile:
    """Memory for the panels of some matrices: those that are kept, or new memory to pack into, see `is_filled`, that `keep` keeps.

    about: what panels follow from, as JSON has it; None: they are not to be kept.  sizes: of each matrix, bytes.
    arrays: bytes of each matrix.  figures: of `keep`, where they are kept.
    """

    def __init__(self, about: Mapping[str, Any] | None, sizes: Sequence[int]) -> None:
        self.figures: dict[str, float] = {}
        self.arrays: list[np.ndarray] | None = None
        self.is_filled = False
        self._unfinished: Path | None = None
        self._about, self._sizes = about, list(sizes)
        self._starts = [HEADER, *(HEADER + np.cumsum([-(-size // PAGE) * PAGE for size in sizes])).tolist()]
        place = folder() if about is not None and LEAST_BYTES <= self._starts[-1] <= MOST_BYTES else None
        if place is None:
            return
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
        self._path = place / f"{key}{SUFFIX}"
        self.is_filled = self._open()
        if not self.is_filled:
            with suppress(OSError, ValueError):
                self._create()

    def _open(self) -> bool:
        """Map what is kept; whether it is there, whole and of these very files."""
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size != self._starts[-1]:
                    return False
                said = json.loads(file.read(HEADER).split(b"\n", 1)[0])
                if said["about"] != self._about or said["sizes"] != self._sizes:
                    return False
                arrays = self._mapped(file.fileno(), access=mmap.ACCESS_COPY)
            if _sums(arrays) != said["sums"]:
                return False
            figures = {str(name): float(number) for name, number in said["figures"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        self.arrays, self.figures = arrays, figures
        with suppress(OSError):
            os.utime(self._path)
        return True

    def _mapped(self, descriptor: int, **access: int) -> list[np.ndarray]:
        pages = mmap.mmap(descriptor, self._starts[-1], **access)
        with suppress(OSError):
            pages.madvise(mmap.MADV_WILLNEED)
        raw = np.frombuffer(pages, np.uint8)
        return [raw[begin : begin + size] for begin, size in zip(self._starts, self._sizes, strict=False)]

    def _create(self) -> None:
        """Reserve room for a file, a tenth of the disk left free."""
        if not hasattr(os, "posix_fallocate"):
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _make_room(self._path.parent, self._starts[-1])
        disk = os.statvfs(self._path.parent)
        if self._starts[-1] > disk.f_bavail * disk.f_frsize - disk.f_blocks * disk.f_frsize // 10:
            return
        unfinished = self._path.with_suffix(f".{os.getpid()}-{os.urandom(4).hex()}.unfinished")
        try:
            with open(unfinished, "xb+") as file:
                os.posix_fallocate(file.fileno(), 0, self._starts[-1])
                self.arrays = self._mapped(file.fileno(), flags=mmap.MAP_SHARED)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        self._unfinished = unfinished

    def keep(self, **figures: float) -> None:
        """The panels are packed: the next start finds them, and these figures."""
        if self._unfinished is None or self.arrays is None:
            return
        about = {"about": self._about, "sizes": self._sizes, "sums": _sums(self.arrays), "figures": figures}
        line = json.dumps(about).encode() + b"\n"
        try:
            if len(line) <= HEADER:  # else of a hundred parts with long names
                with open(self._unfinished, "rb+") as file:
                    file.write(line)
                os.replace(self._unfinished, self._path)
        except OSError:
            pass
        self.drop()

    def drop(self) -> None:
        """What is unfinished is not kept; memory stays."""
        if self._unfinished is not None:
            with suppress(OSError):
                self._unfinished.unlink(missing_ok=True)
            self._unfinished = None


def _sums(arrays: Sequence[np.ndarray]) -> list[int]:
    """Of each array, its bytes as numbers of 64 bits, added up; zeros behind the last byte."""

    def added(part: np.ndarray) -> int:
        whole = len(part) // 8 * 8
        rest = int.from_bytes(part[whole:].tobytes(), "little")
        return int(part[:whole].view(np.uint64).sum(dtype=np.uint64)) + rest

    with ThreadPoolExecutor(usable_cores()) as pool:
        parts = [[array[begin : begin + TOGETHER] for begin in range(0, len(array), TOGETHER)] for array in arrays]
        return [sum(pool.map(added, some)) % 2**64 for some in parts]


def _make_room(place: Path, size: int) -> None:
    """Remove what others left unfinished, and the files that were used longest ago, until one of this size fits within `MOST_BYTES`."""
    for path in place.glob("*.unfinished"):
        with suppress(OSError):
            if time() - path.stat().st_mtime > ABANDONED:
                path.unlink()
    files = sorted(place.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
    sizes = [path.stat().st_size for path in files]
    while files and sum(sizes) + size > MOST_BYTES:
        sizes.pop(0)
        files.pop(0).unlink(missing_ok=True)
