"""Files that are written whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import BinaryIO

from polydraft.errors import InvalidInputError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its name once all is written; what was there before stays until then, and after an error.

    It is as readable as any new file (0666 less the umask).

    Raises:
        InvalidInputError: there is no such folder; none is made.
        OSError: as of any file that cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "x"
        >>> with replacing(path) as file:
        ...     _ = file.write(b"all of it"), path.exists()
        >>> path.read_bytes()
        b'all of it'
    """
    path = Path(path)
    if not path.parent.exists():
        raise InvalidInputError(
            f"{str(path)!r} was to be written, but there is no folder {str(path.parent)!r}. Make it first, or name another one."
        )
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = open(scratch, "xb")  # noqa: SIM115 - closed below, before its name changes
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


def is_full(error: OSError) -> bool:
    """Whether there was no more room to write.

    Example:
        >>> is_full(OSError(ENOSPC, "No space left on device")), is_full(FileNotFoundError())
        (True, False)
    """
    return error.errno in (ENOSPC, EDQUOT, EFBIG)
