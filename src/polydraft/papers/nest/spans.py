"""NEST's spans: what follows, in its passage, the place where the last token was found.

Li et al. 2024 (arXiv 2405.19325).
    delta    a span is begun where the target's share of the mixture, lambda, is at most this      n    its longest draft

A token that the mixture drew and that some hit has as its value is taken for a quotation of the heaviest such hit, and the passage's next tokens are
drafted. Where all were accepted, the next draft goes on in the same passage without a search; where one was not, the token in its place begins none.
Lossless: a draft is a function of the committed text, so POINT_MASS, and any verifier for that. `places` say where each emitted token of a step stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from polydraft.core import (
    Account,
    Budget,
    Draft,
    DraftSampling,
    Needs,
    Offers,
    Outcome,
    Request,
    Scores,
    TreeShape,
)
from polydraft.core import geometry as tree
from polydraft.drafters.base import Parts
from polydraft.errors import InvalidInputError
from polydraft.methods.papers import method


@dataclass(frozen=True)
class Standing:
    """Where a token stands: in the document `source`, its passage of this number, at this position."""

    passage: int
    position: int
    source: str


@dataclass(frozen=True)
class SpanState:
    """at: where the last token stands.  drafted: tokens of the last draft.  used: where spans were begun.  sources, places: see `core.Account`."""

    tokens: tuple[int, ...]
    at: Standing | None = None
    drafted: int = 0
    used: frozenset[tuple[int, int]] = frozenset()
    places: Sequence[Any] = ()
    sources: Sequence[str] = ()


class SpanDrafter:
    """See the module. decoding: a `papers.nest.nearest.Nearest`, whose hits and passages are read.

    Example:
        >>> SpanDrafter.info.name
        'nest'
    """

    info = method(
        "nest", "Spans of retrieved passages", "2405.19325", {DraftSampling.POINT_MASS}, {TreeShape.CHAIN}
    )
    methods = (info,)

    def __init__(self, decoding: Any, *, delta: float = 0.5, longest: int = 64) -> None:
        if not 0 <= delta <= 1 or longest < 1:
            raise InvalidInputError(
                f"delta={delta} and longest={longest} were given to the drafter 'nest'; expected 0 to 1, and at least 1."
            )
        self.decoding = decoding
        self.delta = delta
        self.longest = longest
        self.needs = Needs(hidden=decoding.needs.hidden, every_step=True)

    @classmethod
    def build(cls, parts: Parts, **options: Any) -> "SpanDrafter":
        """For the engine, whose decoding method has the passages; options as the constructor.

        Raises:
            InvalidInputError: another decoding method.
        """
        if not hasattr(parts.decoding, "hits"):
            raise InvalidInputError(
                "the drafter 'nest' was asked for without the decoding method 'nest', whose passages it drafts from. Give decoding='nest'."
            )
        return cls(parts.decoding, **options)

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        return Offers(read=self.read, account=self.account)

    def account(self, state: SpanState) -> Account:
        """Which passages the accepted tokens are from, and where each emitted token stands."""
        return Account(sources=state.sources, places=state.places)

    def start(self, requests: Sequence[Request]) -> list[SpanState]:
        """Nothing is quoted yet."""
        return [SpanState(r.prompt_token_ids) for r in requests]

    def read(self, states: Sequence[SpanState], scores: Scores) -> list[SpanState]:
        """The prompt is not attributed."""
        return list(states)

    def _next(self, at: Standing | None) -> tuple[int, ...]:
        passage = None if at is None else self.decoding.passages.passage(at.passage)
        return (
            ()
            if at is None or passage is None
            else tuple(passage.tokens[at.position + 1 : at.position + 1 + self.longest].tolist())
        )

    def propose(self, states: Sequence[SpanState], budgets: Sequence[Budget]) -> Draft:
        """The passages' next tokens, up to their ends."""
        spans = [self._next(s.at)[: budget.chain_length] for s, budget in zip(states, budgets, strict=True)]
        return Draft.point_mass(
            tree.chains([[s.tokens[-1], *span] for s, span in zip(states, spans, strict=True)])
        )

    def observe(self, states: Sequence[SpanState], outcome: Outcome, scores: Scores) -> list[SpanState]:
        """Where each emitted token stands, and whether the next draft goes on from the last one."""
        (layer,) = self.needs.hidden
        new = list[SpanState]()
        paths, extras = outcome.lists
        for b, s in enumerate(states):
            num_accepted = len(paths[b])
            extra = extras[b]
            drafted = int(scores.tree.is_node[b].sum()) - 1
            standing = (
                [replace(s.at, position=s.at.position + i) for i in range(1, num_accepted + 1)]
                if s.at is not None
                else [None] * num_accepted
            )
            text = (*s.tokens, *scores.tree.tokens[b, paths[b]].tolist())
            at = standing[-1] if standing else s.at
            used = s.used
            if num_accepted < drafted:
                at = None
            elif at is not None and self._next(at)[:1] == (extra,):
                at = replace(at, position=at.position + 1)
            else:
                state = scores.hidden[layer][b, paths[b][-1] if num_accepted else 0]
                at = self._selected(text, state, extra, used)
                used = used if at is None else used | {(at.passage, at.position)}
            names = [f"{x.source}, passage {x.passage}" for x in standing if x is not None]
            new.append(SpanState((*text, extra), at, 0, used, (*standing, at), names))
        return new

    def _selected(
        self, text: tuple[int, ...], state: Any, token: int, used: frozenset[tuple[int, int]]
    ) -> Standing | None:
        hits = self.decoding.hits(text, state)
        if hits is None or hits.model_share > self.delta:
            return None
        for i in (hits.tokens == token).nonzero()[0].tolist():  # the heaviest come first
            number = int(hits.passages[i])
            position = int(hits.positions[i])
            passage = self.decoding.passages.passage(number)
            if (number, position) not in used and passage is not None:
                return Standing(number, position, passage.source)
        return None

    def release(self, states: Sequence[SpanState]) -> None:
        """Nothing is held."""
