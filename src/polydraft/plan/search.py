"""The sizes of a round that promise most tokens per second: of every sequence one of its grid, all weighed in one compiled sweep.

    speed = (T_1 ... T_B)^(1/B) / seconds of the round,   T_b: tokens that sequence b may expect of its size

The sum of speeds would serve those that draft well first, and leave the others to smaller and dearer batches. One sequence takes the size
of highest tokens / seconds. In a batch each takes that of highest log tokens - price x seconds of its own nodes, for every deepest depth at once;
the price, B / seconds of a round, follows from the last choice, each of which is better than the one before (log S <= log S0 + S/S0 - 1). The
first price is that of the best size for all alike.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from polydraft.plan.costs import HINGE, Charges, Work, seconds
from polydraft.plan.sizes import Options

__all__ = ["Found", "best"]

PRICES = 4
"""Most prices that are tried; the choice no longer changes after two or three."""


class Found(NamedTuple):
    """The best drafts of some sequences at least. sizes: row and column of each, None where it had better not draft.  speed: of this choice.

    plain: speed of a round in which nobody drafts.  seconds: of the round.
    loss: tokens that the best size for all alike falls short of as many seconds of plain decoding, 0 where it does not.
    """

    sizes: list[tuple[int, int] | None]
    speed: float
    plain: float
    seconds: float
    loss: float


def best(options: Sequence[Options | None], shares: Sequence[float], contexts: Sequence[int], prices: Charges) -> Found:
    """Of drafts for those sequences that have options, one at least.

    shares: of the rounds that ask for a draft, those in which there is one.  contexts: cached tokens of each.

    Example:
        >>> from polydraft.plan.acceptance import Record
        >>> from polydraft.plan.costs import RoundCosts
        >>> from polydraft.plan.sizes import Paths
        >>> options = Paths(12, 1).options(Record(), np.full(12, 0.8), greedy=False)
        >>> best([options], [1.0], [100], RoundCosts.assumed().prices).sizes
        [(5, 0)]
    """
    live = [b for b, each in enumerate(options) if each is not None]
    known = [each for each in options if each is not None]
    stacked = tuple(x[None] for x in known[0]) if len(known) == 1 else tuple(map(np.stack, zip(*known, strict=True)))
    share, cached = np.array([shares[b] for b in live]), np.array([contexts[b] for b in live], np.float64)
    chosen, *found = _best(stacked, share, cached, len(options), float(sum(contexts)), prices)
    sizes: list[tuple[int, int] | None] = [None] * len(options)
    for b, (row, column) in zip(live, chosen.tolist(), strict=True):
        sizes[b] = (row, column) if row >= 0 else None
    return Found(sizes, *found)


@njit(cache=True, error_model="numpy")
def _round(
    options: tuple[np.ndarray, ...], share: np.ndarray, cached: np.ndarray, chosen: np.ndarray, start: Work, prices: Charges
) -> tuple[float, float]:
    """Log of all tokens, and seconds of a round, if each sequence drafts the size `chosen` [B, 2], none where its row is below 0."""
    tokens, nodes, passes, branching = options
    logs, many, deep, asked, parting, by_context = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for b in range(len(share)):
        d, f = chosen[b, 0], chosen[b, 1]
        if d >= 0:
            logs += np.log(1.0 + share[b] * (tokens[b, d, f] - 1.0))
            many += share[b] * nodes[b, d, f]
            deep = max(deep, share[b] * passes[b, d, f])
            asked += 1.0
            parting += share[b] * branching[b, d, f]
            by_context += share[b] * nodes[b, d, f] * cached[b]
    return logs, seconds(prices, Work(start.sequences, start.context, many, deep, asked, parting, by_context))


@njit(cache=True, error_model="numpy")
def _best(
    options: tuple[np.ndarray, ...], share: np.ndarray, cached: np.ndarray, num_sequences: int, context: float, prices: Charges
) -> tuple[np.ndarray, float, float, float, float]:
    """Row (-1: no draft) and column for each live sequence, [B, 2], and the figures of `Found`. options: [B, D, F] each.  share, cached: [B]."""
    tokens, nodes, _, branching = options
    live, deepest, width = tokens.shape
    start = Work(float(num_sequences), context, 0.0, 0.0, 0.0, 0.0, 0.0)
    B, plain = start.sequences, 1.0 / seconds(prices, start)
    chosen, trial, speed, whole, loss = np.zeros((live, 2), np.int64), np.zeros((live, 2), np.int64), -1.0, 1.0, 0.0
    for size in range(deepest * width):
        possible = True
        for b in range(live):
            trial[b, 0], trial[b, 1] = size // width, size % width
            possible = possible and tokens[b, trial[b, 0], trial[b, 1]] > 0.0
        if possible:
            logs, taken = _round(options, share, cached, trial, start, prices)
            if np.exp(logs / B) / taken > speed:
                speed, whole, loss = np.exp(logs / B) / taken, taken, max(taken * plain - np.exp(logs / live), 0.0)
                for b in range(live):
                    chosen[b, 0], chosen[b, 1] = trial[b, 0], trial[b, 1]
    room, better, most = max(0.0, (HINGE - B) / B), num_sequences > 1, np.zeros(live)
    for _ in range(PRICES if better else 0):
        better, price = False, B / whole
        for b in range(live):
            most[b], trial[b, 0] = 0.0, -1
        for d in range(deepest):
            for b in range(live):
                each = prices.rows + prices.nodes + prices.rows_context * cached[b]
                for f in range(width):
                    if tokens[b, d, f] > 0.0:
                        n = share[b] * nodes[b, d, f]
                        own = n * each + prices.rows_beyond * max(n - room, 0.0) + prices.asked
                        own += prices.branching * share[b] * branching[b, d, f]
                        value = np.log(1.0 + share[b] * (tokens[b, d, f] - 1.0)) - price * own
                        if value > most[b]:
                            most[b], trial[b, 0], trial[b, 1] = value, d, f
            logs, taken = _round(options, share, cached, trial, start, prices)
            if logs > 0.0 and np.exp(logs / B) / taken > speed * (1.0 + 1e-9):
                better, speed, whole = True, np.exp(logs / B) / taken, taken
                for b in range(live):
                    chosen[b, 0], chosen[b, 1] = trial[b, 0], trial[b, 1]
        if not better:
            break
    return chosen, speed, plain, whole, loss
