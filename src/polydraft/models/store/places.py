"""Where a weight lies among the tensors of a model's files, and the number formats of those that are no blocks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from polydraft.numerics.floats import BFLOAT16, as_float32, outline

NUMBERS = {
    "BF16": BFLOAT16,
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
"""Number formats that are no blocks, of GGUF files and folders; the former have none of 64 bits."""


def whole(tensor: np.ndarray) -> np.ndarray:
    """All of a tensor."""
    return tensor


class Stored(NamedTuple):
    """Where a weight lies: `part` of a tensor, or of the matrix of this index in a stack.

    factors: what the numbers there are multiplied by, in float32: one for each row, or None.
    half: which half of its rows it is, in a file; None for all of them.
    """

    name: str
    index: int | None = None  # pyright: ignore[reportIncompatibleMethodOverride]
    part: Callable[[np.ndarray], np.ndarray] = whole
    factors: np.ndarray | None = None
    half: int | None = None

    def of(self, tensor: Any) -> np.ndarray:
        """The weight in a tensor, or in what is sliced like one.

        Example:
            >>> Stored("a", factors=np.array([1.0, 0.5], np.float32)).of(np.ones((2, 1))).tolist()
            [[1.0], [0.5]]
        """
        weight = self.part(tensor[...] if self.index is None else tensor[self.index])
        if self.factors is None:
            return weight
        return as_float32(weight) * self.factors.reshape(-1, *[1] * (weight.ndim - 1))

    def outline(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The same without values, of a tensor of this shape and type."""
        weight = self.part(outline(shape if self.index is None else shape[1:], dtype))
        return outline(weight.shape, weight.dtype if self.factors is None else np.dtype(np.float32))

    def write(self, tensor: np.ndarray, weight: np.ndarray) -> None:
        """Write a weight to where it lies in a tensor.

        Example:
            >>> columns = np.zeros((2, 4))
            >>> Stored("stack", part=lambda tensor: tensor[:, ::2].T).write(columns, np.array([[1.0, 2.0], [3.0, 4.0]]))
            >>> columns.tolist()
            [[1.0, 0.0, 3.0, 0.0], [2.0, 0.0, 4.0, 0.0]]
        """
        assert self.factors is None, "files have such weights multiplied already"
        whole = tensor if self.index is None else tensor[self.index]
        part = self.part(whole)
        if np.may_share_memory(part, tensor):
            part[...] = weight.reshape(part.shape)
            return
        # a copy: where each of its numbers comes from says where it goes
        places = self.part(np.arange(whole.size).reshape(whole.shape))
        np.put(whole, places, weight)
