"""Several drafters share one tree: the nodes that are most likely to be accepted, whoever proposes them.

The notation is that of `credit`.

1. Each source proposes under the whole budget. Equal prefixes are one node.
2. Nodes are taken in the order of v until the budget is used up.
3. After the step the true tokens are known along the accepted path and one further: every node that any source proposed there,
   taken or not, was right or wrong. Its cell learns it; old steps decay.

Feedback is complete, so nothing is explored: a calibrated estimate, not a bandit.
Lossless: the union of drafts is POINT_MASS and meets the verifier `match`, whose draws are fresh. Which nodes are taken depends on what
the sources drafted and on steps that are over, never on the draws that decide this one; and a node's own outcome is learnt
only after it. So any choice, however clever or wrong, is lossless.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.core import (
    Account,
    Budget,
    Draft,
    Drafter,
    DraftSampling,
    Offers,
    Outcome,
    Request,
    SamplingParams,
    Scores,
    TokenTree,
    TreeShape,
)
from polydraft.drafters.base import Parts, teach_each
from polydraft.drafters.grown_tree import NODE, GrownTree, end_ids, point_mass
from polydraft.drafters.text.base import TextDrafter
from polydraft.drafters.text.text_index import TextIndex
from polydraft.errors import InvalidInputError
from polydraft.heads.folder import kind_of
from polydraft.methods import registry
from polydraft.methods.papers import method
from polydraft.numerics.compiled_code import njit
from polydraft.papers.members import Cursors, release_each, start_each
from polydraft.papers.mixture.credit import CANDIDATE, SourceCredit
from polydraft.policy.sizes import drawable

MOST_SOURCES = 8


@dataclass
class MixtureState:
    """One request: the sources' states, what it has learnt, and what was proposed last.

    proposed: (candidates of all sources as `SourceCredit.choose` takes them, the tree of those taken, the source of each of its nodes).
    length: of the text that it was proposed for.  credit: sources of the last step's accepted tokens.
    """

    tokens: list[int]
    params: SamplingParams
    members: list[Any]
    learnt: SourceCredit
    proposed: tuple[np.ndarray, GrownTree, np.ndarray] | None = None
    length: int = -1
    credit: list[str] = field(default_factory=list[str])


class MixtureDrafter:
    """Several drafters under one budget.

    sources: drafters by name; of any distribution, as sampled tokens are as good a guess as others once nobody asks for their q.
    credit: shared by all requests, if they may learn from each other.  decay: of each request's own.

    Raises:
        InvalidInputError: fewer than two sources, more than eight, or two that have nodes scored beside the draft.

    Example:
        >>> from polydraft.core import SamplingParams
        >>> from polydraft.drafters.text.ngram import NgramDrafter
        >>> from polydraft.papers.trigram.drafter import TrigramDrafter, TrigramTable
        >>> table = TrigramTable.of(TextIndex.build([[6, 7, 9, 9]], vocab_size=12))
        >>> drafter = MixtureDrafter({"ngram": NgramDrafter(), "trigram": TrigramDrafter(table)})
        >>> states = drafter.start([Request("r", (1, 6, 7, 8, 6, 7), SamplingParams(), seed=0)])
        >>> sorted(drafter.propose(states, [Budget.grown(2, 1, width=2)]).tree.tokens[0, 1:].tolist())
        [8, 9]
    """

    info = method(
        "mixture", "Several drafters in one tree", "", {DraftSampling.POINT_MASS}, {TreeShape.GROWN}
    )
    methods = (info,)
    reads_text_alone = True

    def __init__(
        self,
        sources: Mapping[str, Drafter],
        *,
        credit: SourceCredit | None = None,
        decay: float = 0.99,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        if not 2 <= len(sources) <= MOST_SOURCES:
            raise InvalidInputError(
                f"sources {list(sources)} were given; expected two to {MOST_SOURCES} drafters."
            )
        extra = {name: source.offers.extra_nodes for name, source in sources.items()}
        asking = [name for name, nodes in extra.items() if nodes is not None]
        if len(asking) > 1:
            raise InvalidInputError(
                f"sources {asking} were given, which all have nodes scored beside the draft; expected one such. Leave out others."
            )
        self.names = list(sources)
        self.sources = list(sources.values())
        self.needs = reduce(or_, (source.needs for source in self.sources))
        self.credit = credit
        self.decay = decay
        self._eos = end_ids(eos_token_ids)
        SourceCredit(1, decay)

    @classmethod
    def build(
        cls,
        parts: Parts,
        *,
        kind: str = "",
        sources: Iterable[str | tuple[str, Mapping[str, Any]]] | None = None,
        index: str | Path | TextIndex | None = None,
        **options: Any,
    ) -> "MixtureDrafter":
        """For the engine: "mixture:suffix,trigram", or sources=["suffix", ("trigram", {"bump": 0.1}), "model:top_k"].

        index: a file of `polydraft index build`, or a `TextIndex`, for every source that reads one. Default sources: ngram, trigram,
        retrieval if there is an index, and model:top_k if there is a draft model.

        Raises:
            InvalidInputError, UnknownNameError, IncompatibleError: as of the sources; a source that is named twice.
        """
        opened = None if index is None else TextIndex.for_engine(index, parts)
        chosen = (
            list(sources)
            if sources is not None
            else [name.strip() for name in kind.split(",") if name.strip()]
        )
        if not chosen:
            chosen = ["ngram", "trigram", *([] if opened is None else ["retrieval"])]
            chosen += [] if parts.draft_model is None else ["model:top_k"]
        parts_by_name: dict[str, Drafter] = {}
        for source in chosen:
            full, own_options = (source, {}) if isinstance(source, str) else source
            if full in parts_by_name or full.partition(":")[0] == "mixture":
                raise InvalidInputError(
                    f"sources {[str(c) for c in chosen]} were given; expected each once, and no mixture in a mixture."
                )
            with_index = {"index": opened} if opened is not None and registry.takes(full, "index") else {}
            parts_by_name[full] = registry.build_drafter(full, parts, {**with_index, **own_options})
        draft_slots = None if parts.draft_model is None else parts.draft_slots
        reading = [
            name
            for name, source in parts_by_name.items()
            if draft_slots and source.offers.slots is draft_slots
        ]
        if len(reading) > 1:
            raise InvalidInputError(
                f"sources {reading} were given, which all run requests in the draft model; expected one such, as it has a slot for each. Leave out others."
            )
        if opened is not None and not any(registry.takes(full, "index") for full in parts_by_name):
            raise InvalidInputError(
                f"an index was given; no source of {list(parts_by_name)} reads one. Leave it out."
            )
        return cls(parts_by_name, eos_token_ids=parts.eos_token_ids, **options)

    @classmethod
    def of_folders(cls, heads: Mapping[str, Path], members: Sequence[str]) -> dict[str, Any]:
        """Its options for `polydraft bench --way mixture:NAME,NAME`: heads grow their most probable trees. heads: folders by name."""
        sources = [
            (f"{kind_of(heads[member])}:top_k", {"weights": str(heads[member])})
            if member in heads
            else (member, {})
            for member in members
        ]
        return {"sources": sources}

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        in_pieces = all(source.offers.cursor is not None for source in self.sources if source.needs.hidden)
        return Offers(
            read=self.read,
            extra_nodes=self._extra_nodes(),
            learn_output=self.learn_output,
            account=self.account,
            cursor=self.cursor if in_pieces else None,
        )

    def _extra_nodes(self) -> Callable[[Sequence[MixtureState]], TokenTree] | None:
        """What the source that has further nodes wants scored, if there is one."""
        for i, source in enumerate(self.sources):
            if (nodes := source.offers.extra_nodes) is not None:
                return lambda states, i=i, nodes=nodes: nodes([state.members[i] for state in states])
        return None

    def start(self, requests: Sequence[Request]) -> list[MixtureState]:
        """Start every source."""
        members = start_each((source, requests) for source in self.sources)
        return [
            MixtureState(list(r.prompt_token_ids), r.params, [m[b] for m in members], self._credit())
            for b, r in enumerate(requests)
        ]

    def cursor(self, state: MixtureState) -> Cursors:
        """Those of all sources that read."""
        cursors = [
            None if (cursor := source.offers.cursor) is None else cursor(member)
            for source, member in zip(self.sources, state.members, strict=True)
        ]
        told = [cursors[i] for i, source in enumerate(self.sources) if source.needs.hidden]
        return Cursors(cursors, told)

    def read(self, states: Sequence[MixtureState], scores: Scores, start: int = 0) -> list[MixtureState]:
        """Tell the sources that need hidden states."""
        place = (start,) if start else ()
        for i, source in enumerate(self.sources):
            if source.needs.hidden and (read := source.offers.read) is not None:
                for state, member in zip(
                    states, read([state.members[i] for state in states], scores, *place), strict=True
                ):
                    state.members[i] = member
        return list(states)

    def account(self, state: MixtureState) -> Account:
        """Whose the accepted tokens are."""
        return Account(sources=state.credit)

    def _credit(self) -> SourceCredit:
        return SourceCredit(len(self.sources), self.decay) if self.credit is None else self.credit

    def release(self, states: Sequence[MixtureState]) -> None:
        """Release every source's states."""
        release_each(
            (source, [state.members[i] for state in states]) for i, source in enumerate(self.sources)
        )

    def learn_output(self, token_ids: Sequence[int]) -> None:
        """Tell every source that learns from it."""
        teach_each(self.sources, token_ids)

    def _trees(self, i: int, states: Sequence[MixtureState], budgets: Sequence[Budget]) -> list[np.ndarray]:
        """Nodes of the tree that source i proposes for each row, the root first: of `grown_tree.NODE`, depth and is_inner aside."""
        source = self.sources[i]
        members = [state.members[i] for state in states]
        if isinstance(source, TextDrafter):
            grown = [
                source.continuations(member, budget) for member, budget in zip(members, budgets, strict=True)
            ]
            return [g.nodes for g in grown]
        texts = [(state.params, len(state.tokens)) for state in states]
        draft = source.propose(members, drawable(budgets, texts, source.info, source.offers))
        trees = []
        q = draft.probs
        rows = draft.rows.tolist()
        for b, size in enumerate(draft.tree.is_node.sum(1).tolist()):
            nodes = np.empty(size, NODE)
            nodes["token"], nodes["parent"] = (
                draft.tree.tokens[b, :size],
                draft.tree.parents[b, :size],
            )
            drawn = zip(rows[b], nodes["token"].tolist(), strict=False)
            nodes["score"] = [1.0 if q is None or row < 0 else float(q[b, row, t]) for row, t in drawn]
            trees.append(nodes)
        return trees

    def propose(self, states: Sequence[MixtureState], budgets: Sequence[Budget]) -> Draft:
        """The most valuable nodes of all sources for each row."""
        trees = [self._trees(i, states, budgets) for i in range(len(self.sources))]
        drafts = []
        for state, budget, own_trees in zip(states, budgets, zip(*trees, strict=True), strict=True):
            candidates = np.empty(sum([len(nodes) - 1 for nodes in own_trees]), CANDIDATE)
            size = 0
            for i, nodes in enumerate(own_trees):
                size = _append(candidates, size, i, nodes)
            grown, sources = state.learnt.choose(state.tokens[-1], candidates, budget, self._eos)
            state.proposed = (candidates, grown, sources)
            state.length = len(state.tokens)
            drafts.append(grown)
        return point_mass(drafts)

    def observe(self, states: Sequence[MixtureState], outcome: Outcome, scores: Scores) -> list[MixtureState]:
        """Tell every source; learn which nodes were right, and whose the accepted ones are."""
        members = [
            source.observe([state.members[i] for state in states], outcome, scores)
            for i, source in enumerate(self.sources)
        ]
        for b, (state, tokens) in enumerate(zip(states, outcome.emitted(scores.tree), strict=True)):
            state.members = [m[b] for m in members]
            state.credit = []
            if state.proposed is not None and state.length == len(state.tokens):
                candidates, grown, sources = state.proposed
                state.learnt.learn_step(candidates, tokens)
                node = 0
                for token in tokens[:-1]:  # as far as the tree that was scored is the one that was proposed
                    node = grown.child(node, token)
                    if node < 0:
                        break
                    state.credit.append(self.names[sources[node]])
            state.tokens += tokens
        return list(states)


@njit(cache=True)
def _append(candidates, size, source, nodes):
    """Put the nodes of a tree, less its root, behind so many candidates; returns how many there are now."""
    for n in range(1, len(nodes)):
        node = nodes[n]
        candidate = candidates[size + n - 1]
        candidate.token = node.token
        candidate.parent = size + node.parent - 1 if node.parent else -1
        candidate.source = source
        candidate.score = node.score
    return size + len(nodes) - 1
