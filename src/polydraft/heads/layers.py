"""Layers of compiled heads: packed and stacked as a model's, as lists of parts that all threads of the target share.

What a head does before and between its layers is its own; see `heads.block.compiled` and `heads.eagle.compiled`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft.heads.checkpoint import HeadCheckpoint, embeddings
from polydraft.models.checkpoint import head_width, rotary
from polydraft.models.compiled.cache import SlotMemory
from polydraft.models.compiled.layers import Block, Weights, around, attention_block, feed_forward_block
from polydraft.models.compiled.llama import CompiledLlama
from polydraft.models.compiled.products import BYTES, FORMATS, Format, Packed, packed
from polydraft.models.compiled.program import Part
from polydraft.models.compiled.workspace import ONE, Sizes, Workspace

__all__ = ["layer_parts", "packed_embedding", "packed_layers", "packed_outputs", "sizes_of"]


def sizes_of(config: Any, outputs: int, **others: Any) -> Sizes:
    """Of layers of a head's configuration. outputs: of its head, in whole panels."""
    width = head_width(config)
    heads = config.num_attention_heads, config.num_key_value_heads, width
    return Sizes(*heads, config.intermediate_size, outputs, np.float32(config.rms_norm_eps), np.float32(width**-0.5), **others)


def packed_layers(
    tensors: Mapping[str, Tensor], prefixes: Sequence[str], config: Any, columns: int, kind: Format, embed: Packed, head: Packed
) -> Weights:
    """Layers whose tensors have these prefixes, of one shape. columns: positions to prepare the rotation for."""

    def matrix(*names: str) -> Packed:
        each = ([tensors[f"{prefix}{name}_proj.weight"].float() for name in names] for prefix in prefixes)
        return packed([torch.cat(parts) for parts in each], kind)

    def vector(name: str) -> np.ndarray:
        rows = [tensors[full] for prefix in prefixes if (full := f"{prefix}{name}.weight") in tensors]
        return torch.stack(rows).float().numpy() if rows else none

    none, zeros = np.zeros((len(prefixes), 0), np.float32), np.zeros(len(prefixes), np.int64)
    cos, sin = (table[None].numpy() for table in rotary(config, columns))
    return Weights(
        embed=embed,
        head=head,
        norm=tensors["norm.weight"].float().numpy(),
        attention_norm=vector("input_layernorm"),
        attention_out_norm=none,
        mlp_norm=vector("post_attention_layernorm"),
        mlp_out_norm=none,
        qkv=matrix("self_attn.q", "self_attn.k", "self_attn.v"),
        bias=none,
        q_norm=vector("self_attn.q_norm"),
        k_norm=vector("self_attn.k_norm"),
        out=matrix("self_attn.o"),
        out_bias=none,
        sinks=none,
        gate_up=matrix("mlp.gate", "mlp.up"),
        down=matrix("mlp.down"),
        cos=cos,
        sin=sin,
        rotaries=zeros,
        windows=zeros,
    )


def layer_parts(
    weights: Weights, sizes: Sizes, memory: SlotMemory, work: Workspace, step: np.ndarray, sights: Sequence[Workspace] = ()
) -> list[list[tuple[Part, int]]]:
    """The parts of each layer, for `program.new_program`. sights: whose rows say what the rows of each layer see, default work's."""

    def surrounded(block: Block, gain: np.ndarray) -> tuple[Part, ...]:
        before, behind = around(block, sizes, work, step, gain, weights.out_bias, weights.out_bias)
        return before, *block.parts, behind

    sights = sights or [work] * len(weights.windows)
    attentions = {
        id(sight): surrounded(attention_block(weights, sizes, memory, work, step, sight), weights.attention_norm)
        for sight in {id(sight): sight for sight in sights}.values()
    }
    feed_forward = surrounded(feed_forward_block(weights, sizes, work, step), weights.mlp_norm)
    return [[(part, l) for part in (*attentions[id(sight)], *feed_forward)] for l, sight in enumerate(sights)]


def packed_embedding(head: HeadCheckpoint, target: Any, kind: Format) -> Packed:
    """Of the head where it has one, else the target's: the very memory of a compiled one that does not scale it."""
    own = head.tensors.get("embed_tokens.weight")
    if own is None and isinstance(target, CompiledLlama) and target.arrays.sizes.embedding_scale == ONE:
        return target.arrays.embed
    exact = own is not None and own.dtype == torch.float32 and kind == FORMATS["float32"]
    return packed([embeddings(target) if own is None else own], FORMATS["float32" if exact else "bfloat16"])


def packed_outputs(head: HeadCheckpoint, target: Any, num_drafts: int, kind: Format) -> Packed:
    """Rows of the draft vocabulary: the head's own, or the target's; the very memory of a compiled one that has as few bits."""
    if isinstance(target, CompiledLlama) and "lm_head.weight" not in head.tensors and num_drafts == target.vocab_size:
        theirs = target.arrays.head
        few_bits = head.shares_rows or theirs.rounding == BYTES or kind.rounding != BYTES
        if few_bits and target.arrays.sizes.logit_scale == ONE:
            return theirs
    return packed([head.output(target)[:num_drafts]], kind)
