"""Some rows of a batch, and batches of such rows: for any value made of tensors whose first dimension is the batch."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def some(batch: T, rows: Sequence[int]) -> T:
    """The same value for these rows only.

    Example:
        >>> from polydraft.core import TokenTree
        >>> some(TokenTree.roots(torch.tensor([5, 6, 7])), [2, 0]).tokens.tolist()
        [[7], [5]]
    """
    return _mapped([batch], lambda parts: parts[0][torch.tensor(rows, dtype=torch.int64).to(parts[0].device)])


def joined(parts: Sequence[T]) -> T:
    """The rows of several batches as one; what is no tensor is the first one's.

    Example:
        >>> from polydraft.core import TokenTree
        >>> joined([TokenTree.roots(torch.tensor([5])), TokenTree.roots(torch.tensor([6]))]).tokens.tolist()
        [[5], [6]]
    """
    return _mapped(parts, torch.cat)


def _mapped(parts: Sequence[Any], change: Any) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return change(parts)
    if isinstance(first, tuple):
        return tuple(_mapped(x, change) for x in zip(*parts, strict=True))
    if isinstance(first, dict):
        return {key: _mapped([x[key] for x in parts], change) for key in first}
    if is_dataclass(first):
        return type(first)(**{f.name: _mapped([getattr(x, f.name) for x in parts], change) for f in fields(first)})
    return first
