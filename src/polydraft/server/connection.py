"""uvicorn's part: a connection that waits only so long for the head of a request, and a server whose end is told to what still runs.

A head that dribbles in would hold a file for ever. A request that uvicorn cancels has no end: a stream is cut, a whole answer is none of ours.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

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
