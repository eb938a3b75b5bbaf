"""A device that computes on the CPU and says what passes between it and the host: `far`, torch's third-party device in Python.

What `meta` tensors cannot show, as they hold no data: whole rounds of the engine run on it, and every read of the host is counted. Reading a
value of a far tensor any other way than by a copy is refused by torch itself, as for a GPU; so is an operation that mixes devices, by us.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


@dataclass
class Transfers:
    """Since the last `clear`: numbers of every read by the host, and of every tensor that was sent."""

    read: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Forget them."""
        self.read.clear()
        self.sent.clear()


transfers = Transfers()


class _Far(torch.Tensor):
    """A tensor of the CPU that says it is elsewhere."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "_Far":
        about = {
            "strides": held.stride(),
            "dtype": held.dtype,
            "device": FAR,
            "storage_offset": held.storage_offset(),
        }
        with torch.inference_mode(False):  # views of what was made outside need counters of their own
            made = torch.Tensor._make_wrapper_subclass(cls, held.size(), **about)
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, *args, **(kwargs or {}))


def _near(x: Any) -> Any:
    return (
        x.held
        if isinstance(x, _Far)
        else torch.device("cpu")
        if x == FAR and isinstance(x, torch.device)
        else x
    )


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    name = func.overloadpacket.__name__
    given = tree_leaves((args, kwargs))
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    far, near = ([x for x in tensors if isinstance(x, _Far) is kind] for kind in (True, False))
    to = next((x for x in given if isinstance(x, torch.device)), None)
    ends_far = to.type == FAR.type if to is not None else bool(far)
    if name == "_local_scalar_dense":
        transfers.read.append(1)
    elif name in ("_to_copy", "copy_"):
        if name == "copy_":
            ends_far = isinstance(args[0], _Far)
            far, near = ([x for x in args[1:2] if isinstance(x, _Far) is kind] for kind in (True, False))
        if far and not ends_far:
            transfers.read.append(far[0].numel())
        if near and ends_far:
            transfers.sent.append(near[0].numel())
    elif far and any(x.ndim for x in near):
        raise RuntimeError(f"{func} met tensors on cpu and {FAR}")
    found = func(
        *tree_map(_near, args),
        **{
            key: _near(x) if not isinstance(x, (list, tuple)) else tree_map(_near, x)
            for key, x in kwargs.items()
        },
    )
    return (
        tree_map(lambda x: _Far(x) if isinstance(x, torch.Tensor) and not isinstance(x, _Far) else x, found)
        if ends_far
        else found
    )


_setup_privateuseone_for_python_backend("far")
FAR = torch.device("far:0")
_libraries = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_libraries[0].fallback(_run, "PrivateUse1")


def _made_anew(name: str) -> None:
    """What torch makes by enlarging an empty tensor, which one of ours cannot show."""
    packet, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")
    _libraries[1].impl(name, lambda *args, **kwargs: _run(func, *args, **kwargs), "PrivateUse1")


for _name in ("arange", "arange.start", "arange.start_step", "eye", "eye.m"):
    _made_anew(_name)
