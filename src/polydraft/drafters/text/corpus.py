"""Documents for an index: text files, each one a document, read one at a time."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from polydraft.errors import InvalidInputError


def files(paths: Iterable[Path]) -> list[Path]:
    """The files themselves, and all files in the folders, sorted, hidden ones left out.

    Raises:
        InvalidInputError: nothing at a path, or no file at all.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            below = (p for p in sorted(path.rglob("*")) if p.is_file())
            found += [p for p in below if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        elif path.exists():
            found.append(path)
        else:
            raise InvalidInputError(f"{str(path)!r} was given as a corpus; there is no such file or folder. Check the path.")
    if not found:
        raise InvalidInputError("an empty corpus was given; expected at least one text file. Check the folders.")
    return found


def documents(
    paths: Sequence[Path],
    encode: Callable[[str], Sequence[int]],
    *,
    skip_unreadable: bool = False,
    done: Callable[[Path], None] = lambda path: None,
    named: Callable[[Path], None] = lambda path: None,
) -> Iterator[Sequence[int]]:
    """Token ids of each file.

    encode: text to token ids.  skip_unreadable: warn about a file that cannot be read or is not UTF-8, and go on.
    done: called after each file.  named: called before each document that is given.

    Raises:
        InvalidInputError: naming the file, unless `skip_unreadable`.
    """
    for path in paths:
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = (
                error.strerror
                if isinstance(error, OSError)
                else f"byte 0x{error.object[error.start]:02x} at offset {error.start} is not UTF-8"
            )
            if not skip_unreadable:
                raise InvalidInputError(
                    f"{str(path)!r} in the corpus cannot be read: {why}. Leave it out, or go on without it with --skip-unreadable."
                ) from error
            warnings.warn(f"{str(path)!r} was left out: {why}", stacklevel=2)
        else:
            named(path)
            yield encode(text)
        done(path)
