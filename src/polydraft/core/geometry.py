"""Geometry of token trees: sizes, depth, ancestors, paths, equal prefixes, padding.

Trees are small (tens of nodes) and are walked on the host by compiled loops, whatever device they live on. Two nodes
are *copies* if their paths from the root spell the same tokens: they are one context, so the target scores them once,
but they stay two draws for the verifier.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Int

from polydraft.core import Outcome, TokenTree
from polydraft.core.arrays import Array, host, like, namespace
from polydraft.core.trees import TreeArrays
from polydraft.errors import InvalidInputError
from polydraft.numerics.compiled_code import njit


@lru_cache(maxsize=1024)
def product(*counts: int) -> tuple[int, ...]:
    """The parents of a tree by position: `counts[d]` children for every node of depth d. See `core.Budget.fixed`.

    Example:
        >>> product(2, 1), product(1, 2)
        ((-1, 0, 0, 1, 2), (-1, 0, 1, 1))
    """
    parents = [-1]
    above = range(1)
    for count in counts:
        parents += [n for n in above for _ in range(count)]
        above = range(above.stop, len(parents))
    return tuple(parents)


def chain(depth: int) -> tuple[int, ...]:
    """The parents of one path.

    Example:
        >>> chain(3)
        (-1, 0, 1, 2)
    """
    return product(*[1] * depth)


def paths(width: int, depth: int, trunk: int = 0) -> tuple[int, ...]:
    """The parents of `width` paths down to `depth` that part at the root, or behind `trunk` tokens that they share.

    Example:
        >>> paths(2, 2), paths(2, 2, trunk=1)
        ((-1, 0, 0, 1, 2), (-1, 0, 1, 1))
    """
    return product(*[1] * min(trunk, depth), *[width] * (depth > trunk), *[1] * (depth - trunk - 1))


def ragged(*lengths: int) -> tuple[int, ...]:
    """The parents of paths of these lengths, longest first, that part at the root.

    Example:
        >>> ragged(3, 1)
        (-1, 0, 0, 1, 3)
    """
    levels = [sum(length > d for length in lengths) for d in range(max(lengths))]
    starts = [1, *(1 + sum(levels[: d + 1]) for d in range(len(levels)))]
    return (-1, *(0 if d == 0 else starts[d - 1] + k for d, count in enumerate(levels) for k in range(count)))


@njit(cache=True)
def _depths(parents: np.ndarray) -> np.ndarray:
    depth = np.full(parents.shape, -1, np.int64)
    for b in range(parents.shape[0]):
        depth[b, 0] = 0
        for n in range(1, parents.shape[1]):
            if parents[b, n] >= 0:
                depth[b, n] = depth[b, parents[b, n]] + 1
    return depth


@njit(cache=True)
def _ancestors(parents: np.ndarray) -> np.ndarray:
    B, N = parents.shape
    mask = np.zeros((B, N, N), np.bool_)
    for b in range(B):
        for n in range(N):
            m = n
            while m >= 0:
                mask[b, n, m] = True
                m = parents[b, m]
    return mask


@njit(cache=True)
def _first_copies(tokens: np.ndarray, parents: np.ndarray) -> np.ndarray:
    B, N = parents.shape
    first = np.empty((B, N), np.int64)
    for b in range(B):
        for n in range(N):
            first[b, n] = n
            if parents[b, n] < 0:
                continue
            context = first[b, parents[b, n]]
            for m in range(1, n):
                if parents[b, m] >= 0 and tokens[b, m] == tokens[b, n] and first[b, parents[b, m]] == context:
                    first[b, n] = first[b, m]
                    break
    return first


@njit(cache=True)
def paths_to(parents: np.ndarray, node: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`path_to` for arrays."""
    length = np.zeros(len(node), np.int64)
    longest = 0
    for b in range(len(node)):
        n = node[b]
        while n > 0:
            length[b] += 1
            n = parents[b, n]
        longest = max(longest, length[b])
    path = np.empty((len(node), longest), np.int64)
    for b in range(len(node)):
        n = node[b]
        for i in range(length[b], longest):
            path[b, i] = -1
        for i in range(length[b] - 1, -1, -1):
            path[b, i] = n
            n = parents[b, n]
    return path, length


def depths(tree: TokenTree) -> Int[Array, "B N"]:
    """Depth of every node: root 0, padding -1.

    Example:
        >>> depths(pad([([5, 7, 9, 9], [-1, 0, 0, 1])])).tolist()
        [[0, 1, 1, 2]]
    """
    return like(_depths(tree.host.parents), tree.tokens)


@njit(cache=True)
def _heights(parents: np.ndarray) -> np.ndarray:
    heights = np.zeros_like(parents)
    for b in range(parents.shape[0]):
        for n in range(parents.shape[1] - 1, 0, -1):
            if parents[b, n] >= 0:
                heights[b, parents[b, n]] = max(heights[b, parents[b, n]], 1 + heights[b, n])
    return heights


def heights(tree: TokenTree) -> Int[Array, "B N"]:
    """How deep a tree goes on below each of its nodes.

    Example:
        >>> heights(TokenTree.chain(np.array([[5, 7, 9]]))).tolist()
        [[2, 1, 0]]
    """
    return like(_heights(tree.host.parents), tree.tokens)


def ancestors(tree: TokenTree) -> Bool[Array, "B N N"]:
    """mask[b, n, m]: node m is n itself or above n. Padding sees only itself.

    Example:
        >>> ancestors(pad([([5, 7, 9], [-1, 0, 0])]))[0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    return like(_ancestors(tree.host.parents), tree.tokens)


def first_copies(tree: TokenTree) -> Int[Array, "B N"]:
    """The first node whose path spells the same tokens; a node that is no copy maps to itself.

    Example:
        >>> first_copies(pad([([5, 7, 7, 9, 9], [-1, 0, 0, 1, 2])])).tolist()
        [[0, 1, 1, 3, 3]]
    """
    return like(_first_copies(*tree.host), tree.tokens)


@dataclass(frozen=True)
class Dedup:
    """The tree to score and where to find each drafted node in it.

    tree: every distinct prefix once.  places: node of `tree` for each drafted one; None where the drafted tree itself is scored.
    """

    tree: TokenTree
    places: Int[Array, "B N"] | None = None

    @property
    def same(self) -> bool:
        """Whether the drafted tree itself is scored."""
        return self.places is None

    @property
    def row(self) -> Int[Array, "B N"]:
        """Node of `tree` with the same prefix as each drafted node (padding: the root)."""
        if self.places is not None:
            return self.places
        every = np.tile(np.arange(self.tree.num_nodes), (self.tree.batch_size, 1))
        return like(every, self.tree.tokens)

    def expand(self, rows: Array) -> Array:
        """From [B, M, ...] per scored node to [B, N, ...] per drafted node (copies get bit-equal rows)."""
        if self.places is None:
            return rows
        batch = np.arange(len(rows))[:, None]
        return rows[like(batch, rows), like(host(self.places), rows)]

    def compact(self, rows: Array) -> Array:
        """From [B, N, ...] per drafted node to [B, M, ...] per scored node: the first copy's."""
        if self.places is None:
            return rows
        first = np.zeros((rows.shape[0], self.tree.num_nodes), np.int64)
        for b, places in enumerate(host(self.places)):
            first[b, places[::-1]] = np.arange(len(places))[::-1]
        return rows[like(np.arange(len(rows))[:, None], rows), like(first, rows)]

    def outcome(self, outcome: Outcome) -> Outcome:
        """The same outcome in terms of the scored tree's nodes."""
        return outcome if self.places is None else _renamed(outcome, self.places)


def at_first_copies(tree: TokenTree, outcome: Outcome) -> Outcome:
    """The same outcome with each node at the first of its copies in the tree.

    Example:
        >>> two = pad([([5, 7, 7, 9], [-1, 0, 0, 2])])
        >>> at_first_copies(two, Outcome.of(np.array([[2, 3]]), np.array([2]), np.array([1]))).lists.paths
        [[1, 3]]
    """
    return _renamed(outcome, first_copies(tree))


def _renamed(outcome: Outcome, places: Int[Array, "B N"]) -> Outcome:
    nodes, *_ = outcome.host
    path = np.where(nodes >= 0, np.take_along_axis(host(places), np.maximum(nodes, 0), 1), -1)
    path = like(path, outcome.path)
    return Outcome(path, outcome.num_accepted, outcome.token)


@njit(cache=True)
def _all_distinct(tokens: np.ndarray, parents: np.ndarray) -> bool:
    """No two siblings with one token, and no node behind padding."""
    for b in range(parents.shape[0]):
        for n in range(1, parents.shape[1]):
            if parents[b, n] < 0:
                continue
            if n > 1 and parents[b, n - 1] < 0:
                return False
            for m in range(parents[b, n] + 1, n):
                if parents[b, m] == parents[b, n] and tokens[b, m] == tokens[b, n]:
                    return False
    return True


def dedup(tree: TokenTree) -> Dedup:
    """Map copies to one scored node. The draft itself is untouched: siblings are never merged for verification.

    Example:
        >>> d = dedup(pad([([5, 7, 7, 9, 9], [-1, 0, 0, 1, 2])]))
        >>> d.tree.tokens.tolist(), d.row.tolist()
        ([[5, 7, 9]], [[0, 1, 1, 2, 2]])
    """
    tokens, parents = tree.host
    if _all_distinct(tokens, parents):
        return Dedup(tree)
    first = _first_copies(tokens, parents)
    index = np.arange(tree.num_nodes)
    stays = (first == index) & ((parents >= 0) | (index == 0))
    row = np.take_along_axis(np.where(stays, stays.cumsum(1) - 1, 0), first, 1)
    scored, _ = packed(tree, stays, row)
    return Dedup(scored, like(row, tree.tokens))


def joined(tree: TokenTree, extra: TokenTree) -> TokenTree:
    """A tree, and behind its nodes those of another one below the same roots.

    Example:
        >>> joined(pad([([5, 7], [-1, 0])]), pad([([5, 8, 9], [-1, 0, 1])])).parents.tolist()
        [[-1, 0, 0, 2]]
    """
    xp = namespace(tree.tokens)
    nodes = extra.parents[:, 1:]
    parents = xp.where(nodes > 0, nodes + tree.num_nodes - 1, nodes)
    tokens = xp.concat([tree.tokens, extra.tokens[:, 1:]], axis=1)
    return TokenTree(tokens, xp.concat([tree.parents, parents], axis=1))


def path_to(tree: TokenTree, node: Int[Array, " B"]) -> tuple[Int[Array, "B A"], Int[Array, " B"]]:
    """Nodes from below the root down to `node`, padded with -1, and how many there are.

    Example:
        >>> path, length = path_to(pad([([5, 7, 9, 9], [-1, 0, 0, 1])]), np.array([3]))
        >>> path.tolist(), length.tolist()
        ([[1, 3]], [2])
    """
    path, length = paths_to(tree.host.parents, host(node))
    return like(path, tree.parents), like(length, tree.parents)


def pad(trees: Sequence[tuple[Sequence[int], Sequence[int]]]) -> TokenTree:
    """A batch from (tokens, parents) lists of different lengths.

    Example:
        >>> pad([([5], [-1]), ([5, 7], [-1, 0])]).parents.tolist()
        [[-1, -1], [-1, 0]]
    """
    N = max(len(tokens) for tokens, _ in trees)
    tokens = [list(t) + [0] * (N - len(t)) for t, _ in trees]
    parents = [list(p) + [-1] * (N - len(p)) for _, p in trees]
    return TokenTree(np.array(tokens, np.int64), np.array(parents, np.int64))


def chains(texts: Sequence[Sequence[int]]) -> TokenTree:
    """A batch of chains of different lengths, each from its root on.

    Example:
        >>> chains([[5], [5, 7]]).parents.tolist()
        [[-1, -1], [-1, 0]]
    """
    return pad([(tokens, range(-1, len(tokens) - 1)) for tokens in texts])


def subtree(tree: TokenTree, b: int) -> TokenTree:
    """Row b alone, without its padding."""
    size = int(tree.is_node[b].sum())
    return TokenTree(tree.tokens[b : b + 1, :size], tree.parents[b : b + 1, :size])


class _Fault(IntEnum):
    """What may be wrong with a tree: the order of nodes, padding before a node, a token id, a root."""

    NONE = 0
    ORDER = 1
    PADDING = 2
    TOKEN = 3
    ROOT = 4


@njit(cache=True)
def _fault(tokens: np.ndarray, parents: np.ndarray, vocab_size: int, roots: np.ndarray) -> int:
    """Of `_Fault`, the first."""
    for b in range(parents.shape[0]):
        if parents[b, 0] != -1:
            return _Fault.ORDER
        if tokens[b, 0] != roots[b]:
            return _Fault.ROOT
        for n in range(parents.shape[1]):
            if parents[b, n] >= n:
                return _Fault.ORDER
            if n > 1 and parents[b, n] >= 0 and parents[b, n - 1] < 0:
                return _Fault.PADDING
            if not 0 <= tokens[b, n] < vocab_size:
                return _Fault.TOKEN
    return _Fault.NONE


def check(tree: TokenTree, vocab_size: int, roots: Int[Array, " B"] | None = None) -> None:
    """Raise InvalidInputError unless parents are in topological order, padding is last and ids are below `vocab_size`.

    roots: the tokens that the trees have to hang on.
    """
    tokens, parents = tree.host
    fault = _fault(tokens, parents, vocab_size, tokens[:, 0] if roots is None else host(roots))
    if fault == _Fault.ORDER:
        raise InvalidInputError(
            f"parents {tree.parents.tolist()} were given; expected -1 at node 0 and parents[n] < n. Sort the nodes topologically."
        )
    if fault == _Fault.PADDING:
        raise InvalidInputError(
            f"parents {tree.parents.tolist()} were given; expected padding (-1) only after the last node."
        )
    if fault == _Fault.ROOT and roots is not None:
        raise InvalidInputError(
            f"a draft rooted at tokens {tree.tokens[:, 0].tolist()} was proposed; expected the last committed tokens {roots.tolist()}."
        )
    if fault == _Fault.TOKEN:
        bad = int(tokens[(tokens < 0) | (tokens >= vocab_size)][0])
        raise InvalidInputError(
            f"token id {bad} was given; expected 0 <= id < {vocab_size}. Check that the tokenizer belongs to the model."
        )


@njit(cache=True)
def _children(parents: np.ndarray, first: np.ndarray) -> np.ndarray:
    B, N = parents.shape
    count = np.zeros((B, N), np.int64)
    for b in range(B):
        for n in range(1, N):
            if parents[b, n] >= 0:
                count[b, first[b, parents[b, n]]] += 1
    children = np.full((B, N, count.max()), -1, np.int64)
    count[:] = 0
    for b in range(B):
        for n in range(1, N):
            if parents[b, n] >= 0:
                u = first[b, parents[b, n]]
                children[b, u, count[b, u]] = n
                count[b, u] += 1
    return children


def children(tree: TokenTree) -> Int[Array, "B N W"]:
    """Draws at every context in draw order, padded with -1; copies of a context pool theirs at the first copy.

    Example:
        >>> children(pad([([5, 7, 7, 9, 8], [-1, 0, 0, 1, 2])]))[0].tolist()
        [[1, 2], [3, 4], [-1, -1], [-1, -1], [-1, -1]]
    """
    tokens, parents = tree.host
    return like(_children(parents, _first_copies(tokens, parents)), tree.tokens)


def packed(
    tree: TokenTree, stays: Bool[np.ndarray, "B N"], number: Int[np.ndarray, "B N"] | None = None
) -> tuple[TokenTree, Int[Array, "B M"]]:
    """A tree without some nodes, padding last, and the old number of each node.

    stays: the root and, of each node, its parent, or a node with the parent's number.  number: new one of each node; default by their order.

    Example:
        >>> smaller, places = packed(TokenTree.chain(np.array([[7, 8, 9]])), np.array([[True, True, False]]))
        >>> smaller.lists, places.tolist()
        (TreeLists(tokens=[[7, 8]], parents=[[-1, 0]]), [[0, 1]])
    """
    tokens, parents = tree.host
    order = np.argsort(~stays, 1, kind="stable")[:, : stays.sum(1).max()]
    number = stays.cumsum(1) - 1 if number is None else number
    above = np.take_along_axis(parents, order, 1)
    real = np.take_along_axis(stays, order, 1)
    new = np.where(real & (above >= 0), np.take_along_axis(number, np.maximum(above, 0), 1), -1)
    ids = np.where(real, np.take_along_axis(tokens, order, 1), 0)
    smaller = TokenTree(like(ids, tree.tokens), like(new, tree.tokens))
    smaller.__dict__["host"] = TreeArrays(ids, new)
    return smaller, like(order, tree.tokens)
