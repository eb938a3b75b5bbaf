"""Packed weights of a model's files, in the cache folder: the next start reads them, where packing takes seconds.

    file     a line of JSON, `about`; then the panels of each matrix as they are in memory, each from a page on
    about    what they follow from (the model's files by path, size and time of change, how they are packed, the code that packs), sums, figures
    sums     of each matrix, the CRC-32 of those of its parts, which know the place of each byte: a file that is damaged is not used
    seal     inode and time of change of a file whose sums were found right: the next start trusts them, and `polydraft doctor` counts again

They are read into memory and not mapped: a file's pages are small, and a forward pass of SmolLM2 over them takes 1.2 times as long.
A file has its name once all is written. Without room, or a folder that can be written, nothing is stored.
"""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from time import time, time_ns
from typing import Any

import numpy as np

from polydraft.files.cache_folder import PACKED, enabled_cache_folder
from polydraft.numerics.processor import usable_cores

MIN_BYTES = 32 << 20
MOST_BYTES = 8 << 30
"""Smaller models are packed at once; of all files those that were used last stay."""
LEFT_FREE = 0.1
"""Share of the disk that stays free."""
PAGE = 4096
HEADER = 4 * PAGE
"""Bytes: matrices begin at pages of the system, behind the line of JSON."""
SEAL = HEADER - 256
"""Where the seal stands, a line of JSON."""
SUFFIX = ".weights"
TOGETHER = 16 << 20
"""Bytes that a thread reads at a time."""


def folder() -> Path | None:
    """Where files are; None where nothing is stored."""
    base = enabled_cache_folder()
    return None if base is None else base / PACKED


@cache
def code_digest() -> str:
    """Of the sources that say how weights are packed."""
    models = Path(__file__).parents[1]
    matrices = [f"matrices/{name}.py" for name in ("dequantising", "formats", "products", "vectors")]
    digest = hashlib.sha256()
    for name in (*matrices, "compiled/weights.py", "compiled/packer.py", "compiled/packed_file.py"):
        digest.update((models / name).read_bytes())
    return digest.hexdigest()[:16]


class PackedFile:
    """Memory of some matrices, and the file that stores what is in it.

    about: what panels follow from, as JSON has it; None: they are not to be stored.  arrays: bytes of each matrix.
    figures: of `write`, once they are read.
    """

    def __init__(self, about: Mapping[str, Any] | None, arrays: Sequence[np.ndarray]) -> None:
        self.figures: dict[str, float] = {}
        self._about = about
        self._arrays = arrays
        self._sizes = [len(array) for array in arrays]
        self._starts = _starts(self._sizes)
        place = folder() if about is not None and MIN_BYTES <= self._starts[-1] <= MOST_BYTES else None
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
        self._path = None if place is None else place / f"{key}{SUFFIX}"

    def read(self) -> bool:
        """Fill the memory with what is stored; whether it is there, whole and of these very files."""
        if self._path is None:
            return False
        try:
            with open(self._path, "rb") as file:
                head = file.read(HEADER)
                about_file = os.fstat(file.fileno())
            header = _header(head)
            if about_file.st_size != self._starts[-1]:
                return False
            if header["about"] != self._about or header["sizes"] != self._sizes:
                return False
            figures = {str(name): float(number) for name, number in header["figures"].items()}
            sealed = _seal(about_file) == head[SEAL:].rstrip(b"\0")
            counted = _nothing if sealed else _sum
            sums = self._sums_of(partial(_read, self._path, counted))
            whole = sealed or sums == header["sums"]
            if whole:
                with suppress(OSError):
                    _note_use(self._path, about_file, seal=not sealed)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            whole = False
            figures = dict[str, float]()
        if not whole:
            for array in self._arrays:
                array[:] = 0
            return False
        self.figures = figures
        return True

    def _sums_of(self, work: Callable[[np.ndarray, int], int]) -> list[int]:
        """A sum of what work(part, place in the file) gives for the parts of each array, in their order, on all cores."""
        with ThreadPoolExecutor(usable_cores()) as pool:
            parts = [
                [(a[k : k + TOGETHER], begin + k) for k in range(0, len(a), TOGETHER)]
                for a, begin in self._pairs()
            ]
            return [
                _sum(np.array(list(pool.map(lambda part: work(*part), some)), np.uint32)) for some in parts
            ]

    def _pairs(self) -> list[tuple[np.ndarray, int]]:
        return list(zip(self._arrays, self._starts, strict=False))

    def write(self, **figures: float) -> None:
        """Write what is in memory now: the next start finds it, and these figures."""
        if self._path is None:
            return
        unfinished = self._path.with_suffix(f".{os.getpid()}-{os.urandom(4).hex()}.unfinished")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _make_room(self._path.parent, self._starts[-1])
            disk = shutil.disk_usage(self._path.parent)
            if self._starts[-1] > disk.free - LEFT_FREE * disk.total:
                return
            header = {
                "about": self._about,
                "sizes": self._sizes,
                "sums": self._sums_of(_sum),
                "figures": figures,
            }
            line = json.dumps(header).encode() + b"\n"
            if len(line) > SEAL:  # a model of a hundred files with long names
                return
            try:
                with open(unfinished, "xb") as file:
                    file.write(line)
                    for array, begin in self._pairs():
                        file.seek(begin)
                        file.write(memoryview(array))  # pyright: ignore[reportArgumentType]
                    file.truncate(self._starts[-1])
                os.replace(unfinished, self._path)
            finally:
                unfinished.unlink(missing_ok=True)
        except OSError:
            return


def damaged() -> Iterator[Path]:
    """Stored files whose bytes are not those that were written, seal or not; and those that are none."""
    place = folder()
    for path in sorted(place.glob(f"*{SUFFIX}")) if place is not None else ():
        if not _is_whole(path):
            yield path


def _is_whole(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            header = _header(file.read(HEADER))
        sizes = [int(size) for size in header["sizes"]]
        file_size = path.stat().st_size
        if file_size != _starts(sizes)[-1]:
            return False
        stored = np.memmap(path, np.uint8, "r")
        arrays = [stored[begin : begin + size] for size, begin in zip(sizes, _starts(sizes), strict=False)]
        return PackedFile(None, arrays)._sums_of(_sum) == header["sums"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each matrix begins, and where the file ends."""
    pages = [-(-size // PAGE) * PAGE for size in sizes]
    return [HEADER, *(HEADER + np.cumsum(pages, dtype=np.int64)).tolist()]


def _header(head: bytes) -> dict[str, Any]:
    return json.loads(head.split(b"\n", 1)[0])


def _seal(about: os.stat_result) -> bytes:
    """What a file has in its own head once its sums were right. A copy, or one that was written to, has another inode or time."""
    return json.dumps({"inode": about.st_ino, "changed": about.st_mtime_ns}).encode()


def _note_use(path: Path, about: os.stat_result, *, seal: bool) -> None:
    """Set the time of use, by which files are removed, and leave that of change. about: the file that was read; another one gets a seal that does not fit."""
    if seal:
        with open(path, "r+b") as file:
            file.seek(SEAL)
            file.write(_seal(about).ljust(HEADER - SEAL, b"\0"))
    os.utime(path, ns=(time_ns(), about.st_mtime_ns))


def _read(path: Path, counted: Callable[[np.ndarray], int], part: np.ndarray, place: int) -> int:
    """Fill a part of the memory from a place of the file; returns its sum."""
    rest = memoryview(part)  # pyright: ignore[reportArgumentType]
    with open(path, "rb", buffering=0) as file:  # of its own: threads share no position
        file.seek(place)
        while rest:
            count = file.readinto(rest)
            if not count:
                raise OSError("the file ends")
            rest = rest[count:]
    return counted(part)


def _sum(part: np.ndarray, _: int = 0) -> int:
    """The CRC-32 of bytes, or of numbers."""
    return zlib.crc32(part)  # pyright: ignore[reportArgumentType]


def _nothing(_: np.ndarray) -> int:
    return 0


def _make_room(place: Path, size: int) -> None:
    """Remove what others left unfinished, and the files that were used longest ago, until one of this size fits within `MOST_BYTES`."""
    for path in place.glob("*.unfinished"):
        with suppress(OSError):
            if time() - path.stat().st_mtime > 3600.0:  # its process has ended
                path.unlink()
    files = sorted(place.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_atime_ns)
    sizes = [path.stat().st_size for path in files]
    while files and sum(sizes) + size > MOST_BYTES:
        sizes.pop(0)
        files.pop(0).unlink(missing_ok=True)
