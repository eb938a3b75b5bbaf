"""The best draft tree: by position for known acceptance (Sequoia, ERSD), or grown by path probability (OPT-Tree, EAGLE-2).

By position. The k-th child of an accepted node is accepted with probability a_k, whatever the node or by its depth (children drawn
one after the other and tried in order). A tree of n nodes then yields, in expectation, F tokens, the sum over its nodes of the product
of a_k along the path, and the best one follows from

    T(n, d)    best F of a subtree with n nodes, its root included, and depth at most d below it:  T(1, d) = T(n, 0) = 1
    T(n, d)    = 1 + C(n - 1, d, 1)
    C(m, d, k) = max over 1 <= s <= m of  a_k T(s, d - 1) + C(m - s, d, k + 1),     C(0, d, k) = C(m, d, K + 1) = 0

(Chen et al. 2024, Sequoia, arXiv 2402.12374, section 3.1; there without depth limit as well.) Drafting costs depth, and a pass
costs rows, so the speed T(n, d) / seconds(n, d) is maximised over both.

By rank. In an exponential race the target takes the k-th arrival of the draft with probability Pr(R = k), `acceptance.race_places`. A node is
worth the product of these along its path, and the best tree of n nodes holds the n of largest worth, as a Tunstall code does
(Kobus & Gunduz 2025, ERSD, arXiv 2504.15475): `race_tree`, O(n log n), where T above takes O(n^2 d K).

By path probability. Children of a node are taken in order of q, and the nodes of largest path product are kept: that maximises
the estimate sum of path products for n nodes (Wang et al. 2024, OPT-Tree, arXiv 2406.17276; Li et al. 2024, EAGLE-2,
arXiv 2406.16858). Growth stops when the best node left adds less than a node costs. Its children are deterministic: verify them
as point masses, never with q.

Growth theorem: growth that does not look ahead keeps the distribution, even across branches: choose a node that was never expanded, and
how many children to draw there, by any function of the partial tree; draw all of them at once; keep every one. Traps: stopping inside a node after seeing a draw, dropping a drawn token, merging copies.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from polydraft.errors import InvalidInputError


class PositionalTree(NamedTuple):
    """parents: of each node, the root first with -1, parents before children, siblings in draw order; as of `core.Budget.fixed`.

    expected_tokens: per round, the target's extra token included.
    """

    parents: tuple[int, ...]
    expected_tokens: float


Acceptance = Sequence[float] | Sequence[Sequence[float]]
"""a_k of the first, second, ... child in draw order; or such a row for each depth of the parent, of which the last holds for deeper ones."""


def _check(acceptance: Acceptance, num_nodes: int, depth: int) -> np.ndarray:
    """[depth, K]: the rates of each depth."""
    rates = np.asarray(acceptance, dtype=np.float64)
    if rates.ndim not in (1, 2) or rates.size == 0 or not ((rates >= 0) & (rates <= 1)).all():
        raise InvalidInputError(
            f"acceptance {list(acceptance)} was given; expected at least one probability, of the first, second, ... child of a node, "
            "or as many for each depth."
        )
    if num_nodes < 1 or depth < 0:
        raise InvalidInputError(
            f"{num_nodes} nodes of depth {depth} were given; expected at least the root and depth >= 0."
        )
    rates = np.atleast_2d(rates)
    return rates[np.minimum(np.arange(max(depth, 1)), len(rates) - 1)]


def _tables(by_depth: np.ndarray, num_nodes: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """T[d, n] and sizes[d, k, m], the nodes of child k where m nodes are left for children k, k + 1, ...; 0 = no such child."""
    K = by_depth.shape[1]
    T = np.zeros((depth + 1, num_nodes + 1))
    T[0, 1:] = 1.0
    sizes = np.zeros((depth + 1, K + 1, num_nodes), np.int64)
    for d in range(1, depth + 1):
        C = np.zeros((K + 1, num_nodes))
        rates = by_depth[depth - d]
        for k in range(K - 1, -1, -1):
            for m in range(1, num_nodes):
                gains = rates[k] * T[d - 1, 1 : m + 1] + C[k + 1, m - 1 :: -1][:m]
                s = int(gains.argmax())
                if gains[s] > 0:
                    C[k, m] = gains[s]
                    sizes[d, k, m] = s + 1
        T[d, 1:] = 1.0 + C[0]
    return T, sizes


def _build(sizes: np.ndarray, num_nodes: int, depth: int) -> tuple[int, ...]:
    """Parents of the best tree, by depth."""
    parents = [-1]
    open_nodes = [(0, num_nodes, depth)]
    while open_nodes:
        below: list[tuple[int, int, int]] = []
        for node, n, d in open_nodes:
            k = 0
            left = n - 1
            while d > 0 and left > 0 and k < sizes.shape[1] - 1 and sizes[d, k, left] > 0:
                s = int(sizes[d, k, left])
                below.append((len(parents), s, d - 1))
                parents.append(node)
                k = k + 1
                left = left - s
        open_nodes = below
    return tuple(parents)


def best_by_position(acceptance: Acceptance, num_nodes: int, depth: int) -> PositionalTree:
    """The tree of at most `num_nodes` nodes (root included) and `depth` with most expected tokens.

    acceptance: a_k, the chance that the k-th child in draw order is the accepted one; or such a row for each depth of the parent.

    Raises:
        InvalidInputError: probabilities outside [0, 1], none at all, or no node.

    Example:
        >>> best_by_position([0.8, 0.1], 4, 3).parents
        (-1, 0, 1, 2)
        >>> best_by_position([0.5, 0.4], 4, 3).parents
        (-1, 0, 0, 1)
        >>> best_by_position([[0.8, 0.1], [0.5, 0.4]], 4, 2).parents
        (-1, 0, 1, 1)
    """
    rates = _check(acceptance, num_nodes, depth)
    T, sizes = _tables(rates, num_nodes, depth)
    return PositionalTree(_build(sizes, num_nodes, depth), float(T[depth, num_nodes]))


def race_tree(places: Sequence[float], num_nodes: int) -> PositionalTree:
    """ERSD's draft tree: the nodes of largest probability to be the target's choice, at most `num_nodes` with the root. O(n log n).

    places: Pr(R = k) of the first, second, ... arrival of the draft's race, of `acceptance.race_places` or counted. It is the best tree where
        they fall, and else no better than `best_by_position`: the k-th arrival is drafted only beside the ones before it.

    Raises:
        InvalidInputError: probabilities outside [0, 1], none at all, or no node.

    Example:
        >>> race_tree([0.8, 0.1], 4).parents
        (-1, 0, 1, 2)
        >>> race_tree([0.5, 0.4], 4)
        PositionalTree(parents=(-1, 0, 0, 1), expected_tokens=2.15)
    """
    (rates,) = _check(places, num_nodes, 1)
    parents = [-1]
    reaches = [1.0]
    waiting = [(-float(rates[0]), 0, 0)]
    while waiting and len(parents) < num_nodes:
        value, parent, rank = heapq.heappop(waiting)
        if value == 0:
            break
        node = len(parents)
        parents.append(parent)
        reaches.append(-value)
        heapq.heappush(waiting, (value * float(rates[0]), node, 0))
        if rank + 1 < len(rates):
            heapq.heappush(waiting, (-reaches[parent] * float(rates[rank + 1]), parent, rank + 1))
    return PositionalTree(tuple(parents), round(sum(reaches), 12))


def fastest_by_position(
    acceptance: Acceptance, seconds: Callable[[int, int], float], *, max_nodes: int = 32, max_depth: int = 12
) -> PositionalTree:
    """The tree of most expected tokens per second. seconds(rows, depth): of a round, measured.

    Example:
        >>> fastest_by_position([0.8, 0.1], lambda rows, depth: 1 + 0.1 * rows + 0.1 * depth).parents
        (-1, 0, 1, 2, 3)
        >>> fastest_by_position([0.1], lambda rows, depth: 1 + depth).parents
        (-1,)
    """
    rates = _check(acceptance, max_nodes, max_depth)
    best = [_tables(rates[: max(d, 1)], max_nodes, d)[0][d] for d in range(max_depth + 1)]
    _, n, d = max(
        (best[d][n] / seconds(n, d), -n, -d)
        for d in range(max_depth + 1)
        for n in range(d + 1, max_nodes + 1)
    )
    return best_by_position(acceptance, -n, -d)


def grow_by_probability(
    row: Callable[[tuple[int, ...]], np.ndarray],
    *,
    max_nodes: int,
    max_depth: int,
    min_path_prob: float = 0.0,
) -> tuple[list[int], list[int], float]:
    """The most probable tree of the draft: (tokens, parents, sum of path probabilities), the root first as token -1.

    row(path): draft distribution after the tokens of a path.  max_nodes: below the root.
    min_path_prob: stop when the best node left has a smaller path probability, such as the cost of a node times the speed so far.
    Parents come before children and siblings by falling probability. Verify as point masses.

    Example:
        >>> row = lambda path: np.array([0.7, 0.3])
        >>> grow_by_probability(row, max_nodes=3, max_depth=2)
        ([-1, 0, 0, 1], [-1, 0, 1, 0], 1.49)
    """
    if max_nodes < 0 or max_depth < 0:
        raise InvalidInputError(
            f"max_nodes={max_nodes} and max_depth={max_depth} were given; expected both >= 0."
        )
    tokens = [-1]
    parents = [-1]
    total = 0.0
    paths: list[tuple[int, ...]] = [()]
    frontier = _Frontier()

    def distribution(path: tuple[int, ...]) -> np.ndarray:
        return np.asarray(row(path), dtype=np.float64) if len(path) < max_depth else np.zeros(0)

    frontier.expand(distribution(()), 1.0)
    while len(frontier) and len(tokens) <= max_nodes and frontier.best >= min_path_prob:
        path_prob, node, token = frontier.pop()
        tokens.append(token)
        parents.append(node)
        paths.append((*paths[node], token))
        total += path_prob
        frontier.expand(distribution(paths[-1]), path_prob)
    return tokens, parents, round(total, 12)


class _Frontier:
    """Children of expanded nodes that are not in the tree: of each node the likeliest one."""

    def __init__(self) -> None:
        self._ranked: list[np.ndarray] = []
        self._distributions: list[np.ndarray] = []
        self._waiting: list[tuple[float, int, int, float]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def best(self) -> float:
        """Path probability of the next one."""
        return -self._waiting[0][0]

    def expand(self, distribution: np.ndarray, path_prob: float) -> None:
        """The next node has these children."""
        self._distributions.append(distribution)
        self._ranked.append(np.argsort(-distribution, kind="stable"))
        self._offer(len(self._ranked) - 1, 0, path_prob)

    def pop(self) -> tuple[float, int, int]:
        """Path probability, parent and token of the next one, whose place its next sibling takes."""
        value, node, rank, weight = heapq.heappop(self._waiting)
        self._offer(node, rank + 1, weight)
        return -value, node, int(self._ranked[node][rank])

    def _offer(self, node: int, rank: int, weight: float) -> None:
        """The rank-th child of a node of this path probability joins those that wait."""
        ranked = self._ranked[node]
        if rank < len(ranked):
            value = weight * float(self._distributions[node][ranked[rank]])
            if value > 0:
                heapq.heappush(self._waiting, (-value, node, rank, weight))
