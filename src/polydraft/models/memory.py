"""Memory: how much is free, how long a context it holds, a refusal before anything is allocated; and what a model reads of it."""

from collections.abc import Mapping
from typing import Any

from polydraft.errors import CapacityError
from polydraft.numerics.processor import available_memory

CPU = "cpu"


def available_bytes(device: Any = CPU) -> int:
    """Memory of a device that can still be taken, in bytes. device: of torch, or its name.

    Example:
        >>> available_bytes() > 0
        True
    """
    if str(device).startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


def check_memory(needed: int, device: Any, *, max_model_len: int, max_num_seqs: int) -> None:
    """Raise CapacityError, with the figures and what to lower, if `needed` bytes are not free.

    Example:
        >>> check_memory(4096, CPU, max_model_len=64, max_num_seqs=1)
    """
    free = available_bytes(device)
    if needed > free:
        fits = int(max_model_len * free / needed)
        raise CapacityError(
            f"a cache of {needed / 2**30:.2f} GiB (max_model_len={max_model_len}, max_num_seqs={max_num_seqs}) was asked for; "
            f"{free / 2**30:.2f} GiB are free on {device}. Lower max_model_len (about {fits} would fit) or max_num_seqs."
        )


def fitting_choice(name: str, needed: Mapping[str, int], device: Any = CPU) -> str:
    """The first way to hold a model's weights that free memory has room for. needed: bytes of each way.

    Raises:
        CapacityError: no way fits.

    Example:
        >>> fitting_choice("model", {"float32": 1 << 60, "bfloat16": 1 << 10})
        'bfloat16'
    """
    free = available_bytes(device)
    for choice, size in needed.items():
        if size <= free:
            return choice
    sizes = " or ".join(f"{size / 2**30:.2f} GiB in {choice}" for choice, size in needed.items())
    raise CapacityError(
        f"the weights of {name!r} take {sizes}, and {free / 2**30:.2f} GiB of memory are free on {device}. "
        "Free some, or give a smaller model or a file of fewer bits."
    )


def fitting_length(context: int, bytes_per_token: int, scratch: int, device: Any, fixed: int = 0) -> int:
    """Default length of a sequence: the model's context, or as much of it as takes half of the free memory, but no less than 512 tokens.

    bytes_per_token: of all sequences together.  scratch: tokens that a cache holds beyond that length.  fixed: bytes of what does not
    grow with it.

    Example:
        >>> fitting_length(1024, 1, 64, CPU)
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
        >>> fitting_tokens(512, 4, 1, CPU, is_given=False)
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
    return min(available_bytes() // 8, 8 << 30)


def weight_bytes(module: Any) -> int:
    """Bytes of a module's weights.

    Example:
        >>> import torch
        >>> weight_bytes(torch.nn.Linear(3, 2))
        32
    """
    return sum(p.numel() * p.element_size() for p in module.parameters())
