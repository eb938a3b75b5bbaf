"""The two workers on a virtual clock: the same `Lead`, driven by given seconds, one event after the other, the same every time."""

from collections.abc import Callable, Sequence
from typing import Any

from polydraft.papers.amusd.lead import Item, Lead
from polydraft.papers.amusd.trace import DRAFT, VERIFY, Trace

Draw = Callable[[Sequence[int], int], tuple[int, Any]]
Verify = Callable[[Sequence[int], Sequence[Item]], tuple[Sequence[int], int]]


def simulate(
    lead: Lead,
    draw: Draw,
    verify: Verify,
    *,
    draft_seconds: Callable[[], float],
    verify_seconds: Callable[[int], float],
    length: int,
    depth: int,
    min_lead: int = 1,
    trace: Trace | None = None,
) -> float:
    """Run until the text has at least so many tokens; returns the virtual seconds.

    draw(text, start): a token and its row; start: of the epoch, see `Lead`.  verify(text, items): the tokens that a pass emits, and how many
    items it kept.  verify_seconds(items): of a pass that takes so many.  depth: most of them.  min_lead: waiting tokens that a pass waits for.

    Example:
        >>> count = lambda text, items: ([len(text) + i for i in range(len(items) + 1)], len(items))  # keeps all
        >>> seconds = simulate(Lead([0], cap=8), lambda text, start: (len(text), None), count,
        ...     draft_seconds=lambda: 1.0, verify_seconds=lambda items: 4.0, length=41, depth=4, min_lead=1)
        >>> seconds  # 40 tokens, about four a pass: the drafting is hidden
        45.0
    """
    now = 0.0
    drafting = None
    verifying = None
    while True:
        step = lead.next() if drafting is None else None
        if step is not None:
            lead.acknowledge(step.epoch)
            drafting = now + draft_seconds(), now, step, lead.before(step)
        if verifying is None and (len(lead.ring) >= min(min_lead, depth) or not lead.room):
            items = lead.take(depth)
            verifying = now + verify_seconds(len(items)), now, items
        ends = [job[0] for job in (drafting, verifying) if job is not None]
        now = min(ends)
        if drafting is not None and drafting[0] == now:
            _, began, step, text = drafting
            token, row = draw(text, step.start)
            lead.publish([Item(token, row, step.epoch, step.place)])
            drafting = None
            if trace is not None:
                trace.add(DRAFT, "draft", began, now, tokens=[token], epoch=step.epoch, place=step.place)
        else:
            assert verifying is not None
            _, began, items = verifying
            tokens, accepted = verify(lead.text, items)
            lead.verified(tokens, accepted)
            verifying = None
            if trace is not None:
                trace.add(VERIFY, "verify", began, now, drafted=len(items), accepted=accepted)
            if len(lead.text) >= length:
                return now
