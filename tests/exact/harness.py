"""Exact losslessness: enumerate every draft, integrate the verdicts, compare with the product of target rows. float64."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product

import numpy as np
import torch

from polydraft import tree as trees
from polydraft.core import Draft, SiblingLaw, TreeShape, Verifier

Path = tuple[int, ...]
Counts = Callable[[Path], int]
"""How many children are drawn at the node with this path (tokens below the root)."""


@dataclass
class Tables:
    """Random rows p and q for every path; the kind of randomness follows the seed (zeros, ties, equal rows, sharp, flat)."""

    V: int
    seed: int
    rows: dict[tuple[str, Path], np.ndarray] = field(default_factory=dict)

    def _row(self, which: str, path: Path) -> np.ndarray:
        kind = self.seed % 6
        rng = np.random.default_rng([self.seed, which == "q", *(t + 1 for t in path)])
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


def sibling_draws(law: SiblingLaw, q: np.ndarray, n: int) -> Iterator[tuple[float, Path]]:
    """(probability, children in draw order) of n draws at one node."""
    support = [int(t) for t in np.flatnonzero(q)]
    ranked = np.argsort(-q, kind="stable")
    match law:
        case SiblingLaw.IID:
            for draws in product(support, repeat=n):
                yield float(np.prod(q[list(draws)])), draws
        case SiblingLaw.WITHOUT_REPLACEMENT | SiblingLaw.COUPLED:
            for draws in permutations(support, min(n, len(support))):
                left, probability = q.copy(), 1.0
                for x in draws:
                    probability *= left[x] / left.sum()
                    left[x] = 0.0
                yield probability, draws
        case SiblingLaw.POINT_MASS:
            yield 1.0, tuple(int(t) for t in ranked[:n])
        case SiblingLaw.GREEDY_PLUS_ONE:
            top = tuple(int(t) for t in ranked[: n - 1])
            rest = q.copy()
            rest[list(top)] = 0.0
            if rest.sum() == 0:
                yield 1.0, top
            for x in np.flatnonzero(rest):
                yield float(rest[x] / rest.sum()), (*top, int(x))


@dataclass
class Grown:
    """A partly grown draft."""

    probability: float
    tokens: list[int]
    parents: list[int]
    paths: list[Path]
    frontier: list[int]


def enumerate_drafts(tables: Tables | Markov, law: SiblingLaw, counts: Counts, depth: int) -> list[Grown]:
    """All drafts, depth by depth; at every frontier node, copies included, counts(path) children are drawn."""
    drafts = [Grown(1.0, [0], [-1], [()], [0])]
    for _ in range(depth):
        grown = []
        for d in drafts:
            options = [
                list(sibling_draws(law, tables.row("q", d.paths[n]), counts(d.paths[n]))) if counts(d.paths[n]) else [(1.0, ())]
                for n in d.frontier
            ]
            for chosen in product(*options):
                new = Grown(d.probability, [*d.tokens], [*d.parents], [*d.paths], [])
                for n, (probability, draws) in zip(d.frontier, chosen, strict=True):
                    new.probability *= probability
                    for x in draws:
                        new.frontier.append(len(new.tokens))
                        new.tokens.append(x)
                        new.parents.append(n)
                        new.paths.append((*d.paths[n], x))
                grown.append(new)
        drafts = grown
    return drafts


def as_batch(tables: Tables | Markov, law: SiblingLaw, shape: TreeShape, drafts: Sequence[Grown]) -> tuple[Draft, torch.Tensor]:
    """The drafts as one padded batch, with the target law at every node."""
    tree = trees.pad([(d.tokens, d.parents) for d in drafts])
    paths = sorted({path for d in drafts for path in d.paths})
    number = {path: i for i, path in enumerate(paths)}
    node = np.zeros(tree.tokens.shape, np.int64)
    above = np.full(tree.tokens.shape, -1, np.int64)
    for b, d in enumerate(drafts):
        node[b, : len(d.paths)] = [number[path] for path in d.paths]
        above[b, 1 : len(d.paths)] = [number[path[:-1]] for path in d.paths[1:]]
    p = np.stack([tables.row("p", path) for path in paths])
    q = np.stack([tables.row("q", path) for path in paths])
    probs = None if law is SiblingLaw.POINT_MASS else torch.from_numpy(q[np.maximum(node, 0)])
    parents = tree.parents.clamp(min=0)
    rows = torch.where(tree.parents >= 0, trees.first_copies(tree).gather(1, parents), -1)
    if probs is None:
        rows = torch.full_like(rows, -1)
    return Draft(tree, law, shape, probs, rows), torch.from_numpy(p[node])


def target_law(tables: Tables | Markov, length: int) -> np.ndarray:
    """Probability of every text of this length, [V] * length."""
    law = np.zeros((tables.V,) * length)
    for text in product(range(tables.V), repeat=length):
        law[text] = np.prod([tables.row("p", text[:i])[t] for i, t in enumerate(text)])
    return law


@dataclass(frozen=True)
class Measured:
    """error: largest difference of a text's probability.  tv: total variation.  block_efficiency: E[accepted] + 1."""

    error: float
    tv: float
    block_efficiency: float


def measure(
    rule: Verifier,
    tables: Tables | Markov,
    law: SiblingLaw,
    shape: TreeShape,
    counts: Counts,
    depth: int,
    drafts: list[Grown] | None = None,
) -> Measured:
    """Sum over all drafts of Pr(draft) x verdict, every block extended by target rows to depth + 1 tokens."""
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
    return lambda path: counts[len(path)] if len(path) < len(counts) else 0


def looks_back(path: Path) -> int:
    """A growth that depends on sampled values but never looks ahead: two at the root, then by the token reached."""
    return 2 if not path else (1, 2, 0, 1, 0)[path[-1]]


SHAPES: dict[TreeShape, list[tuple[str, Counts, int]]] = {
    TreeShape.CHAIN: [("chain of 2", by_depth(1, 1), 2)],
    TreeShape.PATHS: [
        ("2 paths of 2", by_depth(2, 1), 2),
        ("3 paths of 1", by_depth(3), 1),
        ("trunk, then 2", by_depth(1, 2), 2),
    ],
    TreeShape.PRODUCT: [("2 x 2", by_depth(2, 2), 2)],
    TreeShape.GROWN: [("grown", looks_back, 2)],
}
