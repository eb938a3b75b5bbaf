"""How calls may begin in an answer: expressions of the heads of a model's own format, and of those that any model may answer in."""

from functools import lru_cache
from typing import Any, NamedTuple

import regex

from polydraft.server.formats import named
from polydraft.server.formats.form import SLOT, Format

SLOTS = {
    "name": r"(?P<name>[a-zA-Z0-9_.-]{1,256}?)",
    "id": r"[a-zA-Z0-9_.:-]{0,80}?",
    "index": r"\d{1,6}",
    "key": r"(?P<key>[^<>\"\n]{1,256}?)",
    "type": r"(?P<type>\w{1,16})",
    "string": r"(?P<string>true|false)",
}
BARE = regex.compile(
    r'(?:```(?:json)?\s*)?\{\s*"name"\s*:\s*"(?P<name>[a-zA-Z0-9_.-]{1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{"])'
)
"""The head of a call without marks."""
MOST_HEAD = 1024
"""Characters that a head may have."""


class CallHead(NamedTuple):
    """A way in which a call begins. begin: its mark.  pattern: of a whole head from its mark on.  form: of the arguments behind it.

    own: it is the model's own format.
    """

    begin: str
    pattern: Any
    form: Format
    own: bool


def expression(text: str) -> str:
    """An expression of a text with slots, in which blanks may be others.

    Example:
        >>> bool(regex.fullmatch(expression("<f={name}>\\n"), "<f=add> "))
        True
    """
    parts = list[str]()
    seen = set[str]()
    for number, part in enumerate(SLOT.split(text)):
        if number % 2:
            parts.append(f"(?P={part})" if part in seen and part == "name" else SLOTS[part])
            seen.add(part)
            continue
        words = regex.findall(r"\s+|[{}\[\]:,]|[^\s{}\[\]:,]+", part)
        parts += [
            r"\s*"
            if word.isspace()
            else rf"\s*{regex.escape(word)}\s*"
            if word in "{}[]:,"
            else regex.escape(word)
            for word in words
        ]
    return "".join(parts)


@lru_cache(maxsize=32)
def heads_of(form: Format) -> tuple[CallHead, ...]:
    """All ways in which a call may begin in an answer of a model."""
    heads = list[CallHead]()
    for one in dict.fromkeys((form, *named.ANY)):
        own = one is form
        behind = behind_head(one)
        alone = one.read_head or expression(one.head.lstrip())
        for begin, opening in ((one.begin, one.opening), (one.call_begin, "")):
            if begin and (opening or begin == one.call_begin):
                pattern = regex.compile(expression(opening) + alone + behind)
                heads.append(CallHead(begin, pattern, one, own))
    return tuple(heads)


def behind_head(form: Format) -> str:
    """What has to follow a head."""
    if form.coding in ("json", "keyed"):
        return r"\s*(?=[{\"])" if form.coding == "json" else r"\s*(?=\{)"
    if form.coding != "tagged" or form.parameter is None:
        return ""
    opening = expression(SLOT.split(form.parameter.opening)[0].strip())
    tail = form.tail.split()
    return rf"\s*(?={opening}|{expression(tail[0])})" if tail else rf"\s*(?={opening})"


@lru_cache(maxsize=64)
def opening_of(form: Format) -> Any:
    """Of a parameter."""
    assert form.parameter is not None
    return regex.compile(expression(form.parameter.opening.strip()))


@lru_cache(maxsize=64)
def next_head(form: Format) -> Any:
    return regex.compile((form.read_head or expression(form.head.strip())) + behind_head(form))
