"""Where a weight lies among the tensors of a model's files, and the number formats of those that are no blocks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

NUMBERS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Number formats that are no blocks, of GGUF files and folders; the former have none of 64 bits."""


class Stored(NamedTuple):
    """Where a weight lies: `part` of a tensor, or of the matrix of this index in a stack."""

    name: str
    index: int | None = None  # pyright: ignore[reportIncompatibleMethodOverride]
    part: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def of(self, tensor: Any) -> Tensor:
        """The weight in a tensor, or in what is sliced like one."""
        return self.part(tensor[:] if self.index is None else tensor[self.index])

    def write(self, tensor: Tensor, weight: Tensor) -> None:
        """Write a weight to where it lies in a tensor.

        Example:
            >>> columns = torch.zeros(2, 4)
            >>> Stored("stack", part=lambda tensor: tensor[:, ::2].T).write(columns, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            >>> columns.tolist()
            [[1.0, 0.0, 3.0, 0.0], [2.0, 0.0, 4.0, 0.0]]
        """
        whole = tensor if self.index is None else tensor[self.index]
        part = self.part(whole)
        if part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            part.copy_(weight.view_as(part))
            return
        # a copy: where each of its numbers comes from says where it goes
        places = self.part(torch.arange(whole.numel()).view(whole.shape))
        whole.view(-1)[places.flatten().to(tensor.device)] = weight.flatten().to(tensor)
