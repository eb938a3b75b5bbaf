"""How studies time what they compare: contenders by turns, so that what else the machine does meets all of them alike."""

from collections.abc import Callable, Mapping
from time import perf_counter, process_time
from typing import TypeVar

Name = TypeVar("Name")
Clock = Callable[[], float]


def seconds(act: Callable[[], object], clock: Clock = perf_counter) -> float:
    """Of one call. clock: the wall's, `time.process_time` or `time.thread_time`."""
    begin = clock()
    act()
    return clock() - begin


def by_turns(
    acts: Mapping[Name, Callable[[], object]],
    turns: int,
    *,
    warm: int = 1,
    twice: bool = False,
    clock: Clock = perf_counter,
) -> dict[Name, list[float]]:
    """Seconds of each act in each turn. warm: first turns that are not counted.  twice: each is called once before it is timed,
    so that what ran before it is out of the caches.

    Example:
        >>> times = by_turns({"a": lambda: None, "b": lambda: None}, 3)
        >>> [len(each) for each in times.values()]
        [3, 3]
    """
    times: dict[Name, list[float]] = {name: [] for name in acts}
    for turn in range(turns + warm):
        for name, act in acts.items():
            if twice:
                act()
            took = seconds(act, clock)
            if turn >= warm:
                times[name].append(took)
    return times


def shortest(act: Callable[[], object], turns: int, clock: Clock = perf_counter) -> float:
    """Seconds of the shortest of some calls, behind one that is not counted."""
    return min(by_turns({None: act}, turns, clock=clock)[None])


def both_seconds(act: Callable[[], object]) -> tuple[float, float]:
    """The wall's seconds and the process's own."""
    busy = process_time()
    wall = seconds(act)
    return wall, process_time() - busy
