"""Addresses that are asked. A proxy of the environment is for other machines: it cannot reach what listens on this one."""

from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener


def is_of_this_machine(url: str) -> bool:
    """Whether an address leads to this machine by its own name or number.

    Example:
        >>> [is_of_this_machine(f"http://{host}/v1") for host in ("localhost:8000", "127.0.0.1", "[::1]:80", "10.0.0.1", "llm.example")]
        [True, True, True, False, False]
    """
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def opened(request: Request, seconds: float) -> Any:
    """The response to a request, as of `urllib.request.urlopen`; seconds: without a byte, after which it fails."""
    handlers = [ProxyHandler({})] if is_of_this_machine(request.full_url) else []
    return build_opener(*handlers).open(request, timeout=seconds)
