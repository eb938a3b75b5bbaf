"""Measures the seconds of a step with a handful of forward passes of an idle engine, over a text, as rows of a mixture of experts cost what their tokens
choose."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import numpy as np

from polydraft.core import Budget, Drafter, Request, SamplingParams, Target, TokenTree
from polydraft.core.geometry import chain
from polydraft.models.slots import COLUMN, TREE_ROOM, SlotModel
from polydraft.policy.costs import MEASURED, Costs

PROMPT = 4
"""Tokens of a text before those that are timed."""
PASSES = 3
MOST_REPEATS = 3
STEADY = 1.5
"""Timed forward passes of each kind; those of which the largest is more than STEADY times the smallest are measured again, so many times at most."""
DEEP = 5
"""Draft steps of the longer of two measured drafts."""
ROWS_BEHIND = 8
"""Rows of the second forward pass that is timed behind a long context."""
LONG = 4096
"""Tokens of a context behind which forward passes are timed, at most: attention takes about an eighth of one of Qwen2.5-Coder-0.5B there."""


def clock(target: Any) -> Callable[[], float]:
    """CPU time where one thread does all the work, so that a busy machine does not count; else the wall's."""
    return thread_time if not target.on_device and target.num_threads == 1 else perf_counter


class Interrupted(Exception):  # noqa: N818 - no error
    """Measuring was left for later, as a request came."""


class Measured(NamedTuple):
    """spread: the largest over the smallest seconds of the forward passes that varied most."""

    costs: Costs
    spread: float


def _seconds(
    act: Callable[[], object],
    time: Callable[[], float],
    spreads: list[float],
    before: Callable[[], object] = lambda: None,
) -> float:
    """Of an act, the smallest of PASSES, as whatever runs beside it only adds to them; see MOST_REPEATS. before: what comes before each."""
    act()
    seconds = list[float]()
    for _ in range(MOST_REPEATS):
        seconds.clear()
        for _ in range(PASSES):
            before()
            start = time()
            act()
            seconds.append(time() - start)
        if max(seconds) <= STEADY * min(seconds):
            break
    spreads.append(max(seconds) / max(min(seconds), 1e-9))
    return min(seconds)


def seconds_of_a_pass(target: Target, slot: int) -> float:
    """Of one row, the smallest of PASSES, by an idle target. slot: an empty one."""
    *prompt, root = _text(target, ())[:PROMPT]
    target.prefill([slot], [prompt])
    try:
        return _seconds(lambda: target.score([slot], TokenTree.roots(np.array([root]))), clock(target), [])
    finally:
        target.release([slot])


def _text(target: Target, text: Sequence[int]) -> list[int]:
    """A text of as many tokens as are needed: this one, or one that is drawn."""
    needed = PROMPT + MEASURED[-1]
    if len(text) >= needed:
        return list(text[:needed])
    present = np.setdiff1d(np.arange(target.vocab_size), target.absent_ids)
    return np.random.default_rng(0).choice(present, needed).tolist()


def _lengthen(model: SlotModel, slot: int, length: int) -> None:
    """Write copies of the columns of a slot behind them, up to so many: what nobody wrote is one page of zeros, which stays in the processor's caches."""
    while (written := int(model.lengths[slot])) < length:
        count = min(written, length - written)
        source = np.empty(count, COLUMN)
        target = np.empty(count, COLUMN)
        source["slot"] = target["slot"] = slot
        source["column"], target["column"] = np.arange(count), np.arange(written, written + count)
        model.move(source, target)
        model.filled(slot, written + count)


def _slows_by_length(model: Any) -> bool:
    """Whether memory is taken as it is written, and keys and values follow the text, and nothing else."""
    if not isinstance(model, SlotModel):
        return False
    return bool(model.cache_grows and not model.state_bytes and model.bytes_per_token)


def _token_seconds(
    model: Any, slot: int | None, rows: Sequence[int], seconds: Callable[[Callable[[], object]], float]
) -> tuple[float, ...]:
    """Seconds that each token of the context adds to forward passes of so many rows.

    slot: one that may be written behind its text; None for any.
    Only where memory is taken as it is written, and nothing beside keys and values follows the text; else 0.
    """
    if not _slows_by_length(model):
        return (0.0,) * len(rows)
    slot = int(np.argmin(model.lengths)) if slot is None else slot
    begun = int(model.lengths[slot])
    free = model.cache_tokens - int(model.written.sum())
    length = min(LONG, model.max_model_len, begun + free - TREE_ROOM)
    trees = [TokenTree.chain(np.zeros((1, count), np.int64)) for count in rows]
    if length < begun + PROMPT + 1:
        return (0.0,) * len(rows)
    try:
        model.prefill([slot], [_text(model, ())[:PROMPT]])
        start = int(model.lengths[slot])
        passes = [partial(model.score, [slot], tree) for tree in trees]
        short = [seconds(each) for each in passes]
        _lengthen(model, slot, length)
        far = [seconds(each) for each in passes]
    finally:
        model.cut(slot, begun)
        if not begun:
            model.trim(slot)
    return tuple(max(b - a, 0.0) / (length - start) for a, b in zip(short, far, strict=True))


class _Timing(NamedTuple):
    """How forward passes and drafts are timed. spreads: what varied, and by how much; see `_seconds`."""

    time: Callable[[], float]
    stopped: Callable[[], bool]
    spreads: list[float]

    def seconds(self, act: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        """Of an act, unless it is stopped. before: what comes before it each time.

        Raises:
            Interrupted: it is.
        """

        def unless_stopped() -> None:
            if self.stopped():
                raise Interrupted
            act()

        return _seconds(unless_stopped, self.time, self.spreads, before)


def measured(
    target: Target,
    drafter: Drafter,
    slots: tuple[int, int] = (0, 0),
    stopped: Callable[[], bool] = lambda: False,
    text: Sequence[int] | None = None,
) -> Measured:
    """Costs of idle models and how steady they were: forward passes of MEASURED rows in one slot, and drafts of one and of DEEP steps, nothing of which stays.

    slots: empty ones, of the target and of a second sequence.  stopped: asked before each forward pass.  text: token ids, PROMPT more than the most rows;
        where it is shorter, drawn ones.

    Raises:
        Interrupted: where it is `stopped`.
    """
    timing = _Timing(clock(target), stopped, [])
    slot, _ = slots
    ids = _text(target, text or ())
    hidden = drafter.needs.hidden
    first, several = _token_seconds(target, slot, (1, ROWS_BEHIND), timing.seconds)
    scores = target.prefill([slot], [ids[: PROMPT - 1]], hidden=hidden)
    try:
        passes = dict[int, float]()
        for rows in MEASURED:
            tree = TokenTree.chain(np.array([ids[PROMPT - 1 : PROMPT - 1 + rows]], np.int64))
            passes[rows] = timing.seconds(partial(target.score, [slot], tree, hidden=hidden))
        short, long = _draft_seconds(target, drafter, slots, ids[:PROMPT], scores, timing)
    finally:
        target.release([slot])
    (drafted,) = (0.0,) if hidden else _token_seconds(drafter.offers.model, None, (1,), timing.seconds)
    step = max((long - short) / (DEEP - 1), 0.0)
    costs = Costs.of(passes, draft_start=max(short - step, 0.0), draft_step=step)
    further = max(several - first, 0.0) / (ROWS_BEHIND - 1)
    costs = replace(costs, first_row_token=first, row_token=further, draft_token=drafted)
    return Measured(costs, max(timing.spreads))


def _draft_seconds(
    target: Target,
    drafter: Drafter,
    slots: tuple[int, int],
    prompt: Sequence[int],
    scores: Any,
    timing: _Timing,
) -> tuple[float, float]:
    """Seconds of drafts of one and of DEEP steps, each behind a forward pass, as in a step: it leaves nothing of a small head in the processor's caches.

    scores: of the prompt, less its last token, which is the root.
    """
    slot, second = slots
    params = SamplingParams(temperature=1.0)
    (state,) = drafter.start([Request("measured", tuple(prompt), params, 0, slot=slot, second_slot=second)])
    try:
        if drafter.needs.hidden and (read := drafter.offers.read) is not None:
            (state,) = read([state], scores)
        root = TokenTree.roots(np.array(prompt[-1:], np.int64))
        drawn = Budget.fixed(chain(min(DEEP, drafter.offers.draws.room(PROMPT))))

        def of_depth(depth: int) -> float:
            return timing.seconds(
                lambda: drafter.propose([state], [drawn.within(depth)]),
                lambda: target.score([slot], root, hidden=drafter.needs.hidden),
            )

        return of_depth(1), of_depth(DEEP)
    finally:
        drafter.release([state])
