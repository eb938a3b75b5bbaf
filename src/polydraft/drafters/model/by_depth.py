"""Trees grown through a smaller model's `score`, a depth at a time: for models and kinds that no compiled proposal covers.

A model that drafts some of the tokens only may have none that a request allows. The path ends there, which its own tokens decide (see
`budget.Stop`); below the root of a tree of unequal paths the model's own distribution is drawn from: tokens that are rejected, whatever the verifier.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from polydraft.core import Budget, Draft, DraftSampling, NoiseKey, Request, Target, TokenTree, TreeShape
from polydraft.core import geometry as trees
from polydraft.core.batch import stacked
from polydraft.core.budget import Stop
from polydraft.core.confidence import acceptance_at
from polydraft.core.cursor import Cursor
from polydraft.models.growing.layout import layout
from polydraft.sampling import categorical, noise
from polydraft.sampling import processing as sampling
from polydraft.sampling.softmax import softmax, top


@dataclass(frozen=True)
class ModelState:
    """One request. cursor: how far the draft model has read its committed tokens.  context: these."""

    request: Request
    cursor: Cursor
    context: tuple[int, ...]

    @property
    def slot(self) -> int:
        """Where the draft model holds it."""
        return self.cursor.slot

    @property
    def pending(self) -> tuple[int, ...]:
        """Committed tokens that the slot lacks, the root last."""
        return self.cursor.unread(self.context)


class CachedNodes(NamedTuple):
    """A proposal of which a model's cache holds the nodes that have children, and the leaves where they were scored, too."""

    tokens: list[int]
    parents: list[int]
    leaves: bool = False

    def path(self, emitted: Sequence[int]) -> list[int]:
        """Cached nodes on the emitted path, each at its first copy. emitted: the last token is the next root and is never among them.

        Example:
            >>> tree = [5, 7, 7, 9], [-1, 0, 0, 2]
            >>> CachedNodes(*tree).path([7, 9, 8]), CachedNodes(*tree, leaves=True).path([7, 9, 8])
            ([1], [1, 3])
        """
        path = list[int]()
        here = {0}  # the copies of one node
        for token in emitted[:-1]:
            below = [
                n for n in range(1, len(self.tokens)) if self.parents[n] in here and self.tokens[n] == token
            ]
            here = set(below)
            if not below or not (self.leaves or any(parent in here for parent in self.parents)):
                break
            path.append(below[0])
        return path


class Growth:
    """Trees being grown through a model's `score`, one depth for all rows at a time.

    Rows may differ in size: nodes are listed per row, and a forward pass scores, for every row, the nodes that are new.
    kind: see `drafters.model.paths`.  fixed: of each row.  stop_ids: what `min_tokens` masks.  leaves: whether they are scored, too, and
        the logits after all nodes of the draft.
    """

    def __init__(
        self,
        model: Target,
        kind: str,
        states: Sequence[ModelState],
        fixed: Sequence[Budget],
        key: NoiseKey,
        stop_ids: Sequence[int] = (),
        leaves: bool = False,
    ) -> None:
        self.leaves = leaves
        self.scored = [list[Float[np.ndarray, "M V"]]() for _ in states]
        self.model = model
        self.kind = kind
        self.states = states
        self.fixed = fixed
        self.key = key
        self.stop_ids = stop_ids
        self.uniforms = noise.uniforms(
            key, noise.Stream.DRAFT, max(len(g.parents) * (1 + g.has_spares) for g in fixed)
        )
        self.tokens = [[s.context[-1]] for s in states]
        self.parents = [[-1] for _ in states]
        self.rows = [[-1] for _ in states]
        self.node: list[dict[int, int]] = [{0: 0} for _ in states]
        """By node of the budget; those that a distribution of fewer tokens has no children for are none of the draft."""
        self.draft_rows: list[list[Float[np.ndarray, " V"]]] = [[] for _ in states]
        self.row_of: list[dict[int, int]] = [{} for _ in states]
        self.stops = [None if leaves else g.stop for g in fixed]
        self.confidence = [[1.0] for _ in states]
        self.reach = [[1.0] for _ in states]
        """By node of the draft."""
        self.begin = [0] * len(states)
        """The first node of the draft that the model has not scored."""
        self.live: list[set[int]] = [{0} for _ in states]
        """Nodes of the draft that go on, see `budget.Stop`."""

    def grow(self) -> None:
        """All depths, one after the other."""
        for depth in range(max(g.max_depth for g in self.fixed) + self.leaves):
            self._deepen(depth)
        for b, stop in enumerate(self.stops):
            if stop is not None and stop.min_spare_chance:
                self._add_spares(b, stop)

    def _add_spares(self, b: int, stop: Stop) -> None:
        """Spare siblings of a drawn chain, the likeliest to be accepted first."""
        chances = self._spare_chances(b, stop)
        for parent in sorted(range(len(self.tokens[b]) - 1), key=lambda n: -chances[n]):
            node = len(self.tokens[b])
            if node - 2 >= len(stop.min_spare_chance) or chances[parent] < stop.min_spare_chance[node - 2]:
                return
            row = self.rows[b][parent + 1]
            rest = self.draft_rows[b][row].copy()
            rest[self.tokens[b][parent + 1]] = 0.0
            if (rest > 0).any():
                self._add(b, self._choose(b, rest, node), parent, row)
                self.confidence[b].append(float(self.draft_rows[b][row][self.tokens[b][-1]]))

    def _spare_chances(self, b: int, stop: Stop) -> list[float]:
        """That a sibling of each drawn node is accepted, in a chain."""
        elders = [acceptance_at(sure, np.array(stop.acceptance)) for sure in self.confidence[b][1:]]
        return [
            reach * (1.0 - elder) * stop.spare_acceptance
            for reach, elder in zip(self.reach[b], elders, strict=False)
        ]

    def _deepen(self, depth: int) -> None:
        """Score the frontier, then draw its children."""
        groups: dict[tuple[int, int], list[int]] = {}
        for b, g in enumerate(self.fixed):
            if depth < g.max_depth + self.leaves and self.live[b]:
                groups.setdefault((self.begin[b], len(self.tokens[b])), []).append(b)
        for (since, _), batch in groups.items():
            tree = trees.pad([(self.tokens[b], self.parents[b]) for b in batch])
            scores = self.model.score([self.states[b].slot for b in batch], tree, since=since)
            logits = scores.logits
            if self.leaves:
                for i, b in enumerate(batch):
                    self.scored[b].append(logits[i])
            branching = [depth < self.fixed[b].max_depth for b in batch]
            if not any(branching):
                continue
            probs = self._probs(batch, tree, logits, since)
            first = trees.first_copies(tree)
            for i, b in enumerate(batch):
                if branching[i]:
                    self._branch(b, depth, since, logits[i], probs[i], first[i].tolist())

    def _probs(
        self, batch: list[int], tree: TokenTree, logits: Float[np.ndarray, "B M V"], since: int
    ) -> Float[np.ndarray, "B M V"]:
        """What the logits of the nodes from `since` on are distributions of, by each request."""
        states = [self.states[b] for b in batch]
        prompts = [len(s.request.prompt_token_ids) for s in states]
        params = [s.request.params for s in states]
        contexts = [s.context for s in states]
        return sampling.draft_probs(logits, tree, contexts, prompts, params, self.stop_ids, since=since)

    def _branch(
        self,
        b: int,
        depth: int,
        since: int,
        logits: Float[np.ndarray, "M V"],
        probs: Float[np.ndarray, "M V"],
        first: list[int],
    ) -> None:
        """Draw the children of a depth's nodes, whose rows are those of the nodes from `since` on. first: earliest copy of each node."""
        live = self.live[b]
        self.live[b] = set()
        self._add_rows(b, depth, since, logits, probs, [n for n in live if first[n] == n])
        drawn = self._drawn(b, depth, live, first)
        at_one = softmax(logits) if self.states[b].request.params.greedy else probs
        self.begin[b] = len(self.tokens[b])
        for u in sorted(drawn):
            parent = self.node[b][self.fixed[b].parents[u]]
            n = self.node[b][u] = self._add(b, drawn[u], parent, self.row_of[b][first[parent]])
            self._go_on(b, n, depth + 1, float(at_one[first[parent] - since, drawn[u]]))

    def _add(self, b: int, token: int, parent: int, row: int) -> int:
        """A node of the draft. row: that it was drawn from."""
        self.tokens[b].append(token)
        self.parents[b].append(parent)
        self.rows[b].append(row)
        return len(self.tokens[b]) - 1

    def _drawn(self, b: int, depth: int, live: set[int], first: list[int]) -> dict[int, int]:
        """Tokens of the budget's nodes at the next depth; some have none."""
        drawn: dict[int, int] = {}
        for parent, children in self._children(b, depth, live, first).items():
            q = self.draft_rows[b][self.row_of[b][first[parent]]]
            tokens = _DRAWS[self.kind](self, b, q, children, depth, parent)
            drawn |= dict(zip(children, tokens, strict=False))
        return drawn

    def _add_rows(
        self,
        b: int,
        depth: int,
        since: int,
        logits: Float[np.ndarray, "M V"],
        probs: Float[np.ndarray, "M V"],
        contexts: list[int],
    ) -> None:
        """The rows behind contexts that have children; where a request allows none of the model's tokens, its own distribution below the root of a
        tree of unequal paths, which may not end there."""
        _, starts, inner = layout(self.fixed[b].parents)
        branching = {self.node[b].get(u) for u in range(starts[0, depth], inner[0, depth])}
        may_end = depth == 0 or self.fixed[b].shape in (TreeShape.CHAIN, TreeShape.PATHS, TreeShape.PRODUCT)
        for n in sorted({*contexts} & branching):
            is_allowed = float(probs[n - since].max()) > 0.0
            if is_allowed or not may_end:
                self.row_of[b][n] = len(self.draft_rows[b])
                self.draft_rows[b].append(probs[n - since] if is_allowed else softmax(logits[n - since]))

    def _children(self, b: int, depth: int, live: set[int], first: list[int]) -> dict[int, list[int]]:
        """Nodes of the budget that are drawn now, by the node whose children they are; where draws of a context belong together by its first copy."""
        _, starts, _ = layout(self.fixed[b].parents)
        below: dict[int, list[int]] = {}
        for u in range(starts[0, depth + 1], starts[0, depth + 2]):
            n = self.node[b].get(self.fixed[b].parents[u])
            if n in live and first[n] in self.row_of[b]:
                below.setdefault(first[n] if self.kind == "systematic" else n, []).append(u)
        return below

    def _go_on(self, b: int, n: int, depth: int, confidence: float) -> None:
        """Take note of a drawn node, and whether anything is drawn below it."""
        self.confidence[b].append(confidence)
        reach = self.reach[b][self.parents[b][n]]
        stop = self.stops[b]
        if stop is not None:
            reach *= acceptance_at(confidence, np.array(stop.acceptance))
        self.reach[b].append(reach)
        if stop is None or reach >= stop.min_reach[min(depth, len(stop.min_reach)) - 1]:
            self.live[b].add(n)

    def _choose(self, b: int, weights: np.ndarray, node: int) -> int:
        """By the noise of a node of the budget."""
        return int(categorical.choose(weights[None], self.uniforms[b, node : node + 1])[0])

    def _iid(self, b: int, q: np.ndarray, children: list[int], depth: int, parent: int) -> list[int]:
        return [self._choose(b, q, u) for u in children]

    def _distinct(self, b: int, q: np.ndarray, children: list[int], depth: int, parent: int) -> list[int]:
        remaining = q.copy()
        drawn = list[int]()
        for u in children[: np.count_nonzero(q)]:
            drawn.append(self._choose(b, remaining, u))
            remaining[drawn[-1]] = 0.0
        return drawn

    def _greedy_plus_one(
        self, b: int, q: np.ndarray, children: list[int], depth: int, parent: int
    ) -> list[int]:
        rest = q.copy()
        top = list[int]()
        for _ in children[1:]:
            top.append(int(rest.argmax()))
            rest[top[-1]] = -1.0
        rest[top] = 0.0
        return [*top, self._choose(b, rest, children[-1])] if rest.any() else top

    def _coupled(self, b: int, q: np.ndarray, children: list[int], depth: int, parent: int) -> list[int]:
        key = NoiseKey(*(x[b : b + 1] for x in (self.key.seed, self.key.sample, self.key.position)))
        clocks = noise.clocks(replace(key, position=key.position + depth), len(q))[0]
        _, tokens = top((q / clocks)[None], min(len(children), int((q > 0).sum())))
        return tokens[0].tolist()

    def _systematic(self, b: int, q: np.ndarray, children: list[int], depth: int, parent: int) -> list[int]:
        """parent: the first copy of a context, all of whose draws these are."""
        drawn = np.zeros(len(children), np.int64)
        categorical.choose_systematic(np.ascontiguousarray(q), float(self.uniforms[b, parent]), drawn)
        return drawn.tolist()

    def _listed(self, b: int, q: np.ndarray, children: list[int], depth: int, parent: int) -> list[int]:
        """Each path's own race; path numbers and clocks are those of `verifiers.list_race`."""
        seed, sample, position = (int(x[b]) for x in (self.key.seed, self.key.sample, self.key.position))
        winner = np.zeros(1, np.int64)
        rates = q.astype(np.float64)
        drawn = list[int]()
        for u in children:
            path = (u - 1) % self.fixed[b].width
            noise.first_arrivals(rates, seed, sample, position + depth, winner, path * len(q))
            drawn.append(int(winner[0]))
        return drawn

    def draft(self, draft_sampling: DraftSampling, shape: TreeShape) -> Draft:
        """What was grown, with the rows that it was drawn from."""
        tree = trees.pad(list(zip(self.tokens, self.parents, strict=True)))
        rows = np.array([r + [-1] * (tree.num_nodes - len(r)) for r in self.rows], np.int64)
        V = self.model.vocab_size
        dtype = next((q.dtype for distributions in self.draft_rows for q in distributions), np.float32)
        probs = np.full((len(self.draft_rows), max(1, *map(len, self.draft_rows)), V), 1 / V, dtype)
        for b, distributions in enumerate(self.draft_rows):
            for r, q in enumerate(distributions):
                probs[b, r] = q
        key = self.key if draft_sampling in (DraftSampling.COUPLED, DraftSampling.LISTED) else None
        logits = stacked([np.concatenate(rows) for rows in self.scored]) if self.leaves else None
        confidence = stacked([np.array(x, np.float32) for x in self.confidence], 1.0)
        return Draft(tree, draft_sampling, shape, probs, rows, key, logits, confidence)


_DRAWS: dict[str, Callable[..., list[int]]] = {
    "paths": Growth._iid,
    "chain": Growth._iid,
    "without_replacement": Growth._distinct,
    "greedy_plus_one": Growth._greedy_plus_one,
    "coupled": Growth._coupled,
    "listed": Growth._listed,
    "systematic": Growth._systematic,
}
