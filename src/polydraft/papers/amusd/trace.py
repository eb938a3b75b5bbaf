"""When each worker did what, as a file that Perfetto and chrome://tracing open (the trace event format, JSON)."""

import json
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from polydraft.files.atomic import replacing

DRAFT = "draft worker"
VERIFY = "verify worker"
MOST_EVENTS = 200_000
"""The newest that are stored."""


class Span(NamedTuple):
    """What a worker did from `begin` to `end`, in seconds of one clock."""

    worker: str
    name: str
    begin: float
    end: float
    details: dict[str, Any]


class Trace:
    """Events of both workers; appended from either thread.

    Example:
        >>> trace = Trace()
        >>> trace.add(VERIFY, "verify", 0.0, 2.0, rows=3)
        >>> trace.add(DRAFT, "draft", 0.5, 1.0)
        >>> trace.overlap, trace.draft_steps_inside
        (0.5, 1)
    """

    def __init__(self) -> None:
        self.events: deque[Span] = deque(maxlen=MOST_EVENTS)

    def add(self, worker: str, name: str, begin: float, end: float, **details: Any) -> None:
        self.events.append(Span(worker, name, begin, end, details))

    def of(self, name: str) -> list[Span]:
        """Events of this name, in order."""
        return sorted((e for e in list(self.events) if e.name == name), key=lambda e: e.begin)

    @property
    def overlap(self) -> float:
        """Seconds in which both workers worked."""
        return sum(
            max(0.0, min(d.end, v.end) - max(d.begin, v.begin))
            for d, v in _meeting(self.of("draft"), self.of("verify"))
        )

    @property
    def draft_steps_inside(self) -> int:
        """Draft steps that began and ended within one verify forward pass."""
        return sum(
            v.begin <= d.begin and d.end <= v.end for d, v in _meeting(self.of("draft"), self.of("verify"))
        )

    def to_dict(self) -> dict[str, Any]:
        """The trace event format: complete events, microseconds since the first."""
        events = sorted(self.events.copy(), key=lambda e: e.begin)
        zero = events[0].begin if events else 0.0
        workers = [VERIFY, DRAFT]
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": worker}}
            for tid, worker in enumerate(workers, 1)
        ]
        return {
            "displayTimeUnit": "ms",
            "traceEvents": [
                *names,
                *(
                    {
                        "ph": "X",
                        "name": e.name,
                        "cat": e.worker,
                        "pid": 1,
                        "tid": 1 + workers.index(e.worker),
                        "ts": 1e6 * (e.begin - zero),
                        "dur": 1e6 * (e.end - e.begin),
                        "args": e.details,
                    }
                    for e in events
                ),
            ],
        }

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        with replacing(path) as file:
            file.write(json.dumps(self.to_dict()).encode())


def _meeting(drafts: list[Span], passes: list[Span]) -> list[tuple[Span, Span]]:
    """Draft steps and forward passes that share some time; both in order, forward passes one after the other."""
    pairs = list[tuple[Span, Span]]()
    first = 0
    for d in drafts:
        while first < len(passes) and passes[first].end <= d.begin:
            first += 1
        for v in passes[first:]:
            if v.begin >= d.end:
                break
            pairs.append((d, v))
    return pairs
