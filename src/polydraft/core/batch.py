"""Rows of a batch, cut, joined and put in their places: of any value made of arrays whose first dimension is the batch.

A field whose second dimension may differ between batches is `padded`: it says what stands behind the shorter ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
from array_api_compat import device, is_array_api_obj

from polydraft.core.arrays import Array, like, namespace

T = TypeVar("T")


def padded(value: float | Callable[[Array], float]) -> dict[str, Any]:
    """Metadata of a field, [B, N, ...], whose shorter rows go on with this value, or with that of a function of the tensor."""
    return {"padding": value}


def uniform(distributions: Array) -> float:
    """The probability of each token where nothing is known."""
    return 1 / distributions.shape[-1]


def select(batch: T, rows: Sequence[int]) -> T:
    """The same value for these rows only.

    Example:
        >>> from polydraft.core import TokenTree
        >>> select(TokenTree.roots(np.array([5, 6, 7])), [2, 0]).tokens.tolist()
        [[7], [5]]
    """
    index = np.array(rows, np.int64)
    return _mapped([batch], lambda parts, _: parts[0][like(index, parts[0])])


def concat(parts: Sequence[T]) -> T:
    """The rows of several batches as one, the shorter ones padded; what is no array is the first one's.

    Example:
        >>> from polydraft.core import TokenTree
        >>> concat([TokenTree.roots(np.array([5])), TokenTree.chain(np.array([[6, 7]]))]).parents.tolist()
        [[-1, -1], [-1, 0]]
    """
    return _mapped(parts, _stacked)


def scatter(rows: Sequence[Sequence[int]], parts: Sequence[T]) -> T:
    """Several batches as one, `rows[i]` of which are those of `parts[i]`; all rows from 0 on are somebody's.

    Example:
        >>> from polydraft.core import TokenTree
        >>> scatter([[1], [0, 2]], [TokenTree.roots(np.array(tokens)) for tokens in ([5], [6, 7])]).tokens.tolist()
        [[6], [5], [7]]
    """
    numbers = [b for group in rows for b in group]
    return select(concat(parts), np.argsort(numbers).tolist())


def stacked(rows: Sequence[np.ndarray], padding: float = 0.0) -> np.ndarray:
    """Rows of different lengths, [T, ...] each, as one array [B, T, ...], the shorter ones padded.

    Example:
        >>> stacked([np.array([1, 2]), np.array([3])]).tolist()
        [[1, 2], [3, 0]]
    """
    if len(rows) == 1:
        return rows[0][None]
    longest = max(map(len, rows))
    joined = np.full((len(rows), longest, *rows[0].shape[1:]), padding, rows[0].dtype)
    for row, values in zip(joined, rows, strict=True):
        row[: len(values)] = values
    return joined


def _stacked(parts: Sequence[Array], padding: float | Callable[[Array], float] | None) -> Array:
    if padding is not None:
        width = max(x.shape[1] for x in parts)
        value = padding(parts[0]) if callable(padding) else padding
        parts = [_widened(x, width, value) for x in parts]
    return namespace(parts[0]).concat(list(parts), axis=0)


def _widened(x: Array, width: int, value: float) -> Array:
    if x.shape[1] == width:
        return x
    xp = namespace(x)
    missing = (len(x), width - x.shape[1], *x.shape[2:])
    return xp.concat([x, xp.full(missing, value, dtype=x.dtype, device=device(x))], axis=1)


def _mapped(parts: Sequence[Any], change: Callable[..., Array], padding: Any = None) -> Any:
    first = parts[0]
    if is_array_api_obj(first):
        return change(parts, padding)
    if isinstance(first, tuple):
        return tuple(_mapped(x, change) for x in zip(*parts, strict=True))
    if isinstance(first, dict):
        return {key: _mapped([x[key] for x in parts], change) for key in first}
    if is_dataclass(first):
        values = {
            f.name: _mapped([getattr(x, f.name) for x in parts], change, f.metadata.get("padding"))
            for f in fields(first)
        }
        return type(first)(**values)
    return first
