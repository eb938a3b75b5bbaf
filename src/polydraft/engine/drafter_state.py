"""A drafter's state of a sequence: begun, given back, and forgotten where the drafter fails: the text goes on without drafts.

A state whose `release` fails is forgotten; what it holds is the drafter's to mend.
"""

import warnings
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from polydraft.core.methods import Drafter
from polydraft.core.targets import Scores
from polydraft.drafters.base import teach_each
from polydraft.engine.sequence import Sequence
from polydraft.errors import DrafterWarning, DraftWorkerError, place
from polydraft.models.slot_pool import given_back_on_error


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


def drafter_cursor(s: Sequence) -> Any:
    """How far the drafter has read a sequence that it has begun with; None where it reads nothing."""
    cursor = s.speculation.offers.cursor
    return None if cursor is None or s.state is None else cursor(s.state)


def begin(drafter: Drafter, s: Sequence, known: Scores | None = None) -> None:
    """Begin with the committed tokens. known: hidden states of all of them but the last, of a drafter that takes no pieces."""
    request = replace(
        s.request,
        prompt_token_ids=tuple(s.token_ids),
        slot=s.cursor.slot,
        second_slot=None if s.second is None else s.second.slot,
    )
    try:
        with given_back_on_error():
            (s.state,) = drafter.start([request])
        s.num_told = len(s.token_ids)
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
