"""Trees grown through a smaller model's `score`, a depth at a time: for models and kinds that no compiled proposal covers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from polydraft import noise, sampling
from polydraft import tree as trees
from polydraft.core import Draft, NoiseKey, Request, SiblingLaw, Target, TreeShape
from polydraft.models.layout import Size, layout

__all__ = ["Growth", "ModelState"]


@dataclass(frozen=True)
class ModelState:
    """One request: its slot in the draft model, and the committed tokens that the slot lacks, the root last."""

    request: Request
    slot: int
    context: tuple[int, ...]
    pending: tuple[int, ...]


class Growth:
    """Trees being grown through a model's `score`, one depth for all rows at a time.

    Rows may differ in size: nodes are kept per row, and a pass scores, for every row, the nodes that are new.
    kind: see `drafters.model`.  sizes: of each row.  stop_ids: what `min_tokens` masks.
    """

    def __init__(
        self,
        model: Target,
        kind: str,
        states: Sequence[ModelState],
        sizes: Sequence[Size],
        key: NoiseKey,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self.model, self.kind, self.states, self.sizes, self.key, self.stop_ids = model, kind, states, sizes, key, stop_ids
        self.uniforms = noise.uniforms(key, noise.Stream.DRAFT, max(layout(size).parents.shape[1] for size in sizes))
        self.tokens = [[s.context[-1]] for s in states]
        self.parents = [[-1] for _ in states]
        self.rows = [[-1] for _ in states]
        self.frontier = [[0] for _ in states]
        self.laws: list[list[Float[Tensor, V]]] = [[] for _ in states]
        self.row_of: list[dict[int, int]] = [{} for _ in states]

    def deepen(self, depth: int) -> None:
        """Score the frontier, then draw its children."""
        live = [b for b, (_, deepest, *_) in enumerate(self.sizes) if depth < deepest]
        groups: dict[tuple[int, int], list[int]] = {}
        for b in live:
            since = min(self.frontier[b])
            groups.setdefault((since, len(self.tokens[b])), []).append(b)
        for (since, _), batch in groups.items():
            tree = trees.pad([(self.tokens[b], self.parents[b]) for b in batch])
            scores = self.model.score([self.states[b].slot for b in batch], tree, since=since)
            whole = torch.zeros(len(batch), tree.num_nodes, scores.logits.shape[-1])
            whole[:, since:] = scores.logits.cpu()
            probs = sampling.laws(
                whole,
                tree,
                [self.states[b].context for b in batch],
                [len(self.states[b].request.prompt_token_ids) for b in batch],
                [self.states[b].request.params for b in batch],
                self.stop_ids,
            )
            first = trees.first_copies(tree)
            for i, b in enumerate(batch):
                self._branch(b, depth, probs[i], first[i].tolist())

    def _branch(self, b: int, depth: int, probs: Float[Tensor, "N V"], first: list[int]) -> None:
        width, _, trunk, short, by_position = self.sizes[b]
        parents, starts, inner = layout(self.sizes[b])
        going_on = inner[0, depth] - starts[0, depth] if by_position else 1 if 0 < short <= depth else None
        frontier, self.frontier[b] = self.frontier[b][:going_on], []
        for n in frontier:
            if first[n] == n:
                self.row_of[b][n] = len(self.laws[b])
                self.laws[b].append(probs[n])
        if by_position:
            for n in range(starts[0, depth + 1], starts[0, depth + 2]):
                parent = int(parents[0, n])
                row = self.row_of[b][first[parent]]
                self._add(b, parent, *self._draw(b, self.laws[b][row], 1, depth), row)
            return
        for n in frontier:
            row = self.row_of[b][first[n]]
            for x in self._draw(b, self.laws[b][row], width if depth == trunk else 1, depth):
                self._add(b, n, x, row)

    def _add(self, b: int, parent: int, token: int, row: int) -> None:
        self.frontier[b].append(len(self.tokens[b]))
        self.tokens[b].append(token)
        self.parents[b].append(parent)
        self.rows[b].append(row)

    def _draw(self, b: int, q: Float[Tensor, "V"], count: int, depth: int) -> list[int]:
        """The children of one node, in draw order."""
        begin = len(self.tokens[b])

        def uniform(i: int) -> Tensor:
            return self.uniforms[b, begin + i : begin + i + 1]

        return _DRAWS[self.kind](self, b, q, count, depth, uniform)

    def _iid(self, b: int, q: Tensor, count: int, depth: int, uniform: Callable[[int], Tensor]) -> list[int]:
        return [int(noise.choose(q[None], uniform(i))) for i in range(count)]

    def _distinct(self, b: int, q: Tensor, count: int, depth: int, uniform: Callable[[int], Tensor]) -> list[int]:
        left, drawn = q.double().clone(), []
        for i in range(min(count, int((q > 0).sum()))):
            drawn.append(int(noise.choose(left[None], uniform(i))))
            left[drawn[-1]] = 0.0
        return drawn

    def _greedy_plus_one(self, b: int, q: Tensor, count: int, depth: int, uniform: Callable[[int], Tensor]) -> list[int]:
        top = torch.sort(q, descending=True, stable=True).indices[: count - 1].tolist()
        rest = q.double().clone()
        rest[top] = 0.0
        return [*top, int(noise.choose(rest[None], uniform(count - 1)))] if rest.sum() > 0 else top

    def _coupled(self, b: int, q: Tensor, count: int, depth: int, uniform: Callable[[int], Tensor]) -> list[int]:
        key = NoiseKey(*(x[b : b + 1] for x in (self.key.seed, self.key.sample, self.key.position)))
        clocks = noise.clocks(replace(key, position=key.position + depth), len(q))[0]
        return (q.double() / clocks).topk(min(count, int((q > 0).sum()))).indices.tolist()

    def _listed(self, b: int, q: Tensor, count: int, depth: int, uniform: Callable[[int], Tensor]) -> list[int]:
        """Each path's own race; path numbers and clocks are those of `verifiers.list_race`."""
        seed, sample, position = (int(x[b]) for x in (self.key.seed, self.key.sample, self.key.position))
        path, winner, rates = (len(self.tokens[b]) - 1) % self.sizes[b][0], np.zeros(1, np.int64), q.double().numpy()
        drawn: list[int] = []
        for i in range(count):
            noise.first_arrivals(rates, seed, sample, position + depth, winner, (path + i) * len(q))
            drawn.append(int(winner[0]))
        return drawn

    def draft(self, law: SiblingLaw, shape: TreeShape) -> Draft:
        """What was grown, with the rows that it was drawn from."""
        tree = trees.pad(list(zip(self.tokens, self.parents, strict=True)))
        rows = torch.tensor([r + [-1] * (tree.num_nodes - len(r)) for r in self.rows])
        V = self.model.vocab_size
        probs = torch.full((len(self.laws), max(1, *map(len, self.laws)), V), 1 / V)
        for b, found in enumerate(self.laws):
            for r, q in enumerate(found):
                probs[b, r] = q
        return Draft(tree, law, shape, probs, rows, self.key if law in (SiblingLaw.COUPLED, SiblingLaw.LISTED) else None)


_DRAWS: dict[str, Callable[..., list[int]]] = {
    "paths": Growth._iid,
    "chain": Growth._iid,
    "without_replacement": Growth._distinct,
    "greedy_plus_one": Growth._greedy_plus_one,
    "coupled": Growth._coupled,
    "listed": Growth._listed,
}
