"""What comes in: a body, whole, in time and not too long, and whether its client is still there."""

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from polydraft.server.errors import ApiError

log = logging.getLogger("polydraft.server")
T = TypeVar("T")
BODY_SECONDS = 30.0
"""In which a body has to arrive."""
GONE = 499
"""Status, which nobody reads, of a response whose client has left."""


async def body_of(request: Request, most: int) -> bytes:
    """The body of a request. most: bytes.

    Raises:
        ApiError: it is longer, or announced as longer; it is compressed, does not arrive in time, or its client leaves before its end.
    """
    body = bytearray()
    too_long = ApiError(
        413,
        f"the body is longer than {most} bytes. Shorten it, or start the server with a larger --max-body.",
    )
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            415, f"the body has 'Content-Encoding: {coding[:64]}'; expected none. Send it uncompressed."
        )
    if int(request.headers.get("content-length", 0)) > most:
        raise too_long

    async def gather() -> None:
        async for part in request.stream():
            body.extend(part)
            if len(body) > most:
                raise too_long

    try:
        await asyncio.wait_for(gather(), BODY_SECONDS)
    except (asyncio.TimeoutError, TimeoutError):
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:.0f} s.") from None
    except ClientDisconnect:
        log.debug("a client left after %d bytes of its body", len(body))
        raise ApiError(GONE, "the client has left.") from None
    return bytes(body)


async def unless_gone(request: Request, response: Awaitable[T]) -> T | None:
    """What is awaited, or None once the client has left, which cancels it. The body has to be read before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(response)
    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for waiter in (task, watch):
            waiter.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await waiter
