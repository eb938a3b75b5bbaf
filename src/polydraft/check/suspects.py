"""Which known mistake do a server's texts look like? Their likelihood under each, from the rows of target and draft model at every token.

A text shows tokens, not where a step of drafting ended. With state j, the tokens accepted so far in the step of the next token, and depth gamma,

    accepted(x)  = Pr(a draft is accepted, and it is x)            j -> j + 1    where j < gamma
    replaced(x)  = Pr(none is, and x takes its place)              j -> 0        where j < gamma
    extra(x)     = what follows a draft that was accepted whole    gamma -> 0

is a hidden Markov chain. Its forward algorithm sums over all ways in which a text can have come about (Rabiner 1989). A draft may be missing anywhere with
probability `UNDRAFTED`, since servers pause. For a lossless rule accepted + replaced = extra = p, so that

    wealth = average over mistakes and depths of  Pr(texts | mistake, depth) / product of p(x)

has mean 1 at most on a lossless server, and Pr(wealth >= 1 / level) <= level (Ville 1939), as in `conformance.sequential`. A server may draft the first
token or not, with equal probability here. The last one may be cut off and does not count. What the server's arithmetic adds on average, and four
standard deviations of that, are taken off (`arithmetic`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from polydraft.conformance.mistakes import (
    Mistake,
    by_draft_probability,
    catalogue,
    earlier_rows,
    first_where_none,
    next_rows,
    of_target,
    reversed_order,
    without_repeats,
    without_the_token,
)
from polydraft.conformance.sample_test import LIKELIER
from polydraft.conformance.samplers import (
    CONDITIONAL,
    Rejection,
    Row,
    in_draw_order,
    with_replacement,
    without_replacement,
)
from polydraft.conformance.steps import DraftSetting
from polydraft.core import DraftSampling

UNDRAFTED = 0.02
DEPTHS = tuple(range(1, 9))
"""Tried where the depth is not known."""
MOST_TOKENS = 512
MOST_SIBLINGS = 64
"""Tokens of a row, the most probable of target and draft, that stand for themselves; pairs of siblings are enumerated."""
OTHERS = 32
"""Tokens of equal probability that stand for all others."""
LEAST = 1e-9
"""Probability of a first sibling below which it is left out."""
ANYWHERE = frozenset((next_rows, earlier_rows))
"""Changes that need the rows of other places."""


class SampledPlace(NamedTuple):
    """Rows of target and draft where a token was sampled, cut to their most probable tokens; `OTHERS` of equal probability stand for the rest.

    at: its index, or those of all that stand for the rest, which are not told apart. Trap: to let a sampled token of the rest stand for itself cuts the
    rows in another way for each token; the probabilities of all tokens then add to more than 1, and a lossless server is accused.
    """

    p: Float[np.ndarray, " n"]
    q: Float[np.ndarray, " n"]
    at: list[int]


def place_of(p: Row, q: Row, token: int, most: int) -> SampledPlace:
    """p, q: [V] rows at the sampled token. The first and the last token of the vocabulary stay what they are.

    Example:
        >>> place = place_of(np.array([0.1, 0.5, 0.2, 0.1, 0.1]), np.full(5, 0.2), 1, most=1)
        >>> place.p[:2].tolist(), round(float(place.p[2:-1].sum()), 9), place.at
        ([0.1, 0.5], 0.3, [1])
    """
    V = len(p)
    likely = np.argpartition(-(p + q), min(most, V - 1))[:most]
    whole = np.zeros(V, bool)
    whole[likely] = True
    whole[[0, V - 1]] = True
    ids = np.flatnonzero(whole)
    others = ~whole

    def cut(row: Row) -> Row:
        return np.concatenate([row[ids[:-1]], np.full(OTHERS, row[others].sum() / OTHERS), row[ids[-1:]]])

    if not whole[token]:
        return SampledPlace(cut(p), cut(q), list(range(len(ids) - 1, len(ids) - 1 + OTHERS)))
    at = int(np.searchsorted(ids, token))
    return SampledPlace(cut(p), cut(q), [at if at < len(ids) - 1 else at + OTHERS])


class Emission(NamedTuple):
    """Probabilities of the sampled token, where a draft stands and where none does; see the first lines."""

    accepted: float
    replaced: float
    extra: float


@dataclass(frozen=True)
class _Sampler:
    """A sampler with a mistake on one pair of rows."""

    mistake: Mistake
    rule: Rejection
    p: Row
    q: Row
    reported: Row

    @classmethod
    def at(cls, mistake: Mistake, place: SampledPlace) -> "_Sampler":
        rule = mistake.sampler
        assert isinstance(rule, Rejection)
        p, q = rule.rows(place.p[None], place.q[None])
        return cls(mistake, rule, p[0], q[0], place.q)

    def extra(self, row: Row) -> Row:
        """The distribution of what is drawn from a row, which may lack mass."""
        changed = self.rule.extra(row).copy()
        changed[0 if self.rule.draw is first_where_none else -1] += 1 - changed.sum()
        return changed

    def one(self) -> tuple[Row, Row]:
        """Accepted and replaced, of one draft."""
        drawn = self.mistake.drawn(self.reported)
        chance = self.rule.chance(self.p, self.p, self.q, np.arange(len(self.p)))
        refused = drawn * (1 - chance)
        missing = 1 - drawn.sum()
        return drawn * chance, missing * self.extra(self.p) + self._after(refused)

    def _after(self, refused: Row) -> Row:
        """The token in the place of a refused one."""
        if self.rule.leftover is without_the_token:
            shares = refused / np.maximum(1 - self.p, 1e-12)
            return self.p * (shares.sum() - shares)
        return refused.sum() * self.extra(self.rule.leftover(self.p, self.q, 0))

    def two(self, sampling: DraftSampling) -> tuple[Row, Row]:
        """Accepted and replaced, of two siblings: all pairs, as the sampler orders them."""
        n = len(self.p)
        pairs, alone = self._pairs(sampling)
        tokens = np.arange(n)
        first = self.rule.chance(self.p, self.p, self.q, tokens)
        r = self.rule.leftover(self.p, self.q, 0)
        accepted = (pairs.sum(1) + alone) * first
        replaced = ((1 - first) * alone).sum() * self.extra(r)
        refused = pairs * (1 - first)[:, None]
        distinct = self._conditional(sampling) is without_replacement
        for seconds, c in self._after_first(refused) if distinct else [(refused.sum(0), self.q)]:
            second = self.rule.chance(self.p, r, c, tokens)
            accepted = accepted + seconds * second
            rest = (seconds * (1 - second)).sum()
            replaced = replaced + rest * self.extra(self.rule.leftover(r, c, 0))
        return accepted, replaced

    def _after_first(self, refused: Float[np.ndarray, "n n"]) -> Iterator[tuple[Row, Row]]:
        """For each first sibling that is refused: probabilities of the second one, and the distribution that it is taken to be drawn from."""
        for x in np.flatnonzero(refused.sum(1) > LEAST):
            yield refused[x], without_replacement(self.q, (int(x),))

    def _conditional(self, sampling: DraftSampling) -> Callable[..., Row]:
        return self.rule.conditional or CONDITIONAL.get(sampling, with_replacement)

    def _pairs(self, sampling: DraftSampling) -> tuple[Float[np.ndarray, "n n"], Row]:
        """Probability of each pair in the order of its verification, and of tokens that are verified alone."""
        q = self.mistake.drawn(self.reported)
        pairs = np.outer(q, q)
        alone = np.zeros_like(q)
        if sampling is DraftSampling.WITHOUT_REPLACEMENT:
            np.fill_diagonal(pairs, 0.0)
            pairs *= (q.sum() / np.maximum(q.sum() - q, 1e-12))[:, None]
        order = self.rule.order
        if order is reversed_order:
            pairs = pairs.T
        if order is without_repeats:
            alone = pairs.diagonal().copy()
            np.fill_diagonal(pairs, 0.0)
        if order is by_draft_probability:
            rising = self.q[:, None] < self.q[None, :]
            pairs = np.where(rising, 0.0, pairs + np.where(rising.T, pairs.T, 0.0))
        return pairs, alone


def emission(mistake: Mistake, place: SampledPlace, setting: DraftSetting) -> Emission:
    """Of the sampled token."""
    sampler = _Sampler.at(mistake, place)
    accepted, replaced = sampler.two(setting.sampling) if setting.most_siblings == 2 else sampler.one()
    extra = sampler.extra(sampler.p)
    return Emission(*(float(row[place.at].sum()) for row in (accepted, replaced, extra)))


def known(setting: DraftSetting | None) -> list[Mistake]:
    """Mistakes whose probabilities follow from the rows of one place. setting: None where drafts are not known: those that show without them."""
    if setting is None:
        return [
            mistake
            for mistake in catalogue(DraftSetting((-1, 0)))
            if isinstance(mistake.sampler, Rejection) and _of_target(mistake.sampler)
        ]
    return [
        mistake
        for mistake in catalogue(setting, drafts=setting.most_siblings == 1)
        if isinstance(mistake.sampler, Rejection) and _local(mistake.sampler)
    ]


def _of_target(rule: Rejection) -> bool:
    return isinstance(rule.rows, partial) and rule.rows.func is of_target


def _local(rule: Rejection) -> bool:
    same_noise = rule.noise is Rejection(rule.setting).noise
    orders = (in_draw_order, by_draft_probability, reversed_order, without_repeats)
    siblings = rule.setting.most_siblings
    return (
        same_noise
        and rule.rows not in ANYWHERE
        and rule.order in orders
        and (siblings == 1 or rule.leftover is not without_the_token)
    )


class Suspects:
    """Likelihoods of a server's texts. setting: of its drafts, None where they are not known.  depths: that are tried.

    Raises:
        ValueError: more than two siblings, or siblings below the first token.
    """

    def __init__(self, setting: DraftSetting | None, depths: Sequence[int] = DEPTHS) -> None:
        if setting is not None and (
            setting.most_siblings > 2 or (setting.most_siblings == 2 and setting.depth > 1)
        ):
            raise ValueError(f"{setting} was given; expected a chain, or two siblings at its first token.")
        siblings = setting is not None and setting.most_siblings == 2
        self._setting = setting
        self._depths = (1,) if siblings or setting is None else tuple(depths)
        self._most = MOST_SIBLINGS if siblings else MOST_TOKENS
        self.mistakes = known(setting)
        self.tokens = 0
        self._ratios = np.zeros((len(self.mistakes), len(self._depths)))

    def add(
        self, p: Float[np.ndarray, "T V"], q: Float[np.ndarray, "T V"] | None, tokens: Sequence[int]
    ) -> None:
        """A text, with the rows that its tokens were sampled from and, where they are known, those of the draft model."""
        inner = range(len(tokens) - 1)
        drafts = p if q is None else q
        places = [place_of(p[t], drafts[t], tokens[t], self._most) for t in inner]
        if not places:
            return
        self.tokens += len(places)
        lossless = np.array([place.p[place.at].sum() for place in places])
        for m, mistake in enumerate(self.mistakes):
            rows = np.array([self._emission(mistake, place) for place in places])
            for d, depth in enumerate(self._depths):
                self._ratios[m, d] += _log_likelihood(rows, depth) - float(np.log(lossless).sum())

    def _emission(self, mistake: Mistake, place: SampledPlace) -> Emission:
        if self._setting is not None:
            return emission(mistake, place, self._setting)
        changed = float(_Sampler.at(mistake, place).p[place.at].sum())
        return Emission(0.0, changed, changed)

    @property
    def log_ratios(self) -> Mapping[str, float]:
        """Log-likelihood of each mistake, of all depths on average, above that of a lossless server."""
        averages = np.logaddexp.reduce(self._ratios, axis=1) - math.log(len(self._depths))
        return {mistake.name: float(r) for mistake, r in zip(self.mistakes, averages, strict=True)}

    def verdict(self, level: float, noise: float = 0.0) -> "Suspicion":
        """What they say at this probability of a false alarm. noise: mean absolute difference of log-probabilities that arithmetic explains."""
        ratios = self.log_ratios
        wealth = float(np.logaddexp.reduce(list(ratios.values()))) - math.log(len(ratios))
        wealth -= arithmetic(self.tokens, noise)
        best = max(ratios.values())
        near = sorted(
            (name for name, r in ratios.items() if r > best - LIKELIER), key=lambda name: -ratios[name]
        )
        named = wealth >= -math.log(level)
        return Suspicion(math.exp(min(0.0, -wealth)), tuple(near) if named else (), self.tokens)


def arithmetic(tokens: int, noise: float) -> float:
    """What rounding adds to a log-ratio of so many tokens, at most, with probability 1 - 3e-5: its mean, and four standard deviations.

    Log-probabilities whose absolute differences have the mean `noise` have a variance of about noise^2 pi / 2, half of which is their divergence.
    """
    variance = tokens * noise**2 * math.pi / 2
    return variance / 2 + 4 * math.sqrt(variance)


@dataclass(frozen=True)
class Suspicion:
    """p_value: that a lossless server gives such texts, at most.  candidates: known mistakes that they look like, the likeliest first; none where the
    level is not reached.  tokens: that count."""

    p_value: float
    candidates: tuple[str, ...]
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        mistake = self.candidates[0] if self.candidates else None
        return {"p_value": self.p_value, "mistake": mistake, "candidates": list(self.candidates)}


def _log_likelihood(rows: Float[np.ndarray, "T 3"], depth: int) -> float:
    """Of a text, by the forward algorithm. rows: emissions."""
    state = np.zeros(depth + 1)
    state[[0, depth]] = 0.5
    total = 0.0
    for accepted, replaced, extra in rows:
        drafted = state[:depth] * (1 - UNDRAFTED)
        undrafted = state[:depth].sum() * UNDRAFTED
        ended = drafted.sum() * replaced + (undrafted + state[depth]) * extra
        state = np.concatenate([[ended], drafted * accepted])
        probability = state.sum()
        if probability <= 0:
            return -math.inf
        total += math.log(probability)
        state /= probability
    return total


def setting_of(
    drafter: str | None, depth: int | None, num_paths: int | None
) -> tuple[DraftSetting | None, Sequence[int]]:
    """The setting and depths of drafts from a draft model, by the options that they are made with; None where texts do not show it.

    Example:
        >>> setting_of("model:without_replacement", 1, 2)[0].sampling.name, setting_of("model:chain", 4, None)[1]
        ('WITHOUT_REPLACEMENT', (4,))
    """
    kind = (drafter or "model").partition(":")[2]
    if (num_paths or 1) == 1:
        return DraftSetting((-1, 0)), DEPTHS if depth is None else (depth,)
    sampling = DraftSampling.WITHOUT_REPLACEMENT if kind == "without_replacement" else DraftSampling.IID
    return (DraftSetting((-1, 0, 0), sampling), (1,)) if num_paths == 2 and depth == 1 else (None, (1,))
