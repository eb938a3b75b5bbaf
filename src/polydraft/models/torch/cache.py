"""Keys and values of many sequences of different lengths, in memory that is allocated once.

    slot     the number by which the engine knows a sequence
    row      where that sequence lives here: rows 0..n-1 are in use, so that a full batch is a slice and not a copy
    column   place of one token in a row: committed tokens first, then the scratch of the forward pass under way

A forward pass writes its tokens to the columns behind the committed ones. Accepting a path moves the few tokens that are out of
place; dropping the rest is only not moving the length. Nothing is ever concatenated.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import Cache

from polydraft.errors import ModelLoadError
from polydraft.models.torch.door import into, out


class LayerShape(NamedTuple):
    """What one token needs in a layer: heads of keys and values, and their widths."""

    num_heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values.

        Example:
            >>> LayerShape(2, 64, 64, torch.float32).bytes_per_token
            1024
        """
        return self.num_heads * (self.key_width + self.value_width) * self.dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose pages the system hands out only when they are first written (on the CPU)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + 64, np.uint8))
    start = -raw.data_ptr() % 64
    return raw[start : start + size].view(dtype).view(shape)


class PassRecorder(Cache):
    """Stores keys and values of a forward pass without a past, by layer."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        self.states[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    @property
    def devices(self) -> list[torch.device]:
        """Of each layer."""
        return [k.device for _, (k, _) in sorted(self.states.items())]

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """Of each layer.

        Raises:
            ModelLoadError: layers without keys and values among those that have them.
        """
        layers = sorted(self.states)
        if not layers or layers != list(range(len(layers))):
            raise ModelLoadError(
                f"only the layers {layers} have keys and values; each of the first layers is expected to. Use another model."
            )
        return [
            LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
            for _, (keys, values) in sorted(self.states.items())
        ]


class SlotCache(Cache):
    """A cache of transformers with a length of its own for every sequence.

    layers: what a token needs in each.  num_slots: sequences at once.  num_columns: tokens of one sequence, scratch included.
    devices: of each layer, or one for all.

    Around a forward pass, `begin` says where its tokens go and `update` (called by every attention layer) writes them
    and returns what the layer attends over. What is committed is the model's to know, see `models.slots`.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_slots: int,
        num_columns: int,
        devices: torch.device | Sequence[torch.device],
    ) -> None:
        super().__init__(layers=[])
        self.shapes = tuple(layers)
        self.num_columns = num_columns
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """Keys and values, [layers, slots, columns, heads, width], of layers of one shape that follow each other on one device."""
        places = [devices] * len(layers) if isinstance(devices, torch.device) else devices
        for (shape, device), alike in groupby(zip(layers, places, strict=True)):
            place = (len(list(alike)), num_slots, num_columns, shape.num_heads)
            keys, values = (
                _zeros((*place, width), shape.dtype, device) for width in (shape.key_width, shape.value_width)
            )
            self._pairs.append((keys, values))
        self._stacks = [stack for pair in self._pairs for stack in pair]
        self._by_layer = [
            (k.flatten(0, 1), v.flatten(0, 1)) for pair in self._pairs for k, v in zip(*pair, strict=True)
        ]
        self._row_of: dict[int, int] = {}

    def row(self, slot: int) -> int:
        """The row of a slot; one that is new gets the next free row."""
        return self._row_of.setdefault(slot, len(self._row_of))

    def begin(self, slots: Sequence[int], first_columns: np.ndarray, num_tokens: int) -> None:
        """Prepare a forward pass over `num_tokens` new tokens of each slot, from column `first_columns` on.

        slots: in the order of their rows; rows that follow each other are attended in place, others are copied together.
        """
        self.slots = list(slots)
        self.first_columns = first_columns
        rows = [self._row_of[slot] for slot in slots]
        first = rows[0]
        B = len(rows)
        self._width = int(first_columns.max()) + num_tokens
        self._seen = self._written = None
        adjacent = rows == list(range(first, first + B))
        if adjacent:
            self._seen = self._views(slice(first, first + B), slice(self._width))
        else:
            self._gathered = self._sent(np.array(rows))
        if adjacent and (first_columns == first_columns[0]).all():
            self._written = self._views(slice(first, first + B), slice(int(first_columns[0]), self._width))
        else:
            places = (np.array(rows) * self.num_columns + first_columns)[:, None] + np.arange(num_tokens)
            self._places = self._sent(places.ravel())

    def _sent(self, numbers: np.ndarray) -> dict[torch.device, Tensor]:
        """The same on every device that has layers."""
        return {
            device: torch.from_numpy(numbers).to(device)
            for device in {keys.device for keys, _ in self._pairs}
        }

    def _views(self, rows: slice, columns: slice) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer, [B, heads, columns, width], in place."""
        pairs = [
            tuple(stack[:, rows, columns].transpose(2, 3).unbind(0) for stack in pair) for pair in self._pairs
        ]
        return [layer for keys, values in pairs for layer in zip(keys, values, strict=True)]

    def update(
        self,
        key_states: Float[Tensor, "B H T K"],
        value_states: Float[Tensor, "B H T E"],
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[Float[Tensor, "B H C K"], Float[Tensor, "B H C E"]]:
        """Write the new tokens into one layer; returns all columns that the forward pass attends over."""
        stores = self._by_layer[layer_idx]
        if self._written is not None:
            for written, states in zip(self._written[layer_idx], (key_states, value_states), strict=True):
                written.copy_(states)
        else:
            for store, states in zip(stores, (key_states, value_states), strict=True):
                store.index_copy_(0, self._places[store.device], states.transpose(1, 2).flatten(0, 1))
        if self._seen is not None:
            return self._seen[layer_idx]
        rows = self._gathered[stores[0].device]
        held = (store.unflatten(0, (-1, self.num_columns))[:, : self._width] for store in stores)
        keys, values = (x.index_select(0, rows).transpose(1, 2) for x in held)
        return keys, values

    def committed(
        self, layer: int, slots: Sequence[int], count: int
    ) -> tuple[Float[Tensor, "B C H K"], Float[Tensor, "B C H E"]]:
        """The first so many keys and values of these slots in a layer."""
        rows = [self.row(slot) for slot in slots]
        keys, values = (
            store.unflatten(0, (-1, self.num_columns))[rows, :count] for store in self._by_layer[layer]
        )
        return keys, values

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """See `slots.SlotModel.move`."""
        there, here = (self._places_of(x) for x in (source, target))
        for stack in self._stacks:
            flat = stack.flatten(1, 2)
            flat.index_copy_(1, here[stack.device], flat.index_select(1, there[stack.device]))

    def read(self, slot: int, start: int, count: int) -> list[np.ndarray]:
        """Copies of so many columns of a slot, on the host."""
        row = self._row_of[slot]
        columns = (stack[:, row, start : start + count] for stack in self._stacks)
        return [out(x.to("cpu", copy=True)) for x in columns]

    def write(self, slot: int, start: int, columns: Sequence[np.ndarray]) -> None:
        """Columns of a slot from what `read` copied."""
        row = self.row(slot)
        for stack, entries in zip(self._stacks, columns, strict=True):
            stack[:, row, start : start + entries.shape[1]] = into(entries)

    def _places_of(self, cells: np.ndarray) -> dict[torch.device, Tensor]:
        rows = np.array([self.row(slot) for slot in cells["slot"].tolist()], np.int64)
        return self._sent(rows * self.num_columns + cells["column"])

    def free(self, slot: int, used: np.ndarray) -> None:
        """Give a slot back; the last row in use moves into the hole. used: [slots] columns of each. One not in use is ignored."""
        if slot not in self._row_of:
            return
        hole = self._row_of.pop(slot)
        last = len(self._row_of)
        if hole != last:
            moved = next(last_slot for last_slot, row in self._row_of.items() if row == last)
            for stack in self._stacks:
                stack[:, hole, : used[moved]] = stack[:, last, : used[moved]]
            self._row_of[moved] = hole

    said_length = 0
    """What models are told that ask for the length of the cache; positions are given to every forward pass, see `hf`."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.said_length
