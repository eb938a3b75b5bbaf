"""Exact losslessness: enumerate every draft, integrate the verdicts, compare with the product of target rows. float64."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise, permutations, product
from typing import Any

import numpy as np
import torch

from polydraft import tree as trees
from polydraft.core import Draft, DraftSampling, TreeShape, Verifier

Path = tuple[int, ...]


@dataclass
class Tables:
    """Random rows p and q for every path; the kind of randomness follows the seed (zeros, ties, equal rows, sharp, flat)."""

    V: int
    seed: int
    rows: dict[tuple[str, Path], np.ndarray] = field(default_factory=dict)

    def _row(self, which: str, path: Path) -> np.ndarray:
        kind = self.seed % 6
        rng = np.random.default_rng(
            [self.seed, which != "p", *(t + 1 for t in path), *([99, int(which[1:])] if which[1:] else [])]
        )
        x = rng.dirichlet(np.full(self.V, 0.15 if kind == 4 else 5.0 if kind == 5 else 1.0))
        if (kind == 1 and which == "p") or (kind == 2 and which == "q"):
            x[rng.integers(self.V)] = 0.0
        if kind == 3:
            if len(path) % 2:
                return self.row("p", path) if which == "q" else x
            x = np.round(x * 4) + (x == x.max())
        return x / x.sum()

    def row(self, which: str, path: Path) -> np.ndarray:
        if (which, path) not in self.rows:
            self.rows[which, path] = self._row(which, path)
        return self.rows[which, path]


@dataclass
class Markov:
    """Rows that depend on the last token alone, as in the oracle file."""

    p: np.ndarray
    q: np.ndarray
    root: int

    @property
    def V(self) -> int:
        return len(self.p)

    def row(self, which: str, path: Path) -> np.ndarray:
        return (self.p if which == "p" else self.q)[path[-1] if path else self.root]


def draft_row(tables: "Tables | Markov", law: DraftSampling, path: Path, place: Path) -> np.ndarray:
    """The law that the node at `place` was drawn from, below `path`: INDEPENDENT draws have one model for each sum of place."""
    model = sum(place) if law is DraftSampling.INDEPENDENT else 0
    return tables.row(f"q{model}" if model else "q", path)


def sibling_draws(law: DraftSampling, rows: Sequence[np.ndarray], n: int) -> Iterator[tuple[float, Path]]:
    """(probability, children in draw order) of n draws at one node; rows: the law of each."""
    q = rows[0]
    support = [int(t) for t in np.flatnonzero(q)]
    ranked = np.argsort(-q, kind="stable")
    match law:
        case DraftSampling.IID:
            for draws in product(support, repeat=n):
                yield float(np.prod(q[list(draws)])), draws
        case DraftSampling.INDEPENDENT:
            for draws in product(*(map(int, np.flatnonzero(row)) for row in rows[:n])):
                yield float(np.prod([row[x] for row, x in zip(rows, draws, strict=False)])), draws
        case DraftSampling.WITHOUT_REPLACEMENT | DraftSampling.COUPLED:
            for draws in permutations(support, min(n, len(support))):
                left, probability = q.copy(), 1.0
                for x in draws:
                    probability *= left[x] / left.sum()
                    left[x] = 0.0
                yield probability, draws
        case DraftSampling.POINT_MASS:
            yield 1.0, tuple(int(t) for t in ranked[:n])
        case DraftSampling.GREEDY_PLUS_ONE:
            top = tuple(int(t) for t in ranked[: n - 1])
            rest = q.copy()
            rest[list(top)] = 0.0
            if rest.sum() == 0:
                yield 1.0, top
            for x in np.flatnonzero(rest):
                yield float(rest[x] / rest.sum()), (*top, int(x))
        case DraftSampling.SYSTEMATIC:
            ends = np.array([sum(q[: x + 1]) for x in range(len(q))]) / sum(q)
            at = sorted({0.0, 1.0, *(u for end in ends for j in range(n) if 0 < (u := n * end - j) < 1)})
            for low, high in pairwise(at):
                steps = [((low + high) / 2 + j) / n for j in range(n)]
                yield high - low, tuple(min(int((ends <= t).sum()), support[-1]) for t in steps)


@dataclass
class Grown:
    """A partly grown draft. paths: tokens below the root.  places: child numbers below the root.  frontier: nodes to expand, in turn."""

    probability: float
    tokens: list[int]
    parents: list[int]
    paths: list[Path]
    frontier: list[int]
    places: list[Path] = field(default_factory=list)
    pooled: dict[Path, Path] = field(default_factory=dict)
    """Draws of a context that are left for its later copies."""


Counts = Callable[[Grown, int], int]
"""How many children are drawn at a node of a draft whose nodes so far, all of this depth or less, it may look at."""


def enumerate_drafts(tables: Tables | Markov, law: DraftSampling, counts: Counts, depth: int) -> list[Grown]:
    """All drafts, depth by depth and node by node, copies included: what counts(draft, node) says is drawn before the next node is looked at."""

    @cache
    def options(path: Path, place: Path, count: int) -> list[tuple[float, Path, list[Path], list[Path]]]:
        """Probability, tokens, paths and places of the children."""
        rows = [draft_row(tables, law, path, (*place, turn)) for turn in range(count)]
        return [
            (probability, draws, [(*path, x) for x in draws], [(*place, turn) for turn in range(len(draws))])
            for probability, draws in sibling_draws(law, rows, count)
        ]

    growing, done = [Grown(1.0, [0], [-1], [()], [0], [()])], list[Grown]()
    while growing:
        d = growing.pop()
        n, count = 0, 0
        while d.frontier and count == 0:
            n, *d.frontier = d.frontier
            count = counts(d, n) if len(d.paths[n]) < depth else 0
        if count == 0:
            done.append(d)
            continue
        path = d.paths[n]
        if law is DraftSampling.SYSTEMATIC:  # all copies of a context draw together
            total = count + sum(counts(d, m) for m in d.frontier if d.paths[m] == path)
            every = [(1.0, d.pooled[path])] if path in d.pooled else list(sibling_draws(law, [tables.row("q", path)], total))
            found = [
                (w, x[:count], [(*path, t) for t in x[:count]], [(*d.places[n], turn) for turn in range(count)], x[count:])
                for w, x in every
            ]
        else:
            found = [(*option, ()) for option in options(path, d.places[n], count)]
        for probability, draws, paths, places, left in reversed(found):
            new = range(len(d.tokens), len(d.tokens) + len(draws))
            growing.append(
                Grown(
                    d.probability * probability,
                    [*d.tokens, *draws],
                    [*d.parents, *[n] * len(draws)],
                    d.paths + paths,
                    [*d.frontier, *new],
                    d.places + places,
                    {**d.pooled, path: left},
                )
            )
    return done


def stopped_inside(tables: Any, law: DraftSampling) -> list[Grown]:
    """Wrong: of two children of the root the second is drawn only after a look at the first, and not where that is the likeliest."""
    q, found = tables.row("q", ()), dict[Path, float]()
    for probability, (first, *more) in sibling_draws(law, [q] * 2, 2):
        draws = (first,) if first == q.argmax() else (first, *more)
        found[draws] = found.get(draws, 0.0) + probability
    return [Grown(w, [0, *x], [-1, *[0] * len(x)], [(), *((t,) for t in x)], []) for x, w in found.items()]


def as_batch(
    tables: Tables | Markov, law: DraftSampling, shape: TreeShape, drafts: Sequence[Grown]
) -> tuple[Draft, torch.Tensor]:
    """The drafts as one padded batch, with the target law at every node."""
    tree = trees.pad([(d.tokens, d.parents) for d in drafts])
    paths = sorted({path for d in drafts for path in d.paths})
    number = {path: i for i, path in enumerate(paths)}
    node = np.zeros(tree.tokens.shape, np.int64)
    for b, d in enumerate(drafts):
        node[b, : len(d.paths)] = [number[path] for path in d.paths]
    p = torch.from_numpy(np.stack([tables.row("p", path) for path in paths])[node])
    if law is DraftSampling.POINT_MASS:
        return Draft(tree, law, shape, None, torch.full_like(tree.tokens, -1)), p
    if law is DraftSampling.INDEPENDENT:  # row n is the one that node n was drawn from
        drawn, own = dict[tuple[Path, int], int](), np.zeros(node.shape, np.int64)
        for b, d in enumerate(drafts):
            models = [(path[:-1], sum(place)) for path, place in zip(d.paths, d.places, strict=True)]
            own[b, 1 : len(models)] = [drawn.setdefault(model, len(drawn)) for model in models[1:]]
        laws = np.stack([draft_row(tables, law, path, (model,)) for path, model in drawn])
        rows = torch.where(tree.parents >= 0, torch.arange(tree.num_nodes), -1)
        return Draft(tree, law, shape, torch.from_numpy(laws[own]), rows), p
    q = torch.from_numpy(np.stack([tables.row("q", path) for path in paths])[node])
    rows = torch.where(tree.parents >= 0, trees.first_copies(tree).gather(1, tree.parents.clamp(min=0)), -1)
    return Draft(tree, law, shape, q, rows), p


def target_law(tables: Tables | Markov, length: int) -> np.ndarray:
    """Probability of every text of this length, [V] * length."""
    law = np.zeros((tables.V,) * length)
    for text in product(range(tables.V), repeat=length):
        law[text] = np.prod([tables.row("p", text[:i])[t] for i, t in enumerate(text)])
    return law


@lru_cache(maxsize=40)
def _enumerated(V: int, seed: int, law: DraftSampling, shape: TreeShape, counts: Counts, depth: int):
    """All drafts of random tables; kept, as many rules in turn are measured on them."""
    tables = Tables(V, seed)
    drafts = enumerate_drafts(tables, law, counts, depth)
    return drafts, *as_batch(tables, law, shape, drafts)


@dataclass(frozen=True)
class Measured:
    """error: largest difference of a text's probability.  tv: total variation.  block_efficiency: E[accepted] + 1."""

    error: float
    tv: float
    block_efficiency: float


def measure(
    rule: Verifier,
    tables: Tables | Markov,
    law: DraftSampling,
    shape: TreeShape,
    counts: Counts,
    depth: int,
    drafts: list[Grown] | None = None,
) -> Measured:
    """Sum over all drafts of Pr(draft) x verdict, every block extended by target rows to depth + 1 tokens."""
    if drafts is None and isinstance(tables, Tables):
        drafts, draft, p = _enumerated(tables.V, tables.seed, law, shape, counts, depth)
    else:
        drafts = enumerate_drafts(tables, law, counts, depth) if drafts is None else drafts
        draft, p = as_batch(tables, law, shape, drafts)
    weight = np.array([d.probability for d in drafts])
    verdict = rule(draft, p)
    stop = verdict.stop.numpy()
    emitted = [np.zeros((tables.V,) * (k + 1)) for k in range(depth + 1)]
    level = trees.depths(draft.tree).numpy()
    for n in range(draft.tree.num_nodes):
        after = verdict.after(torch.full((len(drafts),), n)).numpy()
        mass = np.where(stop[:, n] > 0, weight * stop[:, n], 0.0)
        for k in range(depth + 1):
            at = np.flatnonzero((mass > 0) & (level[:, n] == k))
            place = tuple(np.array([drafts[b].paths[n] for b in at], np.int64).reshape(len(at), k).T)
            np.add.at(emitted[k], place if k else ..., (mass[at, None] * after[at]) if k else (mass[at, None] * after[at]).sum(0))
    text = emitted[0]
    for k in range(1, depth + 1):
        rows = np.array([tables.row("p", path) for path in product(range(tables.V), repeat=k)]).reshape(*text.shape, tables.V)
        text = text[..., None] * rows + emitted[k]
    difference = np.abs(text - target_law(tables, depth + 1))
    efficiency = 1 + float((weight[:, None] * stop * np.maximum(level, 0)).sum())
    return Measured(float(difference.max()), float(difference.sum() / 2), efficiency)


def by_depth(*counts: int) -> Counts:
    """The same number of children at every node of a depth."""
    return lambda d, n: counts[len(d.paths[n])] if len(d.paths[n]) < len(counts) else 0


def looks_back(d: Grown, n: int) -> int:
    """A growth that depends on sampled values but never looks ahead: two at the root, then by the token reached."""
    return 2 if n == 0 else (1, 2, 0, 1, 0)[d.tokens[n]]


def across(d: Grown, n: int) -> int:
    """A growth across branches: two at the root, one below its first child, two below its second where that one is token 0, else none.

    So copies of one context are given their draws in turn, and how many come last depends on the first of them.
    """
    if n == 2:
        return 2 if 0 in (token for token, parent in zip(d.tokens, d.parents, strict=True) if parent == 1) else 0
    return 2 - n if n < 2 else 0


def ragged(*lengths: int) -> Counts:
    """Paths from the root of these lengths."""
    return lambda d, n: int(len(d.places[n]) < lengths[d.places[n][0]]) if n else len(lengths)


def by_position(*parents: int) -> Counts:
    """The tree of these parents, the root's first; places number siblings in this order."""
    places, children = list[Path]([()]), dict[Path, int]()
    for parent in parents[1:]:
        above = places[parent]
        places.append((*above, children.get(above, 0)))
        children[above] = children.get(above, 0) + 1
    return lambda d, n: children.get(d.places[n], 0)


SHAPES: dict[TreeShape, list[tuple[str, Counts, int]]] = {
    TreeShape.CHAIN: [("chain of 2", by_depth(1, 1), 2)],
    TreeShape.PATHS: [
        ("2 paths of 2", by_depth(2, 1), 2),
        ("3 paths of 1", by_depth(3), 1),
    ],
    TreeShape.PRODUCT: [("2 x 2", by_depth(2, 2), 2), ("trunk, then 2", by_depth(1, 2), 2)],
    TreeShape.GROWN: [("grown", looks_back, 2), ("grown across branches", across, 2)],
    TreeShape.RAGGED: [("3 and 1", ragged(3, 1), 3)],
    TreeShape.BY_POSITION: [
        ("3, then 2", by_position(-1, 0, 0, 0, 1, 1), 2),
        ("a chain and two leaves", by_position(-1, 0, 0, 1, 1, 3), 3),
    ],
}
