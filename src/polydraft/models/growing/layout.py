"""Where the depths of trees lie that are fixed before their first draw, see `core.Budget`: only nodes with children, which are neighbours, are run through a model."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Layout(NamedTuple):
    """parents: of each node, the root's -1.  starts: first node of each depth, then N.  inner: behind the last node with children."""

    parents: Int[np.ndarray, "B N"]
    starts: Int[np.ndarray, "B D+2"]
    inner: Int[np.ndarray, "B D+1"]


@lru_cache(maxsize=4096)
def layout(parents: tuple[int, ...]) -> Layout:
    """The layout of one tree, as a batch of one. parents: numbered as those of `core.Budget`.

    Example:
        >>> layout((-1, 0, 0, 1, 3)).starts.tolist(), layout((-1, 0, 0, 1, 3)).inner.tolist()
        ([[0, 1, 3, 4, 5]], [[1, 2, 4, 4]])
    """
    starts = [0, 1]
    inner = list[int]()
    assert parents[0] == -1
    while starts[-1] < len(parents):
        assert parents[starts[-1]] >= starts[-2], "not numbered depth by depth"
        here = [n for n in range(starts[-1], len(parents)) if starts[-2] <= parents[n] < starts[-1]]
        inner.append(1 + max(parents[n] for n in here))
        starts.append(here[-1] + 1)
    inner.append(starts[-2])  # the deepest have none
    return Layout(*(np.array([x]) for x in (parents, starts, inner)))


@lru_cache(maxsize=1024)
def layouts(trees: Sequence[tuple[int, ...]]) -> Layout:
    """The layouts of a batch, padded: parents by -1, and below a draft's end no node lies."""
    singles = [layout(parents) for parents in trees]
    if len(singles) == 1:
        return singles[0]
    N, D = (
        max(x.shape[1] for x in arrays)
        for arrays in ((e.parents for e in singles), (e.inner for e in singles))
    )
    parents = np.full((len(singles), N), -1)
    starts = np.empty((len(singles), D + 1), np.int64)
    inner = np.empty((len(singles), D), np.int64)
    for b, e in enumerate(singles):
        parents[b, : e.parents.shape[1]] = e.parents
        starts[b], inner[b] = e.starts[0, -1], e.starts[0, -1]
        starts[b, : e.starts.shape[1]] = e.starts
        inner[b, : e.inner.shape[1]] = e.inner
    return Layout(parents, starts, inner)


def with_leaves(places: Layout) -> Layout:
    """The same trees, of which leaves are run through the model too: a depth more, without children.

    Example:
        >>> with_leaves(layout((-1, 0, 0, 1))).inner.tolist(), with_leaves(layout((-1, 0, 0, 1))).starts.tolist()
        ([[1, 3, 4, 4]], [[0, 1, 3, 4, 4]])
    """
    node_ends = places.starts[:, -1:]
    return Layout(
        places.parents, np.hstack([places.starts, node_ends]), np.hstack([places.starts[:, 1:], node_ends])
    )
