"""An interpolated modified Kneser-Ney trigram table: the baseline that a trained target has to beat.

Chen & Goodman 1999, "An empirical study of smoothing techniques for language modeling", section 3.
    n(abc)     count of a trigram; for lower orders the number of distinct left neighbours (continuation count)
    D(n)       discount of a count of 1, 2, or 3 and more, one triple for each order
    p(c|ab) = max(n(abc) - D, 0) / n(ab.) + gamma(ab) p(c|b), down to the uniform distribution over V
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from polydraft.errors import InvalidInputError

DISCOUNT_SCALES = (0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5)


@dataclass(frozen=True)
class Order:
    """Counts of one order. grams: sorted int64 codes; contexts: sorted codes without the last symbol."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    num_by_bucket: np.ndarray  # [num_contexts, 3]: successors counted once, twice, three times or more
    discounts: np.ndarray  # [3]

    @classmethod
    def count(cls, grams: np.ndarray, counts: np.ndarray, vocab_size: int) -> Order:
        contexts, first = np.unique(grams // vocab_size, return_index=True)
        bucket = np.minimum(counts, 3) - 1
        by_bucket = np.stack(
            [np.add.reduceat((bucket == k).astype(np.int64), first) for k in range(3)], axis=1
        )
        n1, n2, n3, n4 = (max(1, int((counts == k).sum())) for k in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        discounts = np.clip(
            [1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3], 0.1, [0.95, 1.95, 2.95]
        )
        return cls(grams, counts, contexts, np.add.reduceat(counts, first), by_bucket, discounts)

    def interpolate(self, contexts: np.ndarray, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Probability of each gram's last symbol after its context, given the lower order's. All [N]."""
        at = np.minimum(np.searchsorted(self.contexts, contexts), len(self.contexts) - 1)
        known = self.contexts[at] == contexts
        slot = np.minimum(np.searchsorted(self.grams, grams), len(self.grams) - 1)
        count = np.where(self.grams[slot] == grams, self.counts[slot], 0)
        discount = np.where(count > 0, self.discounts[np.minimum(count, 3) - 1], 0.0)
        freed = self.num_by_bucket[at] @ self.discounts
        return np.where(known, (count - discount + freed * lower) / self.totals[at], lower)


@dataclass(frozen=True)
class TrigramTable:
    vocab_size: int
    orders: tuple[Order, ...]  # unigram, bigram, trigram

    @classmethod
    def count(cls, tokens: np.ndarray, vocab_size: int) -> TrigramTable:
        """Count a token stream [N]; raises InvalidInputError when it has fewer than three tokens."""
        if len(tokens) < 3:
            raise InvalidInputError(
                f"got {len(tokens)} tokens, a trigram table needs at least 3: pass a longer stream"
            )
        t = tokens.astype(np.int64)
        v = vocab_size
        trigrams, n3 = np.unique((t[:-2] * v + t[1:-1]) * v + t[2:], return_counts=True)
        bigrams, n2 = np.unique(trigrams % (v * v), return_counts=True)
        unigrams, n1 = np.unique(bigrams % v, return_counts=True)
        orders = tuple(Order.count(g, n, v) for g, n in ((unigrams, n1), (bigrams, n2), (trigrams, n3)))
        return cls(vocab_size, orders)

    def probabilities(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """p(c | a, b) for int64 arrays of one shape [N]."""
        v = self.vocab_size
        unigram, bigram, trigram = self.orders
        p = np.full(len(c), 1 / v)
        p = unigram.interpolate(np.zeros_like(c), c, p)
        p = bigram.interpolate(b, b * v + c, p)
        return trigram.interpolate(a * v + b, (a * v + b) * v + c, p)

    def row(self, a: int, b: int) -> np.ndarray:
        """The distribution after the context (a, b); [V], sums to 1."""
        c = np.arange(self.vocab_size)
        return self.probabilities(np.full_like(c, a), np.full_like(c, b), c)

    def nats(self, tokens: np.ndarray) -> np.ndarray:
        """-ln p of every token after the first, [N - 1]; the first context is doubled."""
        t = tokens.astype(np.int64)
        before = np.concatenate([t[:1], t[:-2]])
        return -np.log(self.probabilities(before, t[:-1], t[1:]))

    def tuned(self, tokens: np.ndarray) -> TrigramTable:
        """Scale each order's discounts to the lowest loss on `tokens`, from the unigram up."""
        best = self
        for i, order in enumerate(self.orders):
            trials = []
            for scale in DISCOUNT_SCALES:
                scaled = replace(order, discounts=np.minimum(order.discounts * scale, [1.0, 2.0, 3.0]))
                orders = tuple(scaled if j == i else o for j, o in enumerate(best.orders))
                trial = replace(best, orders=orders)
                trials.append((trial.nats(tokens).mean(), scale, trial))
            best = min(trials, key=lambda t: t[:2])[2]
        return best
