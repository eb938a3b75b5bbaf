"""Stands in for a GPU where there is none: tensors on `meta` hold no data, so whatever reads a value on the host fails.

`OneDevice` also refuses operations that mix devices, as CUDA does, and transfers that wait until the device is done.
"""

from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _NoLists(TorchFunctionMode):
    """`torch.tensor` of a list for a device waits for it: make it on the host and send it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        to = (kwargs or {}).get("device")
        if func is torch.tensor and to is not None and torch.device(to).type != "cpu":
            raise RuntimeError(f"a transfer of a list to {to} waits for the device")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Every operation of torch has to find its tensors on one device; numbers on the host are welcome everywhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        devices = {
            x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.ndim
        }
        to = kwargs.get("device")
        if name == "_to_copy" and to is not None and torch.device(to).type not in devices:
            if not kwargs.get("non_blocking"):
                raise RuntimeError(f"a transfer from {' and '.join(devices)} to {to} waits for the device")
        elif len(devices) > 1:
            raise RuntimeError(f"{func} met tensors on {' and '.join(sorted(devices))}")
        return func(*args, **kwargs)


class OneDevice:
    """A block of code on one device; see the module."""

    def __init__(self) -> None:
        self._modes = ExitStack()

    def __enter__(self) -> None:
        self._modes.enter_context(_NoLists())
        self._modes.enter_context(_Operations())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._modes.close()
