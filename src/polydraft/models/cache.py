"""Keys and values of many sequences of different lengths, in memory that is allocated once.

    slot     the number by which the engine knows a sequence
    row      where that sequence lives here: rows 0..n-1 are in use, so that a full batch is a slice and not a copy
    column   place of one token in a row: committed tokens first, then the scratch of the pass under way

A pass writes its tokens to the columns behind the committed ones. Keeping a path moves the few tokens that are out of
place; dropping the rest is only not moving the length. Nothing is ever concatenated.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from transformers.cache_utils import Cache

from polydraft.errors import CapacityError

__all__ = ["CacheLayout", "SlotCache", "free_bytes"]


@dataclass(frozen=True)
class CacheLayout:
    """What one token needs in every layer: heads and their widths, the same in all layers."""

    num_layers: int
    num_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers.

        Example:
            >>> CacheLayout(6, 2, 64, 64, torch.float32).bytes_per_token
            6144
        """
        return self.num_layers * self.num_heads * (self.key_width + self.value_width) * self.dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on a device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose pages the system hands out only when they are first written (on the CPU)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + 64, np.uint8))
    start = -raw.data_ptr() % 64
    return raw[start : start + size].view(dtype).view(shape)


class SlotCache(Cache):
    """A cache of transformers with a length of its own for every sequence.

    layout: what a token needs.  num_slots: sequences at once.  num_columns: tokens of one sequence, scratch included.

    Around a forward pass, `begin` says where its tokens go and `update` (called by every attention layer) writes them
    and returns what the layer attends over. `keep`, `extend` and `free` change the committed lengths.
    """

    def __init__(self, layout: CacheLayout, num_slots: int, num_columns: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.layout, self.num_slots, self.num_columns = layout, num_slots, num_columns
        place = (layout.num_layers, num_slots, num_columns, layout.num_heads)
        self._keys = _zeros((*place, layout.key_width), layout.dtype, device)
        self._values = _zeros((*place, layout.value_width), layout.dtype, device)
        self._stacks = (self._keys, self._values)
        self._by_layer = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(self._keys, self._values, strict=True)]
        self._row_of: dict[int, int] = {}
        self._lengths = np.zeros(num_slots, np.int64)
        self._scratch = np.zeros(num_slots, np.int64)

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in self._stacks)

    def length_of(self, slot: int) -> int:
        """Committed tokens of a slot; 0 for one that is not in use."""
        return int(self._lengths[self._row_of[slot]]) if slot in self._row_of else 0

    def rows(self, slots: Sequence[int]) -> list[int]:
        """Rows of the slots; a slot that is new gets the next free row.

        Raises:
            CapacityError: more slots than there are rows.
        """
        for slot in slots:
            if slot not in self._row_of:
                if len(self._row_of) == self.num_slots:
                    raise CapacityError(
                        f"slot {slot} was given while all {self.num_slots} slots are in use. Release one, or raise max_num_seqs."
                    )
                self._row_of[slot] = len(self._row_of)
        return [self._row_of[slot] for slot in slots]

    def lengths(self, rows: Sequence[int]) -> Int64[np.ndarray, "B"]:
        """Committed lengths of rows."""
        return self._lengths[rows]

    def begin(self, rows: Sequence[int], start: int, num_tokens: int, width: int) -> None:
        """Prepare a pass: each row writes `num_tokens` columns from its length + `start` on and attends over `width` columns."""
        first, B = rows[0], len(rows)
        begins = self._lengths[rows] + start
        self._scratch[rows] = start + num_tokens
        contiguous = list(rows) == list(range(first, first + B))
        self._seen = self._written = None
        if contiguous:
            self._seen = tuple(x[:, first : first + B, :width].transpose(2, 3).unbind(0) for x in self._stacks)
        else:
            self._gathered, self._width = torch.tensor(rows, device=self._keys.device), width
        if contiguous and (begins == begins[0]).all():
            into = slice(int(begins[0]), int(begins[0]) + num_tokens)
            self._written = tuple(x[:, first : first + B, into].transpose(2, 3).unbind(0) for x in self._stacks)
        else:
            places = (np.array(rows) * self.num_columns + begins)[:, None] + np.arange(num_tokens)
            self._places = torch.from_numpy(places.ravel()).to(self._keys.device)

    def update(
        self, key_states: Float[Tensor, "B H T K"], value_states: Float[Tensor, "B H T E"], layer_idx: int, *_: object, **__: object
    ) -> tuple[Float[Tensor, "B H C K"], Float[Tensor, "B H C E"]]:
        """Write this pass's tokens into one layer; returns all columns that the pass attends over."""
        if self._written is not None:
            self._written[0][layer_idx].copy_(key_states)
            self._written[1][layer_idx].copy_(value_states)
        else:
            for store, states in zip(self._by_layer[layer_idx], (key_states, value_states), strict=True):
                store.index_copy_(0, self._places, states.transpose(1, 2).flatten(0, 1))
        if self._seen is not None:
            return self._seen[0][layer_idx], self._seen[1][layer_idx]
        keys, values = (x[layer_idx, :, : self._width].index_select(0, self._gathered).transpose(1, 2) for x in self._stacks)
        return keys, values

    def extend(self, row: int, num_tokens: int) -> None:
        """The first scratch tokens of a row become committed."""
        self._lengths[row] += num_tokens
        self._scratch[row] = 0

    def keep(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Commit scratch tokens: the root (token 0) and the path, given as increasing scratch positions."""
        sources: list[int] = []
        targets: list[int] = []
        for slot, path in zip(slots, paths, strict=True):
            row = self._row_of[slot]
            assert max(path, default=0) < self._scratch[row], "commit without a pass that scored the path"
            root = row * self.num_columns + int(self._lengths[row])
            for depth, node in enumerate(path, 1):
                if node != depth:
                    sources.append(root + node)
                    targets.append(root + depth)
            self.extend(row, 1 + len(path))
        if sources:
            source, target = (torch.tensor(x, device=self._keys.device) for x in (sources, targets))
            for stack in self._stacks:
                flat = stack.flatten(1, 2)
                flat.index_copy_(1, target, flat.index_select(1, source))

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back; the last row in use moves into each hole. Slots that are not in use are ignored."""
        for slot in slots:
            if slot not in self._row_of:
                continue
            hole, last = self._row_of.pop(slot), len(self._row_of)
            if hole != last:
                moved = next(s for s, row in self._row_of.items() if row == last)
                used = int(self._lengths[last] + self._scratch[last])
                for stack in self._stacks:
                    stack[:, hole, :used] = stack[:, last, :used]
                self._lengths[hole], self._scratch[hole] = self._lengths[last], self._scratch[last]
                self._row_of[moved] = hole
            self._lengths[last] = self._scratch[last] = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest committed length; a model that takes position ids does not ask."""
        return int(self._lengths.max())
