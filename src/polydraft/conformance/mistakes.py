"""Known mistakes of samplers and drafters, each made in the readable samplers: their biases are the signatures that a fault is named by.

A mistake is a right sampler with one decision changed, or drafts that are drawn otherwise than they are reported. Its exact distribution follows on the very
rows that were checked. Mistakes with a strength, such as a temperature, are listed at several; a fault of another strength is nearest to these.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from polydraft.conformance.samplers import (
    BlockVerification,
    Rejection,
    Row,
    clamped_ratio,
    normalised,
    same,
    with_replacement,
    without_replacement,
)
from polydraft.conformance.steps import DraftSetting, Draws, Sampler, as_declared
from polydraft.core import DraftSampling
from polydraft.testing import Path, sibling_draws

TEMPERATURES = (0.5, 0.7, 1.5, 2.0)
TOP_P = (0.5, 0.7, 0.8, 0.9, 0.95)
LENIENCES = (0.5, 0.7, 0.8, 0.9)
TYPICAL_THRESHOLD = 0.09
TYPICAL_SHARE = 0.3
"""Of typical acceptance, as Medusa has them (arXiv 2401.10774)."""
UNLIKELY = (0.1, 0.25, 0.4)
"""Draft probabilities below which a drawn token is left out."""


@dataclass(frozen=True)
class Mistake:
    """name: what is wrong, with its strength.  sampler: that makes it.  draws: how its drafts are drawn.

    drawn: the row that the first draft of a node is drawn from, given the reported one; what it lacks of 1 are nodes without a draft.
    in_drafts: of the drafter, which a sampler that is given its drafts cannot make.
    """

    name: str
    sampler: Sampler
    draws: Draws = as_declared
    drawn: Callable[[Row], Row] = same

    @property
    def in_drafts(self) -> bool:
        return self.draws is not as_declared

    @property
    def kind(self) -> str:
        """The name without its strength."""
        return self.name.partition(" (")[0]


def tempered(row: Row, temperature: float) -> Row:
    """The row at another temperature."""
    return normalised(np.power(row, 1 / temperature))


def truncated(row: Row, top_p: float) -> Row:
    """The most probable tokens that together have at least this share, normalised."""
    order = np.argsort(-row, kind="stable")
    before = row[order].cumsum() - row[order]
    kept = order[before < top_p * row.sum()]
    rest = np.zeros_like(row)
    rest[kept] = row[kept]
    return normalised(rest)


def most_probable(row: Row) -> Row:
    """All mass on the most probable token."""
    return np.eye(len(row))[row.argmax()]


def of_target(change: Callable[[Row], Row], p: Row, q: Row) -> tuple[Row, Row]:
    """The target's rows changed, the draft's as they were drawn from."""
    return np.stack([change(row) for row in p]), q


def of_draft(change: Callable[[Row], Row], p: Row, q: Row) -> tuple[Row, Row]:
    return p, np.stack([change(row) for row in q])


def next_rows(p: Row, q: Row) -> tuple[Row, Row]:
    """The target's rows of the position behind."""
    return np.concatenate([p[1:], p[-1:]]), q


def earlier_rows(p: Row, q: Row) -> tuple[Row, Row]:
    """The target's rows of the position before."""
    return np.concatenate([p[:1], p[:-1]]), q


def unchanged(r: Row, c: Row, x: int) -> Row:
    """No residual: the target as it was."""
    return r


def not_normalised(r: Row, c: Row, x: int) -> Row:
    return np.maximum(r - c, 0.0)


def wrong_sign(r: Row, c: Row, x: int) -> Row:
    return normalised(np.maximum(c - r, 0.0))


def without_the_token(r: Row, c: Row, x: int) -> Row:
    """The target without the rejected token, in the place of the residual."""
    rest = r.copy()
    rest[x] = 0.0
    return normalised(rest) if rest.sum() > 0 else r


def first_where_none(row: Row, source: Any) -> int:
    """The inverse transform whose answer is token 0 where the cumulative distribution never passes the uniform."""
    u = source()
    cumulative = 0.0
    for token in range(len(row)):
        cumulative += row[token]
        if row[token] > 0 and u < cumulative:
            return token
    return 0


def always(p: Row, r: Row, c: Row, x: Any) -> Any:
    return np.ones_like(r[x])[()]


def inverted(p: Row, r: Row, c: Row, x: Any) -> Any:
    return clamped_ratio(c[x], r[x])


def by_target_alone(p: Row, r: Row, c: Row, x: Any) -> Any:
    """The target's probability, as for tokens that were not drawn."""
    return r[x]


def against_the_whole_target(p: Row, r: Row, c: Row, x: Any) -> Any:
    """Each sibling as if it were the first."""
    return clamped_ratio(p[x], c[x])


def lenient(lenience: float, p: Row, r: Row, c: Row, x: Any) -> Any:
    return clamped_ratio(r[x], lenience * c[x])


def typical(p: Row, r: Row, c: Row, x: Any) -> Any:
    """Accepted where the target finds it typical enough."""
    positive = r[r > 0]
    entropy = -(positive * np.log(positive)).sum()
    return (r[x] > min(TYPICAL_THRESHOLD, TYPICAL_SHARE * np.exp(-entropy))) * 1.0


def by_draft_probability(children: list[int], tokens: Row, q: Row) -> list[int]:
    return sorted(children, key=lambda child: -q[child - 1, tokens[child - 1]])


def reversed_order(children: list[int], tokens: Row, q: Row) -> list[int]:
    return children[::-1]


def without_repeats(children: list[int], tokens: Row, q: Row) -> list[int]:
    """Equal siblings once."""
    return list({int(tokens[child - 1]): child for child in reversed(children)}.values())[::-1]


@dataclass
class OneUniform:
    """The same uniform at every request."""

    source: Any
    uniform: Any = None

    def __call__(self) -> Any:
        self.uniform = self.source() if self.uniform is None else self.uniform
        return self.uniform


def factors_clamped(w: float, ratio: float) -> float:
    return w * min(1.0, ratio)


def without_weight(w: float, p: Row, q: Row) -> Row:
    return np.maximum(p - q, 0.0)


def target_itself(w: float, p: Row, q: Row) -> Row:
    return p


def most_probable_draws(sampling: DraftSampling, row: Row, count: int) -> Iterator[tuple[float, Path]]:
    """The top tokens, reported as draws; of iid ones the top token each time."""
    top = [int(token) for token in np.argsort(-row, kind="stable")[:count]]
    distinct = sampling is not DraftSampling.IID or count > 1
    yield 1.0, tuple(top if distinct else top[:1] * count)


def changed_draws(
    change: Callable[[Row], Row], sampling: DraftSampling, row: Row, count: int
) -> Iterator[tuple[float, Path]]:
    """Draws from another row than the reported one."""
    yield from sibling_draws(sampling, [change(row)], count)


def without_unlikely(
    threshold: float, sampling: DraftSampling, row: Row, count: int
) -> Iterator[tuple[float, Path]]:
    """Draws that are left out where they are unlikely."""
    for probability, tokens in sibling_draws(sampling, [row], count):
        yield probability, tuple(x for x in tokens if row[x] >= threshold)


def likely_part(threshold: float, row: Row) -> Row:
    return np.where(row >= threshold, row, 0.0)


def _anywhere(right: Callable[..., Rejection]) -> Iterator[Mistake]:
    """Of a sampler of any drafts."""
    yield from _of_a_rule(right)
    yield from _of_sampling_parameters(right)


def _of_a_rule(right: Callable[..., Rejection]) -> Iterator[Mistake]:
    """What is tested, and what is drawn after a rejection."""
    yield Mistake("target distribution in the place of the residual", right(leftover=unchanged))
    yield Mistake(
        "residual not normalised (the last token where nothing is found)", right(leftover=not_normalised)
    )
    yield Mistake(
        "residual not normalised (token 0 where nothing is found)",
        right(leftover=not_normalised, draw=first_where_none),
    )
    yield Mistake(
        "target without the rejected token in the place of the residual", right(leftover=without_the_token)
    )
    yield Mistake("residual of the wrong sign", right(leftover=wrong_sign))
    yield Mistake("draft tokens accepted untested", right(chance=always))
    yield Mistake("ratio of probabilities inverted", right(chance=inverted))
    yield Mistake("acceptance by the target's probability alone", right(chance=by_target_alone))
    yield Mistake("typical acceptance", right(chance=typical))
    yield Mistake("one uniform for test and extra token", right(noise=OneUniform))
    yield Mistake(
        "target's most probable token in the place of a sample", right(rows=partial(of_target, most_probable))
    )
    for lenience in LENIENCES:
        yield Mistake(f"lenient ratio ({lenience:g})", right(chance=partial(lenient, lenience)))


def _of_sampling_parameters(right: Callable[..., Rejection]) -> Iterator[Mistake]:
    """One side has them, or they come too late."""
    for temperature in TEMPERATURES:
        change = partial(tempered, temperature=temperature)
        yield Mistake(
            f"temperature on the target's side alone ({temperature:g})",
            right(rows=partial(of_target, change)),
        )
        yield Mistake(
            f"temperature on the draft's side alone ({temperature:g})", right(rows=partial(of_draft, change))
        )
    for top_p in TOP_P:
        change = partial(truncated, top_p=top_p)
        yield Mistake(f"top-p after the test ({top_p:g})", right(extra=change))
        yield Mistake(f"top-p on the target's side alone ({top_p:g})", right(rows=partial(of_target, change)))
        yield Mistake(f"top-p on the draft's side alone ({top_p:g})", right(rows=partial(of_draft, change)))


def _of_siblings(setting: DraftSetting, right: Callable[..., Rejection]) -> Iterator[Mistake]:
    """Of a sampler of several children a node."""
    yield Mistake(
        "siblings verified in the order of their draft probability", right(order=by_draft_probability)
    )
    yield Mistake("each sibling tested against the whole target", right(chance=against_the_whole_target))
    if setting.sampling is DraftSampling.IID:
        yield Mistake("equal siblings dropped", right(order=without_repeats))
        yield Mistake("iid siblings verified as distinct ones", right(conditional=without_replacement))
    if setting.sampling is DraftSampling.WITHOUT_REPLACEMENT:
        yield Mistake("siblings verified in reversed order", right(order=reversed_order))
        yield Mistake("distinct siblings verified as iid ones", right(conditional=with_replacement))


def _of_depth(setting: DraftSetting, right: Callable[..., Rejection]) -> Iterator[Mistake]:
    """Of a sampler of several tokens a path."""
    yield Mistake("target's rows of the next position", right(rows=next_rows))
    yield Mistake("target's rows of the position before", right(rows=earlier_rows))
    if setting.is_chain and setting.sampling is DraftSampling.IID:
        yield Mistake(
            "block verification with each factor clamped", BlockVerification(weight=factors_clamped)
        )
        yield Mistake(
            "block verification with a residual without its weight",
            BlockVerification(residual=without_weight),
        )
        yield Mistake(
            "block verification with the target in the place of the residual",
            BlockVerification(residual=target_itself),
        )


def _of_drafts(setting: DraftSetting, sampler: Sampler) -> Iterator[Mistake]:
    """Of a drafter."""
    yield Mistake("most probable tokens reported as draws", sampler, most_probable_draws, most_probable)
    for temperature in TEMPERATURES:
        name = f"drafts drawn at another temperature than reported ({temperature:g})"
        yield _other_row(name, sampler, partial(tempered, temperature=temperature))
    for top_p in TOP_P:
        name = f"drafts drawn from a truncated row, the whole one reported ({top_p:g})"
        yield _other_row(name, sampler, partial(truncated, top_p=top_p))
    for threshold in UNLIKELY:
        yield Mistake(
            f"unlikely draws left out after the draw ({threshold:g})",
            sampler,
            partial(without_unlikely, threshold),
            partial(likely_part, threshold),
        )


def _other_row(name: str, sampler: Sampler, change: Callable[[Row], Row]) -> Mistake:
    """Drafts that are drawn from a changed row, where the unchanged one is reported."""
    return Mistake(name, sampler, partial(changed_draws, change), change)


def catalogue(setting: DraftSetting, *, drafts: bool = False) -> list[Mistake]:
    """Known mistakes that drafts of this kind can show. drafts: those of a drafter, too.

    Example:
        >>> names = [mistake.kind for mistake in catalogue(DraftSetting((-1, 0, 0)))]
        >>> "equal siblings dropped" in names, "block verification with each factor clamped" in names
        (True, False)
    """
    right = partial(Rejection, setting)
    mistakes = list(_anywhere(right))
    if setting.most_siblings > 1:
        mistakes += _of_siblings(setting, right)
    if setting.depth > 1:
        mistakes += _of_depth(setting, right)
    if drafts and setting.sampling is not DraftSampling.POINT_MASS:
        mistakes += _of_drafts(setting, right())
    return mistakes
