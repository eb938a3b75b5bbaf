"""Where the nodes of a draft lie that is fixed before its first draw: depth by depth, within a depth those with children first.

    paths        K below the root or below a trunk that is drawn first, all of one length or the first longer than the others, in order
    by position  any tree; siblings keep their order but for those without children, which come last

Only nodes with children are run through the model, and of each depth these are neighbours. The noise of a draw is that of its node.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

__all__ = ["Layout", "Size", "cut", "layout", "layouts"]


class Size(NamedTuple):
    """What to draw for one sequence. width, depth, trunk, short: as in `Budget.of_paths`.  parents: of a tree by position, else ()."""

    width: int
    depth: int
    trunk: int = 0
    short: int = 0
    parents: tuple[int, ...] = ()


class Layout(NamedTuple):
    """parents: of each node, the root's -1.  starts: first node of each depth, then N.  inner: behind the last node with children."""

    parents: Int[np.ndarray, "B N"]
    starts: Int[np.ndarray, "B D+2"]
    inner: Int[np.ndarray, "B D+1"]


@lru_cache(maxsize=4096)
def cut(parents: tuple[int, ...], depth: int, max_nodes: int) -> Size:
    """Of a tree by position down to `depth` the first `max_nodes` nodes below the root.

    Example:
        >>> cut((-1, 0, 1, 0, 2), 2, 9).parents, cut((-1, 0, 1, 0, 2), 9, 2).parents
        ((-1, 0, 1, 0), (-1, 0, 1))
    """
    number, deep, kept = {0: 0}, [0], [-1]
    for n, parent in enumerate(parents[1:], 1):
        deep.append(deep[parent] + 1)
        if deep[n] <= depth and parent in number and len(kept) <= max_nodes:
            number[n] = len(kept)
            kept.append(number[parent])
    return Size(1, max(deep[n] for n in number), parents=tuple(kept))


def _levels_of_paths(size: Size) -> list[list[int]]:
    """For each depth, whose children its nodes are: places in the depth above."""
    ends = [size.depth] + [size.short or size.depth] * (size.width - 1)
    return [
        [0] if d < size.trunk else [0 if d == size.trunk else k for k in range(size.width) if d < ends[k]]
        for d in range(size.depth)
    ]


def _levels_of_tree(parents: tuple[int, ...]) -> list[list[int]]:
    below: list[list[int]] = [[] for _ in parents]
    for n, parent in enumerate(parents[1:], 1):
        below[parent].append(n)
    here, levels = [0], list[list[int]]()
    while any(below[n] for n in here):
        drawn = sorted(((n, k) for k, m in enumerate(here) for n in below[m]), key=lambda drawn: not below[drawn[0]])
        here = [n for n, _ in drawn]
        levels.append([k for _, k in drawn])
    return levels


@lru_cache(maxsize=4096)
def layout(size: Size | tuple[int, int, int, int]) -> Layout:
    """The layout of one draft, as a batch of one.

    Example:
        >>> layout(Size(2, 3, short=1)).parents.tolist(), layout(Size(2, 2, parents=(-1, 0, 0, 2))).parents.tolist()
        ([[-1, 0, 0, 1, 3]], [[-1, 0, 0, 1]])
    """
    size = size if isinstance(size, Size) else Size(*size)
    parents, starts, inner = [-1], [0, 1], list[int]()
    for above in _levels_of_tree(size.parents) if size.parents else _levels_of_paths(size):
        begin = starts[-2]
        parents += [begin + k for k in above]
        inner.append(begin + max(above) + 1)
        starts.append(len(parents))
    inner.append(starts[-2])  # the deepest have none
    return Layout(*(np.array([x]) for x in (parents, starts, inner)))


@lru_cache(maxsize=1024)
def layouts(sizes: Sequence[Size | tuple[int, int, int, int]]) -> Layout:
    """The layouts of a batch, padded: parents by -1, and below a draft's end no node lies."""
    each = [layout(size) for size in sizes]
    if len(each) == 1:
        return each[0]
    N, D = (max(x.shape[1] for x in found) for found in ((e.parents for e in each), (e.inner for e in each)))
    parents, starts, inner = (
        np.full((len(each), N), -1),
        np.empty((len(each), D + 1), np.int64),
        np.empty((len(each), D), np.int64),
    )
    for b, e in enumerate(each):
        parents[b, : e.parents.shape[1]] = e.parents
        starts[b], inner[b] = e.starts[0, -1], e.starts[0, -1]
        starts[b, : e.starts.shape[1]], inner[b, : e.inner.shape[1]] = e.starts, e.inner
    return Layout(parents, starts, inner)
