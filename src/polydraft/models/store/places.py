"""Where a weight lies among the tensors of a model's files, and the number formats of those that are no blocks."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Number formats that are no blocks, of GGUF files and folders; the former have none of 64 bits."""


class Stored(NamedTuple):
    """Where a weight lies: `part` of a tensor, or of the matrix of this index in a stack."""

    name: str
    index: int | None = None  # pyright: ignore[reportIncompatibleMethodOverride]
    part: Callable[[Tensor], Tensor] = lambda tensor: tensor
