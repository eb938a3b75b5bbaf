"""Documents for an index: text files, each one a document, read one at a time."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from polydraft.errors import InvalidInputError
from polydraft.train.conversations import read_text


class Corpus:
    """The files that are named, and all files in the folders, sorted: hidden ones are left out, and those of folders that are no text.

    files: to be read.  num_read: those that were.  num_hidden, num_binary: those of folders that were left out.

    Raises:
        InvalidInputError: nothing at a path, or no file at all.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.files = list[Path]()
        self._named = set[Path]()
        self.num_read = self.num_hidden = self.num_binary = 0
        for path in paths:
            if path.is_dir():
                self._add_folder(path)
            elif path.exists():
                self.files.append(path)
                self._named.add(path)
            else:
                raise InvalidInputError(
                    f"{str(path)!r} was given as a corpus; there is no such file or folder. Check the path."
                )
        if not self.files:
            raise InvalidInputError(
                "an empty corpus was given; expected at least one text file. Check the folders."
            )

    def _add_folder(self, folder: Path) -> None:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            if any(part.startswith(".") for part in path.relative_to(folder).parts):
                self.num_hidden += 1
            else:
                self.files.append(path)

    def documents(
        self,
        encode: Callable[[str], Sequence[int]],
        *,
        skip_unreadable: bool = False,
        done: Callable[[Path], None] = lambda path: None,
        named: Callable[[Path], None] = lambda path: None,
    ) -> Iterator[Sequence[int]]:
        """Token ids of each file.

        encode: text to token ids.  skip_unreadable: warn about a file that cannot be read, or that is named and no text, and go on.
        done: called after each file.  named: called before each document that is given.

        Raises:
            InvalidInputError: naming the file, unless `skip_unreadable`.
        """
        for path in self.files:
            try:
                text = read_text(path)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                if isinstance(error, ValueError) and path not in self._named:
                    self.num_binary += 1
                elif skip_unreadable:
                    warnings.warn(f"{str(path)!r} was left out: {reason}", stacklevel=2)
                else:
                    raise InvalidInputError(
                        f"{str(path)!r} in the corpus cannot be read: {reason}. Leave it out, or go on without it with --skip-unreadable."
                    ) from error
            else:
                self.num_read += 1
                named(path)
                yield encode(text)
            done(path)

    @property
    def left_out(self) -> str:
        """What is said of the files that folders hold and that were not read.

        Example:
            >>> corpus = Corpus([Path(__file__)])
            >>> corpus.num_hidden = 2
            >>> corpus.left_out
            '; left out: 2 hidden files'
        """
        counts = ((self.num_hidden, "hidden files"), (self.num_binary, "files that are not UTF-8 text"))
        parts = [f"{count:,} {what}" for count, what in counts if count]
        return f"; left out: {', '.join(parts)}" if parts else ""
