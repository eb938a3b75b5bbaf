"""Progress of loading, for whoever listens: a command's line, an application's bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, int, int], None]
"""Called with the name of what is loaded, the bytes that are in memory, and those of all."""
_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def reported_to(listener: Listener) -> Iterator[None]:
    """While entered, models that this thread loads report to a listener.

    Example:
        >>> with reported_to(lambda name, done, total: print(name, f"{done / total:.0%}")):
        ...     report("model", 1, 4)
        model 25%
    """
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def report(name: str, done: int, total: int) -> None:
    """Tell the listener, if there is one, how much of a model is in memory, in bytes."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(name, done, total)
