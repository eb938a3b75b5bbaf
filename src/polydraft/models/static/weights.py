"""Weights of a transformers Llama as the static path reads them: projections fused in torch, shared with the module."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Layer", "fused_layer"]


class Layer(NamedTuple):
    """Weights of one decoder layer; absent parts are None."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def _fused(*modules: Any) -> tuple[Tensor, Tensor | None]:
    """The modules' matrices below one another, and their biases; the modules then hold views of them."""
    weight = torch.cat([m.weight.detach() for m in modules])
    bias = None if modules[0].bias is None else torch.cat([m.bias.detach() for m in modules])
    for m, part in zip(modules, weight.split([len(m.weight) for m in modules]), strict=True):
        m.weight.data = part
    return weight, bias


def fused_layer(layer: Any) -> Layer:
    """The weights of one decoder layer of transformers; its q, k, v and gate, up become views of the fused matrices."""
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name).weight.detach() if hasattr(attention, name) else None for name in ("q_norm", "k_norm")]
    ends = [(m.weight.detach(), None if m.bias is None else m.bias.detach()) for m in (attention.o_proj, mlp.down_proj)]
    return Layer(
        layer.input_layernorm.weight.detach(),
        *_fused(attention.q_proj, attention.k_proj, attention.v_proj),
        *norms,
        *ends[0],
        layer.post_attention_layernorm.weight.detach(),
        *_fused(mlp.gate_proj, mlp.up_proj),
        *ends[1],
    )
