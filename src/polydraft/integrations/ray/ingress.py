"""What clients reach: an ASGI application that hands each request, with its body, to a replica, and returns its answer.

A replica that dies before anything of an answer was sent is as if it had never been asked: another one is. Behind that a stream ends with
an error in OpenAI's format. A client that leaves cancels its request where it runs. Keys and the length of bodies are checked here.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polydraft.integrations.ray.prefixes import digests, prompt_of
from polydraft.server.errors import ApiError
from polydraft.server.incoming import body_of, unless_gone

log = logging.getLogger("polydraft.server")
TRIES = 3
"""That a request gets, each on another replica."""


@dataclass(frozen=True)
class ForwardedCall:
    """A request as it travels: the ASGI scope's plain entries, the whole body, and what its prompt begins with."""

    scope: Mapping[str, Any]
    body: bytes
    digests: tuple[bytes, ...]

    ENTRIES: ClassVar = (
        "type",
        "http_version",
        "method",
        "scheme",
        "path",
        "raw_path",
        "query_string",
        "root_path",
        "headers",
        "client",
        "server",
    )

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> "ForwardedCall":
        """From a request that was received."""
        return cls(
            {name: scope[name] for name in cls.ENTRIES if name in scope}, body, digests(prompt_of(body))
        )


async def answered(app: ASGIApp, call: ForwardedCall) -> AsyncGenerator[list[Message], None]:
    """The ASGI messages of an application's answer; those that came while nobody took any come together. To close it is to leave."""
    messages = asyncio.Queue[Message | None]()
    gone = asyncio.Event()
    body = [call.body]

    async def receive() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop()}
        await gone.wait()
        return {"type": "http.disconnect"}

    task = asyncio.ensure_future(app({**call.scope, "asgi": {"version": "3.0"}}, receive, messages.put))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        ended = False
        while not ended:
            first_messages = [await messages.get()]
            while not messages.empty():
                first_messages.append(messages.get_nowait())
            ended = first_messages[-1] is None
            if bodies := [message for message in first_messages if message is not None]:
                yield bodies
    finally:
        gone.set()
        await task


class ReplicaLostError(Exception):
    """The replica that had a request is no more."""


class Replicas(Protocol):
    """Those behind an ingress."""

    def answer(self, call: ForwardedCall) -> AsyncGenerator[list[Message], None]:
        """The ASGI messages of one replica's answer, as they come; raises `ReplicaLostError`."""
        ...

    async def figures(self) -> dict[str, str]:
        """Of each, what it tells Prometheus."""
        ...


class Ingress:
    """The application. max_body: bytes."""

    def __init__(self, replicas: Replicas, max_body: int) -> None:
        self._replicas = replicas
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI; `http` alone."""
        request = Request(scope, receive)
        if scope["path"] == "/metrics" and scope["method"] == "GET":
            figures = merged(await self._replicas.figures())
            await Response(figures, media_type="text/plain; version=0.0.4; charset=utf-8")(
                scope, receive, send
            )
            return
        call = ForwardedCall.of(scope, await body_of(request, self._max_body))
        await unless_gone(request, self._answer(call, Sent(send, call.scope["path"])))

    async def _answer(self, call: ForwardedCall, sent: "Sent") -> None:
        for _ in range(TRIES):
            try:
                async with aclosing(self._replicas.answer(call)) as answer:
                    async for messages in answer:
                        for message in messages:
                            await sent(message)
                return
            except ReplicaLostError as error:
                log.warning("a replica was lost with a request to %s: %s", call.scope["path"], error)
                if sent.began:
                    await sent.broken()
                    return
        raise ApiError(503, f"{TRIES} replicas were lost with this request. Ask again later.")


class Sent:
    """What a client was sent so far. The head is held back until there is a body to it: until then another replica may answer."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._head = None
        self._events = 0
        self.began = False

    async def __call__(self, message: Message) -> None:
        """One ASGI message of an answer."""
        if message["type"] == "http.response.start":
            self._head = message
            return
        if not self.began:
            assert self._head is not None
            self.began = True
            await self._send(self._head)
        self._events += message.get("body", b"").count(b"\n\n")
        await self._send(message)

    async def broken(self) -> None:
        """The end of an answer that nobody goes on with: of a stream an event that says so.

        Raises:
            ApiError: it is no stream, so that only a closed connection can say it.
        """
        error = ApiError(503, "the replica with this request was lost before its end. Ask again.")
        assert self._head is not None
        if not dict(self._head["headers"]).get(b"content-type", b"").startswith(b"text/event-stream"):
            raise error
        error_event = f"data: {json.dumps(error.body)}\n\n"
        end = "data: [DONE]\n\n"
        if self._path == "/v1/responses":
            error_fields = error.body["error"]
            event = {
                "type": "error",
                "sequence_number": self._events,
                "code": error_fields["type"],
                "message": error_fields["message"],
            }
            error_event = f"event: error\ndata: {json.dumps(event | {'param': None})}\n\n"
            end = ""
        with suppress(OSError):  # the client has left
            await self._send({"type": "http.response.body", "body": (error_event + end).encode()})


def merged(figures: Mapping[str, str]) -> str:
    """The expositions of several replicas as one, each sample labelled with its replica.

    Example:
        >>> print(merged({"a": '# TYPE n gauge\\nn{m="x"} 1.0', "b": '# TYPE n gauge\\nn{m="x"} 2.0'}))
        # TYPE n gauge
        n{replica="a",m="x"} 1.0
        n{replica="b",m="x"} 2.0
    """
    families: dict[str, dict[str, None]] = {}
    for replica, text in figures.items():
        family = dict[str, None]()
        for line in text.splitlines():
            if line.startswith("#"):
                family = families.setdefault(line.split()[2], {})
                family[line] = None
            else:
                family[line.replace("{", f'{{replica="{replica}",', 1)] = None
    return "\n".join(line for family in families.values() for line in family)
