"""Outputs that no call of `step` has returned yet, and the inboxes that get theirs at once."""

from collections.abc import Collection
from typing import Protocol

from polydraft.engine.output import StepOutput


class Inbox(Protocol):
    """Where the outputs of a request go, as steps give them."""

    def append(self, output: StepOutput, /) -> None: ...


class Outbox:
    """streams: inboxes by the id of their request."""

    def __init__(self) -> None:
        self._outputs: list[StepOutput] = []
        self.streams: dict[str, Inbox] = {}

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def give(self, output: StepOutput) -> None:
        """One more."""
        self._outputs.append(output)
        if (inbox := self.streams.get(output.request_id)) is not None:
            inbox.append(output)

    def take(self) -> list[StepOutput]:
        """All of them, once."""
        outputs = self._outputs
        self._outputs = []
        return outputs

    def drop(self, request_ids: Collection[str]) -> None:
        """Nobody reads those of these requests."""
        self._outputs = [output for output in self._outputs if output.request_id not in request_ids]
