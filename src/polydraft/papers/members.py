"""States of drafters that are made of others: started, read for and released together."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from polydraft.core import Drafter, Request
from polydraft.core.cursor import Cursor


class Cursors:
    """Those of several drafters for one text, None for one that reads nothing: what each lacks, it reads. told: of those that are told hidden states."""

    def __init__(self, cursors: Iterable[Cursor | None], told: Iterable[Cursor | None] = ()) -> None:
        self._cursors = [cursor for cursor in cursors if cursor is not None]
        self._told = [cursor for cursor in told if cursor is not None]

    @property
    def length(self) -> int:
        """Tokens whose hidden states nobody needs."""
        return min((cursor.length for cursor in self._told), default=0)

    def num_unread(self, text: Sequence[int]) -> int:
        """Of the one that has most to read."""
        return max((cursor.num_unread(text) for cursor in self._cursors), default=0)

    def read(self, text: Sequence[int], count: int) -> None:
        """Read up to so many tokens in each."""
        for cursor in self._cursors:
            if num_unread := cursor.num_unread(text):
                cursor.read(text, min(count, num_unread))


def start_each(asked: Iterable[tuple[Drafter, Sequence[Request]]]) -> list[list[Any]]:
    """States from each of several drafters; where one fails, the others' are released."""
    with ExitStack() as held:
        started: list[list[Any]] = []
        for drafter, requests in asked:
            started.append(drafter.start(requests))
            held.callback(drafter.release, started[-1])
        held.pop_all()
    return started


def release_each(held: Iterable[tuple[Drafter, Sequence[Any]]]) -> None:
    """Release the states of several drafters, all of them even where one fails; its error is raised afterwards."""
    with ExitStack() as every:
        for drafter, states in held:
            every.callback(drafter.release, states)
