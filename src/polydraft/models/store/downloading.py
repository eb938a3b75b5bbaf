"""A bar on the terminal while files of a model are fetched by somebody else's client."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

BAR = 20
"""Characters."""


def bytes_below(folder: Path) -> int:
    """Of the files below a folder that others write and rename meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.path.getsize(os.path.join(place, name))
    return total


@contextmanager
def downloading(name: str, total: Callable[[], int], num_bytes: Callable[[], int]) -> Iterator[None]:
    """While entered, a terminal shows how much of a model is there, in place of bars of the hub's client. total: asked once, if it takes long."""
    if not sys.stderr.isatty():
        with _no_bars_of_the_hub():
            yield
        return

    def show() -> None:
        whole = 0
        while not ended.wait(0.5):
            whole = whole or max(total(), 1)
            share = min(num_bytes() / whole, 1.0)
            bar = "#" * int(share * BAR) + "-" * (BAR - int(share * BAR))
            sys.stderr.write(f"\r\x1b[Kdownloading {name} [{bar}] {share:.0%} of {whole / 1e6:.0f} MB")
            sys.stderr.flush()
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()

    ended = Event()
    thread = Thread(target=show, daemon=True)
    thread.start()
    try:
        with _no_bars_of_the_hub():
            yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def _no_bars_of_the_hub() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
