"""Small tables between the host and a device, through pinned memory: sending does not wait, fetching waits for what it fetches alone."""

import torch
from torch import Tensor


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, without waiting for what the device is doing.

    Example:
        >>> sent(torch.arange(3), torch.device("cpu")).tolist()
        [0, 1, 2]
    """
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def fetched(x: Tensor) -> Tensor:
    """A tensor on the host, once the device has made it.

    Example:
        >>> fetched(torch.arange(3)).tolist()
        [0, 1, 2]
    """
    if x.device.type != "cuda":
        return x.cpu()
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return pinned
