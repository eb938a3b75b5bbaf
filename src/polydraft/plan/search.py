"""The sizes of a round that promise most tokens per second: of every sequence one of its grid, all weighed in one sweep.

    speed = (T_1 ... T_B)^(1/B) / seconds of the round,   T_b: tokens that sequence b may expect of its size

The sum of speeds would serve those that draft well first, and leave the others to smaller and dearer batches. One sequence takes the size
of highest tokens / seconds. In a batch each takes that of highest log tokens - price x seconds of its own nodes, for every deepest depth at once;
the price, B / seconds of a round, follows from the last choice, each of which is better than the one before (log S <= log S0 + S/S0 - 1). The
first price is that of the best size for all alike.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polydraft.plan.costs import HINGE, Charges, Work, seconds
from polydraft.plan.sizes import Options

__all__ = ["Found", "best"]

ASKING = 4e-5
"""Seconds that a round with drafts takes more than one without, at least: calls to n-grams and tables, which a clock on a busy machine may not tell from
none. Without it one run of n-grams in four, on a target that nothing fits, asked in vain all the time: 0.55 to 0.76 of plain decoding."""
PRICES = 4
"""Most prices that are tried; the choice no longer changes after two or three."""


class Found(NamedTuple):
    """The best drafts of some sequences at least. sizes: row and column of each, None where it had better not draft.  speed: of this choice.

    plain: speed of a round in which nobody drafts.  seconds: of the round, if all were asked.
    loss: tokens that the best size for all alike falls short of as many seconds of plain decoding, 0 where it does not.
    """

    sizes: list[tuple[int, int] | None]
    speed: float
    plain: float
    seconds: float
    loss: float


def best(options: Sequence[Options | None], contexts: Sequence[int], prices: Charges) -> Found:
    """Of drafts for those sequences that have options. contexts: cached tokens of each.  At least one has some.

    Example:
        >>> from polydraft.plan.acceptance import Record
        >>> from polydraft.plan.costs import RoundCosts
        >>> from polydraft.plan.sizes import Paths
        >>> options = Paths(12, [(1, 0)]).options(Record(), np.full(12, 0.8), greedy=False)
        >>> best([options], [100], RoundCosts.assumed().prices).sizes
        [(5, 0)]
    """
    B, live = len(options), [(b, each) for b, each in enumerate(options) if each is not None]
    work = Work(B, float(sum(contexts)))
    least = float(seconds(prices, work))
    plain, least = 1.0 / least, least + ASKING
    sizes: list[tuple[int, int] | None] = [None] * B
    if len(live) == 1:
        ((b, one),) = live
        done = work._replace(nodes=one.nodes, depth=one.passes, branching=one.branching, asked=np.ones(one.nodes.shape))
        taken = np.maximum(seconds(prices, done._replace(nodes_context=one.nodes * contexts[b])), least)
        speed = (one.tokens if B == 1 else one.tokens ** (1.0 / B)) / taken
        row, column = divmod(int(speed.argmax()), speed.shape[1])
        sizes[b], whole = (row, column), float(taken[row, column])
        return Found(sizes, float(speed[row, column]), plain, whole, max(whole * plain - float(one.tokens[row, column]), 0.0))
    together = Options(*(np.stack(each) for each in zip(*(each for _, each in live), strict=True)))
    cached = np.array([contexts[b] for b, _ in live], np.float64)[:, None, None]
    with np.errstate(divide="ignore"):
        logs = np.log(together.tokens)

    def weighed(logs: np.ndarray, chosen: Options, cached: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Speed and seconds of choices: the first axis is that of the sequences, the others are those of the result."""
        sums = {"nodes": chosen.nodes.sum(0), "depth": chosen.passes.max(0), "branching": chosen.branching.sum(0)}
        done = work._replace(**sums, asked=asked, nodes_context=(chosen.nodes * cached).sum(0))
        taken = np.maximum(seconds(prices, done), least)
        return np.exp(logs.sum(0) / B) / taken, taken

    alike, taken = weighed(logs, together, cached, np.full(logs.shape[1:], len(live)))
    row, column = divmod(int(alike.argmax()), alike.shape[1])
    for b, _ in live:
        sizes[b] = row, column
    whole = float(taken[row, column])
    loss = max(whole * plain - float(np.exp(logs[:, row, column].mean())), 0.0)
    found = Found(list(sizes), float(alike[row, column]), plain, whole, loss)
    nodes, room = together.nodes, max(0.0, (HINGE - B) / B)
    own = nodes * (prices.rows + prices.nodes + prices.rows_context * cached) + prices.rows_beyond * np.maximum(nodes - room, 0.0)
    own = own + prices.asked + prices.branching * together.branching
    b, deepest = np.arange(len(live))[:, None], np.arange(logs.shape[1])
    for _ in range(PRICES):
        value = logs - own * (B / whole)
        columns, value = value.argmax(2), value.max(2)
        most = np.maximum.accumulate(value, 1)
        rows = np.maximum.accumulate(np.where(value == most, deepest, 0), 1)
        at, drafts = (b, rows, columns[b, rows]), most > 0.0
        chosen = Options(*(np.where(drafts, x[at], 0.0) for x in together))
        speed, taken = weighed(np.where(drafts, logs[at], 0.0), chosen, cached[:, 0], drafts.sum(0))
        cut = int(np.where(drafts.any(0), speed, 0.0).argmax())
        if speed[cut] <= found.speed * (1.0 + 1e-9) or not drafts[:, cut].any():
            break
        for i, (j, _) in enumerate(live):
            sizes[j] = (int(rows[i, cut]), int(at[2][i, cut])) if drafts[i, cut] else None
        whole = float(taken[cut])
        found = Found(list(sizes), float(speed[cut]), plain, whole, loss)
    return found
