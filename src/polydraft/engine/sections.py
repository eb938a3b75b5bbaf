"""Constraints of a part of an output, which may begin at a node of a drafted tree."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from jaxtyping import Bool

from polydraft.core.params import Constraint


class DraftedTree:
    """A tree behind a text. Arguments as of `Constraint.allowed`; a node's position is that of its token in text and path together.

    Example:
        >>> tree = DraftedTree([7, 5], [5, 3, 4, 3], [-1, 0, 1, 0])
        >>> tree.positions, tree.above(2, 2), tree.above(2, 1)
        ([1, 2, 3, 2], 1, 0)
    """

    def __init__(self, context: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> None:
        self.context = list(context)
        self.tokens = list(tokens)
        self.parents = list(parents)

    @cached_property
    def positions(self) -> list[int]:
        """Of each node; -1 of padding."""
        positions = [len(self.context) - 1]
        for parent in self.parents[1:]:
            above = positions[parent] if parent >= 0 else -1
            positions.append(above + 1 if above >= 0 else -1)
        return positions

    def above(self, node: int, position: int) -> int:
        """The node on a node's path that is at a position, or the root where that lies in the text."""
        while node and self.positions[node] > position:
            node = self.parents[node]
        return node

    def rows(self, constraint: Constraint, anchor: int) -> Bool[np.ndarray, "N V"]:
        """What a constraint allows behind a node and those below it; rows of others are read by nobody."""
        if anchor == 0:
            return constraint.allowed(self.context, self.tokens, self.parents)
        place = {anchor: 0}
        for node in range(anchor + 1, len(self.tokens)):
            if self.parents[node] in place:
                place[node] = len(place)
        tokens = [self.tokens[node] for node in place]
        parents = [-1, *(place[self.parents[node]] for node in list(place)[1:])]
        part = constraint.allowed([*self.context, *self._path(anchor)], tokens, parents)
        rows = np.ones((len(self.tokens), part.shape[1]), np.bool_)
        rows[list(place)] = part
        return rows

    def _path(self, node: int) -> list[int]:
        path = list[int]()
        while node:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]
