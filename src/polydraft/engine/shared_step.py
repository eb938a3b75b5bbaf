"""One step of sequences that are drafted for alike: it is taken, each sequence gets what it emits, and those that are over or that failed leave."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from weakref import WeakKeyDictionary

from polydraft.engine.output import Outbox, StepResult, emit
from polydraft.engine.reader import Pace, Reader, StepTime
from polydraft.engine.roster import Leaving, Roster
from polydraft.engine.sequence import Sequence
from polydraft.engine.speculation import Speculation
from polydraft.engine.stats import share
from polydraft.engine.step import Stepper


@dataclass
class Clocks:
    """steps: of the seconds that steps take.  pricing: of those that a policy learns."""

    steps: Callable[[], float]
    pricing: Callable[[], float]


class SharedStep:
    """Steps of one engine. stepper: makes the one of a way to draft, when it is first asked for."""

    def __init__(
        self,
        stepper: Callable[..., Stepper],
        clocks: Clocks,
        reader: Reader,
        roster: Roster,
        leaving: Leaving,
        outbox: Outbox,
    ) -> None:
        self._stepper = stepper
        self._steppers: WeakKeyDictionary[Speculation, Stepper] = WeakKeyDictionary()
        self._clocks = clocks
        self._reader = reader
        self._roster = roster
        self._leaving = leaving
        self._outbox = outbox

    def __call__(
        self,
        chosen: Speculation,
        sequences: list[Sequence],
        riding: Mapping[Sequence, int],
        num_expected: int,
    ) -> StepTime:
        """Take one. riding: tokens of others that are read in its forward pass.  num_expected: sequences that the next ones have."""
        began = self._clocks.pricing()
        num_riding = sum(riding.values())
        chosen.policy.expect(num_expected, num_riding)
        spare = self._reader.spare(num_riding) if len(self._roster.running) > 1 else inf
        done = self._stepper_of(chosen)(sequences, riding, spare)
        start = self._clocks.steps()
        self._give(done, chosen.source)
        done.seconds["other"] += self._clocks.steps() - start
        took = _time_of(done, num_riding)
        self._reader.book(riding, done.seconds)  # which moves some of these seconds
        share([s.sample.stats for s in sequences], done.seconds)
        if done.sequences and not riding:
            priced = (self._clocks.pricing() - began) / max(sum(done.seconds.values()), 1e-9)
            chosen.policy.time({phase: priced * seconds for phase, seconds in done.seconds.items()})
        return took

    def _stepper_of(self, chosen: Speculation) -> Stepper:
        if chosen not in self._steppers:
            self._steppers[chosen] = self._stepper(chosen, clock=self._clocks.steps, pace=Pace())
        return self._steppers[chosen]

    def _give(self, done: StepResult, source: str) -> None:
        """What the step gave goes to the outbox; sequences that failed, or are over, leave."""
        failed = list(done.failed)
        for b, s in enumerate(done.sequences):
            try:
                output, failure = emit(done, b, s, source)
                self._outbox.give(output)
            except Exception as error:
                failure = error
            if failure is not None:
                failed.append((s, failure))
        for s, error in failed:
            self._leaving.fail(s, error)
        for s in done.sequences:
            if s.finished and s in self._roster.running:
                self._leaving.finish(s, retain=True)


def _time_of(done: StepResult, num_riding: int) -> StepTime:
    """What a step took. num_riding: tokens of others that were read in its forward pass."""
    drafts = done.num_scored - len(done.sequences) - len(done.failed)
    seconds = done.seconds
    whole = sum(seconds.values()) - seconds["prefill"]
    return StepTime(done.num_scored + num_riding, drafts, seconds["scoring"], seconds["drafting"], whole)
