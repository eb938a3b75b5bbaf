"""Streams that say so when nothing comes: what waits for the next output is not broken off by the look at the clock."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import TypeVar

T = TypeVar("T")


class Pause:
    """Nothing has come for a while."""


async def with_pauses(
    outputs: AsyncGenerator[T, None], first: float, later: float
) -> AsyncGenerator[T | Pause, None]:
    """The outputs, and a pause where the first does not come in so many seconds, or another one not `later` seconds after what came last.

    Example:
        >>> async def slowly():
        ...     await asyncio.sleep(0.3)
        ...     yield "late"
        >>> async def main():
        ...     return [type(x).__name__ async for x in with_pauses(slowly(), 0.01, 60)]
        >>> asyncio.run(main())
        ['Pause', 'str']
    """
    waiting = None
    seconds = first
    async with aclosing(outputs):
        try:
            while True:
                waiting = waiting or asyncio.ensure_future(anext(outputs))
                await asyncio.wait({waiting}, timeout=seconds)
                seconds = later
                if not waiting.done():
                    yield Pause()
                    continue
                done = waiting
                waiting = None
                try:
                    output = done.result()
                except StopAsyncIteration:
                    return
                yield output
        finally:
            if waiting is not None:
                waiting.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await waiting
