"""A block head in compiled code: layers over [last token, masks], with the target's states in their caches.

Chen, Liang & Liu 2026, DFlash (arXiv 2602.06036); Christopher et al. 2024, SpecDiff (arXiv 2408.05636).

    columns    one for each committed token that the target has read: keys and values of every layer, made of norm(fc(its states there))
    block      the last token, and behind it masks and revealed tokens; what its places see of the columns and of each other is a layer's own
    place j    logits of the draft vocabulary; the mask is none of it

Layers are parts of a program, see `heads.layers`, which the target's threads share. A layer's attention has rows of its own, which say what is seen there.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from polydraft.heads.block.checkpoint import BlockCheckpoint
from polydraft.heads.foretold import DepthDistributions
from polydraft.heads.layers import HeadLayers, ends_of, layer_bytes, packed_layers, sizes_of
from polydraft.heads.markov import place
from polydraft.models.compiled.layers import ModelArrays, head_part, layer_parts, run_head, run_layer
from polydraft.models.matrices.kernels import copy_row, rms_norm
from polydraft.models.matrices.products import FORMATS, Packed, output_row, packed
from polydraft.models.matrices.vectors import PANEL, aligned
from polydraft.models.mixers.attention.code import PlaceHeads, attend_code, place_code
from polydraft.models.mixers.cache import COLUMNS, SlotMemory, fitting_dtype, whole
from polydraft.models.mixers.dense import Norm, Rounding, norm_code, rounding_code
from polydraft.models.mixers.layer import ATTENTION, Weights, product
from polydraft.models.mixers.program import Part, new_program, new_step
from polydraft.models.mixers.workspace import CHUNK, ROW, Sizes, Workspace, cut_runs
from polydraft.models.slots import TREE_ROOM
from polydraft.numerics.compile_time import inner
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.floats import as_float32

MASK = -1
"""Token of a masked place where the mask is a vector of its own."""


class Sees(IntEnum):
    """What a place of a block attends to beside the text: all places, those before it and itself, or the masks and the last token apart."""

    ALL = 0
    CAUSAL = 1
    APART = 2


class BlockArrays(NamedTuple):
    """model: its first layer turns states into columns, the others are the head's.  states: [CHUNK, F] of the target.  mask: [h] or nothing.
    logits: [CHUNK, D] of several blocks.  sights: [kinds, CHUNK] rows as the attention of a kind of layers reads them.  sees: [kinds] of `Sees`.  has_window: [kinds]."""

    model: ModelArrays
    states: np.ndarray
    logits: np.ndarray
    mask: np.ndarray
    sights: np.ndarray
    sees: np.ndarray
    has_window: np.ndarray


@njit(cache=True, nogil=True)
def inject_states(head, slot, begin, states):
    """Make the columns begin .. of a slot of the target's states [CHUNK or fewer, F]."""
    work = head.model.work
    rows = len(states)
    zero = np.int64(0)
    for t in range(rows):
        copy_row(states[t], head.states[t])
        row = work.rows[t]
        row.slot = slot
        row.position = begin + t
        row.column = begin + t
    run_layer(head.model, zero, rows, zero)


@inner
def _sight(row, n, length, places, sees, has_window):
    """What place n of a block sees. A window is counted from the last column, whatever the place."""
    row.column = length + n
    row.length = length
    row.position = length + n
    row.num_seen = places
    if has_window:
        row.position = length - 1
    if sees == Sees.CAUSAL:
        row.num_seen = n + 1
    elif sees == Sees.APART and n == 0:
        row.num_seen = 1


@inner
def _place_block(head, first, slot, tokens):
    """A block's rows from row `first` on: what they see, and their embeddings."""
    work = head.model.work
    N = len(tokens)
    length = head.model.memory.lengths[slot]
    for n in range(N):
        t = first + n
        row = work.rows[t]
        row.token = tokens[n]
        row.slot = slot
        row.position = length + n
        row.column = length + n
        row.length = length
        for m in range(N):
            work.seen_columns[t, m] = length + m
        for kind in range(len(head.sights)):
            head.sights[kind, t].slot = slot
            _sight(head.sights[kind, t], n, length, N, head.sees[kind], head.has_window[kind])
        if row.token < 0:
            copy_row(head.mask, work.x[t])
        else:
            output_row(head.model.embed, np.int64(0), row.token, work.x[t])


@njit(cache=True, nogil=True)
def block_forward(head, slots, tokens, wanted, states, logits, where):
    """One forward pass over blocks of tokens [B, N], the last token first.

    wanted: places from this one on have logits, [*, N - wanted, D], of block b at where[b].  states: [B N, h] what they put out, behind the norm.
    """
    model = head.model
    work = head.model.work
    B, N = tokens.shape
    zero = np.int64(0)
    for b in range(B):
        _place_block(head, b * N, slots[b], tokens[b])
    rows = np.int64(B * N)
    runs = cut_runs(work.rows, rows, work.runs)
    for l in range(1, len(model.program.layers) - 2):
        run_layer(model, l, rows, runs)
    rms_norm(work.x, model.norm, model.sizes.epsilon, work.normed, zero, rows)  # pyright: ignore[reportArgumentType]
    num_logits = zero
    for t in range(rows):
        copy_row(work.normed[t], states[t])
        if t % N >= wanted:
            copy_row(states[t], work.normed[num_logits])
            num_logits += 1
    if B == 1:
        run_head(model, num_logits, logits[where[0]])
        return
    run_head(model, num_logits, head.logits)
    for b in range(B):
        for k in range(N - wanted):
            copy_row(head.logits[b * (N - wanted) + k], logits[where[b], k])


class Sights(NamedTuple):
    """What rows of a block see, layer by layer: which of the others, and whether through a window.

    looks: of each layer.  kinds: of all layers.  rows: [kinds, CHUNK] of `ROW`, those of each kind.
    """

    looks: list[tuple[str, bool]]
    kinds: list[tuple[str, bool]]
    rows: np.ndarray

    @classmethod
    def of(cls, config: Any) -> "Sights":
        """Those of a head's layers."""
        looks = list(zip(config.sees, map(bool, config.windows), strict=True))
        kinds = list(dict.fromkeys(looks))
        return cls(looks, kinds, np.zeros((len(kinds), CHUNK), ROW))

    def seeing(self, layers: Sequence[list[tuple[Part, int]]]) -> list[list[tuple[Part, int]]]:
        """Layers whose attention reads what their rows see."""
        rows = [self.rows[self.kinds.index(look)] for look in self.looks]
        return [_seeing(layer, seen) for layer, seen in zip(layers, rows, strict=True)]


class CompiledBlock(DepthDistributions):
    """A block head as a draft model; see `DepthDistributions`.

    quantization: of its matrices; it changes no distribution of the output.

    Raises:
        IncompatibleError: a head of another target.
    """

    def __init__(self, head: BlockCheckpoint, target: Any, *, quantization: str = "int8") -> None:
        head.check(target)
        super().__init__(target, head.ids, head.depths, head.kind, head.bias)
        self.pool = target.pool
        self.num_places = int(head.config.slots)
        self.mask = target.vocab_size
        own_mask = head.tensors.get("mask")
        self._shown = MASK if own_mask is not None else int(head.config.mask_token_id)
        self.roots = np.zeros(target.max_num_seqs, np.int64)
        """The last token of each slot."""
        states = aligned(CHUNK, head.tensors["fc.weight"].shape[1])
        sights = Sights.of(head.config)
        self.net = BlockArrays(
            model=self._model(head, target, quantization, states, sights),
            states=states,
            logits=aligned(CHUNK, self.arrays.sizes.outputs),
            mask=np.zeros(0, np.float32) if own_mask is None else as_float32(own_mask),
            sights=sights.rows,
            sees=np.array([Sees[sees.upper()] for sees, _ in sights.kinds]),
            has_window=np.array([window for _, window in sights.kinds]),
        )

    def _model(
        self, head: BlockCheckpoint, target: Any, quantization: str, states: np.ndarray, sights: Sights
    ) -> ModelArrays:
        """Packed weights, slots and program: what makes columns of the target's states, the head's layers, and its output rows."""
        config = head.config
        kind = FORMATS[quantization]
        ends = ends_of(head, target, len(self.draft_ids), kind)
        sizes = sizes_of(config, self.arrays.sizes.outputs)
        prefixes = [f"layers.{layer}." for layer in range(config.num_hidden_layers)]
        windows = [window or 0 for window in config.windows]
        files = HeadLayers.of(config, head.tensors, prefixes, windows)
        columns = whole(target.max_model_len + TREE_ROOM, COLUMNS)
        self.cache_dtype = fitting_dtype(target.cache_dtype, sizes.width)
        (weights,), memory, work = packed_layers(
            [files], ends, sizes, target, self._lengths, columns, quantization, states.shape[1]
        )
        fc = packed([head.tensors["fc.weight"]], kind)
        self.weight_bytes = layer_bytes([weights]) + ends.head.nbytes + fc.nbytes
        self.cache_bytes += memory.keys.nbytes + memory.values.nbytes + memory.scales.nbytes
        step = new_step()
        gain = as_float32(head.tensors["hidden_norm.weight"])[None]
        injection = _injection(weights, sizes, memory, work, step, states, fc, gain)
        layers = layer_parts(weights, sizes, {ATTENTION: memory}, work, step)
        outputs = [(head_part(ends.head, sizes.outputs, work, step), 0)]
        program = new_program([injection, *sights.seeing(layers), outputs], step, target.num_threads)
        return ModelArrays(*ends, sizes, memory, work, program, np.zeros(len(memory.lengths), np.int64))

    def inject(
        self, slot: int, begin: int, states: Float[np.ndarray, "T F"], following: Sequence[int] = ()
    ) -> None:
        """See `network.BlockModel.inject`."""
        rows = np.ascontiguousarray(states, np.float32)
        with self.pool:
            for i in range(0, len(rows), CHUNK):
                inject_states(self.net, slot, begin + i, rows[i : i + CHUNK])
        self.filled(slot, begin + len(rows))

    def _block(
        self,
        slots: Sequence[int],
        blocks: Int[np.ndarray, "B X"],
        logits: Float[np.ndarray, "C K D"],
        where: Sequence[int],
    ) -> Float[np.ndarray, "B N h"]:
        """States of all places of blocks of masks and revealed tokens behind the last token, by one forward pass; logits of those that draft go to logits[where]."""
        tokens = np.concatenate(
            [self.roots[list(slots)][:, None], np.where(blocks == self.mask, self._shown, blocks)], 1
        )
        B, N = tokens.shape
        most = CHUNK // tokens.shape[1]
        states = np.empty((B, N, len(self.net.model.norm)), np.float32)
        with self.pool:
            for i in range(0, B, most):
                some = slice(i, i + most)
                places = (
                    np.array(slots[some]),
                    tokens[some],
                    N - self.depths,
                    states[some].reshape(-1, states.shape[2]),
                )
                block_forward(self.net, *places, logits, np.array(where[some]))
        self.passes += 1
        return states

    def denoise(self, slots: Sequence[int], blocks: Int[np.ndarray, "B X"]) -> Float[np.ndarray, "B X D"]:
        """Logits at every place of blocks of masks and revealed tokens: one forward pass."""
        logits = np.empty((len(slots), self.depths, self.arrays.sizes.outputs), np.float32)
        self._block(slots, blocks, logits, range(len(slots)))
        return logits

    def know(self, slots: Sequence[int], states: Float[np.ndarray, "B F"]) -> None:
        """One forward pass over a block of masks. The states are injected already."""
        blocks = np.full((len(slots), self.num_places - 1), self.mask)
        place(
            self.arrays.markov,
            list(slots),
            self._block(slots, blocks, self.arrays.logits, slots),
            self.roots[list(slots)],
        )


def _injection(
    weights: Weights,
    sizes: Sizes,
    memory: SlotMemory,
    work: Workspace,
    step: np.ndarray,
    states: np.ndarray,
    fc: Packed,
    gain: np.ndarray,
) -> list[tuple[Part, int]]:
    """Parts that turn the target's states into rows, and those into keys and values of every layer."""
    queries = sizes.heads * sizes.width
    some, heads = (weights.qkv.behind(queries), 0) if queries % PANEL == 0 else (weights.qkv, sizes.heads)
    placed = PlaceHeads(step, sizes._replace(heads=heads), work.rows, work.qkv, weights.bias, weights.q_norm, weights.k_norm,
                   weights.cos, weights.sin, weights.rotaries, weights.stores, memory)  # fmt: skip
    rows = (
        Part(rounding_code, Rounding(step, states, states.shape[1], fc.rounding, work.rounded)),
        product(step, states, fc, work.update, work),
        Part(
            norm_code, Norm(step, work.update, gain, sizes.epsilon, work.normed, some.rounding, work.rounded)
        ),
    )
    columns = product(step, work.normed, some, work.qkv, work), Part(place_code, placed)
    return [
        *((part, 0) for part in rows),
        *((part, l) for l in range(len(weights.windows)) for part in columns),
    ]


def _seeing(parts: list[tuple[Part, int]], rows: np.ndarray) -> list[tuple[Part, int]]:
    """A layer whose attention reads what rows see in these."""
    work = next(part.arguments.work for part, _ in parts if part.code is attend_code)._replace(rows=rows)
    return [
        (
            part._replace(arguments=part.arguments._replace(work=work)) if part.code is attend_code else part,
            index,
        )
        for part, index in parts
    ]
