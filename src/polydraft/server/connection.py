"""A connection of uvicorn that waits only so long for the head of a request: one that dribbles in would hold a file for ever."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

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
