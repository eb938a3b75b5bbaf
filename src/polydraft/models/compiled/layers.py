"""The layers of a compiled model: which parts they have, with which weights."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from polydraft.models.compiled.architectures.base import (
    ATTENTION,
    ATTENTION_AND_STATE_SPACE,
    CONVOLUTION,
    DELTA_NET,
    SIDE_BY_SIDE,
    STATE_SPACE,
)
from polydraft.models.compiled.cache import SlotMemory
from polydraft.models.compiled.kernels import cap, scale_row
from polydraft.models.compiled.mixtures import ExpertWeights, expert_parts
from polydraft.models.compiled.parts.attention import Attention, Place, attend_code, place_code
from polydraft.models.compiled.parts.delta_net import (
    DeltaMemory,
    DeltaNet,
    DeltaWeights,
    delta_code,
    delta_scratch,
    new_delta,
)
from polydraft.models.compiled.parts.feed_forward import Gate, gate_code
from polydraft.models.compiled.parts.products import (
    Add,
    Bias,
    Head,
    Join,
    Norm,
    Product,
    Rounding,
    add_code,
    bias_code,
    head_code,
    join_code,
    norm_code,
    product_code,
    rounding_code,
)
from polydraft.models.compiled.parts.short_convolution import (
    ConvolutionMemory,
    GatedConvolution,
    KeepInputs,
    convolve_code,
    keep_inputs_code,
    new_convolution,
)
from polydraft.models.compiled.parts.state_space import (
    GatedNorm,
    KeepRows,
    Mix,
    Overlap,
    Scan,
    StateSpaceMemory,
    gated_norm_code,
    keep_rows_code,
    mix_code,
    new_state_space,
    overlap_code,
    scan_code,
    scan_scratch,
)
from polydraft.models.compiled.products import Packed, matmul
from polydraft.models.compiled.program import (
    Items,
    Part,
    Program,
    Work,
    new_program,
    new_step,
    panel_grain,
    panel_work,
    replace_part,
    run_parts,
)
from polydraft.models.compiled.recurrent import BLOCK, PENDING, StateKind, StateShape
from polydraft.models.compiled.rounding import quantize_rows
from polydraft.models.compiled.vectors import aligned
from polydraft.models.compiled.workspace import CHUNK, NONE, Sizes, Workspace
from polydraft.numerics.compile_time import inner, unowned
from polydraft.numerics.shared_code import shared_code
from polydraft.numerics.threads import share


class Weights(NamedTuple):
    """All layers stacked: first axis = layer; absent parts are empty."""

    embed: Packed  # [V, h]
    head: Packed
    norm: np.ndarray  # [h]
    attention_norm: np.ndarray  # [L, h]
    attention_out_norm: np.ndarray  # [L, h] or [L, 0]
    mlp_norm: np.ndarray  # [L, h]
    mlp_out_norm: np.ndarray  # [L, h] or [L, 0]
    qkv: Packed
    bias: np.ndarray  # [L, (H + 2 G) D] or [L, 0]
    q_norm: np.ndarray  # [L, D] or [L, 0]
    k_norm: np.ndarray  # [L, D] or [L, 0]
    out: Packed
    out_bias: np.ndarray  # [L, h] or [L, 0]
    sinks: np.ndarray  # [L, H] or [L, 0]
    gate_up: Packed
    down: Packed
    cos: np.ndarray  # [rotaries, columns, half of the rotated numbers of a head]
    sin: np.ndarray
    rotaries: np.ndarray  # [L] which of them a layer has, or -1
    windows: np.ndarray  # [L] tokens that a row attends to, itself included, or 0 for all
    is_sparse: tuple[bool, ...] = ()  # [L] whether the feed-forward of a layer is a mixture of experts
    experts: ExpertWeights | None = None  # of these layers; `gate_up` and `down` are of the others
    mixers: tuple[str, ...] = ()  # kind of each layer, of `architectures.base.MIXERS`
    others: Any = None  # stacked weights of other kinds of layers than attention, by their names there


class ModelArrays(NamedTuple):
    """All that a compiled function needs of a model.  embed: [V, h].  norm: [h] before the head."""

    embed: Packed
    head: Packed
    norm: np.ndarray
    sizes: Sizes
    memory: SlotMemory
    work: Workspace
    program: Program


class Block(NamedTuple):
    """What stands between a norm and the sum with what went into it. rounding: of the input.  Its parts leave what is added in `work.update`."""

    rounding: int
    parts: tuple[Part, ...]


def product(step: np.ndarray, x: np.ndarray, w: Packed, y: np.ndarray, work: Workspace) -> Part:
    """y = x W^T, where x was rounded into `work.rounded`."""
    items = panel_work(w.panels, w.panel_bytes, len(work.queries))
    return Part(product_code, Product(step, x, w, work.rounded, y), items)


def biased_product(
    step: np.ndarray, x: np.ndarray, w: Packed, y: np.ndarray, work: Workspace, bias: np.ndarray
) -> tuple[Part, ...]:
    """y = x W^T + bias. bias: [layers, outputs], or [layers, 0]."""
    added = (Part(bias_code, Bias(step, y, bias)),) if bias.shape[1] else ()
    return product(step, x, w, y, work), *added


def attention_block(
    weights: Weights, sizes: Sizes, memory: SlotMemory, work: Workspace, step: np.ndarray
) -> Block:
    """Keys and values go to the slot's column, then every row attends to those that it sees."""
    heads = Place(step, sizes, work.rows, work.qkv, weights.bias, weights.q_norm, weights.k_norm,
                  weights.cos, weights.sin, weights.rotaries, memory)  # fmt: skip
    runs = Work(Items.RUNS, sizes.groups, sizes.heads // sizes.groups, grain=1)
    parts = (
        product(step, work.normed, weights.qkv, work.qkv, work),
        Part(place_code, heads),
        Part(attend_code, Attention(step, sizes, weights.windows, weights.sinks, memory, work), runs),
        Part(rounding_code, Rounding(work.mixed, work.mixed.shape[1], weights.out.rounding, work.rounded)),
        product(step, work.mixed, weights.out, work.update, work),
    )
    return Block(weights.qkv.rounding, parts)


def convolution_block(
    weights: Weights, sizes: Sizes, memory: ConvolutionMemory, work: Workspace, step: np.ndarray
) -> Block:
    """Inputs become pending rows, then every row takes those of its path; see `parts.short_convolution`."""
    of = weights.others
    into = of["conv_in"]
    out = of["conv_out"]
    taps = of["conv_taps"]
    taps = np.ascontiguousarray(taps[:, :, 0].swapaxes(1, 2))
    x = aligned(CHUNK, into.outputs)
    mixed = aligned(CHUNK, taps.shape[2])
    convolution = GatedConvolution(
        step,
        work.rows,
        work.seen_columns,
        x,
        memory,
        taps,
        of["conv_taps_bias"],
        mixed,
        out.rounding,
        work.rounded,
    )
    parts = (
        *biased_product(step, work.normed, into, x, work, of["conv_in_bias"]),
        Part(keep_inputs_code, KeepInputs(step, work.rows, x, memory)),
        Part(convolve_code, convolution),
        *biased_product(step, mixed, out, work.update, work, of["conv_out_bias"]),
    )
    return Block(into.rounding, parts)


def state_space_block(
    weights: Weights, sizes: Sizes, memory: StateSpaceMemory, work: Workspace, step: np.ndarray
) -> Block:
    """All rows behind the convolution, then each head of all rows; see `parts.state_space`."""
    of = weights.others
    s = memory.sizes
    into = of["ssm_in"]
    out = of["ssm_out"]
    taps = np.ascontiguousarray(of["ssm_taps"][:, :, 0].swapaxes(1, 2))
    x = aligned(CHUNK, into.outputs)
    mixed = aligned(CHUNK, s.channels)
    y = aligned(CHUNK, s.inner)
    overlaps = aligned(CHUNK, s.groups, BLOCK)
    rows = (step, work.rows, work.seen_columns)
    scan = Scan(*rows, memory, of["ssm_skips"], mixed, overlaps, y, scan_scratch(s, CHUNK, len(work.queries)))
    mix = Mix(
        *rows, x, memory, taps, of["ssm_taps_bias"], -np.exp(of["ssm_rates"]), of["ssm_rate_bias"], mixed
    )
    norm = GatedNorm(step, x, y, of["ssm_norm"], s.groups, sizes.epsilon, out.rounding, work.rounded)
    parts = (
        *biased_product(step, work.normed, into, x, work, of["ssm_in_bias"]),
        Part(keep_rows_code, KeepRows(step, work.rows, x, memory)),
        Part(mix_code, mix, Work(grain=1)),
        Part(overlap_code, Overlap(*rows, memory, mixed, overlaps), Work(grain=1)),
        Part(scan_code, scan, Work(Items.FIXED, s.heads, grain=1)),
        Part(gated_norm_code, norm),
        *biased_product(step, y, out, work.update, work, of["ssm_out_bias"]),
    )
    return Block(into.rounding, parts)


def delta_net_block(
    weights: Weights, sizes: Sizes, memory: DeltaMemory, work: Workspace, step: np.ndarray
) -> Block:
    """Each key head of a slot's rows with its value heads; see `parts.delta_net`."""
    of = weights.others
    d = memory.sizes
    into = of["delta_in"]
    out = of["delta_out"]
    values = d.value_heads * d.value_width
    taps = np.ascontiguousarray(of["delta_taps"][:, :, 0].swapaxes(1, 2))
    numbers = DeltaWeights(taps, -np.exp(of["delta_rate"]), of["delta_rate_bias"], of["delta_norm"])
    x = aligned(CHUNK, into.outputs)
    mixed = aligned(CHUNK, values)
    scratch = delta_scratch(d, CHUNK, PENDING, len(work.queries))
    net = DeltaNet(step, work.rows, work.runs, work.seen_columns, numbers, memory, x, mixed, scratch)
    parts = (
        product(step, work.normed, into, x, work),
        Part(delta_code, net, Work(Items.RUNS, d.key_heads, grain=1)),
        Part(rounding_code, Rounding(mixed, values, out.rounding, work.rounded)),
        product(step, mixed, out, work.update, work),
    )
    return Block(into.rounding, parts)


def feed_forward_block(weights: Weights, sizes: Sizes, work: Workspace, step: np.ndarray) -> Block:
    """Down times (activation(gate) up)."""
    gate = Gate(work.gate_up, sizes.inner, sizes.activation, work.act, weights.down.rounding, work.rounded)
    parts = (
        product(step, work.normed, weights.gate_up, work.gate_up, work),
        Part(gate_code, gate, Work(grain=1)),
        product(step, work.act, weights.down, work.update, work),
    )
    return Block(weights.gate_up.rounding, parts)


def experts_block(weights: ExpertWeights, sizes: Sizes, work: Workspace, step: np.ndarray) -> Block:
    """A mixture of experts."""
    return Block(weights.gate_up.rounding, expert_parts(weights, sizes, work, step))


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
    feed_forwards = {
        kind: experts_block(weights.experts, sizes, work, step)
        if kind and weights.experts
        else feed_forward_block(weights, sizes, work, step)
        for kind in {*is_sparse}
    }
    return [
        indexed(blocks[mixer], (*norms[0], biases[mixer]), l, mixers[:l].count(mixer))
        + indexed(feed_forwards[kind], norms[1], l, is_sparse[:l].count(kind))
        for l, (mixer, kind) in enumerate(zip(mixers, is_sparse, strict=True))
    ]


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
