"""Gemma 4's assistant in compiled code, in the slots of its target; see `heads.assistant`."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from polydraft.heads.assistant.checkpoint import CENTROIDS, EMBEDDING, ORDER, AssistantCheckpoint
from polydraft.heads.compiled import HEADS, CompiledHead
from polydraft.heads.layers import layer_bytes
from polydraft.heads.target_slots import TargetSlots
from polydraft.models.compiled.layers import layer_parts, multiply, multiply_shared, run_layer
from polydraft.models.compiled.weights import Ends, packed_weights
from polydraft.models.matrices.kernels import copy_row, rms_norm, scale_row
from polydraft.models.matrices.products import FORMATS, Packed, output_row, packed
from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.cache import SlotMemory
from polydraft.models.mixers.layer import ATTENTION, WIDE_ATTENTION, Weights
from polydraft.models.mixers.program import Program, new_program, new_step
from polydraft.models.mixers.workspace import CHUNK, Sizes, Workspace, cut_runs, workspace
from polydraft.models.slots import TREE_ROOM
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.floats import as_float32

BEYOND_WINDOW = 2
"""Tokens that its windows are wider by than those of the target: transformers masks a root at the position behind the keys so."""


class AssistantArrays(NamedTuple):
    """program: of the layers.  sizes, memory: of the assistant's heads; the target's.  embed, embedding_scale: the target's.

    given: [slots, S] the target's state before each root.  outputs: [slots, TREE_ROOM, S] what rows put out.  pairs: [CHUNK, 2 S].
    centroids: of groups of tokens, or no matrix.  order: [groups, tokens of a group].  chosen: groups whose tokens have logits.  rows: [CHUNK, outputs].
    """

    program: Program
    sizes: Sizes
    memory: SlotMemory
    work: Workspace
    embed: Packed
    embedding_scale: np.float32
    before: Packed
    behind: Packed
    norm: np.ndarray
    head: Packed
    given: np.ndarray
    outputs: np.ndarray
    pairs: np.ndarray
    states: np.ndarray
    centroids: Packed
    order: np.ndarray
    chosen: int
    groups: np.ndarray


@njit
def _join_pairs(model, rows):
    """Embeddings and states side by side, through the first projection into work.x; rows then stand where their root does."""
    work = model.work
    S = model.given.shape[1]
    for t in range(rows):
        row = work.rows[t]
        pair = model.pairs[t]
        output_row(model.embed, np.int64(0), row.token, pair)
        scale_row(pair[:S], model.embedding_scale)
        if row.column == row.length:
            copy_row(model.given[row.slot], pair[S:])
        else:
            parent = work.seen_columns[t, row.num_seen - 2] - row.length
            copy_row(model.outputs[row.slot, parent], pair[S:])
        row.position = row.length
        row.num_seen = 0
    multiply_shared(work, model.pairs, model.before, 0, work.rounded, work.update, rows)
    for t in range(rows):
        copy_row(work.update[t], work.x[t])


@njit
def _of_groups(model, rows, logits):
    """Logits of tokens of the best groups; all others have the least of them less 1."""
    work = model.work
    size = model.order.shape[1]
    multiply(work.normed, model.centroids, 0, work.rounded, model.groups, rows)
    weights = work.x[0]
    for t in range(rows):
        scores = model.groups[t]
        least = np.float32(np.inf)
        chosen = np.empty(model.chosen, np.int64)
        for j in range(model.chosen):
            best = np.int64(-1)
            for g in range(len(model.order)):
                if best < 0 or scores[g] > scores[best]:
                    best = np.int64(g)
            chosen[j] = best
            scores[best] = np.float32(-np.inf)
        found = np.empty(model.chosen * size, np.float32)
        for j in range(model.chosen):
            for i in range(size):
                output_row(model.head, np.int64(0), model.order[chosen[j], i], weights)
                total = np.float32(0.0)
                for k in range(work.normed.shape[1]):
                    total += work.normed[t, k] * weights[k]
                found[j * size + i] = total
                least = min(least, total)
        for i in range(logits.shape[1]):
            logits[t, i] = least - np.float32(1.0)
        for j in range(model.chosen):
            for i in range(size):
                logits[t, model.order[chosen[j], i]] = found[j * size + i]


@njit
def _run(model, rows, logits, done):
    """Run the rows in work; their logits go to logits[done:]. Returns how many logits there are now."""
    work = model.work
    zero: Any = np.int64(0)
    _join_pairs(model, rows)
    runs = cut_runs(work.rows, rows, work.runs)
    for l in range(len(model.program.layers) - 2):
        run_layer(model, l, rows, runs)
    rms_norm(work.x, model.norm, model.sizes.epsilon, work.normed, zero, rows)
    multiply_shared(work, work.normed, model.behind, 0, work.rounded, model.states, rows)
    num_logits = zero
    for t in range(rows):
        row = work.rows[t]
        copy_row(model.states[t], model.outputs[row.slot, row.column - row.length])
        if row.has_logits:
            copy_row(work.normed[t], work.normed[num_logits])
            num_logits += 1
    if num_logits > 0 and model.chosen > 0:
        _of_groups(model, num_logits, logits[done:])
    elif num_logits > 0:
        multiply_shared(work, work.normed, model.head, 0, work.rounded, logits[done:], num_logits)
    return done + num_logits


HEADS[AssistantArrays] = _run


class _Outside(NamedTuple):
    """Weights that are of no layer; see `AssistantArrays`. rows: of tokens."""

    rows: Packed
    before: Packed
    behind: Packed
    norm: np.ndarray
    centroids: Packed
    order: np.ndarray

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in (self.rows, self.before, self.behind, self.centroids))


class CompiledAssistant(TargetSlots, CompiledHead):
    """An assistant as a draft model in the target's own slots; see `core.Target`.

    quantization: of its matrices; it changes no distribution of the output.

    Raises:
        IncompatibleError: an assistant of another target, or a target that is not compiled.
    """

    def __init__(self, head: AssistantCheckpoint, target: Any, *, quantization: str = "int8") -> None:
        head.check(target)
        self.share(target)
        self.name = head.kind
        self.pool = target.pool
        outside = _outside(head, quantization)
        layers = _layers(head, target, outside, quantization)
        sizes = _sizes(head, layers, outside.rows.outputs, target.arrays.sizes.activation)
        S = head.config.state_size
        work = workspace(layers, sizes, target.num_threads, max(2 * S, max(layers.inners)))
        self.weight_bytes = outside.nbytes + layer_bytes([layers])
        self.arrays = AssistantArrays(
            program=_program(layers, sizes, target, work),
            sizes=sizes,
            memory=target.arrays.memory,
            work=work,
            embed=target.arrays.embed,
            embedding_scale=target.arrays.sizes.embedding_scale,
            before=outside.before,
            behind=outside.behind,
            norm=outside.norm,
            head=outside.rows,
            given=aligned(self.max_num_seqs, S),
            outputs=aligned(self.max_num_seqs, TREE_ROOM, S),
            pairs=aligned(CHUNK, 2 * S),
            states=aligned(CHUNK, outside.behind.outputs),
            centroids=outside.centroids,
            order=outside.order,
            chosen=head.config.chosen_centroids,
            groups=aligned(CHUNK, outside.centroids.outputs),
        )

    def give(self, slot: int, state: Float[np.ndarray, " S"]) -> None:
        """The target's state that the root of the next draft was drawn from."""
        self.arrays.given[slot] = state


def _outside(head: AssistantCheckpoint, quantization: str) -> _Outside:
    tensors = head.tensors
    has_groups = head.config.chosen_centroids > 0

    def matrix(name: str) -> Packed:
        return packed([as_float32(tensors[name])], FORMATS[quantization])

    order = np.zeros((0, 0), np.int64)
    if has_groups:
        order = tensors[ORDER].astype(np.int64).reshape(head.config.num_centroids, -1)
    return _Outside(
        rows=matrix(EMBEDDING),
        before=matrix("pre_projection.weight"),
        behind=matrix("post_projection.weight"),
        norm=as_float32(tensors["model.norm.weight"]),
        centroids=matrix(CENTROIDS) if has_groups else Packed.none(),
        order=order,
    )


def _layers(head: AssistantCheckpoint, target: Any, outside: _Outside, quantization: str) -> Weights:
    layers = packed_weights(
        head.layer,
        target.max_model_len + TREE_ROOM,
        None if quantization == "float32" else quantization,
        length=target.max_model_len,
        outer=Ends(outside.rows, outside.rows, outside.norm),
    )
    return _attending(layers.weights, target)


def _program(weights: Weights, sizes: Sizes, target: Any, work: Workspace) -> Program:
    """The layers, which read the memories of the target, and no parts behind them."""
    step = new_step()
    memories: dict[str, SlotMemory] = dict(zip((ATTENTION, WIDE_ATTENTION), target.memories, strict=True))
    layers = [*layer_parts(weights, sizes, memories, work, step), []]
    return new_program(layers, step, target.num_threads)


def _sizes(head: AssistantCheckpoint, weights: Weights, outputs: int, activation: int) -> Sizes:
    """The sizes of an assistant. activation: that of its target."""
    spec = head.layer.spec
    attention = spec.heads(head.config)[ATTENTION]
    return Sizes(
        head.config.num_attention_heads,
        attention.groups,
        attention.width,
        int(max(weights.inners)),
        outputs,
        np.float32(spec.epsilon),
        np.float32(spec.attention_scale),
        activation=activation,
        value_norm=head.layer.architecture.attention.value_norm,
    )


def _attending(weights: Weights, target: Any) -> Weights:
    """Layers that attend to the target's last layers of their kind that have keys and values, and make none."""
    spec = target.checkpoint.spec

    def attending(layers: int, kind: str) -> dict[str, np.ndarray]:
        last = len(spec.layers_with_keys(kind)) - 1
        return {"stores": np.full(layers, -1, np.int64), "sources": np.full(layers, last, np.int64)}

    windows = np.where(weights.windows > 0, weights.windows + BEYOND_WINDOW, 0)
    own = attending(len(windows), ATTENTION)
    wide = weights.wide
    of_wide = {**wide.weights, **attending(len(wide.weights["windows"]), WIDE_ATTENTION)}
    return weights._replace(windows=windows, wide=wide._replace(weights=of_wide), **own)
