"""A tree of deterministic drafts, grown node by node under a budget: what every training-free drafter builds.

Children are merged by token, so that no two nodes spell the same prefix; nothing hangs on an end-of-sequence token.
A tree lives in arrays, so that a compiled drafter grows it in one call; the methods are for drafters in Python. Between two
forward passes of a model nothing of all this is in the processor's caches: few different functions a step are worth more than few nodes.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from polydraft.core import Budget, Draft, TokenTree, TreeShape
from polydraft.numerics.compiled_code import njit

NODE = np.dtype(
    [*((name, np.int64) for name in ("token", "parent", "depth", "is_inner")), ("score", np.float64)]
)
ABOUT = np.dtype([(name, np.int64) for name in ("num_nodes", "num_paths", "max_nodes", "max_depth", "width")])
"""Of a tree: how large it is, the root counted, and the bounds of its budget."""


class GrownArrays(NamedTuple):
    """A tree as compiled functions take it. nodes: [N] of NODE, the root first.  about: [1] of ABOUT.  end_ids: that end a path."""

    nodes: np.ndarray
    about: np.ndarray
    end_ids: np.ndarray


class Limits(NamedTuple):
    """A budget as compiled functions take it: at most so many nodes below the root, so deep, on so many paths."""

    max_nodes: int
    max_depth: int
    width: int


def end_ids(ids: Collection[int]) -> np.ndarray:
    """End-of-sequence ids as compiled drafters read them."""
    return np.array(sorted(ids), np.int64)


class GrownTree:
    """Tokens and parents of one draft; `add` refuses what the budget does not hold.

    arrays: for the compiled functions of this module; planted and grown by one of them, or by `rooted` and `add`.
    scores: what the source thinks of each node once its parent is accepted, in [0, 1]; only a mixture reads it, no verifier.
    A path is what leads from the root to a leaf: `budget.width` bounds their number, and so the nodes of every depth.

    Example:
        >>> tree = GrownTree.rooted(5, Budget.grown(3, 2, width=2))
        >>> tree.add(0, 7), tree.add(1, 8), tree.add(0, 7), tree.add(2, 9), tree.add(1, 9), tree.add(0, 6)
        (1, 2, 1, -1, 3, -1)
        >>> tree.tokens, tree.parents
        ([5, 7, 8, 9], [-1, 0, 1, 1])
    """

    def __init__(self, arrays: GrownArrays) -> None:
        self.arrays = arrays

    @classmethod
    def rooted(cls, root: int, budget: Budget, eos: Collection[int] | np.ndarray = ()) -> "GrownTree":
        """A root alone. root: last committed token.  eos: ids that end a path, best given by `end_ids`."""
        arrays = new_tree(budget, eos if isinstance(eos, np.ndarray) else end_ids(eos))
        plant(arrays, root, limits(budget))
        return cls(arrays)

    @property
    def size(self) -> int:
        """Nodes, the root among them."""
        return self.arrays.about["num_nodes"].item()

    @property
    def nodes(self) -> np.ndarray:
        """[size] of NODE."""
        return self.arrays.nodes[: self.size]

    @property
    def tokens(self) -> list[int]:
        return self.nodes["token"].tolist()

    @property
    def parents(self) -> list[int]:
        return self.nodes["parent"].tolist()

    @property
    def scores(self) -> list[float]:
        return self.nodes["score"].tolist()

    def child(self, parent: int, token: int) -> int:
        """The node of this child, or -1."""
        return int(_child(self.arrays, parent, token))

    def add(self, parent: int, token: int, score: float = 1.0) -> int:
        """The node of this child, new if need be; -1 if it does not fit. score: see the class."""
        return int(add_node(self.arrays, parent, token, score))

    def add_path(self, tokens: Iterable[int], parent: int = 0, score: float = 1.0) -> int:
        """Follow tokens down from `parent`, as far as they fit; returns the last node reached."""
        for token in tokens:
            node = self.add(parent, token, score)
            if node < 0:
                break
            parent = node
        return parent


def new_tree(budget: Budget, eos: np.ndarray) -> GrownArrays:
    """Room for a tree within a budget, still to be planted."""
    return GrownArrays(np.empty(budget.max_nodes + 1, NODE), np.empty(1, ABOUT), eos)


def limits(budget: Budget) -> Limits:
    """Of a budget."""
    return Limits(budget.max_nodes, budget.max_depth, budget.width)


@njit(cache=True)
def plant(tree, root, limits):
    """Begin a tree in arrays that may hold anything. limits: of `Limits`."""
    node = tree.nodes[0]
    about = tree.about[0]
    about.num_nodes = 1
    about.num_paths = 0
    about.max_nodes = limits.max_nodes
    about.max_depth = limits.max_depth
    about.width = limits.width
    node.token = root
    node.parent = -1
    node.depth = 0
    node.is_inner = 0
    node.score = 1.0


@njit(cache=True)
def new_trial(tree):
    """Room for another tree within the same budget, still to be planted."""
    return GrownArrays(np.empty_like(tree.nodes), np.empty_like(tree.about), tree.end_ids)


@njit(cache=True)
def copy_tree(tree, other):
    """Make a tree equal to another within the same budget."""
    tree.about[0] = other.about[0]
    for n in range(num_nodes(other)):
        tree.nodes[n] = other.nodes[n]


@njit(cache=True)
def num_nodes(tree):
    """Nodes of a tree, the root among them."""
    return tree.about[0].num_nodes


@njit(cache=True)
def num_paths(tree):
    """Paths of a tree; see `GrownTree`."""
    return tree.about[0].num_paths


@njit(cache=True)
def is_full(tree):
    """No further node fits."""
    about = tree.about[0]
    return about.num_nodes > about.max_nodes or about.max_depth == 0


@njit(cache=True)
def _child(tree, parent, token):
    for n in range(parent + 1, tree.about[0].num_nodes):
        if tree.nodes[n].parent == parent and tree.nodes[n].token == token:
            return n
    return -1


@njit(cache=True)
def _opens_path_beyond_width(tree, parent):
    """Whether a new child of this node were a leaf beyond the paths that there may be."""
    about = tree.about[0]
    return about.num_paths >= about.width and (parent == 0 or tree.nodes[parent].is_inner == 1)


@njit(cache=True)
def add_node(tree, parent, token, score):
    """`GrownTree.add`, for compiled callers."""
    n = _child(tree, parent, token)
    if n >= 0:
        return n
    above = tree.nodes[parent]
    about = tree.about[0]
    n = about.num_nodes
    if n > about.max_nodes or above.depth >= about.max_depth or _opens_path_beyond_width(tree, parent):
        return -1
    if parent:
        for end in tree.end_ids:
            if above.token == end:
                return -1
    about.num_nodes += 1
    about.num_paths += parent == 0 or above.is_inner
    above.is_inner = 1
    node = tree.nodes[n]
    node.token = token
    node.parent = parent
    node.depth = above.depth + 1
    node.is_inner = 0
    node.score = score
    return n


@njit(cache=True)
def best_candidate(tree, parents, masses, count):
    """The candidate of the largest mass that does not open a path beyond the width, the first of equals; -1 if there is none.

    parents: the nodes that the first `count` candidates would hang on; -1 for one that cannot be taken yet, or has been tried.
    """
    best = -1
    for i in range(count):
        heavier = parents[i] >= 0 and (best < 0 or masses[i] > masses[best] + 1e-12)
        if heavier and not _opens_path_beyond_width(tree, parents[i]):
            best = i
    return best


@njit(cache=True)
def add_best(tree, parents, masses, tokens, scores, count):
    """Add the best candidate that fits; returns (its number, its node), -1 where none fits."""
    while True:
        best = best_candidate(tree, parents, masses, count)
        if best < 0:
            return -1, -1
        node = add_node(tree, parents[best], tokens[best], scores[best])
        parents[best] = -1
        if node >= 0:
            return best, node


@njit(cache=True)
def copy_onto(tree, other):
    """Hang the nodes of another tree on this one's root, as far as they fit; what hangs on a refused node is refused with it."""
    places = np.zeros(num_nodes(other), np.int64)
    for n in range(1, len(places)):
        node = other.nodes[n]
        parent = places[node.parent]
        places[n] = -1 if parent < 0 else add_node(tree, parent, node.token, node.score)


def point_mass(grown: Sequence[GrownTree]) -> Draft:
    """A batch of grown trees as a draft without a q.

    Example:
        >>> point_mass([GrownTree.rooted(5, Budget.grown(0, 0))]).sampling.name
        'POINT_MASS'
    """
    trees = [g.nodes for g in grown]
    tokens = np.zeros((len(trees), max(map(len, trees))), np.int64)
    parents = np.full_like(tokens, -1)
    for b, nodes in enumerate(trees):
        tokens[b, : len(nodes)], parents[b, : len(nodes)] = nodes["token"], nodes["parent"]
    return Draft.point_mass(TokenTree.of(tokens, parents), TreeShape.GROWN)
