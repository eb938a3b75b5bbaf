"""Refuse a cache that does not fit, before it is allocated."""

import os

import torch

from polydraft.errors import CapacityError

__all__ = ["available_bytes", "check_memory"]


def available_bytes(device: torch.device) -> int:
    """Free memory of a device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(needed: int, device: torch.device, *, max_model_len: int, max_num_seqs: int) -> None:
    """Raise CapacityError, with the figures and what to lower, if `needed` bytes are not free."""
    free = available_bytes(device)
    if needed > free:
        raise CapacityError(
            f"a cache of {needed / 2**30:.2f} GiB (max_model_len={max_model_len}, max_num_seqs={max_num_seqs}) was asked for; "
            f"{free / 2**30:.2f} GiB are free on {device}. Lower max_model_len or max_num_seqs."
        )
