"""Draft trees of every kind of draft sampling, drawn behind one context with shared noise.

The uniform of a draw belongs to the draft model, the drafted tokens before it and the number of earlier draws there: trees of different kinds agree
wherever their contexts do, so that few rows serve all of them, and each kind has its own distribution.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from jaxtyping import Float

from polydraft.core import Budget, Request, SamplingParams
from polydraft.core.geometry import chain
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.sampling import categorical
from studies.several_drafts.rows import Prefix, RowStore

__all__ = ["MAX_DEPTH", "MAX_PATHS", "WIDTHS", "DraftTree", "draw_trees", "lookup", "side_by_side", "with_spares"]

MAX_PATHS, MAX_DEPTH = 4, 8
WIDTHS: Mapping[str, Sequence[int]] = {
    "iid": (MAX_PATHS,),
    "without_replacement": (MAX_PATHS,),
    "greedy_plus_one": range(2, MAX_PATHS + 1),
    "systematic": range(2, MAX_PATHS + 1),
}
"""How paths are drawn -> numbers of paths that need a tree of their own; fewer iid or distinct paths are the first of more."""


@dataclass
class DraftTree:
    """Nodes in the order of drawing. paths: number of each node's path, by which a tree is restricted.  sources: of several draft models, which drew it."""

    tokens: list[int] = field(default_factory=lambda: [-1])
    parents: list[int] = field(default_factory=lambda: [-1])
    paths: list[int] = field(default_factory=lambda: [0])
    prefixes: list[Prefix] = field(default_factory=lambda: [()])
    sources: list[int] = field(default_factory=lambda: [0])

    def add(self, parent: int, token: int, path: int, source: int = 0) -> int:
        """A drawn node below another one."""
        self.tokens.append(int(token))
        self.parents.append(parent)
        self.paths.append(path)
        self.prefixes.append((*self.prefixes[parent], int(token)))
        self.sources.append(source)
        return len(self.tokens) - 1

    @property
    def depths(self) -> list[int]:
        """Of each node; the root's is 0."""
        return [len(prefix) for prefix in self.prefixes]

    def level(self, depth: int) -> dict[Prefix, list[int]]:
        """Nodes of a depth by the tokens that lead there: copies together."""
        nodes: dict[Prefix, list[int]] = {}
        for n, prefix in enumerate(self.prefixes):
            if len(prefix) == depth:
                nodes.setdefault(prefix, []).append(n)
        return nodes

    def inner(self) -> Iterator[int]:
        """Nodes that have children."""
        return iter(sorted(set(self.parents) - {-1}))


@dataclass(frozen=True)
class Noise:
    """Uniforms by what is drawn where."""

    seed: int
    draft: str

    def __call__(self, prefix: Prefix, copy: int, kind: str = "") -> float:
        digest = blake2b(repr((self.seed, self.draft, prefix, copy, kind)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2.0**64


def systematic(q: Float[np.ndarray, " V"], u: float, count: int) -> list[int]:
    """Draws at equal steps of one uniform; a single one is an ordinary draw."""
    drawn = np.zeros(count, np.int64)
    categorical.choose_systematic(np.ascontiguousarray(q), u, drawn)
    return drawn.tolist()


def _distinct(q: Float[np.ndarray, " V"], uniforms: Iterable[float], without: Sequence[int] = ()) -> list[int]:
    """Draws without replacement, and without some tokens."""
    rest, drawn = q.astype(np.float64), list[int]()
    rest[list(without)] = 0.0
    for u in uniforms:
        if not rest.any():
            break
        drawn += systematic(rest, u, 1)
        rest[drawn[-1]] = 0.0
    return drawn


def _root_draws(kind: str, q: Float[np.ndarray, " V"], count: int, uniform: Noise) -> list[int]:
    if kind == "systematic":
        return systematic(q, uniform((), 0, "systematic"), count)
    if kind == "without_replacement":
        return _distinct(q, [uniform((), copy, kind if copy else "") for copy in range(count)])
    if kind == "greedy_plus_one":
        top = np.argsort(-q, kind="stable")[: count - 1].tolist()
        return [*top, *_distinct(q, [uniform((), 0, kind)], top)]
    return [systematic(q, uniform((), copy), 1)[0] for copy in range(count)]


def _deepen(tree: DraftTree, kind: str, count: int, depth: int, q_of: Mapping[Prefix, np.ndarray], uniform: Noise) -> None:
    """Draw the children of all nodes of a depth: `count` at the root, then one of each node."""
    drawn: dict[int, int] = {}
    for prefix, nodes in tree.level(depth).items():
        q = q_of[prefix]
        if depth == 0:
            for path, token in enumerate(_root_draws(kind, q, count, uniform)):
                tree.add(0, token, path)
            return
        if kind == "systematic" and len(nodes) > 1:
            tokens = systematic(q, uniform(prefix, 0, "systematic"), len(nodes))
        else:
            tokens = [systematic(q, uniform(prefix, copy), 1)[0] for copy in range(len(nodes))]
        drawn |= dict(zip(nodes, tokens, strict=True))
    for n in sorted(drawn):
        tree.add(n, drawn[n], tree.paths[n])


def draw_trees(
    rows: RowStore,
    draft: str,
    temperatures: Sequence[float],
    seed: int,
    depth: int = MAX_DEPTH,
    widths: Mapping[str, Sequence[int]] = WIDTHS,
) -> dict[tuple[float, str, int], DraftTree]:
    """(temperature, kind, paths) -> tree; one forward pass of the draft model a depth serves all of them. widths: as `WIDTHS`."""
    uniform = Noise(seed, draft)
    trees = {(T, kind, K): DraftTree() for T in temperatures for kind, numbers in widths.items() for K in numbers}
    for d in range(depth):
        at = {T: {p for (t, _, _), tree in trees.items() if t == T for p in tree.level(d)} for T in temperatures}
        rows.fill(set().union(*at.values()))
        for T in temperatures:
            q_of = {prefix: rows.probs(prefix, T) for prefix in at[T]}
            for (t, kind, K), tree in trees.items():
                if t == T:
                    _deepen(tree, kind, K, d, q_of, uniform)
    return trees


def with_spares(
    rows: RowStore, draft: str, temperature: float, seed: int, path: Sequence[int], distinct: bool, paths: int = MAX_PATHS
) -> DraftTree:
    """A chain whose every token has spare siblings, which are not gone on from: path 0 is the chain, path s its s-th spares."""
    uniform, tree, here = Noise(seed, draft), DraftTree(), 0
    for token in path:
        prefix = tree.prefixes[here]
        q = rows.probs(prefix, temperature)
        uniforms = [uniform(prefix, copy, "spare") for copy in range(1, paths)]
        spares = _distinct(q, uniforms, [token]) if distinct else [systematic(q, u, 1)[0] for u in uniforms]
        parent, here = here, tree.add(here, token, 0)
        for spare, other in enumerate(spares, 1):
            tree.add(parent, other, spare)
    return tree


def lookup(context: Sequence[int], depth: int = MAX_DEPTH) -> list[int]:
    """What followed the last tokens earlier in the context, as the drafter `ngram` finds it; perhaps nothing."""
    drafter = NgramDrafter()
    states = drafter.start([Request("lookup", tuple(context), SamplingParams(), seed=0)])
    tokens = drafter.propose(states, [Budget.fixed(chain(depth))]).tree.tokens[0, 1:].tolist()
    drafter.release(states)
    return tokens


def side_by_side(first: Sequence[int], second: Sequence[int]) -> DraftTree:
    """Path 0 of one draft model, path 1 of another one, which may end earlier; in the order of depths."""
    tree, here = DraftTree(), [0, 0]
    for depth in range(max(len(first), len(second))):
        for path, tokens in enumerate((first, second)):
            if depth < len(tokens):
                here[path] = tree.add(here[path], tokens[depth], path, path)
    return tree
