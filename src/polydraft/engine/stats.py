"""What a request cost and what its drafts were worth, measured while it runs."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

PHASES = ("prefill", "drafting", "scoring", "verifying", "other")


def _no_seconds() -> dict[str, float]:
    return dict.fromkeys(PHASES, 0.0)


@dataclass
class RequestStats:
    """Counts and seconds of one sequence; a step's seconds are shared equally by the sequences in it.

    prompt_tokens, cached_tokens: of the prompt, and those of them that a slot still held from an earlier request.  read_tokens: that are read by now.
    steps: forward passes of the target after the prefill.
    drafted_by_depth[d]: steps whose tree reached depth d+1; accepted_by_depth[d]: steps that accepted a token there.
    seconds: by phase, see `PHASES`; compiling and loading compiled code is left out.
    arrival: of `add_request`, on `perf_counter`.  seconds_waiting: from then until it had a slot.
    seconds_to_first_token, seconds_to_last_token: from `add_request`, waiting and compiling included.  first_tokens: that the first step gave.
    near_ties: greedy decisions within `tie_margin`, which were scored again.
    drafter_counts: what a drafter says of its own work, such as `papers.amusd.lead.Counts`; None where it says nothing.

    Example:
        >>> stats = RequestStats()
        >>> stats.record(num_nodes=4, depth=4, num_accepted=2)
        >>> stats.tokens_per_step, stats.acceptance_rate, stats.acceptance_by_depth
        (3.0, 0.5, [1.0, 1.0, 0.0, 0.0])
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    read_tokens: int = 0
    generated_tokens: int = 0
    discarded_tokens: int = 0
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_depth: list[int] = field(default_factory=list[int])
    accepted_by_depth: list[int] = field(default_factory=list[int])
    seconds: dict[str, float] = field(default_factory=_no_seconds)
    arrival: float = field(default_factory=perf_counter)
    seconds_waiting: float | None = None
    seconds_to_first_token: float | None = None
    seconds_to_last_token: float | None = None
    first_tokens: int = 0
    drafter_error: str | None = None
    near_ties: int = 0
    drafter_counts: dict[str, float] | None = None

    def record(self, *, num_nodes: int, depth: int, num_accepted: int) -> None:
        """Count one step: a tree of `num_nodes` drafted tokens reaching `depth`, `num_accepted` of them accepted."""
        self.steps += 1
        self.drafted_tokens += num_nodes
        self.accepted_tokens += num_accepted
        self.generated_tokens += num_accepted + 1
        for counts, reached in ((self.drafted_by_depth, depth), (self.accepted_by_depth, num_accepted)):
            counts.extend([0] * (depth - len(counts)))
            for d in range(reached):
                counts[d] += 1

    def discard(self, num_tokens: int) -> None:
        """Discard tokens of the last step that lie behind a stop."""
        self.generated_tokens -= num_tokens
        self.discarded_tokens += num_tokens

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens per forward pass of the target (block efficiency; vLLM's mean acceptance length, EAGLE's tau)."""
        return self.generated_tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted tokens over drafted ones."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Acceptance rate by depth: share of the steps with a draft of depth d+1 that accepted a token there."""
        return [
            a / d if d else 0.0 for a, d in zip(self.accepted_by_depth, self.drafted_by_depth, strict=True)
        ]

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the request's share of the time after its prefill."""
        decoding = self.total_seconds - self.seconds["prefill"]
        return self.generated_tokens / decoding if decoding > 0 else 0.0

    @property
    def reading_seconds(self) -> float:
        """By the wall, whoever ran beside: from its slot until the first token."""
        if self.seconds_to_first_token is None:
            return 0.0
        return self.seconds_to_first_token - (self.seconds_waiting or 0.0)

    @property
    def writing_seconds(self) -> float:
        """By the wall, whoever ran beside: from the first step's tokens, `first_tokens`, to the last."""
        if self.seconds_to_first_token is None or self.seconds_to_last_token is None:
            return 0.0
        return self.seconds_to_last_token - self.seconds_to_first_token

    def emitted(self, num_tokens: int) -> None:
        """Note the time: a step gave tokens."""
        self.seconds_to_last_token = perf_counter() - self.arrival
        if self.seconds_to_first_token is None:
            self.seconds_to_first_token = self.seconds_to_last_token
            self.first_tokens = num_tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "steps": self.steps,
            "tokens_per_step": self.tokens_per_step,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "acceptance_rate": self.acceptance_rate,
            "drafted_by_depth": self.drafted_by_depth,
            "accepted_by_depth": self.accepted_by_depth,
            "acceptance_by_depth": self.acceptance_by_depth,
            "seconds": self.seconds,
            "seconds_waiting": self.seconds_waiting,
            "seconds_to_first_token": self.seconds_to_first_token,
            "seconds_to_last_token": self.seconds_to_last_token,
            "tokens_per_second": self.tokens_per_second,
            "drafter_error": self.drafter_error,
            "near_ties": self.near_ties,
            "drafter_counts": self.drafter_counts,
        }


def share(stats: Sequence[RequestStats], seconds: Mapping[str, float]) -> None:
    """Book a step's seconds on its sequences, equally."""
    for request_stats in stats:
        for phase, value in seconds.items():
            request_stats.seconds[phase] += value / len(stats)


class _Phase(AbstractContextManager[None]):
    def __init__(self, seconds: dict[str, float], name: str, clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self.name = name
        self.clock = clock

    def __enter__(self) -> None:
        self.start = self.clock()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] += self.clock() - self.start


class Stopwatch:
    """Seconds by phase within one step; what no phase claims is "other". clock: seconds, of the wall by default."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self.seconds = _no_seconds()
        self._clock = clock
        self._start = clock()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """While entered, time counts towards `name`."""
        return _Phase(self.seconds, name, self._clock)

    def stop(self) -> dict[str, float]:
        """Seconds by phase, summing to the time since the watch was made."""
        self.seconds["other"] += self._clock() - self._start - sum(self.seconds.values())
        return self.seconds
