"""Where what an answer writes ends: marks that have begun, marks behind a call, and the arguments of a call that is read whole."""

import regex

from polydraft.server.formats.form import Format
from polydraft.server.formats.values import read_arguments


def num_held(text: str, marks: tuple[str, ...]) -> int:
    """Characters at the end of a text with which a mark may begin."""
    longest = max(map(len, marks), default=1)
    lengths = range(min(longest - 1, len(text)), 0, -1)
    return next((n for n in lengths if any(len(m) > n and m.startswith(text[-n:]) for m in marks)), 0)


def without(text: str, marks: list[str], last: bool) -> str | None:
    """A text without the marks that it begins with, in order, some of which may be missing; None where more has to come."""
    for mark in marks:
        plain = text.lstrip()
        if plain.startswith(mark):
            text = plain[len(mark) :]
        elif mark.startswith(plain):
            return "" if last else None  # a mark that is cut is no content
    return text


def object_end(text: str) -> int | None:
    """Behind the bracket that closes an object of which the text is the rest."""
    found = regex.match(r'(?:[^"{}]|"(?:[^"\\]|\\.)*")*+\}', text)
    return found.end() if found else None


def end_of(text: str, form: Format) -> tuple[int, int] | None:
    """Where the arguments of a call end, and the call; None where they do not yet."""
    if form.coding == "nested":
        at = text.find(form.tail)
        return None if at < 0 else (at, at + len(form.tail))
    if form.coding == "keyed":
        at = text.find("}" + form.tail)
        return None if at < 0 else (at + 1, at + 1 + len(form.tail))
    found = regex.match(
        rf"(.*?){regex.escape(form.tail)}\s*(?:{regex.escape(form.closing or ']')}|,\s*[\w.-]+\()",
        text,
        regex.DOTALL,
    )
    while found:
        end = found.end(1)
        try:
            read_arguments(form, text[:end], None)
            return end, end + len(form.tail)
        except (ValueError, IndexError):
            found = regex.match(
                rf"(.{{{end + 1},}}?){regex.escape(form.tail)}\s*(?:{regex.escape(form.closing or ']')}|,\s*[\w.-]+\()",
                text,
                regex.DOTALL,
            )
    return None
