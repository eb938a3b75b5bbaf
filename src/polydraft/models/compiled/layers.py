"""The layers of a compiled model: which parts they have, with which weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polydraft.models.matrices.kernels import cap, layer_norm, rms_norm, scale_row
from polydraft.models.matrices.matrix_unit import for_prompts
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
from polydraft.models.mixers.latent_attention import OF_SINGLE_HEADS, latent_attention_block
from polydraft.models.mixers.layer import (
    ATTENTION,
    ATTENTION_AND_STATE_SPACE,
    CONVOLUTION,
    DELTA_NET,
    LATENT_ATTENTION,
    NO_BIAS,
    NOTHING,
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
    """All that a compiled function needs of a model.

    embed: [V, h].  norm: [h] before the head.  norm_bias: [h] or [0].  head_bias: [V] or [0].  prompt_lengths: [slots] first tokens that stand in a prompt.
    """

    embed: Packed
    head: Packed
    norm: np.ndarray
    sizes: Sizes
    memory: SlotMemory
    work: Workspace
    program: Program
    prompt_lengths: np.ndarray
    norm_bias: np.ndarray = NO_BIAS
    head_bias: np.ndarray = NO_BIAS


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
        Part(rounding_code, Rounding(step, work.normed, work.normed.shape[1], second.rounding, work.rounded)),
        *second.parts,
        Part(add_code, Add(mixed, work.update, replaces=False)),
    )
    return Block(first.rounding, parts)


MIXER_BLOCKS: dict[str, Callable[..., Block]] = {
    ATTENTION: attention_block,
    WIDE_ATTENTION: wide_attention_block,
    LATENT_ATTENTION: latent_attention_block,
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


class Norms(NamedTuple):
    """Of the norm before a block gain and bias, of that behind it the gain, and what is added to what the block gives; [layers, h] or [layers, 0] each."""

    gain: np.ndarray
    bias: np.ndarray
    out_gain: np.ndarray
    added: np.ndarray


def around(
    block: Block,
    sizes: Sizes,
    work: Workspace,
    step: np.ndarray,
    norms: Norms,
    update: np.ndarray,
) -> tuple[Part, Part]:
    """The norm before a block, and the sum behind it. update: what is added."""
    before = Norm(
        step,
        work.x,
        norms.gain,
        sizes.epsilon,
        work.normed,
        block.rounding,
        work.rounded,
        norms.bias,
        sizes.centred,
    )
    behind = Join(step, work.x, update, norms.added, norms.out_gain, sizes.epsilon, sizes.residual_scale)
    return Part(norm_code, before), Part(join_code, behind)


Parts = list[tuple[Part, int]]
"""Of a layer, in order, each with its index among the layers that have such a part."""


class _Enclosed(NamedTuple):
    """A block, the norm before it and the sum behind it."""

    block: Block
    before: Part
    behind: Part

    def of_layer(self, layer: int, index: int) -> Parts:
        """Its parts in a layer. index: among the layers that have such a block."""
        return [(self.before, layer), *_indexed(self.block.parts, index), (self.behind, layer)]


class _Builder(NamedTuple):
    """What the parts of all layers are made of."""

    weights: Weights
    sizes: Sizes
    work: Workspace
    step: np.ndarray

    def enclosed(self, block: Block, norms: Norms, update: np.ndarray) -> _Enclosed:
        """A block between a norm and a sum. update: what is added."""
        return _Enclosed(block, *around(block, self.sizes, self.work, self.step, norms, update))

    def mixing(
        self, mixers: Sequence[str], memories: Mapping[str, Any], update: np.ndarray
    ) -> dict[str, _Enclosed]:
        """By kind of mixer, what layers mix tokens with. memories: by kind.  update: what is added."""
        weights = self.weights
        norms = Norms(
            weights.attention_norm,
            weights.attention_norm_bias,
            weights.attention_out_norm,
            self.nothing_added,
        )
        mixing = dict[str, _Enclosed]()
        for kind in dict.fromkeys(mixers):
            if kind == NOTHING:
                continue
            memory = [memories[k] for k in SIDE_BY_SIDE[kind]] if kind in SIDE_BY_SIDE else memories[kind]
            block = MIXER_BLOCKS[kind](weights, self.sizes, memory, self.work, self.step)
            biased = norms._replace(added=weights.out_bias) if kind == ATTENTION else norms
            mixing[kind] = self.enclosed(block, biased, update)
        return mixing

    def feed_forwards(self, kinds: Iterable[bool]) -> dict[bool, _Enclosed]:
        """Feed-forwards of layers, by whether they are mixtures of experts."""
        weights = self.weights
        norms = Norms(weights.mlp_norm, weights.mlp_norm_bias, weights.mlp_out_norm, self.nothing_added)
        return {
            sparse: self.enclosed(
                _feed_forward(weights, self.sizes, self.work, self.step, sparse=sparse),
                norms,
                self.work.update,
            )
            for sparse in set(kinds)
        }

    @property
    def nothing_added(self) -> np.ndarray:
        """No bias of any layer."""
        return np.zeros((len(self.weights.attention_norm), 0), np.float32)


def layer_parts(
    weights: Weights, sizes: Sizes, memories: Mapping[str, Any], work: Workspace, step: np.ndarray
) -> list[Parts]:
    """Of layers that each mix tokens in their way, and then have a feed-forward, or one of the two. memories: by kind of mixer."""
    num_layers = len(weights.attention_norm)
    mixers = weights.mixers or (ATTENTION,) * num_layers
    is_sparse = weights.is_sparse or (False,) * num_layers
    has_feed_forward = weights.has_feed_forward or (True,) * num_layers
    indexes = _feed_forward_indexes(weights, is_sparse, has_feed_forward)
    builder = _Builder(weights, sizes, work, step)
    kept = aligned(*work.update.shape) if weights.parallel else work.update
    keep = Part(add_code, Add(work.update, kept, replaces=True))
    mixing = builder.mixing(mixers, memories, kept)
    feed_forwards = builder.feed_forwards(
        sparse for sparse, has in zip(is_sparse, has_feed_forward, strict=True) if has
    )
    first, ends = _around_layers(weights, sizes, work, step)
    layers = list[Parts]()
    for layer, mixer in enumerate(mixers):
        parts = Parts()
        last = Parts()
        if mixer != NOTHING:
            parts = mixing[mixer].of_layer(layer, mixers[:layer].count(mixer))
            if weights.parallel:
                last = [parts.pop()]
                parts.append((keep, layer))
        if has_feed_forward[layer]:
            parts += feed_forwards[is_sparse[layer]].of_layer(layer, indexes[layer])
        layers.append(parts + last + _indexed(ends, layer))
    layers[0][:0] = _indexed(first, 0)
    return layers


def _feed_forward_indexes(
    weights: Weights, is_sparse: Sequence[bool], has_feed_forward: Sequence[bool]
) -> list[int]:
    """Of each layer's feed-forward among those of its kind; one beside a mixture counts as both."""
    beside = weights.experts is not None and weights.experts.mixture.beside
    dense = [has and (beside or not sparse) for has, sparse in zip(has_feed_forward, is_sparse, strict=True)]
    return [
        sum(is_sparse[:layer]) if sparse else sum(dense[:layer]) for layer, sparse in enumerate(is_sparse)
    ]


def _indexed(parts: Sequence[Part], index: int) -> Parts:
    return [(part, index) for part in parts]


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


def _for_prompts(weights: Weights) -> Weights:
    """The same weights, of which the matrix unit multiplies all but those of experts and of single heads with rows of prompts."""

    def of_all(matrices: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: for_prompts(w) if isinstance(w, Packed) and name not in OF_SINGLE_HEADS else w
            for name, w in matrices.items()
        }

    dense = {"qkv": weights.qkv, "out": weights.out, "gate_up": weights.gate_up, "down": weights.down}
    wide = weights.wide and weights.wide._replace(weights=of_all(weights.wide.weights))
    return weights._replace(**of_all(dense), wide=wide, others=weights.others and of_all(weights.others))


def model_arrays(
    weights: Weights,
    sizes: Sizes,
    memory: SlotMemory,
    work: Workspace,
    states: Mapping[str, Any],
    prompt_lengths: np.ndarray | None = None,
) -> ModelArrays:
    """A model of such layers. states: memory of its kinds of mixers.  memory: of one kind of attention, whose slots are those of all.
    prompt_lengths: [slots] first tokens that stand in a prompt, which the matrix unit reads; None: it reads none."""
    if prompt_lengths is None:
        prompt_lengths = np.zeros(len(memory.lengths), np.int64)
    else:
        weights = _for_prompts(weights)
    step = new_step()
    layers = layer_parts(weights, sizes, states, work, step)
    program = new_program(
        [*layers, [(head_part(weights.head, sizes.outputs, work, step), 0)]], step, len(work.queries)
    )
    ends = weights.embed, weights.head, weights.norm
    biases = weights.norm_bias, weights.head_bias
    return ModelArrays(*ends, sizes, memory, work, program, prompt_lengths, *biases)


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
    matmul(x, w, k, rounded, y, zero, w.panels, rows, False)


@unowned
def _do_panels(arguments, begin, end, thread):
    """Panels begin .. end-1 of a product."""
    x, w, k, rounded, y, rows = arguments
    matmul(x, w, k, rounded, y, begin, end, rows, False)


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
def norm_states(model, rows):
    """The norm before the head, of the rows in work."""
    zero = np.int64(0)
    work = model.work
    if model.sizes.centred:
        layer_norm(work.x, model.norm, model.norm_bias, model.sizes.epsilon, work.normed, zero, rows)
    else:
        rms_norm(work.x, model.norm, model.sizes.epsilon, work.normed, zero, rows)


@inner
def finish_logits(sizes, bias, logits, rows):
    """Scale and cap what the head gave, with its bias. bias: [V] or [0]."""
    for t in range(rows):
        for i in range(len(bias)):
            logits[t, i] += bias[i]
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
    finish_logits(model.sizes, model.head_bias, logits, rows)
