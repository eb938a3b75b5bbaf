"""A server on a scripted model whose requests are recorded: what a client asked first, what it was answered, and when its first byte came."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from polydraft import AsyncEngine
from polydraft.config import ServerConfig
from polydraft.server.app import create_app
from polydraft.server.starting import Connection
from studies.clients.scripted import scripted_engine, uses_a_shell


@dataclass
class Recorded:
    """A request. seconds: to the first byte of the body that answered it."""

    method: str
    path: str
    body: Any
    status: int = 0
    seconds: float | None = None
    answer: bytes = b""


@dataclass
class Recording:
    """ASGI middleware."""

    app: Any
    requests: list[Recorded] = field(default_factory=list[Recorded])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        parts = bytearray()
        began = time.perf_counter()
        recorded = Recorded(scope["method"], scope["path"], None)
        self.requests.append(recorded)

        async def received() -> Any:
            message = await receive()
            parts.extend(message.get("body", b""))
            return message

        async def told(message: Any) -> None:
            if message["type"] == "http.response.start":
                recorded.status = message["status"]
            elif message.get("body"):
                recorded.seconds = recorded.seconds or time.perf_counter() - began
                recorded.answer = (recorded.answer + message["body"])[:4000]
            await send(message)

        try:
            await self.app(scope, received, told)
        finally:
            recorded.body = _parsed(bytes(parts))


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


@contextmanager
def serving(name: str = "small") -> Iterator[tuple[str, Recording]]:
    """The address of a running server, and its record."""
    config = ServerConfig(served_model_name=name)
    recording = Recording(create_app(AsyncEngine(scripted_engine(uses_a_shell())), config))
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(recording, log_level="warning", ws="none", timeout_keep_alive=75, http=Connection)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", recording
    finally:
        server.should_exit = True
        thread.join(20)
