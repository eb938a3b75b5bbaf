"""States of drafters that are made of others: started and released together."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from polydraft.core import Drafter, Request


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
