"""Memory: how much is free, how long a context it holds, a refusal before anything is allocated.

device: a device of torch that a model computes on, or None for the host.
"""

import os
from typing import Any

from polydraft.errors import CapacityError


def available_bytes(device: Any = None) -> int:
    """Memory of a device that can still be taken, in bytes.

    Example:
        >>> available_bytes() > 0
        True
    """
    if getattr(device, "type", "cpu") == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    try:
        with open(
            "/proc/meminfo"
        ) as lines:  # unlike SC_AVPHYS_PAGES, it counts what the system would give up on demand
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(needed: int, device: Any, *, max_model_len: int, max_num_seqs: int) -> None:
    """Raise CapacityError, with the figures and what to lower, if `needed` bytes are not free.

    Example:
        >>> check_memory(4096, None, max_model_len=64, max_num_seqs=1)
    """
    free = available_bytes(device)
    if needed > free:
        fits = int(max_model_len * free / needed)
        raise CapacityError(
            f"a cache of {needed / 2**30:.2f} GiB (max_model_len={max_model_len}, max_num_seqs={max_num_seqs}) was asked for; "
            f"{free / 2**30:.2f} GiB are free on {device or 'cpu'}. Lower max_model_len (about {fits} would fit) or max_num_seqs."
        )


def fitting_length(context: int, bytes_per_token: int, scratch: int, device: Any, fixed: int = 0) -> int:
    """Default length of a sequence: the model's context, or as much of it as takes half of the free memory, but no less than 512 tokens.

    bytes_per_token: of all sequences together.  scratch: tokens that a cache holds beyond that length.  fixed: bytes of what does not
    grow with it.

    Example:
        >>> fitting_length(1024, 1, 64, None)
        1024
    """
    fits = (available_bytes(device) // 2 - fixed) // max(bytes_per_token, 1) - scratch
    return min(context, max(fits, 512))


def fitting_tokens(
    columns: int,
    max_num_seqs: int,
    bytes_per_token: int,
    device: Any,
    *,
    is_given: bool,
    fixed: int = 0,
) -> int:
    """Tokens that slots may hold together, where a slot takes memory as it grows: what all of them have room for, or what fits half of the free memory.

    columns: of a slot; one of them may be full, whatever there is.  is_given: whether its length was asked for, and all that is free may be taken.
    fixed: bytes of what does not grow.

    Example:
        >>> fitting_tokens(512, 4, 1, None, is_given=False)
        2048
    """
    free = available_bytes(device) - fixed
    every = columns * max_num_seqs
    if not bytes_per_token or every * bytes_per_token <= (free if is_given else free // 2):
        return every
    return max(columns, free // 2 // bytes_per_token)


def default_prefix_cache_bytes() -> int:
    """Of KV cache entries that outlive their slots: an eighth of the free memory, at most 8 GiB.

    Example:
        >>> 0 < default_prefix_cache_bytes() <= 8 << 30
        True
    """
    return min(available_bytes(None) // 8, 8 << 30)
