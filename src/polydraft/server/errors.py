"""Errors as OpenAI writes them: {"error": {"message", "type", "param", "code"}} with a status that fits."""

import re
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from polydraft.errors import BusyError, CapacityError, ClosedError, PolydraftError

KINDS = {"str", "int", "float", "bool", "list", "dict", "none"}
"""What pydantic calls the members of a union."""
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A refusal: an HTTP status, what to do, and OpenAI's `param` and `code` where there are any."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def ollama(self) -> dict[str, Any]:
        """As its clients read it."""
        return {"error": str(self)}

    def response(self, path: str = "") -> JSONResponse:
        """As clients of a path read it."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else None
        body = {"type": "error", **self.body} if path.startswith("/v1/messages") else self.body
        return JSONResponse(self.ollama if path.startswith("/api/") else body, self.status, headers)


def of(error: Exception) -> ApiError:
    """What a client is told of an error: ours in full, of anything else only that it happened.

    Example:
        >>> of(BusyError("wait")).status, of(CapacityError("too long")).code, str(of(KeyError("a secret")))
        (429, 'context_length_exceeded', 'the server failed on this request; its log says why.')
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _invalid(error)
    if isinstance(error, ClosedError):
        return ApiError(
            503,
            "the server is going down and takes no more requests. Ask again in a moment, or another server.",
            code="going_down",
        )
    if isinstance(error, BusyError):
        return ApiError(429, str(error), code="rate_limit_exceeded")
    if isinstance(error, CapacityError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, PolydraftError) and isinstance(error, (ValueError, LookupError)):
        return ApiError(400, str(error))
    return ApiError(500, "the server failed on this request; its log says why.")


def _invalid(error: ValidationError) -> ApiError:
    """What is wrong with a body, and where: of what may be of several kinds, by all that fit furthest."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    furthest = max(len(_place(problem)) for problem in problems)
    places = [problem for problem in problems if len(_place(problem)) == furthest]
    alike = [problem["msg"] for problem in places if _place(problem) == _place(places[0])]
    where = ".".join(_place(places[0])) or None
    reason = "; or: ".join(dict.fromkeys(alike))
    return ApiError(400, f"{where or 'the body'}: {reason}", param=where)


def _place(problem: Any) -> list[str]:
    """Where something is wrong, by names in the body."""
    return [str(part) for part in problem["loc"] if _is_name(part)]


def _is_name(part: int | str) -> bool:
    """Whether a part of a place is in the body, and not the kind of value that was tried there."""
    return isinstance(part, int) or (re.fullmatch("[a-z0-9_]+", part) is not None and part not in KINDS)
