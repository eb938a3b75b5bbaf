"""Where a prompt comes from: the argument, a file, or standard input."""

import sys
from pathlib import Path

from polydraft.errors import InvalidInputError

__all__ = ["read_prompt"]


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"{source} holds the byte 0x{data[error.start]:02x} at offset {error.start}, which is not UTF-8; expected "
            "UTF-8 text. Convert it first, for example with iconv."
        ) from error


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The text to continue, exactly as given.

    argument: the text, or "-" or None for standard input.  file: instead of an argument.

    Raises:
        InvalidInputError: nothing or two things given, an unreadable file, or text that is not UTF-8.
    """
    if file is not None:
        if argument is not None:
            raise InvalidInputError("a prompt and --file were given; expected one of them. Drop the other.")
        try:
            return _decode(file.read_bytes(), f"file {str(file)!r}")
        except OSError as error:
            raise InvalidInputError(
                f"--file {str(file)!r} was given and cannot be read: {error.strerror}. Check the path."
            ) from error
    if argument not in (None, "-"):
        return _encodable(argument)
    if argument is None and sys.stdin.isatty():
        raise InvalidInputError('no prompt was given; expected text to continue. Try: polydraft generate "def quicksort(".')
    return _decode(sys.stdin.buffer.read(), "standard input")


def _encodable(argument: str) -> str:
    """The shell hands over bytes that are no text as lone surrogates."""
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            "the prompt holds bytes that are not UTF-8; expected UTF-8 text. Check the terminal's encoding."
        ) from error
    return argument
