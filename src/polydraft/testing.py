"""Exact losslessness of a verifier, for its author's tests: every draft enumerated, the verdicts summed, the sum compared with the target.

    enumerate_outputs   a verifier, target and draft rows, a draft shape -> the exact distribution of the output, and its distance from the target's
    Tables              random target and draft rows that find mistakes: zeros, ties, equal rows, sharp and flat ones, by seed

Sizes are those of an enumeration: three to five tokens, drafts of two or three. All is float64; a lossless verifier has an error below 1e-12.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise, permutations, product
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import Budget, Draft, DraftSampling, TokenTree, TreeShape, Verifier
from polydraft.core import geometry as trees
from polydraft.core.arrays import Array, host
from polydraft.core.trees import TreeArrays
from polydraft.errors import InvalidInputError

Path = tuple[int, ...]
"""Token ids below the root."""

FromNumpy = Callable[[np.ndarray], Array]
"""Makes arrays of NumPy's."""

Rows = Callable[[Path], Any]
"""Tokens below the root -> probabilities of the next token, [V], summing to one."""


class RowSource(Protocol):
    """Target and draft rows at every path. row(name, path): "p" of the target, "q" of the draft, "q1" .. of further draft models."""

    @property
    def V(self) -> int: ...

    def row(self, name: str, path: Path) -> np.ndarray: ...


@dataclass
class Tables:
    """Random rows p and q for every path; the kind of randomness follows the seed modulo 6 (plain, zeros in p, zeros in q, ties and equal rows, sharp, flat).

    Example:
        >>> Tables(3, seed=0).target((1,)).round(2).tolist()
        [0.55, 0.3, 0.15]
    """

    V: int
    seed: int
    rows: dict[tuple[str, Path], np.ndarray] = field(default_factory=dict[tuple[str, Path], np.ndarray])

    def target(self, path: Path) -> np.ndarray:
        """The target's probabilities of the next token."""
        return self.row("p", path)

    def draft(self, path: Path) -> np.ndarray:
        """The draft model's."""
        return self.row("q", path)

    def row(self, name: str, path: Path) -> np.ndarray:
        """See `RowSource`."""
        if (name, path) not in self.rows:
            self.rows[name, path] = self._row(name, path)
        return self.rows[name, path]

    def _row(self, name: str, path: Path) -> np.ndarray:
        kind = self.seed % 6
        rng = np.random.default_rng(
            [self.seed, name != "p", *(t + 1 for t in path), *([99, int(name[1:])] if name[1:] else [])]
        )
        x = rng.dirichlet(np.full(self.V, 0.15 if kind == 4 else 5.0 if kind == 5 else 1.0))
        if (kind == 1 and name == "p") or (kind == 2 and name == "q"):
            x[rng.integers(self.V)] = 0.0
        if kind == 3:
            if len(path) % 2:
                return self.row("p", path) if name == "q" else x
            x = np.round(x * 4) + (x == x.max())
        return x / x.sum()


@dataclass(frozen=True)
class _Functions:
    """Rows by two functions."""

    target: Rows
    draft: Rows

    @property
    def V(self) -> int:
        return len(self.row("p", ()))

    def row(self, name: str, path: Path) -> np.ndarray:
        x = np.asarray((self.target if name == "p" else self.draft)(path), np.float64)
        if x.ndim != 1 or not (x >= 0).all() or abs(x.sum() - 1) > 1e-9:
            raise InvalidInputError(
                f"a row of shape {x.shape} that sums to {x.sum():.6g} was given for the path {path}; expected probabilities, [V], that sum "
                "to 1 in float64. Divide by the sum."
            )
        return x


@dataclass(frozen=True)
class Enumeration:
    """What a verifier does over all drafts.

    probs: [V] * (depth + 1), of every output of so many tokens.  expected: the same of the target alone.
    error: largest difference of the two.  tv: total variation.  block_efficiency: E[accepted tokens] + 1.
    """

    probs: np.ndarray
    expected: np.ndarray
    block_efficiency: float

    @property
    def error(self) -> float:
        """Largest difference of an output's probability."""
        return float(np.abs(self.probs - self.expected).max())

    @property
    def tv(self) -> float:
        """Total variation from the target."""
        return float(np.abs(self.probs - self.expected).sum() / 2)


def enumerate_outputs(
    verifier: Verifier,
    target: Rows,
    draft: Rows,
    *,
    sampling: DraftSampling = DraftSampling.IID,
    parents: Sequence[int] = (-1, 0, 1),
    arrays: FromNumpy = np.asarray,
) -> Enumeration:
    """The exact distribution of what a verifier emits: Pr(draft) x verdict summed over every draft, every block extended by target rows.

    target, draft: probabilities of the next token after the tokens below the root.
    sampling: how siblings are drawn; all but LISTED, whose draws share noise.
    parents: the draft's tree by position, as of `Budget.fixed`: (-1, 0, 1) is a chain of two, (-1, 0, 0) two paths of one.
    arrays: what makes the arrays that the verifier is given of NumPy's, such as `torch.from_numpy` or `jax.numpy.asarray`; default NumPy's.

    Raises:
        InvalidInputError: rows that are no distribution, or a draft sampling that cannot be enumerated.

    Example:
        >>> from polydraft.methods import registry
        >>> tables = Tables(3, seed=0)
        >>> result = enumerate_outputs(registry.verifier("block"), tables.target, tables.draft)
        >>> result.error < 1e-12, result.probs.shape
        (True, (3, 3, 3))
        >>> lenient = enumerate_outputs(registry.verifier("lenient"), tables.target, tables.draft, sampling=DraftSampling.POINT_MASS)
        >>> lenient.tv > 0.01
        True
    """
    if sampling is DraftSampling.LISTED:
        raise InvalidInputError(
            "sampling=LISTED was given, whose draws share their noise; expected another draft sampling. Test such a verifier by its texts."
        )
    budget = Budget.fixed(tuple(parents))
    return measure(
        verifier,
        _Functions(cache(target), cache(draft)),
        sampling,
        budget.shape,
        by_position(*parents),
        budget.max_depth,
        arrays=arrays,
    )


def draft_row(tables: RowSource, sampling: DraftSampling, path: Path, place: Path) -> np.ndarray:
    """The row that the node at `place` was drawn from, below `path`: INDEPENDENT draws have one model for each sum of place."""
    model = sum(place) if sampling is DraftSampling.INDEPENDENT else 0
    return tables.row(f"q{model}" if model else "q", path)


def sibling_draws(
    sampling: DraftSampling, rows: Sequence[np.ndarray], n: int
) -> Iterator[tuple[float, Path]]:
    """(probability, children in draw order) of n draws at one node; rows: what each is drawn from."""
    q = rows[0]
    support = [int(t) for t in np.flatnonzero(q)]
    ranked = np.argsort(-q, kind="stable")
    match sampling:
        case DraftSampling.IID:
            for draws in product(support, repeat=n):
                yield float(np.prod(q[list(draws)])), draws
        case DraftSampling.INDEPENDENT:
            for draws in product(*(map(int, np.flatnonzero(row)) for row in rows[:n])):
                yield float(np.prod([row[x] for row, x in zip(rows, draws, strict=False)])), draws
        case DraftSampling.WITHOUT_REPLACEMENT | DraftSampling.COUPLED:
            for draws in permutations(support, min(n, len(support))):
                yield _without_replacement(q, draws), draws
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
            yield from _systematic(q, n)
        case _:
            pass


def _without_replacement(q: np.ndarray, draws: Path) -> float:
    """The probability of distinct draws in this order."""
    rest = q.copy()
    probability = 1.0
    for x in draws:
        probability *= rest[x] / rest.sum()
        rest[x] = 0.0
    return probability


def _systematic(q: np.ndarray, n: int) -> Iterator[tuple[float, Path]]:
    """Of n draws at equal steps of one uniform: between two places at which one of them changes, all stay."""
    last = int(np.flatnonzero(q)[-1])
    cumulative = np.array([sum(q[: x + 1]) for x in range(len(q))]) / sum(q)
    changes = (u for end in cumulative for j in range(n) if 0 < (u := n * end - j) < 1)
    for low, high in pairwise(sorted({0.0, 1.0, *changes})):
        steps = [((low + high) / 2 + j) / n for j in range(n)]
        yield high - low, tuple(min(int((cumulative <= t).sum()), last) for t in steps)


@dataclass
class Grown:
    """A partly grown draft. paths: tokens below the root.  places: child numbers below the root.  frontier: nodes to expand, in turn."""

    probability: float
    tokens: list[int]
    parents: list[int]
    paths: list[Path]
    frontier: list[int]
    places: list[Path] = field(default_factory=list[Path])
    pooled: dict[Path, Path] = field(default_factory=dict[Path, Path])
    """Draws of a context that are left for its later copies."""

    def with_children(self, n: int, probability: float, draws: Path, rest: Path) -> "Grown":
        """The same with these children of node n. rest: what its context's later copies get."""
        path = self.paths[n]
        new = range(len(self.tokens), len(self.tokens) + len(draws))
        return Grown(
            self.probability * probability,
            [*self.tokens, *draws],
            [*self.parents, *[n] * len(draws)],
            [*self.paths, *((*path, x) for x in draws)],
            [*self.frontier, *new],
            [*self.places, *((*self.places[n], turn) for turn in range(len(draws)))],
            {**self.pooled, path: rest},
        )


Counts = Callable[[Grown, int], int]
"""How many children are drawn at a node of a draft whose nodes so far, all of this depth or less, it may look at."""


def by_position(*parents: int) -> Counts:
    """The tree of these parents, the root's first; places number siblings in this order."""
    places = list[Path]([()])
    children = dict[Path, int]()
    for parent in parents[1:]:
        above = places[parent]
        places.append((*above, children.get(above, 0)))
        children[above] = children.get(above, 0) + 1
    return lambda d, n: children.get(d.places[n], 0)


def enumerate_drafts(tables: RowSource, sampling: DraftSampling, counts: Counts, depth: int) -> list[Grown]:
    """All drafts, depth by depth and node by node, copies included: what counts(draft, node) says is drawn before the next node is looked at."""

    @cache
    def options(path: Path, place: Path, count: int) -> list[tuple[float, Path]]:
        """Probability and tokens of the children."""
        rows = [draft_row(tables, sampling, path, (*place, turn)) for turn in range(count)]
        return list(sibling_draws(sampling, rows, count))

    def pooled(d: Grown, n: int, count: int) -> list[tuple[float, Path, Path]]:
        """Probability, children, and draws that are left: all copies of a context draw together."""
        path = d.paths[n]
        if path in d.pooled:
            every = [(1.0, d.pooled[path])]
        else:
            total = count + sum(counts(d, m) for m in d.frontier if d.paths[m] == path)
            every = list(sibling_draws(sampling, [tables.row("q", path)], total))
        return [(probability, draws[:count], draws[count:]) for probability, draws in every]

    growing = [Grown(1.0, [0], [-1], [()], [0], [()])]
    done = list[Grown]()
    while growing:
        d = growing.pop()
        n = 0
        count = 0
        while d.frontier and count == 0:
            n, *d.frontier = d.frontier
            count = counts(d, n) if len(d.paths[n]) < depth else 0
        if count == 0:
            done.append(d)
            continue
        if sampling is DraftSampling.SYSTEMATIC:
            choices = pooled(d, n, count)
        else:
            choices = [(*choice, ()) for choice in options(d.paths[n], d.places[n], count)]
        growing += [d.with_children(n, *choice) for choice in reversed(choices)]
    return done


def as_batch(
    tables: RowSource,
    sampling: DraftSampling,
    shape: TreeShape,
    drafts: Sequence[Grown],
    arrays: FromNumpy = np.asarray,
) -> tuple[Draft, Float[Array, "B N V"]]:
    """The drafts as one padded batch, with the target distribution at every node."""
    tree, row_numbers, draft_rows, p = _batch(tables, sampling, drafts)
    drafted = TokenTree(arrays(tree.tokens), arrays(tree.parents))
    probs = None if draft_rows is None else arrays(draft_rows)
    return Draft(drafted, sampling, shape, probs, arrays(row_numbers)), arrays(p)


def _batch(
    tables: RowSource, sampling: DraftSampling, drafts: Sequence[Grown]
) -> tuple[TreeArrays, np.ndarray, np.ndarray | None, np.ndarray]:
    """Tree, row of each node, draft rows and target rows, in arrays of the host."""
    tree = trees.pad([(d.tokens, d.parents) for d in drafts])
    tokens, parents = tree.host
    paths = sorted({path for d in drafts for path in d.paths})
    number = {path: i for i, path in enumerate(paths)}
    node = np.zeros(tokens.shape, np.int64)
    for b, d in enumerate(drafts):
        node[b, : len(d.paths)] = [number[path] for path in d.paths]
    p = np.stack([tables.row("p", path) for path in paths])[node]
    if sampling is DraftSampling.POINT_MASS:
        return tree.host, np.full_like(parents, -1), None, p
    if sampling is DraftSampling.INDEPENDENT:
        rows = np.where(parents >= 0, np.arange(parents.shape[1]), -1)
        return tree.host, rows, _independent_rows(tables, drafts, node.shape), p
    q = np.stack([tables.row("q", path) for path in paths])[node]
    above = np.take_along_axis(host(trees.first_copies(tree)), np.maximum(parents, 0), 1)
    return tree.host, np.where(parents >= 0, above, -1), q, p


def _independent_rows(
    tables: RowSource, drafts: Sequence[Grown], shape: tuple[int, ...]
) -> Float[np.ndarray, "B N V"]:
    """The row that each node was drawn from, of the model of its place."""
    numbers = dict[tuple[Path, int], int]()
    row_numbers = np.zeros(shape, np.int64)
    for b, d in enumerate(drafts):
        models = [(path[:-1], sum(place)) for path, place in zip(d.paths, d.places, strict=True)]
        row_numbers[b, 1 : len(models)] = [numbers.setdefault(model, len(numbers)) for model in models[1:]]
    sampling = DraftSampling.INDEPENDENT
    rows = np.stack([draft_row(tables, sampling, path, (model,)) for path, model in numbers])
    return rows[row_numbers]


def target_text_probs(tables: RowSource, length: int) -> np.ndarray:
    """Probability of every text of this length, [V] * length."""
    probs = np.zeros((tables.V,) * length)
    for text in product(range(tables.V), repeat=length):
        probs[text] = np.prod([tables.row("p", text[:i])[t] for i, t in enumerate(text)])
    return probs


@lru_cache(maxsize=40)
def _enumerated(
    V: int,
    seed: int,
    sampling: DraftSampling,
    shape: TreeShape,
    counts: Counts,
    depth: int,
    arrays: FromNumpy,
) -> tuple[list[Grown], Draft, Float[Array, "B N V"]]:
    """All drafts of random tables; they stay, as many verifiers in turn are measured on them."""
    tables = Tables(V, seed)
    drafts = enumerate_drafts(tables, sampling, counts, depth)
    return drafts, *as_batch(tables, sampling, shape, drafts, arrays)


def measure(
    verifier: Verifier,
    tables: RowSource,
    sampling: DraftSampling,
    shape: TreeShape,
    counts: Counts,
    depth: int,
    drafts: list[Grown] | None = None,
    arrays: FromNumpy = np.asarray,
) -> Enumeration:
    """`enumerate_outputs` for drafts of any growth: `counts` says how many children each node gets, or `drafts` are given with their probabilities."""
    if drafts is None and isinstance(tables, Tables):
        drafts, draft, p = _enumerated(tables.V, tables.seed, sampling, shape, counts, depth, arrays)
    else:
        drafts = enumerate_drafts(tables, sampling, counts, depth) if drafts is None else drafts
        draft, p = as_batch(tables, sampling, shape, drafts, arrays)
    weight = np.array([d.probability for d in drafts])
    verdict = verifier(draft, p)
    stop = host(verdict.stop)
    emitted = [np.zeros((tables.V,) * (k + 1)) for k in range(depth + 1)]
    level = host(trees.depths(draft.tree))
    for n in range(draft.tree.num_nodes):
        after = host(verdict.after(arrays(np.full(len(drafts), n))))
        mass = np.where(stop[:, n] > 0, weight * stop[:, n], 0.0)
        for k in range(depth + 1):
            at = np.flatnonzero((mass > 0) & (level[:, n] == k))
            paths = np.array([drafts[b].paths[n] for b in at], np.int64).reshape(len(at), k)
            _add_blocks(emitted[k], paths, mass[at, None] * after[at])
    accepted = float((weight[:, None] * stop * np.maximum(level, 0)).sum())
    text = extended(tables, emitted)
    return Enumeration(text, target_text_probs(tables, depth + 1), 1 + accepted)


def _add_blocks(
    emitted: Float[np.ndarray, "..."], paths: Int[np.ndarray, "B k"], blocks: Float[np.ndarray, "B V"]
) -> None:
    """Add the mass of blocks of k accepted tokens and one more, by their tokens."""
    if paths.shape[1] == 0:
        emitted += blocks.sum(0)
    else:
        np.add.at(emitted, tuple(paths.T), blocks)


def extended(tables: RowSource, emitted: Sequence[np.ndarray]) -> np.ndarray:
    """Mass of texts as long as the longest block: shorter ones go on with tokens of the target."""
    text = emitted[0]
    for k in range(1, len(emitted)):
        rows = np.array([tables.row("p", path) for path in product(range(tables.V), repeat=k)])
        text = text[..., None] * rows.reshape(*text.shape, tables.V) + emitted[k]
    return text
