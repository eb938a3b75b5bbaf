"""Attention: its weights, and its block; what is compiled is in `code`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.attention.code import Attention, PlaceHeads, attend_code, place_code
from polydraft.models.mixers.cache import SlotMemory
from polydraft.models.mixers.dense import Rounding, rounding_code
from polydraft.models.mixers.layer import (
    ATTENTION,
    Block,
    HeadNorms,
    LayerWeights,
    Shapes,
    Weights,
    is_set,
    product,
)
from polydraft.models.mixers.program import Items, Part, Work
from polydraft.models.mixers.workspace import CHUNK, Sizes, Workspace, room_of_heads
from polydraft.models.rotary import head_width
from polydraft.models.windows import setting

HEAD_NORMS = "self_attn.q_norm", "self_attn.k_norm"


@dataclass(frozen=True)
class AttentionWeights(LayerWeights):
    """See `LayerWeights`; by default Llama's.

    norms: names of those of queries and keys, where it has them, in their form.  each_has_norms: whether heads have gains of their own.
    bias, out_bias: whether its first and its last product have biases, or the setting that says so.
    output_gate: whether each head of queries has another one behind it, whose sigmoid its output is multiplied by.
    sinks: whether each head has a score more in its softmax, without a value.  value_norm: whether values have a norm, without a gain.
    """

    kind: str = ATTENTION
    matrices: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "out": ("self_attn.o_proj",),
        }
    )
    names: Mapping[str, str] = field(
        default_factory=lambda: {
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.sinks": "attn_sinks.weight",
        }
    )
    norms: tuple[str, ...] = ()
    norm_form: HeadNorms = field(default_factory=HeadNorms)
    each_has_norms: bool = False
    bias: bool | str = False
    out_bias: bool | str = False
    output_gate: bool = False
    sinks: bool = False
    value_norm: bool = False

    def has_bias(self, config: Any) -> bool:
        """Whether queries, keys and values have biases."""
        return is_set(self.bias, config)

    def shapes_of(self, config: Any, inputs: int | None = None) -> Shapes:
        """Of the weights of one layer. inputs: width of what it reads, default the model's."""
        width = head_width(config)
        hidden = config.hidden_size
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        outputs = [number * width for number in heads]
        qkv = self.matrices["qkv"]
        (out,) = self.matrices["out"]
        shapes: Shapes = {
            f"{name}.weight": (rows, inputs or hidden) for name, rows in zip(qkv, outputs, strict=True)
        }
        if self.output_gate:
            shapes[f"{qkv[0]}.weight"] = (2 * outputs[0], inputs or hidden)
        shapes[f"{out}.weight"] = (hidden, outputs[0])
        if self.has_bias(config):
            shapes |= {f"{name}.bias": (rows,) for name, rows in zip(qkv, outputs, strict=True)}
        if is_set(self.out_bias, config):
            shapes[f"{out}.bias"] = (hidden,)
        if self.sinks:
            shapes["self_attn.sinks"] = (config.num_attention_heads,)
        norms = self.norms if setting(config, "use_qk_norm", True) else ()
        counts = heads[:2] if self.norm_form.whole or self.each_has_norms else (1, 1)
        return shapes | {
            f"{name}.weight": (count, width) if self.each_has_norms else (count * width,)
            for name, count in zip(norms, counts, strict=False)
        }


def attention_block(
    weights: Weights, sizes: Sizes, memory: SlotMemory, work: Workspace, step: np.ndarray
) -> Block:
    """Keys and values go to the slot's column, then every row attends to those that it sees."""
    heads = PlaceHeads(step, sizes, work.rows, work.qkv, weights.bias, weights.q_norm, weights.k_norm,
                  weights.cos, weights.sin, weights.rotaries, weights.stores, memory,
                  weights.head_norms, weights.query_scales)  # fmt: skip
    seen = weights.windows, weights.sinks, weights.sources
    runs = Work(Items.RUNS, sizes.groups, sizes.heads // sizes.groups, grain=1)
    parts = (
        product(step, work.normed, weights.qkv, work.qkv, work),
        Part(place_code, heads),
        Part(attend_code, Attention(step, sizes, *seen, memory, work), runs),
        Part(
            rounding_code, Rounding(step, work.mixed, work.mixed.shape[1], weights.out.rounding, work.rounded)
        ),
        product(step, work.mixed, weights.out, work.update, work),
    )
    return Block(weights.qkv.rounding, parts)


def wide_attention_block(
    weights: Weights, sizes: Sizes, memory: SlotMemory, work: Workspace, step: np.ndarray
) -> Block:
    """The same of heads of another width, see `layer.WideAttention`."""
    wide = weights.wide
    own_sizes = sizes._replace(width=wide.width, groups=wide.groups, keys_as_values=wide.keys_as_values)
    numbers = (sizes.heads + 2 * wide.groups) * wide.width
    room = room_of_heads(own_sizes, len(work.queries))
    own_work = work._replace(qkv=aligned(CHUNK, max(wide.qkv.outputs, numbers)), **room)
    return attention_block(weights._replace(**wide.weights), own_sizes, memory, own_work, step)
