"""What a command does before its first word comes, in one line on standard error; bars of what it measures."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic

import typer

from polydraft.files.progress import reported_to

WIDTH = 79
SECONDS = 10.0
"""Between two lines of progress."""


class Preparation(ExitStack):
    """While entered, says what is loaded and which functions are compiled; `close` it when the first word comes.

    A terminal shows one line, which is gone afterwards. Elsewhere only compiling is told of: when it begins, and how long it took.
    begins: the line before anything is compiled.
    """

    def __init__(self, first_line: str = "") -> None:
        super().__init__()
        self._begins = first_line
        self._num_compiled = 0
        self._terminal = sys.stderr.isatty()

    def __enter__(self) -> "Preparation":
        self._show(self._begins)  # before the imports, of which numba's is one
        from polydraft.numerics import compile_time

        self._before = compile_time.seconds()
        self.callback(self._end)
        self.enter_context(compile_time.reporting(self._tell))
        self.enter_context(reported_to(self._report))
        return self

    def say(self, text: str) -> None:
        """A line that stays."""
        self._show("")
        typer.echo(text, err=True)

    def _tell(self, name: str) -> None:
        if not self._num_compiled and not self._terminal:
            typer.echo("compiling for this machine, once ...", err=True)
        self._num_compiled += 1
        self._show(f"compiling for this machine, once: function {self._num_compiled}, {name} ...")

    def _report(self, name: str, done: int, total: int) -> None:
        self._show(f"loading {Path(name).name}: {done / total:.0%} of {total / 1e6:.0f} MB ...")

    def _end(self) -> None:
        from polydraft.numerics import compile_time

        self._show("")
        if self._num_compiled:
            spent = compile_time.seconds() - self._before
            functions = f"{self._num_compiled} function{'s' if self._num_compiled > 1 else ''}"
            typer.echo(f"compiled {functions} in {spent:.0f} s; the next start finds them", err=True)

    def _show(self, text: str) -> None:
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{text[:WIDTH]}")
            sys.stderr.flush()


@contextmanager
def bars(first: str, *, hidden: bool = False) -> Iterator[Callable[..., None]]:
    """While entered, a bar on the terminal's standard error for each thing that is measured; elsewhere a line every `SECONDS` says where it is.

    Yields step(total=None, done=None, what=first): one more of `total` is done, or `done` of them are.
    """
    if not hidden and not sys.stderr.isatty():
        yield _Lines(first).step
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=hidden) as progress:
        tasks = {first: progress.add_task(first, total=None)}

        def step(total: int | None = None, done: int | None = None, what: str = first) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], total=total, advance=1 if done is None else None, completed=done)

        yield step


class _Lines:
    """Progress where there is no terminal."""

    def __init__(self, first: str) -> None:
        self._first = first
        self._counts = Counter[str]()
        self._last = monotonic()

    def step(self, total: int | None = None, done: int | None = None, what: str | None = None) -> None:
        """One more of `total` is done, or `done` of them are."""
        what = what or self._first
        self._counts[what] = self._counts[what] + 1 if done is None else done
        now = monotonic()
        if now - self._last >= SECONDS:
            self._last = now
            typer.echo(f"{what}: {self._counts[what]}{'' if total is None else f' of {total}'}", err=True)
