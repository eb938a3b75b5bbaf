"""What lies in the slots of a model: lengths, capacity, the one commit; the ids that end and begin a text.

slot     a sequence's place in a model
column   place of one token in a slot: committed tokens first, then the nodes of the tree that was scored last
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int64

from polydraft.core import Outcome, Scores, Target, TokenTree
from polydraft.core.batch import stacked
from polydraft.errors import CapacityError, InvalidInputError
from polydraft.models.memory import CPU, check_memory, fitting_length, fitting_tokens
from polydraft.numerics.compiled_code import njit

TREE_ROOM = 256
"""Most nodes of one tree, which lie behind the context."""
RowAndStates = tuple[Float[np.ndarray, " V"], list[Float[np.ndarray, "T D"]]]
"""Logits after the last token of a text, and the states of all its tokens in each layer that was asked for."""
COLUMN = np.dtype([("slot", np.int64), ("column", np.int64)])
"""Where a token lies."""


def special_ids(model: Any) -> tuple[list[int], int | None]:
    """End-of-sequence ids and the id that begins a text: what the generation settings say, else the configuration, else that of its text model.

    model: with `config` and perhaps `generation_config`, as of transformers.

    Example:
        >>> from transformers import GPT2Config, GenerationConfig
        >>> from types import SimpleNamespace
        >>> config, settings = GPT2Config(eos_token_id=7, bos_token_id=1), GenerationConfig(bos_token_id=5)
        >>> special_ids(SimpleNamespace(config=config, generation_config=settings))
        ([7], 5)
    """
    config = model.config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else None
    places = (getattr(model, "generation_config", None), config, text_config)
    eos, bos = (
        next((ids for place in places if (ids := getattr(place, name, None)) not in (None, [], -1)), None)
        for name in ("eos_token_id", "bos_token_id")
    )
    return ([] if eos is None else [eos] if isinstance(eos, int) else list(eos)), bos


@njit(cache=True)
def _moves(lengths, scored, slots, path, counts):
    """Where the columns of each path are and belong, those in place left out; lengths grow by root and path.

    The third result is whether all of them were scored; if not, nothing has changed.
    """
    source = np.empty(path.size, COLUMN)
    target = np.empty(path.size, COLUMN)
    moved = 0
    for b in range(len(slots)):
        last = path[b, counts[b] - 1] if counts[b] > 0 else 0  # nodes grow along a path
        if last >= scored[slots[b]]:
            return source[:0], target[:0], False
    for b in range(len(slots)):
        slot = slots[b]
        for i in range(counts[b]):
            if path[b, i] != i + 1:
                source[moved].slot = slot
                source[moved].column = lengths[slot] + path[b, i]
                target[moved].slot = slot
                target[moved].column = lengths[slot] + i + 1
                moved += 1
        lengths[slot] += 1 + counts[b]
        scored[slot] = 0
    return source[:moved], target[:moved], True


class SlotModel(Target, ABC):
    """Sequences of a model in slots: all that changes what is committed; a backend writes the columns, and supplies `move`.

    lengths: [slots] committed tokens, to be read; they change by `prefill`, `commit`, `cut`, `copy` and `release`.
    max_model_len: most tokens of a sequence.  max_num_seqs: slots.  passes: forward passes so far.
    cache_bytes: the KV cache when it is full.  bytes_per_token: of one token's entries.  block_tokens, state_bytes: see `core.BlockCopying`.
     cache_grows: whether memory is taken only as tokens are written, so that any slot may have the whole context.
     cache_tokens: that all slots may hold together; see `Slots.make_room`.
    """

    bytes_per_token: int
    cache_dtype = "float32"
    """What keys and values are stored in."""
    block_tokens = state_bytes = 0
    absent_ids: Sequence[int] = ()
    """Ids below `vocab_size` without a token, which have probability 0."""

    def without_absent(self, logits: Float[np.ndarray, "*rows V"]) -> Float[np.ndarray, "*rows V"]:
        """Logits of a forward pass, in place, in which ids without a token are ruled out."""
        if self.absent_ids:
            logits[..., list(self.absent_ids)] = -np.inf
        return logits

    def open_slots(
        self,
        max_model_len: int | None,
        max_num_seqs: int,
        *,
        context: int,
        bytes_per_token: int,
        bytes_per_slot: int = 0,
        device: Any = CPU,
        multiple: int = 1,
        spare: int = 0,
    ) -> int:
        """Begin with empty slots; how many columns each needs: the context and a tree, and `spare` more, up to a multiple.

        max_model_len: default the model's context, or as much of it as fits half the free memory, for one slot where the cache grows, else for all.
        bytes_per_token: of one sequence.  bytes_per_slot: of what does not grow with it.  device: see `memory`.

        Raises:
            InvalidInputError, CapacityError: no slots, or more memory than is free.
        """
        if max_num_seqs < 1:
            raise InvalidInputError(f"max_num_seqs={max_num_seqs} was given; expected an integer >= 1.")
        self.bytes_per_token = bytes_per_token
        every = bytes_per_token * max_num_seqs
        needed = bytes_per_token if self.cache_grows else every
        fixed = bytes_per_slot * max_num_seqs
        self.max_model_len = max_model_len or fitting_length(context, needed, TREE_ROOM, device, fixed)
        columns = -(-(self.max_model_len + TREE_ROOM + spare) // multiple) * multiple
        reserved = max(
            columns * needed, columns * every // 1024
        )  # slots that grow may have room for 1024 times the free memory
        check_memory(reserved + fixed, device, max_model_len=self.max_model_len, max_num_seqs=max_num_seqs)
        self.cache_tokens = columns * max_num_seqs
        is_given = max_model_len is not None
        if self.cache_grows:
            self.cache_tokens = fitting_tokens(
                columns, max_num_seqs, bytes_per_token, device, is_given=is_given, fixed=fixed
            )
        self.cache_bytes = self.cache_tokens * bytes_per_token + fixed
        self.max_num_seqs = max_num_seqs
        self.passes = 0
        self._lengths, self._scored, self._written, self._prompt_lengths = (
            np.zeros(max_num_seqs, np.int64) for _ in range(4)
        )
        self._read_only = self._lengths.view()
        self._read_only.flags.writeable = False
        return columns

    @property
    def lengths(self) -> Int64[np.ndarray, " slots"]:
        """See the class."""
        return self._read_only

    @property
    def written(self) -> Int64[np.ndarray, " slots"]:
        """Tokens of each slot that memory was taken for, and not given back."""
        return np.maximum(self._written, self._lengths)

    def trim(self, slot: int) -> None:
        """Empty a slot and give its memory back, where it grows."""
        self.release([slot])
        self._written[slot] = 0

    def read_states(self, slot: int, length: int) -> Any:
        """See `core.BlockCopying`; without recurrent layers there are none."""
        return ()

    def write_states(self, slot: int, states: Any) -> None:
        """See `core.BlockCopying`."""

    chunk = TREE_ROOM
    """Prompt tokens of one sequence that `append` is given at a time."""

    @abstractmethod
    def append(self, token_ids: Mapping[int, Sequence[int]], hidden: Sequence[int]) -> list[RowAndStates]:
        """Write tokens behind the committed ones of each slot: logits after the last, and the states asked for of all."""

    def prefill(
        self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], *, hidden: Sequence[int] = ()
    ) -> Scores:
        """Append committed tokens, in chunks; lengths may differ. Logits after the last token of each, and the hidden states of all.

        Raises:
            CapacityError: a sequence longer than `max_model_len`; nothing is appended.
            InvalidInputError: no tokens for a slot.
        """
        self.check_slots(slots, [len(ids) for ids in token_ids])
        remaining = dict(zip(slots, token_ids, strict=True))
        last: dict[int, np.ndarray] = {}
        states: dict[int, list[list[np.ndarray]]] = {slot: [] for slot in slots}
        while remaining:
            chunk_ids = {slot: ids[: self.chunk] for slot, ids in remaining.items()}
            for slot, (row, pieces) in zip(chunk_ids, self.append(chunk_ids, hidden), strict=True):
                last[slot] = row
                states[slot].append(pieces)
            self.appended(list(chunk_ids), [len(ids) for ids in chunk_ids.values()])
            remaining = {slot: ids[self.chunk :] for slot, ids in remaining.items() if len(ids) > self.chunk}
        hidden_states = {
            layer: stacked([np.concatenate([piece[i] for piece in states[slot]]) for slot in slots])
            for i, layer in enumerate(hidden)
        }
        roots = TokenTree.roots(np.array([ids[-1] for ids in token_ids], np.int64))
        return Scores(roots, np.stack([last[slot] for slot in slots])[:, None], hidden_states)

    @abstractmethod
    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy columns, [M] of COLUMN each; of one slot no target lies behind its source."""

    def check_slots(self, slots: Sequence[int], counts: Sequence[int], beyond: int = 0) -> None:
        """Refuse slots that are not there, and more tokens than fit behind the committed ones. beyond: columns behind the context.

        Raises:
            CapacityError: saying what to do.
            InvalidInputError: no tokens.
        """
        if len(set(slots)) != len(slots) or not all(0 <= slot < self.max_num_seqs for slot in slots):
            raise CapacityError(
                f"slots {list(slots)} were given; expected different numbers from 0 to {self.max_num_seqs - 1}. "
                "Raise max_num_seqs for more."
            )
        for slot, count in zip(slots, counts, strict=True):
            room = self.max_model_len - int(self._lengths[slot])
            if count == 0:
                raise InvalidInputError(f"no tokens were given for slot {slot}; expected at least one.")
            if count > room + beyond:
                raise CapacityError(
                    f"{count} tokens were given for slot {slot}, which has room for {room}: "
                    f"the context holds {self.max_model_len}. Shorten the text or raise max_model_len."
                )

    def check_tree(self, num_nodes: int) -> None:
        """Refuse more rows than a forward pass takes."""
        if num_nodes > TREE_ROOM:
            raise CapacityError(
                f"a tree of {num_nodes} nodes was given; a forward pass takes at most {TREE_ROOM}. Draft less."
            )

    def appended(self, slots: Sequence[int], counts: Any) -> None:
        """Tokens that a forward pass wrote behind the committed ones are committed."""
        index = np.asarray(slots, np.int64)
        self._lengths[index] += counts
        self._scored[index] = 0

    def reads(self, slot: int, token_ids: Sequence[int]) -> None:
        """See `core.BlockCopying`."""

    def set_prompt_length(self, slot: int, length: int) -> None:
        """See `core.Target`."""
        self._prompt_lengths[slot] = length

    def filled(self, slot: int, length: int) -> None:
        """The columns of a slot were made of what another model has read, up to `length`."""
        self._lengths[slot] = length

    def scored(self, slots: Sequence[int], num_nodes: int) -> None:
        """The nodes of trees lie behind the committed tokens, to be committed."""
        self._scored[np.asarray(slots, np.int64)] = num_nodes

    def commit(self, slots: Sequence[int], outcome: Outcome) -> None:
        """Keep the columns of the root and the path of the last score; the siblings are forgotten."""
        source, target, all_scored = _moves(
            self._lengths, self._scored, np.asarray(slots, np.int64), *outcome.host[:2]
        )
        assert all_scored, "a commit without a score of its path"
        if len(source):
            self.move(source, target)

    def cut(self, slot: int, length: int) -> None:
        """Forget all committed tokens but the first `length`."""
        assert 0 <= length <= self._lengths[slot], "a cut behind the end"
        self._written[slot] = self.written[slot]
        self._lengths[slot] = length
        self._scored[slot] = 0

    def copy(self, source: int, slot: int, length: int) -> None:
        """The first `length` committed tokens of a slot into an empty one: a prefix that two sequences share."""
        assert source != slot and self._lengths[slot] == 0 and 0 <= length <= self._lengths[source]
        here = np.empty(length, COLUMN)
        there = np.empty(length, COLUMN)
        here["slot"] = source
        there["slot"] = slot
        here["column"] = there["column"] = np.arange(length)
        self.move(here, there)
        self._lengths[slot] = length

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots; those that are empty already are ignored."""
        index = list(slots)
        self._written[index] = self.written[index]
        self._lengths[index] = self._scored[index] = 0
