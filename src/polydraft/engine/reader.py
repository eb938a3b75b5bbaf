"""New prompts are read in pieces: while others run, each worth less than a step, so that running streams go on; alone, each so long
that whoever has left meanwhile is soon heard.

Chunked prefill, Agrawal et al. 2023, "SARATHI" (arXiv 2308.16369): pieces ride in the forward passes of steps where the target takes
both together (`core.Mixing`), and are read between the steps elsewhere. A piece is committed like any tokens: what is read of a prompt,
and by which pieces, changes no distribution.

The prompt is read first whose end is due first: what was read before it came, and its own length (fair queueing, Demers, Keshav &
Shenker 1989). Short prompts go before long ones, and those that come later delay one by no more than its own length.
"""

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from math import inf
from statistics import median
from time import perf_counter
from typing import NamedTuple

from polydraft.core import Drafter, EncoderDecoder, Mixing, Target
from polydraft.engine import drafter_state, drafting, reading
from polydraft.engine.sequence import Sequence, alike, slots_of
from polydraft.engine.stats import Stopwatch, share

FEWEST = 4
MOST = 256
"""Prompt tokens of a step while others run: fewer would pay a forward pass of their own for little, more are a stall on any machine."""
SHARE = 0.5
"""Of a step's time that pieces may take. At 0.75 the p99 between tokens grew 2.2 to 2.8 times while 892 tokens joined (SmolLM2-135M), as times vary."""
LONGEST = 0.25
"""Seconds of a step that the pieces of several prompts may take together."""
ALONE_SECONDS = 0.3
ALONE_FIRST = 256
ALONE_MIN = 128
"""Of a step that does nothing but read; and tokens that such a step reads before any was timed, and their minimum."""
NEWEST = 0.1
"""Weight of the last step in the means that the cost of a row is learnt from."""
RECENT = 9
HICCUP = 1.5
"""Steps whose median a piece is measured against, and how much longer than foretold a forward pass counts at most: one that the machine held up says
nothing about the next."""


PIECE = 512
AT_ONCE = 64
MIN_PIECE = 16
"""Tokens that a draft model reads in a step: maximum; so many that a draft reads them itself, and a first piece beside others; minimum."""
PIECE_SECONDS = 0.05
"""That a piece takes beside others, at most."""


class RowCost:
    """Seconds that one more row of a forward pass takes, by regression over the last ones.

    Example:
        >>> cost = RowCost()
        >>> for rows in (1, 4, 2, 1, 6):
        ...     cost.learn(rows, 0.005 + 0.002 * rows)
        >>> round(cost.seconds, 4)
        0.002
    """

    def __init__(self) -> None:
        self.seconds = self._rows = self._mean = self._variance = self._covariance = 0.0

    def learn(self, rows: int, seconds: float) -> None:
        """A forward pass of so many rows took so long. As long as all have the same number, one costs what they do on average."""
        if not self._rows:
            self._rows = float(rows)
            self._mean = seconds
        wider = rows - self._rows
        longer = min(seconds, HICCUP * (self._mean + max(wider, 0.0) * self.seconds)) - self._mean
        self._variance = (1 - NEWEST) * (self._variance + NEWEST * wider * wider)
        self._covariance = (1 - NEWEST) * (self._covariance + NEWEST * wider * longer)
        self._rows = self._rows + NEWEST * wider
        self._mean = self._mean + NEWEST * longer
        average = self._mean / self._rows
        self.seconds = (
            min(max(self._covariance / self._variance, average / 16), average)
            if self._variance > 0.01
            else average
        )


class StepTime(NamedTuple):
    """What a step took. rows: in its forward pass, drafts: those of drafted tokens.  scoring, drafting, whole: seconds of the forward pass, of making
    drafts, and of all."""

    rows: int
    drafts: int
    scoring: float
    drafting: float
    whole: float


class Reader:
    """What is read of new sequences in each step. clock: seconds, by which the size of pieces is learnt.  max_step: of a step in which others run.

    is_single: whether no second sequences are read, of which pieces lie behind those of the first.
    rides: whether pieces ride in the forward passes of steps.  step_seconds: of a step of plain decoding, without what rode in it; the median of the
        last. Drafts make steps longer, and pieces no longer than they are beside plain decoding: whoever waits for a step would wait for both.
    """

    def __init__(
        self, target: Target, clock: Callable[[], float], max_step: float = inf, *, is_single: bool = True
    ) -> None:
        self._target = target
        self._clock = clock
        self._max_step = max_step
        self.rides = isinstance(target, Mixing) and is_single
        self._cost = RowCost()
        self._seconds_per_token = 0.0
        self._num_read = 0
        self.step_seconds = 0.0
        self._recent = deque[float](maxlen=RECENT)
        self._alone = 0.0
        """Seconds of a token that is read alone."""

    def room(self, num_new: int = 1) -> int:
        """Prompt tokens that take a share of a step's time for each of the prompts that are read."""
        one_prompt = SHARE * self.step_seconds
        seconds = min(
            max(one_prompt, min(one_prompt * num_new, LONGEST)), max(self._max_step - self.step_seconds, 0.0)
        )
        count = int(seconds / self._seconds_per_token) if self._seconds_per_token else 0
        return max(1 if self.rides else FEWEST, min(MOST, count))

    def spare(self, riding: int) -> float:
        """Seconds that are left of what pieces may take of a step, for drafters that read, too. riding: prompt tokens in its forward pass."""
        return max(SHARE * self.step_seconds - riding * self._seconds_per_token, 0.0)

    def join(self, s: Sequence) -> None:
        """A sequence has a slot; what that holds already is not read."""
        s.due = self._num_read + reading.num_unread(s)

    def encode(self, joining: Seq[Sequence]) -> None:
        """Read the sources of new sequences, where the target has an encoder."""
        if joining and isinstance(self._target, EncoderDecoder):
            watch = Stopwatch(self._clock)
            with watch.phase("prefill"):
                sources = [s.request.source_token_ids for s in joining]
                self._target.encode(slots_of(joining), sources)
            share([s.sample.stats for s in joining], watch.stop())

    def read(self, new: list[Sequence], *, beside: bool) -> dict[Sequence, int]:
        """Read what this step reads of new sequences; how many tokens of which are left to its first forward pass. beside: whether others run."""
        whole, riding = self.pieces(new) if beside else (self.piece(new), dict[Sequence, int]())
        for s in new:
            s.sample.stats.read_tokens = s.cursor.length
        if whole:
            watch = Stopwatch(self._clock)
            with watch.phase("prefill"):
                for speculation, group in alike(whole):
                    reading.read_whole(speculation.drafter, group)
            share([s.sample.stats for s in whole], watch.stop())
        for s in whole:
            s.filling = False
            s.sample.stats.read_tokens = s.sample.stats.prompt_tokens
        return riding

    def pieces(self, new: Seq[Sequence]) -> tuple[list[Sequence], dict[Sequence, int]]:
        """Those that are read to their end when this step reads what it reads alone, and how many tokens ride for which others.

        Equal texts count once, and are ready together: the others copy the first, unless their drafters need states of each.
        """
        room = self.room(len(new))
        whole = list[Sequence]()
        riding = dict[Sequence, int]()
        for equal in _equal_texts(new):
            first = equal[0]
            tokens_left = reading.num_unread(first)
            if tokens_left == 0 or (tokens_left <= room and not self.rides):
                whole += equal
                self._num_read += tokens_left
                room -= tokens_left
            elif room > 0 and self.rides:
                riding[first] = min(tokens_left, room)
                room -= riding[first]
            elif room == self.room(len(new)):
                self._seconds_per_token = self._read_alone(first, room)
                room = 0
        self._num_read += sum(riding.values())
        return whole, riding

    def piece(self, new: Seq[Sequence]) -> list[Sequence]:
        """Those that are read to their end in this step, while nothing else runs: all where that does not take long, else a part of the first is read."""
        room = (
            ALONE_FIRST
            if not self._alone
            else max(1, int(ALONE_SECONDS / self._alone) // ALONE_MIN) * ALONE_MIN
        )
        whole = list[Sequence]()
        for s in sorted(new, key=lambda s: s.due):
            is_read = reading.listener(s) is None and any(s.context == earlier.context for earlier in whole)
            tokens_left = 0 if is_read else reading.num_unread(s)
            if tokens_left > room:
                if not whole:
                    self._alone = self._read_alone(s, room)
                break
            whole.append(s)
            room = max(room - tokens_left, 0)
        return whole

    def _read_alone(self, s: Sequence, count: int) -> float:
        """Seconds of a token."""
        start = self._clock()
        reading.read_on(s, count)
        seconds = self._clock() - start
        s.sample.stats.seconds["prefill"] += seconds
        self._num_read += count
        return seconds / count

    def book(self, riding: Mapping[Sequence, int], seconds: dict[str, float]) -> None:
        """Move what reading took from a step's seconds to the sequences that were read."""
        token_seconds = min(self._seconds_per_token, seconds["scoring"] / (1 + sum(riding.values())))
        for s, count in riding.items():
            s.sample.stats.seconds["prefill"] += count * token_seconds
            seconds["scoring"] -= count * token_seconds

    def learn(self, times: Seq[StepTime], riding: int) -> None:
        """What the sequences that are drafted for alike took, one after the other. riding: prompt tokens in the first forward pass."""
        rows = riding + sum(time.drafts for time in times)
        plain = sum(time.whole - time.drafting for time in times)
        if self.rides:
            for time in times:
                if time.rows:
                    self._cost.learn(time.rows, time.scoring)
            self._seconds_per_token = self._cost.seconds
        self._recent.append(max(plain - rows * self._seconds_per_token, plain / (1 + rows)))
        self.step_seconds = median(self._recent)


class Pace:
    """How many tokens of a long text a drafter's own model reads in a step: as many as there is time for."""

    def __init__(self) -> None:
        self._token_seconds = 0.0

    def count(self, spare: float) -> int:
        """spare: seconds for which those wait that run beside it; inf where nobody does."""
        if spare == inf:
            return PIECE
        seconds = min(spare, PIECE_SECONDS)
        return (
            min(max(int(seconds / self._token_seconds), MIN_PIECE), PIECE) if self._token_seconds else AT_ONCE
        )

    def learn(self, count: int, seconds: float) -> None:
        """So many tokens took so long."""
        self._token_seconds = seconds / count


def _equal_texts(new: Seq[Sequence]) -> list[list[Sequence]]:
    """Sequences whose texts are read once, the most urgent first; each alone whose drafter needs states of its own."""
    groups: dict[object, list[Sequence]] = {}
    for number, s in enumerate(sorted(new, key=lambda s: s.due)):
        groups.setdefault((s.context, None if reading.listener(s) is None else number), []).append(s)
    return list(groups.values())


def catch_up(
    drafter: Drafter, sequences: Seq[Sequence], pace: Pace | None, spare: float = inf
) -> list[Sequence]:
    """Let a drafter begin with sequences that are to draft, and read what it has not read of them; those of which more is left than a draft should wait for.

    A piece of one long text is read a step. Meanwhile its sequence has no drafts; where these decide the output, with a seed above temperature 0, it is left
    out of the steps; without a pace all of such a text is read at once.
    """
    drafting.tell_missed(
        drafter,
        [s for s in sequences if s.drafting and s.state is not None and s.num_told < len(s.token_ids)],
    )
    behind = [s for s in sequences if s.held and s.is_suspect]
    count = PIECE if pace is None else pace.count(spare)
    is_spent = False
    for s in [s for s in sequences if s.drafting]:
        is_new = s.state is None
        if is_new and is_spent and len(s.token_ids) > count:
            behind.append(s)
            continue
        if is_new:
            drafter_state.begin(drafter, s)
        cursor = drafter_state.drafter_cursor(s)
        if cursor is None:
            continue
        num_unread = cursor.num_unread(s.token_ids)
        if num_unread <= (0 if is_new else AT_ONCE):
            continue
        most = num_unread if pace is None and s.follows_drafts else count
        if is_spent and (not is_new or num_unread > most):
            behind.append(s)
            continue
        start = perf_counter()
        piece = min(most, num_unread)
        try:
            cursor.read(s.token_ids, piece)
        except Exception as error:
            drafter_state.switch_off(drafter, s, error)
            continue
        if pace and (piece == count or not is_new):
            pace.learn(piece, perf_counter() - start)
        is_spent = is_spent or not is_new or piece < num_unread
        if piece < num_unread:
            behind.append(s)
    return behind
