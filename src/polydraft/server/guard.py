"""Around every request: an id, a key where one is asked for, and a last net, so that no trace of a failure reaches a client."""

import hmac
import logging
import re
from collections.abc import Sequence
from hashlib import sha256
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polydraft.server.errors import ApiError, of

log = logging.getLogger("polydraft.server")
CONTENT = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class Guard:
    """ASGI middleware. keys: any of them opens; none asks for none.  hosts: names by which a server of this machine alone is asked without a key,
    beside its own; None: any, as it is open to others.  origins: sites beside its own whose pages may call it without a key, or "*".
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str] = (),
        hosts: Sequence[str] | None = None,
        origins: Sequence[str] = (),
    ) -> None:
        self.app = app
        self._keys = [sha256(key.encode()).digest() for key in keys]
        self._hosts = None if keys else hosts
        self._origins = ("*",) if keys else origins  # browsers send no key for a page that has none

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
                out["x-request-id"] = name
                out["x-content-type-options"] = "nosniff"
                out["content-security-policy"] = CONTENT
                out["referrer-policy"] = "no-referrer"
            await send(message)

        try:
            self._check(scope["method"], scope["path"], headers)
            await self.app(scope, receive, send_marked)
        except Exception as error:
            told_error = of(error)
            if told_error.status >= 500:
                log.exception("request %s failed", name)
            if not began:
                await told_error.response(scope["path"])(scope, receive, send_marked)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        """Raise what a request is refused for: its host, its site, its key."""
        host = headers.get("host", "")
        if self._hosts is not None and not _is_own(host, self._hosts):
            raise ApiError(
                403,
                f"the Host header names {host[:200]!r}, another machine than this one; a page of another site may have been led here. "
                f"Ask for localhost, or start the server with an API key or --allowed-host {_name(host)[:200]}.",
            )
        if method not in ("GET", "HEAD", "OPTIONS") and _is_of_another_site(headers, self._origins):
            origin = headers.get("origin", "ORIGIN")[:200]
            raise ApiError(
                403,
                f"a page of another site asked. Start the server with --cors {origin} to let it, or with an API key.",
            )
        is_open = re.fullmatch(r"/|/page/.*|/health|/ready|/metrics", path) or method == "OPTIONS"
        if not (is_open or self._opens(headers)):
            raise ApiError(
                401,
                "no valid API key was given; send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
            )

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
    name = _name(host)
    address = re.fullmatch(r"\[[0-9a-f:.]+\]|\d{1,3}(\.\d{1,3}){3}", name)
    return address is not None or "." not in name or name.endswith(".localhost") or name in others


def _name(host: str) -> str:
    """Of a Host header, without its port."""
    return re.sub(r":\d*$", "", host).lower().rstrip(".")


def _is_of_another_site(headers: Headers, allowed: Sequence[str]) -> bool:
    """Whether a browser asks for a page that another server gave. Programs send neither header; old browsers, and those on plain HTTP, send `Origin` alone.

    Example:
        >>> [_is_of_another_site(Headers({"host": "localhost:8000", **more}), ["https://a.example"]) for more in
        ...  ({}, {"sec-fetch-site": "cross-site"}, {"origin": "http://localhost:8000"}, {"origin": "https://a.example"}, {"origin": "null"})]
        [False, True, False, False, True]
    """
    site = headers.get("sec-fetch-site")
    origin = headers.get("origin")
    if "*" in allowed or origin in allowed:
        return False
    if site is not None:  # no page can write it, and proxies do not change it
        return site not in ("same-origin", "none")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


class BelowRoot:
    """ASGI middleware for a server below a path of a proxy. root: that path, which some proxies take away and others leave."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self.app = app
        self.root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self.root:  # links of the page are relative
            await RedirectResponse(f"{self.root}/")(scope, receive, send)
            return
        below = path.startswith(f"{self.root}/")
        await self.app({**scope, "path": path.removeprefix(self.root)} if below else scope, receive, send)
