"""A drafter's state of a sequence: begun, given back, and forgotten where the drafter fails: the text goes on without drafts.

A long text is read by a draft model in pieces. A state whose `release` fails is forgotten; what it holds is the drafter's to mend.
"""

import warnings
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf
from time import perf_counter

from polydraft.core.methods import Drafter
from polydraft.core.targets import Scores
from polydraft.drafters.base import teach_each
from polydraft.engine.sequence import Sequence
from polydraft.errors import DrafterWarning, DraftWorkerError, place
from polydraft.models.slot_pool import given_back_on_error

__all__ = ["Pace", "begin", "begin_one", "release", "switch_off", "teach"]

PIECE = 512
FIRST = 64
FEWEST = 16
"""Tokens of a prompt that a draft model reads in a step: maximum; beside others, before any was timed; minimum."""
PIECE_SECONDS = 0.05
"""That a piece takes beside others, at most; the last one may be twice as long."""


def switch_off(drafter: Drafter, sequence: Sequence, error: Exception) -> None:
    if isinstance(error, DraftWorkerError):  # no failure of this request's
        raise error
    sequence.drafting = False
    note_failure(sequence, error)
    release(drafter, [sequence])


def begin_anew(drafter: Drafter, sequence: Sequence, error: Exception) -> None:
    """Forget a state that a failed step has left, perhaps of another sequence's making; off where this one was alone in it.

    The next step begins with its text, in pieces as with that of a new sequence.
    """
    if sequence.is_suspect or isinstance(error, DraftWorkerError):
        switch_off(drafter, sequence, error)
    else:
        release(drafter, [sequence])
        sequence.drafting = False
        sequence.held = True
        sequence.is_suspect = True


def note_failure(sequence: Sequence, error: Exception) -> None:
    at = place(error)
    reason = f"{type(error).__name__}: {error}" + (f", at {at}" if at else "")
    sequence.sample.stats.drafter_error = sequence.sample.stats.drafter_error or reason
    warnings.warn(
        f"the drafter failed for request {sequence.request.id!r} and is off for it now ({reason}); its text goes on without drafts.",
        DrafterWarning,
        stacklevel=2,
    )


class Pace:
    """How many tokens of a long text a drafter's own model reads in a step: as many as there is time for."""

    def __init__(self) -> None:
        self._token_seconds = 0.0

    def count(self, spare: float) -> int:
        """spare: seconds for which those wait that run beside it; inf where nobody does."""
        if spare == inf:
            return PIECE
        seconds = min(spare, PIECE_SECONDS)
        return min(max(int(seconds / self._token_seconds), FEWEST), PIECE) if self._token_seconds else FIRST

    def learn(self, count: int, seconds: float) -> None:
        """So many tokens took so long."""
        self._token_seconds = seconds / count


def begin(
    drafter: Drafter, sequences: Seq[Sequence], pace: Pace | None, spare: float = inf
) -> list[Sequence]:
    """Give each sequence without one a drafter state that has read all its committed tokens; those that have to wait for theirs.

    A long text is read over several steps, one text a step. Meanwhile its sequence has no drafts; where these decide the output, with a seed above
    temperature 0, it is left out of the steps; without a pace all of it is read at once then. beside: whether others wait for this step.
    """
    late = list[Sequence]()
    count = pace.count(spare) if pace else PIECE
    spent = False
    for s in [s for s in sequences if s.drafting and s.state is None]:
        start = perf_counter()
        at_once = pace is None and s.follows_drafts
        if at_once or ((not spent or len(s.token_ids) <= count) and _read_ahead(drafter, s, count)):
            begin_one(drafter, s, len(s.token_ids))
            continue
        if pace and not spent and s.drafting:
            pace.learn(count, perf_counter() - start)
            spent = True
        if s.drafting and s.follows_drafts:
            late.append(s)
    return late


def _read_ahead(drafter: Drafter, s: Sequence, count: int) -> bool:
    """Whether a drafter has read enough of a text to begin; so many tokens more are read where it has not."""
    read_ahead = s.speculation.offers.read_ahead
    if read_ahead is None:
        return True
    try:
        return read_ahead(s.token_ids, count)
    except Exception as error:
        switch_off(drafter, s, error)
        return False


def begin_one(drafter: Drafter, s: Sequence, length: int, known: Scores | None = None) -> None:
    """Begin with so many of the committed tokens. known: hidden states of all of them but the last, where there are more."""
    request = replace(
        s.request,
        prompt_token_ids=tuple(s.token_ids[:length]),
        slot=s.cursor.slot,
        second_slot=None if s.second is None else s.second.slot,
    )
    try:
        with given_back_on_error():
            (s.state,) = drafter.start([request])
        s.num_read = length
        if drafter.needs.hidden and known is not None:  # all of them
            read = s.speculation.offers.read
            assert read is not None  # as was checked when the engine was built
            (s.state,) = read([s.state], known)
    except Exception as error:
        switch_off(drafter, s, error)


def release(drafter: Drafter, sequences: Seq[Sequence]) -> None:
    """Give back what the sequences' states hold, each on its own, even where another fails."""
    for s in sequences:
        s.unread.clear()
        if s.state is not None:
            state = s.state
            s.state = None
            try:
                drafter.release([state])
            except Exception as error:
                note_failure(s, error)


def teach(drafter: Drafter, sequence: Sequence) -> None:
    """Tell a drafter that learns from outputs what a finished sequence emitted."""
    emitted = sequence.token_ids[sequence.num_prompt_tokens :]
    try:
        if emitted:
            teach_each([drafter], emitted)
    except Exception as error:
        note_failure(sequence, error)
