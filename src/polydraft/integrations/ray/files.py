"""Rows of a file in parts, each answered and written once, and put together in order: what survives a crash.

OUT.parts/job.json       what was asked; a run that goes on has to ask the same
OUT.parts/00007.jsonl    a part's answers, written whole or not at all
OUT                      all of them, when the last part is there; the parts are deleted then
OUT.errors.jsonl         rows that were not answered: number, reason, and the line as it was
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from polydraft.errors import CapacityError, InvalidInputError
from polydraft.files.atomic import replacing

PARQUET = ".parquet"


def rows_of(source: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a .jsonl or .parquet file with their numbers; a line that is no object is {"error": reason, "line": text}.

    Raises:
        InvalidInputError: a file that is missing or of another kind, or parquet without its library.
    """
    if not source.is_file():
        raise InvalidInputError(
            f"{str(source)!r} was given to be answered; expected a .jsonl or .parquet file. Check the path."
        )
    if source.suffix == PARQUET:
        yield from enumerate(_of_table(source))
        return
    with source.open("rb") as file:
        lines = (line for line in file if line.strip())
        yield from ((number, _parsed(line)) for number, line in enumerate(lines))


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if isinstance(row, dict):
            return row
        reason = f"a row is an object; this is {type(row).__name__}"
    except ValueError as error:
        reason = f"no JSON: {error}"
    return {"error": reason, "line": line.decode(errors="replace").rstrip("\n")}


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InvalidInputError(
            "a parquet file was given, and pyarrow is not installed. Install polydraft[parquet]."
        ) from error
    return pyarrow.parquet


def _of_table(source: Path) -> Iterator[dict[str, Any]]:
    for batch in _parquet().ParquetFile(source).iter_batches(256):
        yield from batch.to_pylist()


class RowParts:
    """The parts of one call. out: the file to be.  job: what was asked, as JSON can say it.  resume: whether to go on.

    Raises:
        InvalidInputError: the file is there, or parts of it and `resume` was not asked for, or parts of another job.
    """

    def __init__(self, out: Path, job: Mapping[str, Any], *, resume: bool = False) -> None:
        self.out = out
        self.errors = out.with_name(f"{out.name}.errors.jsonl")
        self.folder = out.with_name(f"{out.name}.parts")
        if out.exists():
            raise InvalidInputError(
                f"{str(out)!r} is there already; nothing was changed. Name another file, or delete it."
            )
        begun = any(self.folder.glob("[0-9]*.jsonl"))
        if resume and not self.folder.exists():
            raise InvalidInputError(
                f"an earlier run was to be resumed (--resume, resume=True), and {str(self.folder)!r} holds no part of one. Leave it out."
            )
        if begun and not resume:
            raise InvalidInputError(
                f"{str(self.folder)!r} holds parts of an earlier run; go on with --resume, or delete it to begin again."
            )
        written = self.folder / "job.json"
        if begun:
            before = json.loads(written.read_text(encoding="utf-8"))
            if changed := sorted(key for key in {*before, *job} if before.get(key) != job.get(key)):
                raise InvalidInputError(
                    f"the parts in {str(self.folder)!r} were asked for with {changed[0]}={before.get(changed[0])!r}, and now with "
                    f"{job.get(changed[0])!r}; expected the same. Ask as before, or delete them."
                )
        else:
            self.folder.mkdir(exist_ok=True)
            with replacing(written) as file:
                file.write(json.dumps(dict(job)).encode())

    def _path(self, part: int) -> Path:
        return self.folder / f"{part:05}.jsonl"

    @contextmanager
    def _room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CapacityError(
                f"{str(self.out)!r} and its parts cannot be written: {error.strerror}. Free some room; what was finished stays: run it again with --resume."
            ) from error

    def missing(
        self, source: Path, size: int, progress: Callable[[int], None]
    ) -> Iterator[tuple[int, list[tuple[int, dict[str, Any]]]]]:
        """Parts of so many rows that were not answered yet; `progress` is told of those that were."""
        rows = rows_of(source)
        part = 0
        while chunk := list(islice(rows, size)):
            if self._path(part).exists():
                progress(len(chunk))
            else:
                yield part, chunk
            part += 1

    def write(self, part: int, answers: list[dict[str, Any]]) -> None:
        """Write a part's answers.

        Raises:
            CapacityError: there is no room for them; the parts before stay.
        """
        with self._room(), replacing(self._path(part)) as file:
            file.write("".join(json.dumps(row) + "\n" for row in answers).encode())

    def finish(self) -> tuple[int, int]:
        """Put all parts together; how many rows were answered, and how many were not.

        Raises:
            CapacityError: there is no room for them; all parts stay.
        """
        good = bad = 0
        answers = list[dict[str, Any]]()
        with self._room(), replacing(self.errors) as errors, replacing(self.out) as file:
            for path in sorted(self.folder.glob("[0-9]*.jsonl")):
                for line in path.read_bytes().splitlines():
                    row = json.loads(line)
                    if "error" in row:
                        bad += 1
                        errors.write(line + b"\n")
                    else:
                        good += 1
                        row.pop("row")
                        if self.out.suffix == PARQUET:
                            answers.append(row)
                        else:
                            file.write(json.dumps(row).encode() + b"\n")
            if self.out.suffix == PARQUET:
                import pyarrow

                _parquet().write_table(pyarrow.Table.from_pylist(answers), file)
        if not bad:
            self.errors.unlink()
        shutil.rmtree(self.folder)
        return good, bad
