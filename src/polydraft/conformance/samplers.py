"""Two right samplers in their readable form, with a name for each of their decisions: what a known mistake changes is one of these.

Recursive rejection down a tree: Leviathan et al. 2023 (arXiv 2211.17192) for a chain, Miao et al. 2023 (2305.09781), Jeon et al. 2024 (2402.14160) for
siblings. Block verification of a chain: Sun et al. 2024 (2403.10444). The distributions of both are those of `polydraft.verifiers`, which a test shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polydraft.conformance.steps import DraftSetting
from polydraft.core import DraftSampling

Row = np.ndarray


def normalised(row: Row) -> Row:
    """The row over its sum; where that is 0 the row itself, which then is drawn with probability 0."""
    total = row.sum()
    return row / total if total > 0 else row


def inverse_transform(row: Row, source: Any) -> int:
    """The token at which the cumulative distribution passes a uniform; the last one where it never does."""
    u = source()
    cumulative = 0.0
    for token in range(len(row) - 1):
        cumulative += row[token]
        if row[token] > 0 and u < cumulative:
            return token
    return len(row) - 1


def clamped_ratio(numerator: Any, denominator: Any) -> Any:
    """Of probabilities, at most 1, and 1 where the denominator is 0. Numbers or arrays."""
    positive = denominator > 0
    return np.where(positive, np.minimum(1.0, numerator / np.where(positive, denominator, 1.0)), 1.0)[()]


def acceptance(p: Row, r: Row, c: Row, x: Any) -> Any:
    """Chance of a sibling: r of what is left of p, against c that it was drawn from. x: a token, or several."""
    return clamped_ratio(r[x], c[x])


def leftover(r: Row, c: Row, x: int) -> Row:
    """What the target still wants after a rejection."""
    return normalised(np.maximum(r - c, 0.0))


def in_draw_order(children: list[int], tokens: Row, q: Row) -> list[int]:
    return children


def with_replacement(c: Row, earlier: Sequence[int]) -> Row:
    """The distribution of an iid draw, given those before it."""
    return c


def without_replacement(c: Row, earlier: Sequence[int]) -> Row:
    """The distribution of a draw that differs from those before it."""
    rest = c.copy()
    rest[list(earlier)] = 0.0
    return normalised(rest)


def as_given(p: Row, q: Row) -> tuple[Row, Row]:
    return p, q


def same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Rejection:
    """Recursive rejection. rows: of target and draft as the sampler takes them.  order: of siblings.  conditional: distribution of a draw given earlier ones.

    chance: of a sibling.  leftover: of the target after a rejection.  extra: the row that the last token is drawn from.  draw: of this row.
    noise: what uniforms are drawn from.  A token of -1 is a node that was not drawn.

    Example:
        >>> from polydraft.conformance.branching import outcomes
        >>> chain = Rejection(DraftSetting((-1, 0)))
        >>> p, q = np.array([[0.5, 0.5], [0.5, 0.5]]), np.array([[1.0, 0.0]])
        >>> outcomes(lambda source: chain(p, q, np.array([0]), source))
        {(1, 0): 0.25, (1, 1): 0.25, (0, 1): 0.5}
    """

    setting: DraftSetting
    rows: Callable[[Row, Row], tuple[Row, Row]] = as_given
    order: Callable[[list[int], Row, Row], list[int]] = in_draw_order
    conditional: Callable[[Row, Sequence[int]], Row] | None = None
    chance: Callable[[Row, Row, Row, Any], Any] = acceptance
    leftover: Callable[[Row, Row, int], Row] = leftover
    extra: Callable[[Row], Row] = same
    draw: Callable[[Row, Any], int] = inverse_transform
    noise: Callable[[Any], Any] = same

    def __call__(self, p: Row, q: Row, tokens: Row, source: Any) -> tuple[int, int]:
        p, q = self.rows(p, q)
        source = self.noise(source)
        conditional = self.conditional or CONDITIONAL.get(self.setting.sampling, with_replacement)
        node = 0
        while True:
            r = p[node]
            earlier = list[int]()
            there = [child for child in self.setting.children(node) if tokens[child - 1] >= 0]
            for child in self.order(there, tokens, q):
                x = int(tokens[child - 1])
                c = conditional(q[child - 1], earlier)
                if source() < self.chance(p[node], r, c, x):
                    node = child
                    break
                r = self.leftover(r, c, x)
                earlier.append(x)
            else:
                return node, self.draw(self.extra(r), source)


CONDITIONAL = {DraftSampling.WITHOUT_REPLACEMENT: without_replacement}


def accepted_weight(w: float, ratio: float) -> float:
    """Of the prefix that is longer by one token: the product is clamped."""
    return min(1.0, w * ratio)


def surplus(w: float, p: Row, q: Row) -> Row:
    """What a prefix of this weight still wants."""
    return np.maximum(w * p - q, 0.0)


@dataclass(frozen=True)
class BlockVerification:
    """Block verification of a chain. weight: of a longer prefix.  surplus: its row, which the last token is drawn from.

    Example:
        >>> from polydraft.conformance.branching import outcomes
        >>> p, q = np.array([[0.5, 0.5], [0.5, 0.5]]), np.array([[1.0, 0.0]])
        >>> outcomes(lambda source: BlockVerification()(p, q, np.array([0]), source))
        {(1, 0): 0.25, (1, 1): 0.25, (0, 1): 0.5}
    """

    weight: Callable[[float, float], float] = accepted_weight
    residual: Callable[[float, Row, Row], Row] = surplus

    def __call__(self, p: Row, q: Row, tokens: Row, source: Any) -> tuple[int, int]:
        weights = [1.0]
        for i, x in enumerate(tokens):
            weights.append(self.weight(weights[-1], p[i, x] / q[i, x]))
        if source() < weights[-1]:
            return len(tokens), inverse_transform(p[-1], source)
        for i in reversed(range(len(tokens))):
            rest = surplus(weights[i], p[i], q[i]).sum()
            if i == 0 or source() < rest / (rest + 1 - weights[i]):
                return i, inverse_transform(normalised(self.residual(weights[i], p[i], q[i])), source)
        raise AssertionError("the root accepts")
