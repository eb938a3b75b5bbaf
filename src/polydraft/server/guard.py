"""Around every request: an id, a key where one is asked for, and a last net, so that no trace of a failure reaches a client."""

import hmac
import logging
import re
from collections.abc import Sequence
from hashlib import sha256
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polydraft.server.errors import ApiError, of

log = logging.getLogger("polydraft.server")
CONTENT = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class Guard:
    """ASGI middleware. keys: any of them opens; none asks for none.  hosts: names by which a server of this machine alone is asked without a key,
    beside its own; None: any, as it is open to others.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str] = (), hosts: Sequence[str] | None = None) -> None:
        self.app, self._keys = app, [sha256(key.encode()).digest() for key in keys]
        self._hosts = None if keys else hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        name = request_id if re.fullmatch(r"[\w.-]{1,64}", request_id, re.ASCII) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = name
        began = False

        async def send_marked(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                out = MutableHeaders(scope=message)
                out["x-request-id"], out["x-content-type-options"] = name, "nosniff"
                out["content-security-policy"], out["referrer-policy"] = CONTENT, "no-referrer"
            await send(message)

        try:
            if self._hosts is not None and not _is_own(headers.get("host", ""), self._hosts):
                raise ApiError(403, "the Host header names another machine than this one; a page of another site may have been led here. "
                                    "Ask for localhost, or start the server with an API key or --allowed-host.")  # fmt: skip
            needs_key = not re.fullmatch(r"/|/page/.*|/health|/ready|/metrics", scope["path"]) and scope["method"] != "OPTIONS"
            if needs_key and not self._opens(headers):
                raise ApiError(401, "no valid API key was given; send it as 'Authorization: Bearer KEY'.", code="invalid_api_key")
            await self.app(scope, receive, send_marked)
        except Exception as error:
            told_error = of(error)
            if told_error.status >= 500:
                log.exception("request %s failed", name)
            if not began:
                await told_error.response(scope["path"])(scope, receive, send_marked)

    def _opens(self, headers: Headers) -> bool:
        """Compared in a time that does not depend on the key."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = sha256(key.encode("latin-1", "replace")).digest()
        matches = [hmac.compare_digest(digest, digest_of_key) for digest_of_key in self._keys]
        return any(matches) or not self._keys


def _is_own(host: str, others: Sequence[str]) -> bool:
    """Whether a Host header names this machine: by an address, by a name without a dot or of localhost, or as one of the others.

    A page whose name is made to lead to this machine (DNS rebinding) asks for a name with a dot.

    Example:
        >>> [_is_own(host, ["llm.example.org"]) for host in ("localhost:8000", "127.0.0.1", "[::1]:80", "llm.example.org", "evil.example:8000")]
        [True, True, True, True, False]
    """
    name = re.sub(r":\d*$", "", host).lower().rstrip(".")
    address = re.fullmatch(r"\[[0-9a-f:.]+\]|\d{1,3}(\.\d{1,3}){3}", name)
    return address is not None or "." not in name or name.endswith(".localhost") or name in others
