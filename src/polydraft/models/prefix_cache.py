"""Prefix cache: the KV cache entries of finished texts, in blocks that several texts share, the least recently used dropped first.

A block holds the entries of `block_tokens` tokens and is known by its parent and those tokens (hashed blocks, Kwon et al. 2023, "vLLM",
arXiv 2309.06180): a system prompt that many conversations share is stored once. Blocks are copies, so that they outlive slots, and what
is copied back has the same bits as what a forward pass wrote.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

from polydraft.core import BlockCopying
from polydraft.errors import InvalidInputError

__all__ = ["PrefixCache"]

ROOT = 0
"""Parent of a text's first block."""

Key = tuple[int, tuple[object, ...]]
"""Parent's number and the tokens."""


class CacheBlock(NamedTuple):
    """number: of this block among all that ever were, by which its children know it.  entries: as the model copied them out."""

    number: int
    entries: Any


class PrefixCache:
    """Blocks of one model, in at most so many bytes.

    model: whose slots they come from and go to.  capacity_bytes: of all blocks.

    Raises:
        InvalidInputError: a negative capacity.
    """

    def __init__(self, model: BlockCopying, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise InvalidInputError(f"prefix_cache_bytes={capacity_bytes} was given; expected at least 0, which keeps nothing.")
        self._model = model
        self.block_bytes = model.block_tokens * model.bytes_per_token
        self.max_blocks = capacity_bytes // self.block_bytes if self.block_bytes else 0
        self._blocks: OrderedDict[Key, CacheBlock] = OrderedDict()
        """The least recently used first; a parent was never used before its children, so that the first has none."""
        self._numbers = count(ROOT + 1)
        self.hit_tokens = self.evicted_tokens = 0

    @property
    def num_bytes(self) -> int:
        """That the blocks take now."""
        return len(self._blocks) * self.block_bytes

    @property
    def capacity_bytes(self) -> int:
        """That they take at most."""
        return self.max_blocks * self.block_bytes

    def length(self, token_ids: Sequence[object]) -> int:
        """Tokens of the text's beginning that are here."""
        return self._model.block_tokens * sum(1 for _ in self._path(token_ids))

    def store(self, slot: int, token_ids: Sequence[object]) -> None:
        """Copy out what is not here yet of a slot that holds this text, as far as whole blocks go and the capacity allows."""
        size, path, parent = self._model.block_tokens, list(self._path(token_ids)), ROOT
        if path:
            parent = self._blocks[path[-1]].number
        self._use(path)
        for i in range(len(path), min(len(token_ids) // size if size else 0, self.max_blocks)):
            while len(self._blocks) >= self.max_blocks:
                self._blocks.popitem(last=False)
                self.evicted_tokens += size
            key = parent, tuple(token_ids[i * size : (i + 1) * size])
            self._blocks[key] = CacheBlock(next(self._numbers), self._model.read_block(slot, i * size))
            parent = self._blocks[key].number
            path.append(key)
            self._use(path)

    def load(self, slot: int, token_ids: Sequence[object]) -> None:
        """Write what is here of the text's beginning behind the whole blocks that the slot holds of it already."""
        size, path = self._model.block_tokens, list(self._path(token_ids))
        first = int(self._model.lengths[slot]) // size
        self._model.cut(slot, first * size)
        for key in path[first:]:
            self._model.write_block(slot, self._blocks[key].entries)
        self._use(path)
        self.hit_tokens += size * (len(path) - first)

    def _path(self, token_ids: Sequence[object]) -> Iterator[Key]:
        size, parent = self._model.block_tokens, ROOT
        for start in range(0, len(token_ids) - size + 1, size) if self._blocks else ():
            key = parent, tuple(token_ids[start : start + size])
            if (block := self._blocks.get(key)) is None:
                return
            parent = block.number
            yield key

    def _use(self, path: Sequence[Key]) -> None:
        for key in reversed(path):
            self._blocks.move_to_end(key)
