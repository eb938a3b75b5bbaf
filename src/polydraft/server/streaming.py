"""Answers as streams of server-sent events, which say so when nothing comes for a while."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

from fastapi import Request

from polydraft.engine.output import StepOutput
from polydraft.engine.sequence import Result
from polydraft.server import errors
from polydraft.server.answers import Answer

log = logging.getLogger("polydraft.server")
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


PAUSE_SECONDS = 5.0
"""Without an event, after which a stream says what its request does."""


async def events(
    request: Request,
    answer: Answer,
    first: tuple[int, StepOutput] | Pause,
    outputs: AsyncGenerator[tuple[int, StepOutput] | Pause, None],
    results: Sequence[Result],
) -> AsyncGenerator[str, None]:
    """Server-sent events: chunks, comments where there are none for a while, perhaps the usage, and the end; an error is the last event."""
    try:
        async with aclosing(outputs):
            for chunk in answer.opening():
                yield answer.written(chunk)
            if isinstance(first, Pause):
                yield ""  # the head alone: some clients take every line for an event
            else:
                for chunk in answer.chunks(*first):
                    yield answer.written(chunk)
            async for output in outputs:
                await asyncio.sleep(
                    0
                )  # where the client has left, the loop learns of it before more is written
                if isinstance(output, Pause):
                    yield answer.pause(_doing(results))
                    continue
                for chunk in answer.chunks(*output):
                    yield answer.written(chunk)
        for chunk in answer.closing():
            yield answer.written(chunk)
    except Exception as error:
        refusal = errors.of(error)
        level = logging.ERROR if refusal.status >= 500 else logging.INFO
        log.log(level, "request %s failed while it was streamed: %s", request.state.request_id, error)
        yield answer.written(answer.failed(refusal))
    yield answer.end


def _doing(results: Sequence[Result]) -> str:
    """What a request does that has given nothing for a while, in words for its stream."""
    stats = [sample.stats for result in results for sample in result.samples if sample.finish_reason is None]
    if any(s.seconds_to_first_token is not None for s in stats):
        return "decoding"
    if all(s.seconds_waiting is None for s in stats):
        return "waiting for a slot"
    return f"prefill {sum(s.read_tokens for s in stats)} / {sum(s.prompt_tokens for s in stats)}"
