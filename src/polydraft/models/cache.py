"""A preallocated key-value cache with one length for each row, as a cache that transformers' models accept.

Slot s keeps its committed tokens in columns 0 .. length[s] - 1; the nodes of the tree being scored lie behind them, node n
in column length[s] + n, until `keep` moves the accepted ones into place. Rolling back is not moving a length.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = ["SlotCache"]


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: [slots, heads, columns, head size]."""

    is_sliding = False
    is_croppable = False

    def __init__(self, cache: "SlotCache", num_columns: int) -> None:
        super().__init__()
        self._cache, self._num_columns = cache, num_columns

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def zeros(x: Tensor) -> Tensor:
            return x.new_zeros(self._cache.num_slots, x.shape[1], self._num_columns, x.shape[3])

        self.keys, self.values, self.is_initialized = zeros(key_states), zeros(value_states), True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Write this pass's rows where the pass says, and return the columns that it looks at."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, store: Tensor | None, states: Tensor) -> Tensor:
        assert store is not None
        at = self._cache.current
        store[at.slots[:, None], :, at.columns] = states.transpose(1, 2)
        seen = store[:, :, : at.width]
        return seen[at.view] if at.view is not None else seen[at.slots]

    def move(self, slots: Int[Tensor, "M"], source: Int[Tensor, "M"], sink: Int[Tensor, "M"]) -> None:
        """Copy columns within slots."""
        for store in (self.keys, self.values):
            if store is not None:
                store[slots, :, sink] = store[slots, :, source]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.current.width, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._num_columns


class _Pass:
    """Where one pass writes and how far it looks."""

    def __init__(self, slots: Sequence[int], columns: Int[Tensor, "B T"], width: int) -> None:
        self.slots = torch.tensor(list(slots), device=columns.device)
        self.columns, self.width = columns, width
        consecutive = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        self.view = slice(slots[0], slots[0] + len(slots)) if consecutive else None


class SlotCache(Cache):
    """Layers made when the first pass shows their shape.

    num_columns: longest committed text plus room for a tree.
    """

    current: _Pass

    def __init__(self, num_layers: int, num_slots: int, num_columns: int) -> None:
        self.num_slots, self.num_columns = num_slots, num_columns
        super().__init__(layers=[_SlotLayer(self, num_columns) for _ in range(num_layers)])

    def begin(self, slots: Sequence[int], columns: Int[Tensor, "B T"], width: int) -> None:
        """Say where the next pass writes (columns per row) and that it looks at columns below `width`."""
        self.current = _Pass(slots, columns, width)

    def keep(self, slots: Int[Tensor, "M"], source: Int[Tensor, "M"], sink: Int[Tensor, "M"]) -> None:
        """Move rows of accepted nodes behind the committed ones."""
        for layer in self.layers:
            assert isinstance(layer, _SlotLayer)
            layer.move(slots, source, sink)
