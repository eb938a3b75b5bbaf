"""Files in memory as they are on disk: the system reads the pages that are looked at, and takes them back where they are forgotten; and what they are
known again by."""

import mmap
from pathlib import Path


def mapped(file: Path) -> mmap.mmap:
    """A file's bytes, to be read. Raises as `open`, and ValueError of an empty file."""
    with file.open("rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def forgotten(data: mmap.mmap, start: int, end: int) -> None:
    """Give back the memory of the whole pages between two places, where the system can: they are read again when they are looked at again."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if end - begin >= mmap.PAGESIZE:
        data.madvise(mmap.MADV_DONTNEED, begin, (end - begin) // mmap.PAGESIZE * mmap.PAGESIZE)


def stamp(path: Path) -> tuple[str, int, int]:
    """What a file is known again by: its path, its size, and when it was changed; zeros of one that is not there."""
    try:
        about = path.stat()
    except OSError:
        return str(path), 0, 0
    return str(path), about.st_size, about.st_mtime_ns
