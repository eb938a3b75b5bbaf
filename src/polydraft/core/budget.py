"""A draft's size is a tree: fixed by position before its first draw, or the bounds of one that grows; its shape is what verifiers ask about."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property, lru_cache
from typing import NamedTuple

from polydraft.core.confidence import IDENTITY
from polydraft.errors import InvalidInputError


class TreeShape(Enum):
    """What was fixed about the tree before any token was drawn, each but RAGGED a case of the next; of a batch: for some row."""

    CHAIN = auto()
    """At most one child a node."""
    PATHS = auto()
    """K paths of equal length that part at the root and never branch again."""
    PRODUCT = auto()
    """A fixed number of children for every node of a depth: K paths behind a trunk, for one."""
    RAGGED = auto()
    """Paths from the root, the first longer than the others and drawn first; they never branch again."""
    BY_POSITION = auto()
    """Any numbers of children, fixed for every position."""
    GROWN = auto()
    """Numbers of children that depend on sampled values or scores, on any branch, earlier siblings and all below them included."""

    @classmethod
    def of_batch(cls, shapes: Iterable["TreeShape"]) -> "TreeShape":
        """The narrowest shape that all of these are.

        Example:
            >>> TreeShape.of_batch([TreeShape.CHAIN, TreeShape.RAGGED]).name, TreeShape.of_batch([TreeShape.PRODUCT, TreeShape.RAGGED]).name
            ('RAGGED', 'BY_POSITION')
        """
        shapes_seen = {*shapes}
        return (
            cls.BY_POSITION
            if shapes_seen >= {cls.PRODUCT, cls.RAGGED}
            else max(shapes_seen, key=lambda shape: shape.value)
        )


class Stop(NamedTuple):
    """Where drafts end by themselves: no child is drawn below a node whose own path is too unsure.

    min_reach: by depth of the node, from 1 on, the smallest reach with which it goes on; deeper nodes as the last. Of a tree that grows
        best first the reach of all nodes of the depth together. The root always goes on.
    acceptance: of a drafted token by its confidence; see `polydraft.core.confidence`.
    min_spare_chance: of a chain, by the number of tokens drafted so far, from 1 on, the smallest chance of acceptance with which one more is drawn
        beside a token of the chain, a spare sibling: a row of the forward pass and no draft step. None are drawn behind the last, or where it is ().
        Of a tree that a head of one forward pass grows (`heads.foretold`) the same of any node at temperature 0, and of spare siblings above it.
    spare_acceptance: of a spare sibling whose elder was rejected.

    `min_reach` reads the tokens of a node's path and the rows above them, before the node's own children are drawn, and what was drawn stays: so
    chains, paths of equal length and trees of one width a depth have the shape that verifiers are told, and every verifier that is exact for
    it stays exact. Trap: dropping a token after a look at it biases the output (total variation up to .28 in enumerated cases).
    Spare siblings are chosen when the chain is drawn, by all of its tokens, the best first: they make a tree that grows (`TreeShape.GROWN`), its
    siblings drawn without replacement. Verifiers that try siblings in the order of their draws stay exact.
    """

    min_reach: tuple[float, ...]
    acceptance: tuple[float, ...] = IDENTITY
    min_spare_chance: tuple[float, ...] = ()
    spare_acceptance: float = 1.0


@dataclass(frozen=True)
class Budget:
    """The draft of one sequence in one step: a tree fixed by position before its first draw, or the bounds of one that grows.

    Made by `Budget.fixed` and `Budget.grown`, for drafters that draw by position and for those that choose nodes as they go; what
    either may be asked of the other kind reads the four bounds, which both have.

    max_nodes: nodes below the root.  max_depth: of a path.  width: paths; of one that grows best first: nodes of a depth that are expanded; of one that
        is drawn as it grows: spare siblings beside a token.
    min_path_prob: smallest path probability for which a node is worth drafting.
    parents: the parent of each node, the root first with -1, depth by depth, siblings in the order of their draws, and within a depth
        those with children first; () where it grows.
    stop: where paths end before that; None draws all of a fixed tree.
    copied: tokens of a chain that are verified in place of what the drafter would draft.

    Raises:
        InvalidInputError: bounds below zero, parents that come after their children, or spare siblings of what is no chain.

    Example:
        >>> Budget.fixed((-1, 0, 1, 0, 2))
        Budget(max_nodes=4, max_depth=3, width=2, min_path_prob=0.0, parents=(-1, 0, 0, 1, 3), stop=None)
        >>> Budget.grown(12, 4, width=3)
        Budget(max_nodes=12, max_depth=4, width=3, min_path_prob=0.0, parents=(), stop=None)
    """

    max_nodes: int
    max_depth: int
    width: int = 1
    min_path_prob: float = 0.0
    parents: tuple[int, ...] = ()
    stop: Stop | None = None
    copied: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if (
            min(self.max_nodes, self.max_depth) < 0
            or self.width < 1
            or (self.parents and self.max_nodes != len(self.parents) - 1)
        ):
            raise InvalidInputError(
                f"budget {self} was given; expected max_nodes >= 0, max_depth >= 0 and width >= 1, of a fixed tree its own. "
                "Use max_depth=0 for plain decoding."
            )
        if not 0.0 <= self.min_path_prob <= 1.0:
            raise InvalidInputError(
                f"min_path_prob={self.min_path_prob} was given in a budget; expected a probability in [0, 1]. Use 0 for no limit."
            )

        if self.has_spares and self.parents and self.parents != (-1, *range(self.max_depth)):
            raise InvalidInputError(
                f"a stop with min_spare_chance was given for a tree of the parents {self.parents}; expected a chain, such as (-1, 0, 1). "
                "Use min_spare_chance=() for other trees."
            )

    @classmethod
    def fixed(cls, parents: Sequence[int]) -> "Budget":
        """A tree by position, its nodes numbered as the class says. `polydraft.core.geometry` has chains, paths and others."""
        return _fixed(tuple(parents))

    @classmethod
    def grown(cls, nodes: int, depth: int, width: int = 1, min_path_prob: float = 0.0) -> "Budget":
        """Bounds of a tree whose nodes are chosen as it grows."""
        return cls(nodes, depth, width, min_path_prob)

    @classmethod
    def copying(cls, tokens: Sequence[int]) -> "Budget":
        """These tokens as a chain.

        Example:
            >>> Budget.copying((7, 8, 9)).within(2).copied
            (7, 8)
        """
        return replace(_fixed((-1, *range(len(tokens)))), copied=tuple(tokens))

    def ending(self, stop: Stop | None) -> "Budget":
        """The same with paths that end where they are unsure.

        Example:
            >>> Budget.fixed((-1, 0, 1)).ending(Stop((0.5,))).shape.name
            'CHAIN'
        """
        return self if stop == self.stop else replace(self, stop=stop)

    def without_spares(self) -> "Budget":
        """The same without spare siblings.

        Example:
            >>> Budget.fixed((-1, 0, 1)).ending(Stop((0.5,), min_spare_chance=(0.1,))).without_spares().shape.name
            'CHAIN'
        """
        return self if self.stop is None else self.ending(self.stop._replace(min_spare_chance=()))

    @property
    def has_spares(self) -> bool:
        """Whether spare siblings may be drawn beside its tokens."""
        return self.stop is not None and bool(self.stop.min_spare_chance)

    @cached_property
    def shape(self) -> TreeShape:
        """The narrowest shape of the tree; GROWN where it grows, where spare siblings may be drawn, and where an unequal tree may end anywhere.

        Example:
            >>> Budget.fixed((-1, 0, 0, 1, 2)).shape.name, Budget.fixed((-1, 0, 1, 1)).shape.name, Budget.fixed((-1, 0, 0, 1)).shape.name
            ('PATHS', 'PRODUCT', 'RAGGED')
        """
        if not self.parents or self.has_spares:
            return TreeShape.GROWN
        depth = [0] * len(self.parents)
        children = [0] * len(self.parents)
        for n, parent in enumerate(self.parents[1:], 1):
            depth[n] = depth[parent] + 1
            children[parent] += 1
        numbers = [
            {c for c, d in zip(children, depth, strict=True) if d == deep} for deep in range(self.max_depth)
        ]
        if all(len(values) == 1 for values in numbers):
            flat = [1, *(count for values in numbers for count in values)]
            return (
                TreeShape.CHAIN
                if max(flat) == 1
                else TreeShape.PATHS
                if max(flat[2:], default=1) == 1
                else TreeShape.PRODUCT
            )
        if self.stop:
            return TreeShape.GROWN
        is_ragged = (
            max(children[1:]) == 1 and depth.count(self.max_depth) == 1 and self._is_deepest_first(depth)
        )
        return TreeShape.RAGGED if is_ragged else TreeShape.BY_POSITION

    def _is_deepest_first(self, depth: Sequence[int]) -> bool:
        """Whether the path to the last node is the first one at each depth. depth: of each node."""
        n = len(self.parents) - 1
        while n > 0:
            if depth.index(depth[n]) != n:
                return False
            n = self.parents[n]
        return True

    @property
    def chain_length(self) -> int:
        """Tokens of the longest chain within it."""
        return min(self.max_depth, self.max_nodes)

    def within(self, depth: int) -> "Budget":
        """The same cut to a depth.

        Example:
            >>> Budget.fixed((-1, 0, 0, 1, 3)).within(1).parents, Budget.grown(9, 4).within(2).max_depth
            ((-1, 0, 0), 2)
        """
        if self.copied and depth < self.max_depth:
            return Budget.copying(self.copied[:depth])
        return self if self.max_depth <= depth else _within(self, depth)


@lru_cache(maxsize=4096)
def _fixed(given: tuple[int, ...]) -> Budget:
    if not (given and given[0] == -1 and all(0 <= p < n for n, p in enumerate(given[1:], 1))):
        raise InvalidInputError(
            f"parents={given} were given; expected the root first with -1, then for each node one that comes before it, "
            "such as (-1, 0, 0, 1). Number the nodes so that parents come before their children."
        )
    below: list[list[int]] = [[] for _ in given]
    for n, parent in enumerate(given[1:], 1):
        below[parent].append(n)
    parents = [-1]
    here = [0]
    depth = 0
    while drawn := sorted(
        ((n, k) for k, m in enumerate(here) for n in below[m]), key=lambda node: not below[node[0]]
    ):
        begin = len(parents) - len(here)
        parents += [begin + k for _, k in drawn]
        here = [n for n, _ in drawn]
        depth = depth + 1
    return Budget(len(parents) - 1, depth, sum(not nodes for nodes in below), parents=tuple(parents))


@lru_cache(maxsize=4096)
def _within(budget: Budget, depth: int) -> Budget:
    if not budget.parents:
        return replace(budget, max_depth=depth)
    deep = [0]
    for parent in budget.parents[1:]:
        deep.append(deep[parent] + 1)
    parents = tuple(
        p for p, d in zip(budget.parents, deep, strict=True) if d <= depth
    )  # deeper ones come last
    return _fixed(parents).ending(budget.stop)


NOTHING = Budget.fixed((-1,))
"""No draft."""
