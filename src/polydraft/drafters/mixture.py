"""Several drafters share one tree: the nodes that are most likely to be accepted, whoever proposes them.

    s  source      a(s, d, g)  how often nodes of source s, at depth d, of score grade g, were right once their parent was
    r(s)           accepted over expected nodes of s: corrects the scores of a source where a cell has seen little
    v              value of a node: the product along its path of the best source's estimate (for nodes that more than one
                   source proposes, 1 - prod(1 - a)^AGREEMENT of the others)

1. Each source proposes under the whole budget. Equal prefixes are one node.
2. Nodes are taken in the order of v until the budget is used up.
3. After the round the true tokens are known along the accepted path and one further: every node that any source proposed there,
   taken or not, was right or wrong. Its cell learns it; old rounds decay.

Feedback is complete, so nothing is explored: a calibrated estimate, not a bandit.
Lossless: the union of drafts is POINT_MASS and meets the match rule, whose draws are fresh. Which nodes are taken depends on what
the sources drafted and on rounds that are over, never on the draws that decide this round; and a node's own outcome is learnt
only after it. So any choice, however clever or wrong, keeps the law.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from polydraft import registry
from polydraft.core import AuxRows, Budget, Draft, Drafter, Method, Outcome, Request, Scores, SiblingLaw, TreeShape
from polydraft.drafters import index_file
from polydraft.drafters.growth import GrownTree, point_mass
from polydraft.drafters.parts import Auxiliary, Parts, Resumable, Snapshot
from polydraft.errors import IncompatibleError, InvalidInputError

__all__ = ["Calibration", "MixtureDrafter", "MixtureState"]

DEPTHS, GRADES = 4, 8
GRADE_ENDS = np.array([0.05, 0.12, 0.25, 0.4, 0.6, 0.8, 0.95])
PRIOR_WEIGHT = 4.0
PRIOR_RATIO = 0.6
AGREEMENT = 0.5
MOST_SOURCES = 8


class Calibration:
    """How often each source's nodes were right. One belongs to each request, unless it is given to the drafter.

    decay: weight of a round relative to the one after it.

    Example:
        >>> calibration = Calibration(1)
        >>> round(calibration.estimate(0, depth=1, score=1.0), 2)
        0.6
        >>> for _ in range(20):
        ...     calibration.learn(0, depth=1, score=1.0, right=False)
        >>> round(calibration.estimate(0, depth=1, score=1.0), 2)
        0.02
    """

    def __init__(self, num_sources: int, decay: float = 0.99) -> None:
        if not 0 < decay <= 1:
            raise InvalidInputError(f"decay={decay} was given; expected 0 < decay <= 1.")
        self.decay, self.lock = decay, threading.RLock()
        self.cells = np.zeros((2, num_sources, DEPTHS, GRADES))  # right, tried
        self.totals = np.zeros((2, num_sources))  # right, expected

    def estimate(self, source: int, *, depth: int, score: float) -> float:
        """Chance that a node of this source is right if its parent is. depth: from 1."""
        return float(_estimate(self.cells, self.totals, source, depth, score))

    def learn(self, source: int, *, depth: int, score: float, right: bool) -> None:
        """One node whose parent was right."""
        with self.lock:
            _learn(self.cells, self.totals, source, depth, score, right)

    def learn_round(self, nodes: tuple[np.ndarray, ...], emitted: Sequence[int]) -> None:
        """All nodes that were proposed before these tokens came out."""
        with self.lock:
            _learn_round(self.cells, self.totals, self.decay, *nodes, np.array(emitted, np.int64))

    def select(self, nodes: tuple[np.ndarray, ...], budget: Budget) -> tuple[np.ndarray, ...]:
        """(token, parent, source, value) of the nodes taken, most valuable first; parents index them, -1 is the root."""
        with self.lock:
            return _select(self.cells, self.totals, *nodes, budget.max_nodes, budget.max_depth, budget.width)


@njit(cache=True)
def _grade(score):
    g = 0
    while g < len(GRADE_ENDS) and score >= GRADE_ENDS[g]:
        g += 1
    return g


@njit(cache=True)
def _estimate(cells, totals, s, depth, score):
    d, g = min(depth, DEPTHS) - 1, _grade(score)
    ratio = (totals[0, s] + PRIOR_WEIGHT * PRIOR_RATIO) / (totals[1, s] + PRIOR_WEIGHT)
    prior = min(max(score * ratio, 0.005), 0.98)
    return (cells[0, s, d, g] + PRIOR_WEIGHT * prior) / (cells[1, s, d, g] + PRIOR_WEIGHT)


@njit(cache=True)
def _learn(cells, totals, s, depth, score, right):
    d, g = min(depth, DEPTHS) - 1, _grade(score)
    cells[1, s, d, g] += 1
    totals[1, s] += score
    if right:
        cells[0, s, d, g] += 1
        totals[0, s] += 1


@njit(cache=True)
def _learn_round(cells, totals, decay, token, parent, source, score, emitted):
    cells *= decay
    totals *= decay
    level = np.full(len(token), -1, np.int64)  # depth of the nodes whose path is what was emitted
    for i in range(len(token)):
        above = 0 if parent[i] < 0 else level[parent[i]]
        if 0 <= above < len(emitted):
            right = token[i] == emitted[above]
            _learn(cells, totals, source[i], above + 1, score[i], right)
            if right:
                level[i] = above + 1


@njit(cache=True)
def _select(cells, totals, token, parent, source, score, max_nodes, max_depth, width):
    # merge equal prefixes; the nodes of each source come after their parents
    count = len(token)
    node = np.empty(count, np.int64)  # merged node of each candidate
    first = np.empty(count, np.int64)  # candidate that made each merged node
    above, depth = np.empty(count, np.int64), np.empty(count, np.int64)
    best, misses, credit = np.empty(count), np.empty(count), np.empty(count, np.int64)
    size = 0
    for i in range(count):
        up = -1 if parent[i] < 0 else node[parent[i]]
        level = 1 if up < 0 else depth[up] + 1
        p = _estimate(cells, totals, source[i], level, score[i])
        n = -1
        if source[i] > 0:  # the first source's nodes are distinct
            for m in range(up + 1, size):
                if above[m] == up and token[first[m]] == token[i]:
                    n = m
                    break
        if n < 0:
            n = size
            size += 1
            first[n], above[n], depth[n] = i, up, level
            best[n], misses[n], credit[n] = p, 1.0, source[i]
        elif p > best[n]:
            misses[n] *= (1 - best[n]) ** AGREEMENT
            best[n], credit[n] = p, source[i]
        else:
            misses[n] *= (1 - p) ** AGREEMENT
        node[i] = n
    value = np.empty(size)
    for n in range(size):
        value[n] = (1 - (1 - best[n]) * misses[n]) * (1.0 if above[n] < 0 else value[above[n]])
    # take them, most valuable first
    place, inner, paths, num = np.full(size, -1, np.int64), np.zeros(size, np.bool_), 0, 0
    out_token, out_parent = np.empty(max_nodes, np.int64), np.empty(max_nodes, np.int64)
    out_source, out_value = np.empty(max_nodes, np.int64), np.empty(max_nodes)
    while num < max_nodes:
        take = -1
        for n in range(size):
            if place[n] >= 0 or depth[n] > max_depth or (above[n] >= 0 and place[above[n]] < 0):
                continue
            if take >= 0 and value[n] <= value[take]:
                continue
            if paths < width or (above[n] >= 0 and not inner[above[n]]):
                take = n
        if take < 0:
            break
        up = above[take]
        paths += up < 0 or inner[up]
        if up >= 0:
            inner[up] = True
        place[take] = num
        out_token[num], out_parent[num] = token[first[take]], -1 if up < 0 else place[up]
        out_source[num], out_value[num] = credit[take], value[take]
        num += 1
    return out_token[:num], out_parent[:num], out_source[:num], out_value[:num]


@dataclass
class MixtureState:
    """One request: the sources' states, what it has learnt, and what was proposed last.

    nodes: (token, parent, source, score) of all nodes that the sources proposed.  taken: (token, parent, source) of the draft.
    length: of the text that it was proposed for.  accepted: by source.  credit: sources of the last round's accepted tokens.
    """

    tokens: list[int]
    members: list[Any]
    calibration: Calibration
    nodes: tuple[np.ndarray, ...] | None = None
    taken: tuple[np.ndarray, ...] | None = None
    length: int = -1
    accepted: dict[str, int] = field(default_factory=dict[str, int])
    credit: list[str] = field(default_factory=list[str])


class MixtureDrafter:
    """Several drafters under one budget.

    sources: drafters by name; of any law, as sampled tokens are as good a guess as others once nobody asks for their q.
    calibration: shared by all requests, if they may learn from each other.  decay: of each request's own calibration.

    Raises:
        InvalidInputError: fewer than two sources, more than eight, or two that need auxiliary rows.

    Example:
        >>> from polydraft.core import SamplingParams
        >>> from polydraft.drafters.ngram import NgramDrafter
        >>> from polydraft.drafters.trigram import TrigramDrafter, TrigramTable
        >>> table = TrigramTable.build([[6, 7, 9, 9]], vocab_size=12)
        >>> drafter = MixtureDrafter({"ngram": NgramDrafter(), "trigram": TrigramDrafter(table)})
        >>> states = drafter.start([Request("r", (1, 6, 7, 8, 6, 7), SamplingParams(), seed=0)])
        >>> sorted(drafter.propose(states, [Budget(max_nodes=2, max_depth=1, width=2)]).tree.tokens[0, 1:].tolist())
        [8, 9]
    """

    info = Method(
        name="mixture",
        title="Several drafters in one tree",
        authors="polydraft",
        year=2026,
        arxiv="",
        laws=frozenset({SiblingLaw.POINT_MASS}),
        shapes=frozenset({TreeShape.GROWN}),
    )
    methods = (info,)

    def __init__(
        self,
        sources: Mapping[str, Drafter],
        *,
        calibration: Calibration | None = None,
        decay: float = 0.99,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        if not 2 <= len(sources) <= MOST_SOURCES:
            raise InvalidInputError(f"sources {list(sources)} were given; expected two to {MOST_SOURCES} drafters.")
        asking = [name for name, source in sources.items() if "aux" in source.needs]
        if len(asking) > 1:
            raise InvalidInputError(
                f"sources {asking} were given, which all need auxiliary rows; expected one such. Leave out others."
            )
        self.names, self.sources = list(sources), list(sources.values())
        self.needs: frozenset[str] = frozenset().union(*(source.needs for source in self.sources))
        self.calibration, self.decay, self._eos = calibration, decay, frozenset(eos_token_ids)
        Calibration(1, decay)

    @classmethod
    def build(
        cls,
        parts: Parts,
        *,
        kind: str = "",
        sources: Iterable[str | tuple[str, Mapping[str, Any]]] | None = None,
        index: Any = None,
        **options: Any,
    ) -> "MixtureDrafter":
        """For the engine: "mixture:suffix,trigram", or sources=["suffix", ("trigram", {"bump": 0.1}), "model:top_k"].

        index: a file of `polydraft index build`, or several; each goes to the source of its kind. Default sources: ngram, trigram,
        retrieval if there is an index for it, and model:top_k if there is a draft model.

        Raises:
            InvalidInputError, UnknownNameError, IncompatibleError: as of the sources; a source that is named twice.
        """
        files = [] if index is None else [index] if isinstance(index, (str, Path)) else list(index)
        of_kind = {index_file.kind_of(path): path for path in files}
        chosen = list(sources) if sources is not None else [name.strip() for name in kind.split(",") if name.strip()]
        if not chosen:
            chosen = ["ngram", "trigram", *(["retrieval"] if "retrieval" in of_kind else [])]
            chosen += [] if parts.draft_model is None else ["model:top_k"]
        made: dict[str, Drafter] = {}
        for source in chosen:
            full, own = (source, {}) if isinstance(source, str) else source
            name, _, inner = full.partition(":")
            if full in made or name == "mixture":
                raise InvalidInputError(
                    f"sources {[str(c) for c in chosen]} were given; expected each once, and no mixture in a mixture."
                )
            given = {**({"index": of_kind.pop(name)} if name in of_kind else {}), **({"kind": inner} if inner else {}), **own}
            made[full] = registry.drafter(name).build(parts, **given)
        if of_kind:
            raise InvalidInputError(
                f"an index of kind {next(iter(of_kind))!r} was given; no source of {list(made)} reads it. Leave it out."
            )
        return cls(made, eos_token_ids=parts.eos_token_ids, **options)

    def start(self, requests: Sequence[Request]) -> list[MixtureState]:
        """Start every source."""
        members = [source.start(requests) for source in self.sources]
        return [
            MixtureState(list(r.prompt_token_ids), [m[b] for m in members], self._calibration()) for b, r in enumerate(requests)
        ]

    def _calibration(self) -> Calibration:
        return Calibration(len(self.sources), self.decay) if self.calibration is None else self.calibration

    def release(self, states: Sequence[MixtureState]) -> None:
        """Release every source's states."""
        for i, source in enumerate(self.sources):
            source.release([state.members[i] for state in states])

    def _trees(
        self, i: int, states: Sequence[MixtureState], budgets: Sequence[Budget]
    ) -> list[tuple[list[int], list[int], list[float]]]:
        """(tokens, parents, scores) of what source i proposes for each row; the root is node 0."""
        source, members = self.sources[i], [state.members[i] for state in states]
        grow = getattr(source, "grow", None)
        if grow is not None:
            grown = [grow(member, budget) for member, budget in zip(members, budgets, strict=True)]
            return [(g.tokens, g.parents, g.scores) for g in grown]
        draft = source.propose(members, budgets)
        counts = draft.tree.is_node.sum(1).tolist()
        tokens, parents, rows = draft.tree.tokens.tolist(), draft.tree.parents.tolist(), draft.rows.tolist()
        found = []
        for b, n in enumerate(counts):
            q = draft.probs
            scores = [
                1.0 if q is None or row < 0 else float(q[b, row, t]) for row, t in zip(rows[b][:n], tokens[b], strict=False)
            ]
            found.append((tokens[b][:n], parents[b][:n], scores))
        return found

    def _nodes(self, states: Sequence[MixtureState], budgets: Sequence[Budget]) -> list[tuple[np.ndarray, ...]]:
        """What all sources propose, as arrays for `Calibration`."""
        trees = [self._trees(i, states, budgets) for i in range(len(self.sources))]
        found = []
        for b in range(len(states)):
            token, parent, source, score = [], [], [], []
            for i, tree in enumerate(trees):
                tokens, parents, scores = tree[b]
                before = len(token) - 1  # node n of the tree is candidate before + n
                token += tokens[1:]
                parent += [before + p if p else -1 for p in parents[1:]]
                source += [i] * (len(tokens) - 1)
                score += scores[1:]
            found.append(
                (np.array(token, np.int64), np.array(parent, np.int64), np.array(source, np.int64), np.array(score, np.float64))
            )
        return found

    def propose(self, states: Sequence[MixtureState], budgets: Sequence[Budget]) -> Draft:
        """The most valuable nodes of all sources for each row."""
        trees = []
        for state, budget, nodes in zip(states, budgets, self._nodes(states, budgets), strict=True):
            grown = GrownTree(state.tokens[-1], budget, self._eos)
            taken = state.calibration.select(nodes, budget)
            grown.add_ranked(taken[0], taken[1], taken[3])
            state.nodes, state.taken, state.length = nodes, taken[:3], len(state.tokens)
            trees.append(grown)
        return point_mass(trees)

    def aux(self, states: Sequence[MixtureState]) -> AuxRows | None:
        """The auxiliary rows of the source that needs some."""
        for i, source in enumerate(self.sources):
            if "aux" in source.needs and isinstance(source, Auxiliary):
                return source.aux([state.members[i] for state in states])
        return None

    def observe(self, states: Sequence[MixtureState], outcome: Outcome, scores: Scores) -> list[MixtureState]:
        """Tell every source; learn which nodes were right, and whose the accepted ones are."""
        members = [
            source.observe([state.members[i] for state in states], outcome, scores) for i, source in enumerate(self.sources)
        ]
        for b, (state, tokens) in enumerate(zip(states, outcome.emitted(scores.tree), strict=True)):
            state.members = [m[b] for m in members]
            state.credit = []
            if state.nodes is not None and state.taken is not None and state.length == len(state.tokens):
                state.calibration.learn_round(state.nodes, tokens)
                state.credit = [self.names[i] for i in _credit(state.taken, tokens[:-1])]
                for name in state.credit:
                    state.accepted[name] = state.accepted.get(name, 0) + 1
            state.tokens += tokens
        return list(states)

    def _resumable(self, i: int) -> Resumable:
        source = self.sources[i]
        if not isinstance(source, Resumable):
            raise IncompatibleError(
                f"the state of a mixture with {self.names[i]!r} was to be saved; that source has no `snapshot` and `restore`. "
                "Give it both (see `parts.Resumable`), or leave it out of the mixture."
            )
        return source

    def snapshot(self, state: MixtureState) -> Snapshot:
        """The sources' snapshots and what was learnt; a shared calibration is saved by its owner."""
        saved: Snapshot = {"tokens": np.array(state.tokens)}
        if self.calibration is None:
            saved |= {"cells": state.calibration.cells.copy(), "totals": state.calibration.totals.copy()}
        for i, member in enumerate(state.members):
            saved |= {f"{i}.{key}": value for key, value in self._resumable(i).snapshot(member).items()}
        return saved

    def restore(self, request: Request, snapshot: Snapshot) -> MixtureState:
        """The state that drafts as the one of the snapshot; see `parts.Resumable`."""
        members = []
        for i in range(len(self.sources)):
            own = {key.partition(".")[2]: value for key, value in snapshot.items() if key.startswith(f"{i}.")}
            members.append(self._resumable(i).restore(request, own))
        calibration = self._calibration()
        if self.calibration is None:
            calibration.cells[:], calibration.totals[:] = snapshot["cells"], snapshot["totals"]
        return MixtureState(snapshot["tokens"].tolist(), members, calibration)


def _credit(taken: tuple[np.ndarray, ...], accepted: Sequence[int]) -> list[int]:
    """The sources of the nodes along the accepted path; it ends where another tree was scored than was proposed."""
    token, parent, source = (x.tolist() for x in taken)
    at, found = -1, []
    for t in accepted:
        at = next((n for n in range(len(token)) if parent[n] == at and token[n] == t), None)
        if at is None:
            break
        found.append(source[at])
    return found
