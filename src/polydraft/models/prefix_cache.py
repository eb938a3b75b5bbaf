"""Prefix cache: the KV cache entries of finished texts, in blocks that several texts share, the least recently used dropped first.

A block holds the entries of `block_tokens` tokens and is known by its parent and those tokens (hashed blocks, Kwon et al. 2023, "vLLM",
arXiv 2309.06180): a system prompt that many conversations share is stored once. Blocks are copies, so that they outlive slots, and what
is copied back has the same bits as what a forward pass wrote. A text goes on behind a block only where recurrent layers' states are known there, too.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeGuard

from polydraft.core import BlockCopying, EncoderDecoder, Target
from polydraft.errors import InvalidInputError


def can_store(model: Target | None) -> TypeGuard[BlockCopying]:
    """Whether entries of a model's texts can outlive their slots."""
    return isinstance(model, BlockCopying) and model.rolls_back and not isinstance(model, EncoderDecoder)


def shares(capacity_bytes: int, target: Target, draft_model: BlockCopying) -> tuple[int, int]:
    """Bytes of the target's cache and of the draft model's, which hold as many tokens each."""
    target_bytes = target.bytes_per_token if isinstance(target, BlockCopying) else 0
    both = target_bytes + draft_model.bytes_per_token
    draft_share = capacity_bytes * draft_model.bytes_per_token // both if both else 0
    return capacity_bytes - draft_share, draft_share


ROOT = 0
"""Parent of a text's first block."""


class Key(NamedTuple):
    """A block's parent, by number, and its own tokens."""

    parent: int
    tokens: tuple[object, ...]


class CacheBlock(NamedTuple):
    """number: of this block among all that ever were, by which its children know it.  entries: as the model copied them out.
    states: of recurrent layers behind it, None where nobody knows them.  num_bytes: that it takes."""

    number: int
    entries: Any
    states: Any
    num_bytes: int


class StoredBlock(NamedTuple):
    """A block outside of its cache. parent: its place among the others, or -1.  entries, states: as of `CacheBlock`."""

    parent: int
    tokens: tuple[object, ...]
    entries: Any
    states: Any


class PrefixCache:
    """Blocks of one model, in at most so many bytes.

    model: whose slots they come from and go to.  capacity_bytes: of all blocks.

    Raises:
        InvalidInputError: a negative capacity.
    """

    def __init__(self, model: BlockCopying, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise InvalidInputError(
                f"prefix_cache_bytes={capacity_bytes} was given; expected 0, which stores nothing, or more."
            )
        self.model = model
        self.block_bytes = model.block_tokens * model.bytes_per_token
        self.max_blocks = capacity_bytes // self.block_bytes if self.block_bytes else 0
        self._blocks: OrderedDict[Key, CacheBlock] = OrderedDict()
        """The least recently used first; a parent was never used before its children, so that the first has none."""
        self._numbers = count(ROOT + 1)
        self.num_bytes = self.hit_tokens = self.evicted_tokens = 0

    @property
    def capacity_bytes(self) -> int:
        """That they take at most."""
        return self.max_blocks * self.block_bytes

    def length(self, token_ids: Sequence[object]) -> int:
        """Tokens of the text's beginning that are here, and behind which it can go on."""
        return self.model.block_tokens * len(self._resumable(token_ids))

    def store(self, slot: int, token_ids: Sequence[object]) -> None:
        """Copy out what is not here yet of a slot that holds this text, as far as whole blocks go and the capacity allows."""
        size = self.model.block_tokens
        path = list(self._path(token_ids))
        parent = ROOT
        if path:
            parent = self._blocks[path[-1]].number
        self._use(path)
        path_bytes = sum(self._blocks[key].num_bytes for key in path)
        for i in range(len(path), len(token_ids) // size if size else 0):
            states = self.model.read_states(slot, (i + 1) * size)
            num_bytes = self.bytes_of(states)
            path_bytes += num_bytes
            if path_bytes > self.capacity_bytes:
                return
            while self.num_bytes + num_bytes > self.capacity_bytes:
                self._evict(size)
            key = Key(parent, tuple(token_ids[i * size : (i + 1) * size]))
            self._blocks[key] = CacheBlock(
                next(self._numbers), self.model.read_block(slot, i * size), states, num_bytes
            )
            self.num_bytes += num_bytes
            parent = self._blocks[key].number
            path.append(key)
            self._use(path)

    def load(self, slot: int, token_ids: Sequence[object]) -> None:
        """Write what is here of the text's beginning behind the whole blocks that the slot holds of it already."""
        size = self.model.block_tokens
        path = self._resumable(token_ids)
        first = int(self.model.lengths[slot]) // size
        self.model.cut(slot, first * size)
        self.model.reads(slot, list[Any](token for key in path[first:] for token in key.tokens))
        for key in path[first:]:
            block = self._blocks[key]
            self.model.write_block(slot, block.entries)
            if block.states is not None:
                self.model.write_states(slot, block.states)
        self._use(path)
        self.hit_tokens += size * (len(path) - first)

    def _evict(self, size: int) -> None:
        """Drop the least recently used."""
        self.num_bytes -= self._blocks.popitem(last=False)[1].num_bytes
        self.evicted_tokens += size

    def _resumable(self, token_ids: Sequence[object]) -> list[Key]:
        """The text's path, up to its last block behind which it can go on."""
        path = list(self._path(token_ids))
        while path and self._blocks[path[-1]].states is None:
            path.pop()
        return path

    def contents(self) -> list[StoredBlock]:
        """All blocks, the most recently used first and so each behind its parent."""
        places = {block.number: place for place, block in enumerate(reversed(self._blocks.values()))}
        return [
            StoredBlock(places.get(key.parent, -1), key.tokens, block.entries, block.states)
            for key, block in reversed(self._blocks.items())
        ]

    def restore(self, blocks: Sequence[StoredBlock]) -> int:
        """Hold what `contents` of a cache of this model gave, as far as the capacity goes; what is here already goes. How many blocks those are."""
        numbers = list[int]()
        restored = list[tuple[Key, CacheBlock]]()
        self.num_bytes = 0
        for parent, tokens, entries, states in blocks:
            num_bytes = self.bytes_of(states)
            if self.num_bytes + num_bytes > self.capacity_bytes:
                break
            self.num_bytes += num_bytes
            numbers.append(next(self._numbers))
            key = Key(ROOT if parent < 0 else numbers[parent], tokens)
            restored.append((key, CacheBlock(numbers[-1], entries, states, num_bytes)))
        self._blocks = OrderedDict(reversed(restored))
        return len(restored)

    def bytes_of(self, states: Any) -> int:
        """That a block takes, with these states."""
        return self.block_bytes + (0 if states is None else self.model.state_bytes)

    def _path(self, token_ids: Sequence[object]) -> Iterator[Key]:
        size = self.model.block_tokens
        parent = ROOT
        for start in range(0, len(token_ids) - size + 1, size) if self._blocks else ():
            key = Key(parent, tuple(token_ids[start : start + size]))
            if (block := self._blocks.get(key)) is None:
                return
            parent = block.number
            yield key

    def _use(self, path: Sequence[Key]) -> None:
        for key in reversed(path):
            self._blocks.move_to_end(key)
