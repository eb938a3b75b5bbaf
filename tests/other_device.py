"""Stands in for a GPU where there is none: tensors on `meta` hold no data, so whatever reads a value on the host fails.

`OneDevice` also refuses operations that mix devices, as CUDA does; transfers are allowed.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["OneDevice", "moved"]

TRANSFERS = ("_to_copy", "copy_")


class OneDevice(TorchDispatchMode):
    """Every operation of torch has to find its tensors on one device; numbers on the host are welcome everywhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor) and x.ndim]
        devices = {x.device.type for x in given}
        if len(devices) > 1 and func.overloadpacket.__name__ not in TRANSFERS:
            raise RuntimeError(f"{func} met tensors on {' and '.join(sorted(devices))}")
        return func(*args, **(kwargs or {}))


def moved(x: torch.Tensor | None) -> torch.Tensor | None:
    """The same without data."""
    return None if x is None else x.to("meta")
