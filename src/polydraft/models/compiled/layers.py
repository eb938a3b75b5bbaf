"""The layers of a compiled model: which parts they have, with which weights."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from polydraft.models.matrices.kernels import cap, scale_row
from polydraft.models.matrices.products import Packed, matmul
from polydraft.models.matrices.rounding import quantize_rows
from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.attention import attention_block, wide_attention_block
from polydraft.models.mixers.cache import SlotMemory
from polydraft.models.mixers.delta_net import delta_net_block
from polydraft.models.mixers.delta_net.code import new_delta
from polydraft.models.mixers.dense import (
    Add,
    Head,
    Join,
    Norm,
    Rounding,
    add_code,
    head_code,
    join_code,
    norm_code,
    rounding_code,
)
from polydraft.models.mixers.experts.block import experts_beside_block, experts_block
from polydraft.models.mixers.feed_forward import feed_forward_block
from polydraft.models.mixers.layer import (
    ATTENTION,
    ATTENTION_AND_STATE_SPACE,
    CONVOLUTION,
    DELTA_NET,
    SIDE_BY_SIDE,
    STATE_SPACE,
    WIDE_ATTENTION,
    Block,
    Weights,
)
from polydraft.models.mixers.layer_inputs import Scale, input_parts, scale_code
from polydraft.models.mixers.program import (
    Part,
    Program,
    new_program,
    new_step,
    panel_grain,
    panel_work,
    replace_part,
    run_parts,
)
from polydraft.models.mixers.recurrent import StateKind, StateShape
from polydraft.models.mixers.short_convolution import convolution_block, new_convolution
from polydraft.models.mixers.state_space import state_space_block
from polydraft.models.mixers.state_space.code import new_state_space
from polydraft.models.mixers.workspace import NONE, Sizes, Workspace
from polydraft.numerics.compile_time import inner, unowned
from polydraft.numerics.shared_code import shared_code
from polydraft.numerics.threads import share


class ModelArrays(NamedTuple):
    """All that a compiled function needs of a model.  embed: [V, h].  norm: [h] before the head."""

    embed: Packed
    head: Packed
    norm: np.ndarray
    sizes: Sizes
    memory: SlotMemory
    work: Workspace
    program: Program


def head_part(head: Packed, outputs: int, work: Workspace, step: np.ndarray) -> Part:
    arguments = Head(step, work.normed, head, work.rounded, outputs)
    return Part(head_code, arguments, panel_work(head.panels, head.panel_bytes, len(work.queries)))


def side_by_side_block(
    weights: Weights, sizes: Sizes, memories: Sequence[Any], work: Workspace, step: np.ndarray
) -> Block:
    """Attention and a state space of the same input, added."""
    first = state_space_block(weights, sizes, memories[1], work, step)
    second = attention_block(weights, sizes, memories[0], work, step)
    mixed = aligned(*work.update.shape)
    parts = (
        *first.parts,
        Part(add_code, Add(work.update, mixed, replaces=True)),
        Part(rounding_code, Rounding(work.normed, work.normed.shape[1], second.rounding, work.rounded)),
        *second.parts,
        Part(add_code, Add(mixed, work.update, replaces=False)),
    )
    return Block(first.rounding, parts)


MIXER_BLOCKS: dict[str, Callable[..., Block]] = {
    ATTENTION: attention_block,
    WIDE_ATTENTION: wide_attention_block,
    CONVOLUTION: convolution_block,
    STATE_SPACE: state_space_block,
    ATTENTION_AND_STATE_SPACE: side_by_side_block,
    DELTA_NET: delta_net_block,
}
"""By kind of layer: what its block is made of, the memory being that of the kind."""
STATES: dict[str, Callable[[StateShape, np.ndarray], tuple[Any, StateKind]]] = {
    CONVOLUTION: new_convolution,
    STATE_SPACE: new_state_space,
    DELTA_NET: new_delta,
}
"""By kind of recurrent layer: new memory of a shape for the slots whose folded tokens are counted, as its parts and as `RecurrentMemory` take it."""


def around(
    block: Block,
    sizes: Sizes,
    work: Workspace,
    step: np.ndarray,
    gain: np.ndarray,
    out_gain: np.ndarray,
    out_bias: np.ndarray,
) -> tuple[Part, Part]:
    """The norm before a block, and the sum behind it."""
    before = Norm(step, work.x, gain, sizes.epsilon, work.normed, block.rounding, work.rounded)
    behind = Join(step, work.x, work.update, out_bias, out_gain, sizes.epsilon, sizes.residual_scale)
    return Part(norm_code, before), Part(join_code, behind)


def layer_parts(
    weights: Weights, sizes: Sizes, memories: Mapping[str, Any], work: Workspace, step: np.ndarray
) -> list[list[tuple[Part, int]]]:
    """Of layers that each mix tokens in their way, and then have a feed-forward. memories: by kind of mixer."""

    def indexed(
        block: Block, gains: tuple[np.ndarray, ...], layer: int, index: int
    ) -> list[tuple[Part, int]]:
        """Parts of a block with their index among the layers that have it; its norms are stacked over all layers."""
        before, behind = around_block[id(block)] = around_block.get(id(block)) or around(
            block, sizes, work, step, *gains
        )
        return [(before, layer), *((part, index) for part in block.parts), (behind, layer)]

    around_block: dict[int, tuple[Part, Part]] = {}
    num_layers = len(weights.attention_norm)
    none = np.zeros((num_layers, 0), np.float32)
    mixers = weights.mixers or (ATTENTION,) * num_layers
    memories = {
        **memories,
        **{mixer: [memories[k] for k in SIDE_BY_SIDE[mixer]] for mixer in SIDE_BY_SIDE if mixer in mixers},
    }
    blocks = {
        kind: MIXER_BLOCKS[kind](weights, sizes, memories[kind], work, step) for kind in dict.fromkeys(mixers)
    }
    biases = dict.fromkeys(mixers, none) | {ATTENTION: weights.out_bias}
    norms = (
        (weights.attention_norm, weights.attention_out_norm),
        (weights.mlp_norm, weights.mlp_out_norm, none),
    )
    is_sparse = weights.is_sparse or (False,) * num_layers
    feed_forwards = {kind: _feed_forward(weights, sizes, work, step, sparse=kind) for kind in {*is_sparse}}
    before, behind = _around_layers(weights, sizes, work, step)
    layers = [
        indexed(blocks[mixer], (*norms[0], biases[mixer]), l, mixers[:l].count(mixer))
        + indexed(feed_forwards[kind], norms[1], l, is_sparse[:l].count(kind))
        + [(part, l) for part in behind]
        for l, (mixer, kind) in enumerate(zip(mixers, is_sparse, strict=True))
    ]
    layers[0] = [(part, 0) for part in before] + layers[0]
    return layers


def _feed_forward(
    weights: Weights, sizes: Sizes, work: Workspace, step: np.ndarray, *, sparse: bool
) -> Block:
    """Of layers that are mixtures, or of those that are none."""
    experts = weights.experts
    if not sparse or experts is None:
        return feed_forward_block(weights, sizes, work, step)
    if experts.mixture.beside:
        return experts_beside_block(
            experts, feed_forward_block(weights, sizes, work, step), sizes, work, step
        )
    return experts_block(experts, sizes, work, step)


def _around_layers(
    weights: Weights, sizes: Sizes, work: Workspace, step: np.ndarray
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """What is before the first layer, and behind each."""
    scale = (Part(scale_code, Scale(step, work.x, weights.layer_scale)),)
    scaled = scale if weights.layer_scale.shape[1] else ()
    if weights.layer_inputs is None:
        return (), scaled
    before, behind = input_parts(weights.layer_inputs, sizes, work, step)
    return before, (*behind, *scaled)


def model_arrays(
    weights: Weights,
    sizes: Sizes,
    memory: SlotMemory,
    work: Workspace,
    states: Mapping[str, Any] = MappingProxyType({}),
) -> ModelArrays:
    """A model of such layers. states: memory of kinds of mixers other than attention."""
    step = new_step()
    layers = layer_parts(weights, sizes, {ATTENTION: memory, **states}, work, step)
    program = new_program(
        [*layers, [(head_part(weights.head, sizes.outputs, work, step), 0)]], step, len(work.queries)
    )
    return ModelArrays(weights.embed, weights.head, weights.norm, sizes, memory, work, program)


def with_head(model: ModelArrays, head: Packed) -> ModelArrays:
    """The model with other outputs, which take the place of those that it had."""
    replace_part(model.program, -1, head_part(head, head.outputs, model.work, model.program.step))
    return model._replace(head=head, sizes=model.sizes._replace(outputs=head.outputs))


@inner
def multiply(x, w, k, rounded, y, rows):
    """y[:rows] = x[:rows] @ W.T, W the k-th of packed matrices."""
    zero = np.int64(0)
    k = np.int64(k)  # a literal 0 would compile everything below twice
    quantize_rows(x, x.shape[1], w.rounding, rounded, zero, rows)
    matmul(x, w, k, rounded, y, zero, w.panels, rows)


@unowned
def _do_panels(arguments, begin, end, thread):
    """Panels begin .. end-1 of a product."""
    x, w, k, rounded, y, rows = arguments
    matmul(x, w, k, rounded, y, begin, end, rows)


@inner
def multiply_shared(work, x, w, k, rounded, y, rows):
    """`multiply` on as many threads as a forward pass with this workspace."""
    zero = np.int64(0)
    k = np.int64(k)
    threads = len(work.queries)
    quantize_rows(x, x.shape[1], w.rounding, rounded, zero, rows)
    code = shared_code(_do_panels, (x, w, k, rounded, y, rows))
    share(
        work.sync, threads, code, np.int64(w.panels), np.int64(panel_grain(w.panels, w.panel_bytes, threads))
    )


@inner
def finish_logits(sizes, logits, rows):
    """Scale and cap what the head gave."""
    for t in range(rows):
        scale_row(logits[t], sizes.logit_scale)
        if sizes.logit_cap > NONE:
            cap(logits[t], np.int64(0), len(logits[t]), sizes.logit_cap)


@inner
def run_layer(model, layer, rows, runs):
    """Run the rows in work, whose states are in work.x, through a layer. runs: of `cut_runs`."""
    run_parts(model.program, layer, rows, runs, np.int64(0))


@inner
def run_head(model, rows, logits):
    """Logits of rows whose states are in work.normed, in panels."""
    work = model.work
    zero = np.int64(0)
    program = model.program
    quantize_rows(work.normed, work.normed.shape[1], model.head.rounding, work.rounded, zero, rows)
    run_parts(program, np.int64(len(program.layers) - 2), rows, zero, np.int64(logits.ctypes.data))
    finish_logits(model.sizes, logits, rows)
