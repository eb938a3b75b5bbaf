"""An EAGLE-3 head, or an MTP module, in compiled code: layers that read the target's states and their own, with slots like any draft model.

Li, Wei, Zhang & Zhang 2025 (arXiv 2503.01840). A slot's column belongs to a committed token and the target's states before it:

    given rows    [norm(embedding of x[t+1]); norm(fc(states at t))]            committed tokens that the cache lacks, the root last
    drafted rows  [norm(embedding of a node); norm(what its parent put out)]    nodes of the tree behind the root

Attention of EAGLE-3's first layer reads the pair; in an MTP module (arXiv 2412.19437), which has no fc, a projection of the pair is the row that the layer reads.

A row attends to the columns of committed tokens, which all were given rows, and to its own path. So every committed token is read once more with
the target's states after it was drafted with the head's own: of a proposal `heads.eagle` leaves nothing cached but its root.
The distribution of a row is over the draft vocabulary and lies in rows of all the target's tokens, with nothing elsewhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polydraft.core import TokenTree
from polydraft.heads.compiled import HEADS, CompiledHead
from polydraft.heads.eagle.checkpoint import EagleCheckpoint
from polydraft.heads.layers import cached_heads, ends_of, layer_bytes, packed_layers, sizes_of
from polydraft.heads.states import GivenStates
from polydraft.models.compiled.layers import layer_parts, multiply_shared, run_layer
from polydraft.models.compiled.weights import Ends
from polydraft.models.matrices.kernels import copy_row, norm_part, rms_norm
from polydraft.models.matrices.products import FORMATS, MatrixFormat, Packed, output_row, packed
from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.cache import (
    COLUMNS,
    SlotMemory,
    fitting_dtype,
    forget,
    move_columns,
)
from polydraft.models.mixers.dense import Rounding, rounding_code
from polydraft.models.mixers.layer import Weights, product
from polydraft.models.mixers.program import Part, Program, new_program, new_step
from polydraft.models.mixers.workspace import CHUNK, Sizes, Workspace, cut_runs
from polydraft.models.slots import TREE_ROOM, RowAndStates
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.floats import as_float32


class EagleWeights(NamedTuple):
    """Those around the layer. Of an EAGLE-3 head project is empty, of an MTP module fc.
    state_norms: [parts of the target's states that are normed, width of one], no parts where none is.
    """

    embed: Packed
    input_norm: np.ndarray
    hidden_norm: np.ndarray
    norm: np.ndarray
    state_norms: np.ndarray
    fc: Packed
    project: Packed
    head: Packed


class EagleArrays(NamedTuple):
    """program: of the layers.  target_states: [slots, TREE_ROOM, F] states of given rows.  counts: [slots] how many there are.  outputs: [slots, TREE_ROOM, h] what rows put out."""

    weights: EagleWeights
    program: Program
    sizes: Sizes
    memory: SlotMemory
    work: Workspace
    target_states: np.ndarray
    counts: np.ndarray
    outputs: np.ndarray
    states: np.ndarray  # [CHUNK, F]
    pairs: np.ndarray  # [CHUNK, 2 h]
    norm_before_residual: bool
    norm_output: bool


@njit
def _is_given(model, row):
    """Whether a row is read with the target's states, else with what its parent put out."""
    return row.column - row.length < model.counts[row.slot]


@njit
def _read_states(model, rows):
    """The target's states of given rows in their order, as the head reads them: normed part by part, through fc, in work.update or in states."""
    weights = model.weights
    norms = weights.state_norms
    num_given = np.int64(0)
    for t in range(rows):
        row = model.work.rows[t]
        if _is_given(model, row):
            copy_row(model.target_states[row.slot, row.column - row.length], model.states[num_given])
            num_given += 1
    for t in range(num_given):
        for part in range(len(norms)):
            norm_part(model.states[t], part * norms.shape[1], norms[part], model.sizes.epsilon)
    if num_given > 0 and weights.fc.panels > 0:
        multiply_shared(
            model.work, model.states, weights.fc, 0, model.work.rounded, model.work.update, num_given
        )


@njit
def _join_pairs(model, rows):
    """Pairs of a token's normed embedding and a normed state, and the rows that the first layer adds to, in work.x."""
    weights = model.weights
    work = model.work
    epsilon = model.sizes.epsilon
    zero: Any = np.int64(0)  # a literal 0 would compile everything below twice
    h = len(weights.norm)
    num_given = zero
    for t in range(rows):
        row = work.rows[t]
        if _is_given(model, row):
            copy_row(work.update[num_given] if weights.fc.panels > 0 else model.states[num_given], work.x[t])
            num_given += 1
        else:
            parent = work.seen_columns[t, row.num_seen - 2] - row.length
            copy_row(model.outputs[row.slot, parent], work.x[t])
        output_row(weights.embed, zero, row.token, work.normed[t])
    rms_norm(work.normed, weights.input_norm, epsilon, model.pairs, zero, rows)
    rms_norm(work.x, weights.hidden_norm, epsilon, work.normed, zero, rows)
    for t in range(rows):
        copy_row(work.normed[t], model.pairs[t, h:])
        if model.norm_before_residual:
            copy_row(work.normed[t], work.x[t])
    if weights.project.panels > 0:
        multiply_shared(work, model.pairs, weights.project, 0, work.rounded, work.update, rows)
        for t in range(rows):
            copy_row(work.update[t], work.x[t])


@njit
def _run(model, rows, logits, done):
    """Run the rows in work; their logits go to logits[done:]. Returns how many logits there are now."""
    weights = model.weights
    work = model.work
    epsilon = model.sizes.epsilon
    zero: Any = np.int64(0)
    _read_states(model, rows)
    _join_pairs(model, rows)
    runs = cut_runs(work.rows, rows, work.runs)
    for l in range(len(model.program.layers) - 2):
        run_layer(model, l, rows, runs)
    if model.norm_output:
        rms_norm(work.x, weights.norm, epsilon, work.normed, zero, rows)
    num_logits = zero
    for t in range(rows):
        row = work.rows[t]
        put_out = work.normed[t] if model.norm_output else work.x[t]
        copy_row(put_out, model.outputs[row.slot, row.column - row.length])
        if row.has_logits:
            copy_row(work.x[t], work.x[num_logits])
            num_logits += 1
    if num_logits > 0:
        rms_norm(work.x, weights.norm, epsilon, work.normed, zero, num_logits)
        multiply_shared(work, work.normed, weights.head, 0, work.rounded, logits[done:], num_logits)
    return done + num_logits


HEADS[EagleArrays] = _run


def _program(
    layers: Sequence[Weights], sizes: Sizes, memory: SlotMemory, work: Workspace, pairs: np.ndarray | None
) -> Program:
    """Of the first layer and of those behind it. pairs: what attention of the first reads in the place of the normed rows, or None."""
    step = new_step()
    parts = list[list[tuple[Part, int]]]()
    for weights in layers:
        some = slice(len(parts), len(parts) + len(weights.mixers))
        layer_memory = memory._replace(
            keys=memory.keys[some], values=memory.values[some], scales=memory.scales[some]
        )
        parts += layer_parts(weights, sizes, dict.fromkeys(weights.mixers, layer_memory), work, step)
    if pairs is not None:
        qkv = layers[0].qkv
        rounding = Part(rounding_code, Rounding(step, pairs, pairs.shape[1], qkv.rounding, work.rounded))
        parts[0][:2] = (rounding, 0), (product(step, pairs, qkv, work.qkv, work), 0)
    return new_program([*parts, []], step, len(work.queries))


def _weights_around(head: EagleCheckpoint, ends: Ends, kind: MatrixFormat) -> EagleWeights:
    def norm(name: str) -> np.ndarray:
        return as_float32(head.tensors[name])

    def matrix(name: str) -> Packed:
        return packed([head.tensors.get(name, np.zeros((0, 2 * head.config.hidden_size)))], kind)

    state_norms = [name for name in head.tensors if name.startswith("fc_norm.")]
    state_norms.sort(key=lambda name: (len(name), name))
    state_norms += [name for name in ("input_norm.weight",) if name in head.tensors and not state_norms]
    return EagleWeights(
        embed=ends.embed,
        input_norm=norm("midlayer.input_layernorm.weight"),
        hidden_norm=norm("midlayer.hidden_norm.weight"),
        norm=ends.norm,
        state_norms=np.stack([norm(name) for name in state_norms])
        if state_norms
        else np.empty((0, 0), np.float32),
        fc=matrix("fc.weight"),
        project=matrix("project.weight"),
        head=ends.head,
    )


class CompiledEagle(GivenStates, CompiledHead):
    """A head as a draft model with slots; see `core.Target`. It reads tokens with the target's states before them, given by `give`.

    target: of which it takes embeddings and, where it has none of its own, output rows.  max_num_seqs: default the target's.
    quantization: of its matrices, as of `CompiledModel`; it changes no distribution.

    Raises:
        IncompatibleError: a head of another target.
    """

    cache_grows = True

    def __init__(
        self,
        head: EagleCheckpoint,
        target: Any,
        *,
        max_num_seqs: int | None = None,
        quantization: str = "int8",
    ) -> None:
        head.check(target)
        self.target = target
        self.pool = target.pool
        self.name = head.kind
        self.vocab_size = target.vocab_size
        self.draft_ids = head.ids[head.ids < target.vocab_size]
        kind = FORMATS[quantization]
        ends = ends_of(head, target, len(self.draft_ids), kind)
        weights = _weights_around(head, ends, kind)
        sizes = target.arrays.sizes if head.shares_rows else sizes_of(head.config, ends.head.outputs)
        parts = [part for part in (head.layer, head.further_layers) if part is not None]
        num_layers = sum(len(part.spec.mixers) for part in parts)
        heads = cached_heads(parts)
        slots = max_num_seqs or target.max_num_seqs
        self.cache_dtype = fitting_dtype(target.cache_dtype, heads.width)
        columns = self.open_slots(
            target.max_model_len,
            slots,
            context=0,
            bytes_per_token=num_layers * heads.token_bytes(self.cache_dtype),
            multiple=COLUMNS,
        )
        h = head.config.hidden_size
        F = head.tensors["fc.weight"].shape[1] if "fc.weight" in head.tensors else h
        layers, memory, work = packed_layers(
            parts, ends, sizes, target, self._lengths, columns, quantization, max(F, 2 * h)
        )
        own_rows = 0 if head.shares_rows else ends.head.nbytes
        self.weight_bytes = layer_bytes(layers) + weights.fc.nbytes + weights.project.nbytes + own_rows
        pairs = aligned(CHUNK, 2 * h)
        self.arrays = EagleArrays(
            weights=weights,
            program=_program(layers, sizes, memory, work, None if head.projects else pairs),
            sizes=sizes,
            memory=memory,
            work=work,
            target_states=aligned(slots, TREE_ROOM, F),
            counts=np.zeros(slots, np.int64),
            outputs=aligned(slots, TREE_ROOM, h),
            states=aligned(CHUNK, F),
            pairs=pairs,
            norm_before_residual=bool(head.config.norm_before_residual),
            norm_output=bool(head.config.norm_output),
        )

    def trim(self, slot: int) -> None:
        """See `slots.SlotModel.trim`."""
        super().trim(slot)
        forget(self.arrays.memory, slot)

    def reads(self, slot: int, token_ids: Sequence[int]) -> None:
        """Put the states of the next tokens where the forward pass finds them."""
        count = len(token_ids)
        self.arrays.target_states[slot, :count] = self.take(slot, count)
        self.arrays.counts[slot] = count

    def append(self, token_ids: Mapping[int, Sequence[int]], hidden: Sequence[int]) -> list[RowAndStates]:
        """See `slots.SlotModel.append`; there are no hidden states to be had."""
        last_logits = list[RowAndStates]()
        for slot, ids in token_ids.items():
            self.reads(slot, ids)
            logits = self._run([slot], TokenTree.chain(np.array([ids], np.int64)), 0, len(ids) - 1)
            last_logits.append((self.wide(logits)[0], []))
        return last_logits

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """See `slots.SlotModel.move`."""
        move_columns(self.arrays.memory, source, target)
