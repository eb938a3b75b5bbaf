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
import torch
from torch import Tensor

from polydraft.core import TokenTree
from polydraft.heads.compiled import HEADS, CompiledHead
from polydraft.heads.eagle.network import EagleCheckpoint
from polydraft.heads.layers import ends_of, sizes_of
from polydraft.heads.network import ReadsStates
from polydraft.models.compiled.layers import layer_parts, multiply_shared, run_layer
from polydraft.models.compiled.weights import packed_weights
from polydraft.models.matrices.kernels import copy_row, norm_part, rms_norm
from polydraft.models.matrices.products import FORMATS, Packed, output_row, packed
from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.cache import (
    COLUMNS,
    SlotMemory,
    fitting_dtype,
    forget,
    move_columns,
    new_memory,
    token_bytes,
)
from polydraft.models.mixers.dense import Rounding, rounding_code
from polydraft.models.mixers.layer import ATTENTION, Weights, product
from polydraft.models.mixers.program import Part, Program, new_program, new_step
from polydraft.models.mixers.workspace import CHUNK, Sizes, Workspace, cut_runs, workspace
from polydraft.models.slots import TREE_ROOM
from polydraft.numerics.compiled_code import njit


class EagleWeights(NamedTuple):
    """Those around the layer. ids: [D] the draft vocabulary. Of an EAGLE-3 head project is empty, of an MTP module fc."""

    embed: Packed
    ids: np.ndarray
    input_norm: np.ndarray
    hidden_norm: np.ndarray
    norm: np.ndarray
    state_norms: (
        np.ndarray
    )  # [parts of the target's states that are normed, width of one], no parts where none is
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
def _norm_states(states, norms, epsilon, rows):
    """Norm each part of the target's states with weights of its own."""
    for t in range(rows):
        for part in range(len(norms)):
            norm_part(states[t], part * norms.shape[1], norms[part], epsilon)


@njit
def _run(model, rows, logits, done):
    """Run the rows in work; their logits go to logits[done:]. Returns how many logits there are now."""
    weights = model.weights
    sizes = model.sizes
    work = model.work
    zero: Any = np.int64(0)  # a literal 0 would compile everything below twice
    h = len(weights.norm)
    num_given = zero
    for t in range(rows):
        slot = work.rows[t].slot
        n = work.rows[t].column - work.rows[t].length
        if n < model.counts[slot]:
            copy_row(model.target_states[slot, n], model.states[num_given])
            num_given += 1
    _norm_states(model.states, weights.state_norms, sizes.epsilon, num_given)
    if num_given > 0 and weights.fc.panels > 0:
        multiply_shared(work, model.states, weights.fc, 0, work.rounded, work.update, num_given)
    num_given = zero
    for t in range(rows):
        row = work.rows[t]
        slot = row.slot
        n = row.column - row.length
        if n < model.counts[slot]:
            copy_row(work.update[num_given] if weights.fc.panels > 0 else model.states[num_given], work.x[t])
            num_given += 1
        else:
            copy_row(model.outputs[slot, work.seen_columns[t, row.num_seen - 2] - row.length], work.x[t])
        output_row(weights.embed, zero, row.token, work.normed[t])
    rms_norm(work.normed, weights.input_norm, sizes.epsilon, model.pairs, zero, rows)
    rms_norm(work.x, weights.hidden_norm, sizes.epsilon, work.normed, zero, rows)
    for t in range(rows):
        copy_row(work.normed[t], model.pairs[t, h:])
        if model.norm_before_residual:
            copy_row(work.normed[t], work.x[t])
    if weights.project.panels > 0:
        multiply_shared(work, model.pairs, weights.project, 0, work.rounded, work.update, rows)
        for t in range(rows):
            copy_row(work.update[t], work.x[t])
    runs = cut_runs(work.rows, rows, work.runs)
    for l in range(len(model.program.layers) - 2):
        run_layer(model, l, rows, runs)
    num_logits = zero
    if model.norm_output:
        rms_norm(work.x, weights.norm, sizes.epsilon, work.normed, zero, rows)
    for t in range(rows):
        copy_row(
            work.normed[t] if model.norm_output else work.x[t],
            model.outputs[work.rows[t].slot, work.rows[t].column - work.rows[t].length],
        )
        if work.rows[t].has_logits:
            copy_row(work.x[t], work.x[num_logits])
            num_logits += 1
    if num_logits > 0:
        rms_norm(work.x, weights.norm, sizes.epsilon, work.normed, zero, num_logits)
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
        some = slice(len(parts), len(parts) + len(weights.windows))
        layer_memory = memory._replace(
            keys=memory.keys[some], values=memory.values[some], scales=memory.scales[some]
        )
        parts += layer_parts(weights, sizes, {ATTENTION: layer_memory}, work, step)
    if pairs is not None:
        qkv = layers[0].qkv
        rounding = Part(rounding_code, Rounding(pairs, pairs.shape[1], qkv.rounding, work.rounded))
        parts[0][:2] = (rounding, 0), (product(step, pairs, qkv, work.qkv, work), 0)
    return new_program([*parts, []], step, len(work.queries))


class CompiledEagle(ReadsStates, CompiledHead):
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
        config = head.config
        tensors = head.tensors
        kind = FORMATS[quantization]
        self.name = head.kind
        self.vocab_size = target.vocab_size
        self.draft_ids = head.ids[head.ids < target.vocab_size]
        h = config.hidden_size
        model_ends = ends_of(head, target, len(self.draft_ids), kind)
        sizes = target.arrays.sizes if head.shares_rows else sizes_of(config, model_ends.head.outputs)
        slots = max_num_seqs or target.max_num_seqs
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        cpu = torch.device("cpu")
        files = [files for files in (head.layer, head.further_layers) if files is not None]
        num_layers = sum(len(part.spec.windows) for part in files)
        self.cache_dtype = fitting_dtype(target.cache_dtype, sizes.width)
        bytes_per_token = num_layers * token_bytes(sizes.groups, sizes.width, self.cache_dtype)
        columns = self.open_slots(
            target.max_model_len,
            slots,
            context=0,
            bytes_per_token=bytes_per_token,
            device=cpu,
            multiple=COLUMNS,
        )
        memory = new_memory(
            (num_layers, slots, sizes.groups), sizes.width, columns, self._lengths, self.cache_dtype
        )
        stored = None if quantization == "float32" else quantization
        length = target.max_model_len
        layers = [
            packed_weights(part, columns, stored, length=length, outer=model_ends).weights for part in files
        ]
        nothing = torch.zeros(0, 2 * h)
        first = {
            name: packed([tensors.get(f"{name}.weight", nothing).float()], kind) for name in ("fc", "project")
        }
        experts = () if layers[0].experts is None else layers[0].experts.matrices
        matrices = [
            *first.values(),
            *experts,
            *(w for l in layers for w in (l.qkv, l.out, l.gate_up, l.down)),
        ]
        self.weight_bytes = sum(
            matrix.nbytes for matrix in (*matrices, *(() if head.shares_rows else (model_ends.head,)))
        )
        parts = [name for name in tensors if name.startswith("fc_norm.")] or [
            name for name in tensors if name == "input_norm.weight"
        ]
        norms = [tensors[name].float() for name in sorted(parts, key=lambda name: (len(name), name))]
        weights = EagleWeights(
            embed=model_ends.embed,
            head=model_ends.head,
            norm=model_ends.norm,
            state_norms=torch.stack(norms).numpy() if norms else np.empty((0, 0), np.float32),
            ids=self.draft_ids,
            input_norm=tensors["midlayer.input_layernorm.weight"].float().numpy(),
            hidden_norm=tensors["midlayer.hidden_norm.weight"].float().numpy(),
            **first,
        )
        F = tensors["fc.weight"].shape[1] if "fc.weight" in tensors else h
        work = workspace(layers[0], sizes, target.num_threads, max(F, 2 * h))
        pairs = aligned(CHUNK, 2 * h)
        program = _program(layers, sizes, memory, work, None if head.projects else pairs)
        target_rooms = aligned(slots, TREE_ROOM, F), np.zeros(slots, np.int64)
        rooms = aligned(slots, TREE_ROOM, h), aligned(CHUNK, F), pairs
        self.arrays = EagleArrays(
            weights,
            program,
            sizes,
            memory,
            work,
            *target_rooms,
            *rooms,
            bool(config.norm_before_residual),
            bool(config.norm_output),
        )

    def trim(self, slot: int) -> None:
        """See `slots.SlotModel.trim`."""
        super().trim(slot)
        forget(self.arrays.memory, slot)

    def reads(self, slot: int, token_ids: Sequence[int]) -> None:
        """Put the states of the next tokens where the forward pass finds them."""
        count = len(token_ids)
        self.arrays.target_states[slot, :count] = self.take(slot, count).float().numpy()
        self.arrays.counts[slot] = count

    def append(
        self, token_ids: Mapping[int, Sequence[int]], hidden: Sequence[int]
    ) -> list[tuple[Tensor, list[Tensor]]]:
        """See `slots.SlotModel.append`; there are no hidden states to be had."""
        last_logits: list[tuple[Tensor, list[Tensor]]] = []
        for slot, ids in token_ids.items():
            self.reads(slot, ids)
            logits = self._run([slot], TokenTree.chain(torch.tensor([ids])), 0, len(ids) - 1)
            last_logits.append((self.wide(logits)[0], []))
        return last_logits

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """See `slots.SlotModel.move`."""
        move_columns(self.arrays.memory, source, target)
