"""Memory of the KV cache where slots grow: which requests may join, and which one waits again where texts have outgrown it.

No request has a fixed share. One that grows beyond what is there makes the one that came last wait, which is read again later and loses no token
(preemption by recomputation, Kwon et al. 2023, arXiv 2309.06180).
"""

from collections.abc import Sequence as Seq

from polydraft.core import Target
from polydraft.engine.sequence import Sequence
from polydraft.models.slot_pool import Slots
from polydraft.models.slots import TREE_ROOM


class Room:
    """Of the slots of a target. per_request: slots that each request takes."""

    def __init__(self, target: Target, slots: Slots, per_request: int = 1) -> None:
        self._slots = slots
        self._per_request = per_request
        bound = target.cache_grows and target.cache_tokens < target.max_num_seqs * (
            target.max_model_len + TREE_ROOM
        )
        self._most = target.cache_tokens if bound else None

    def _taken(self, sequences: Seq[Sequence]) -> int:
        return self._per_request * sum(len(s.token_ids) + TREE_ROOM for s in sequences)

    def admits(self, s: Sequence, running: Seq[Sequence]) -> bool:
        """Whether what runs leaves room for one more, as long as it is now."""
        return self._most is None or not running or self._taken([*running, s]) <= self._most

    def outgrown(self, running: list[Sequence]) -> list[Sequence]:
        """Those that have to wait, the last first, so that the others have room for their next step."""
        staying = list(running)
        while self._most is not None and len(staying) > 1 and self._taken(staying) > self._most:
            staying.pop()
        return running[len(staying) :][::-1]

    def make(self, running: Seq[Sequence]) -> None:
        """Take the memory of free slots for the next step of those that run."""
        if self._most is not None:
            self._slots.make_room(self._per_request * len(running) * TREE_ROOM)
