"""A server's first seconds: it listens and says that it loads at once, and requests wait until their application is there.

Nothing heavy is imported here.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from contextvars import copy_context
from threading import Thread
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

LOADING: Mapping[str, int] = {"/health": 200, "/ready": 503}
"""Paths that are answered while the application is made: the process lives, and takes no requests yet."""


class Starting:
    """An ASGI application in the place of one that a thread makes.

    make: returns it, with a starlette router.  ready: called once it takes requests.  ends: whether the server ends.  failed: called after an
    error of `make` or of the application's start, which is then in `error`.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        ready: Callable[[], None],
        ends: Callable[[], bool],
        failed: Callable[[], None],
    ) -> None:
        self._make = make
        self._ready = ready
        self._ends = ends
        self._failed = failed
        self._app: Any = None
        self.error: BaseException | None = None

    @property
    def loading(self) -> bool:
        """Whether the application is not there yet."""
        return self._app is None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        while self.loading:
            if (
                status := LOADING.get(f"/{scope['path'].rpartition('/')[2]}")
            ) is not None:  # below a proxy's path, too
                await _answer(send, status, "loading")
                return
            if self._ends():
                await _answer(send, 503, "the server ends")
                return
            await asyncio.sleep(0.1)
        await self._app(scope, receive, send)

    async def drain(self) -> None:
        """Have the application end its requests, where it is there."""
        if self._app is not None:
            await self._app.state.drain()

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        async with AsyncExitStack() as running:
            starting = asyncio.create_task(self._start(running))
            await receive()
            starting.cancel()  # no more than the thread goes on, and ends with the process
        await send({"type": "lifespan.shutdown.complete"})

    async def _start(self, running: AsyncExitStack) -> None:
        try:
            app = await _in_daemon(self._make)
            await running.enter_async_context(app.router.lifespan_context(app))
        except Exception as error:
            self.error = error
            self._failed()
        else:
            self._app = app
            self._ready()


async def _in_daemon(work: Callable[[], Any]) -> Any:
    """What `work` returns, done in a daemon thread: the process can end before it."""
    loop = asyncio.get_running_loop()
    result = asyncio.get_running_loop().create_future()
    context = copy_context()

    def settle(done: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            done(value)

    def run() -> None:
        try:
            value = context.run(work)
            done = result.set_result
        except BaseException as error:
            value = error
            done = result.set_exception
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, done, value)

    Thread(target=run, name="polydraft-loading", daemon=True).start()
    return await result


async def _answer(send: Any, status: int, text: str) -> None:
    body = json.dumps({"status": text}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"1"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


LAST_SECONDS = 10
"""For last answers, behind a server's drain."""
HEAD_SECONDS = 10.0
"""From a connection's beginning, or a head's first byte, to the head's end. Between requests uvicorn's own limit holds."""


class Connection(H11Protocol):
    """For `uvicorn.Config(http=...)`."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        in_head = self.cycle is None or self.cycle.response_complete
        if in_head and self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        elif not in_head:
            self._in_time()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._in_time()
        super().connection_lost(exc)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class DrainingServer(uvicorn.Server):
    """Ends requests itself before uvicorn would cancel them. drain: begun when the server is told to end; what runs has its last answer behind it.

    Until then it listens: new requests are told that it goes down.
    """

    def __init__(self, config: uvicorn.Config, drain: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._drain = drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        draining = asyncio.ensure_future(self._drain())
        while not (draining.done() or self.force_exit):
            await asyncio.wait({draining}, timeout=0.1)  # a second signal wants the end at once
        await super().shutdown(sockets)
        await draining
