"""What a person waits for, in seconds from the start of the process: until the model is loaded, the prompt is read, the first token comes."""

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polydraft.engine.stats import RequestStats


LONGEST_IMPORT = 600.0
"""Seconds in which a command has imported this module: an age beyond them is of a clock that was set."""


def _age() -> float:
    """Seconds since this process began, 0 where the system does not say it."""
    with suppress(OSError, AttributeError, ValueError, IndexError):
        with open("/proc/self/stat", encoding="utf-8") as file:
            ticks = int(
                file.read().rpartition(")")[2].split()[19]
            )  # from the machine's start to the process's
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return age if 0 <= age < LONGEST_IMPORT else 0.0
    return 0.0


_IMPORTED = time.monotonic()
_AGE = _age()


def process_seconds() -> float:
    """Seconds since this process began, by a clock that nobody sets; where the system does not say it, since this module was imported.

    Example:
        >>> 0 < process_seconds() <= process_seconds()
        True
    """
    return _AGE + time.monotonic() - _IMPORTED


class Waiting:
    """Notes when the model was loaded; `begin` it when the request is made."""

    def __init__(self) -> None:
        self._loaded = self._begun = process_seconds()

    def begin(self) -> None:
        """The request is made now."""
        from polydraft.numerics import compile_time

        self._begun = process_seconds()
        self._compiled = compile_time.seconds()

    def until(self, stats: "RequestStats") -> dict[str, float | None]:
        """Seconds from the start of the process until the model was `load`ed, the prompt was read (`prefill`), the `first_token` came and the
        text was there (`total`); `compile`: how many of them went into compiling and loading compiled code; `tokens_per_second`.
        """
        from polydraft.numerics import compile_time

        compiled = compile_time.seconds()
        read = self._begun + stats.seconds["prefill"] + compiled - self._compiled
        first = None if stats.seconds_to_first_token is None else self._begun + stats.seconds_to_first_token
        return {
            "load": self._loaded,
            "compile": compiled,
            "prefill": read if first is None else min(read, first),
            "first_token": first,
            "total": process_seconds(),
            "tokens_per_second": stats.tokens_per_second,
        }

    def line(self, stats: "RequestStats") -> str:
        """The same in words."""
        waited = self.until(stats)
        moments = {"loaded": "load", "prompt read": "prefill", "first token": "first_token", "end": "total"}
        moments_text = ", ".join(
            f"{words} {waited[name]:.2f} s" for words, name in moments.items() if waited[name] is not None
        )
        return f"from the start: {moments_text}; {waited['compile']:.2f} s of it compiling"
