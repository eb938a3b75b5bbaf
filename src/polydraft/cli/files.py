"""Files of the commands: prompts that are read, and results that are refused before the work if they could not be written."""

import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import typer

from polydraft.errors import InvalidInputError


def check_output(option: str, path: Path | None, *, picture: bool = False) -> None:
    """Refuse, before anything is measured, a file that could not be written; None is no file.

    picture: it is or brings a picture.

    Raises:
        InvalidInputError: a folder is there, its own folder is not there or cannot be written to, or nothing can draw a picture.
    """
    if path is None:
        return
    message = f"{option} {str(path)!r} was given"
    if path.is_dir():
        raise InvalidInputError(f"{message}, which is a folder; expected the name of a file. Add one.")
    if not path.parent.exists():
        raise InvalidInputError(
            f"{message} and cannot be written: there is no folder {str(path.parent)!r}. Make it first, or name another one."
        )
    try:
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(bytes(1 << 20))  # the largest report has half as many
    except OSError as error:
        raise InvalidInputError(
            f"{message} and cannot be written: {error.strerror}. Name a place that you may write to, with a megabyte of room."
        ) from error
    if picture and find_spec("matplotlib") is None:
        raise InvalidInputError(
            f"{message}, with a picture, and matplotlib is not installed. Try: pip install matplotlib."
        )


def say_written(paths: Iterable[Path]) -> None:
    """Name the files that were written, on standard error."""
    for path in paths:
        typer.echo(f"wrote {path}", err=True)


def read_lines(option: str, file: Path) -> list[str]:
    """One prompt a line; of a .jsonl file each line's "prompt". Empty lines are left out.

    Raises:
        InvalidInputError: a file that cannot be read, holds no prompt, or a line of JSON without one.
    """
    lines = [line.removesuffix("\r") for line in read_text(option, file).removesuffix("\n").split("\n")]
    of_line = _of_json if file.suffix == ".jsonl" else lambda _, line: line
    prompts = [
        of_line(f"{option} {str(file)!r}, line {n}", line) for n, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise InvalidInputError(
            f"{option} {str(file)!r} holds no prompt; expected one a line. Add some text."
        )
    return prompts


def prompt_texts(file: Path | None, most: int) -> list[str]:
    """The prompts of a file, or so many of those that come with the embedded pair."""
    from polydraft.models import pair

    return (
        [prompt.text for prompt in pair.prompts()[:most]] if file is None else read_lines("--prompts", file)
    )


def read_text(option: str, file: Path) -> str:
    """A file's text, exactly as it is, without a byte-order mark.

    Raises:
        InvalidInputError: a file that cannot be read, or is not UTF-8.
    """
    try:
        return _decode(file.read_bytes(), f"{option} {str(file)!r}")
    except OSError as error:
        raise InvalidInputError(
            f"{option} {str(file)!r} was given and cannot be read: {error.strerror}. Check the path."
        ) from error


def _of_json(where: str, line: str) -> str:
    from polydraft.files.schema import PROMPT, fault, read_json

    try:
        content = read_json(line)
        message = fault(content, PROMPT)
    except ValueError as error:
        content = {}
        message = str(error)
    if message:
        raise InvalidInputError(
            f'{where} holds no prompt: {message}; expected {{"prompt": "text"}}. Correct it, or name the file .txt to read each line as it is.'
        )
    return content["prompt"]


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
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
        return read_text("--file", file)
    if argument not in (None, "-"):
        return _encodable(argument)
    if argument is None and sys.stdin.isatty():
        raise InvalidInputError(
            'no prompt was given; expected text to continue. Try: polydraft generate "def quicksort(".'
        )
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
