"""A transformers model's weights as a compiled Llama reads them: fused, stacked by layer, packed in panels, perhaps rounded."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft.models.kernels import PANEL, aligned, pack
from polydraft.models.llama_pass import Weights

__all__ = ["packed_weights"]


def _stack(parts: Sequence[Tensor]) -> np.ndarray:
    return torch.stack([x.detach() for x in parts]).float().numpy()


def _quantization_error(matrices: Sequence[Tensor], dtype: type[np.generic]) -> float:
    """Relative error of all matrices as they are stored: the root of sum |W - W'|^2 / sum |W|^2."""
    if dtype is np.float32:
        return 0.0
    lost, whole = 0.0, 0.0
    for matrix in matrices:
        w = matrix.detach().float()
        step = w.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        stored = w.bfloat16().float() if dtype is np.uint16 else (w / step).round() * step
        lost, whole = lost + float((w - stored).square().sum()), whole + float(w.square().sum())
    return (lost / whole) ** 0.5


def _packed(layers: Sequence[Sequence[Tensor]], dtype: type[np.generic]) -> tuple[np.ndarray, np.ndarray]:
    """The matrices of each layer below one another, in panels [L, panels, inputs, PANEL], and their factors [L, outputs or 0]."""
    outputs, inputs = sum(len(w) for w in layers[0]), layers[0][0].shape[1]
    out = aligned(len(layers), -(-outputs // PANEL), inputs, PANEL, dtype=dtype, huge=True)
    factors = [pack(torch.cat([w.detach() for w in matrices]), out[layer]) for layer, matrices in enumerate(layers)]
    return out, np.stack(factors) if dtype is np.int8 else np.zeros((len(layers), 0), np.float32)


def _storage(matrices: Sequence[Tensor], quantization: str | None) -> type[np.generic]:
    """How matrices are stored: int8 if asked for; bfloat16 if asked for or if it loses nothing; else float32."""
    if quantization == "int8":
        return np.int8
    exact = all(torch.equal(w.detach().float(), w.detach().bfloat16().float()) for w in matrices)
    return np.uint16 if quantization == "bfloat16" or exact else np.float32


def packed_weights(model: Any, columns: int, quantization: str | None) -> tuple[Weights, float]:
    """Take a transformers model's weights; also returns what storing them lost."""
    inner = model.model
    layers = inner.layers
    attention, mlp = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
    projections = [(a.q_proj, a.k_proj, a.v_proj) for a in attention]
    biased, normed = attention[0].q_proj.bias is not None, hasattr(attention[0], "q_norm")
    none = torch.empty(0)
    half = attention[0].head_dim // 2
    cos, sin = inner.rotary_emb(torch.zeros(1), torch.arange(columns)[None])
    matrices = {
        "qkv": [[p.weight for p in three] for three in projections],
        "out": [[a.o_proj.weight] for a in attention],
        "gate_up": [[m.gate_proj.weight, m.up_proj.weight] for m in mlp],
        "down": [[m.down_proj.weight] for m in mlp],
    }
    every = [w for parts in matrices.values() for layer in parts for w in layer]
    every.append(model.lm_head.weight)
    dtype = _storage(every, quantization)
    tied = dtype is np.float32 and model.lm_head.weight is inner.embed_tokens.weight
    packed = {name: _packed(parts, dtype) for name, parts in matrices.items()}
    head, head_factors = _packed([[model.lm_head.weight]], dtype)
    weights = Weights(
        embed=np.zeros((0, model.config.hidden_size), np.float32)
        if tied
        else inner.embed_tokens.weight.detach().float().numpy().copy(),
        head=head[0],
        norm=_stack([inner.norm.weight])[0],
        attention_norm=_stack([layer.input_layernorm.weight for layer in layers]),
        mlp_norm=_stack([layer.post_attention_layernorm.weight for layer in layers]),
        bias=_stack([torch.cat([p.bias for p in three]) if biased else none for three in projections]),
        q_norm=_stack([a.q_norm.weight if normed else none for a in attention]),
        k_norm=_stack([a.k_norm.weight if normed else none for a in attention]),
        head_factors=head_factors[0],
        **{name: matrix for name, (matrix, _) in packed.items()},
        **{f"{name}_factors": factors for name, (_, factors) in packed.items()},
        cos=cos[0, :, :half].numpy().copy(),
        sin=sin[0, :, :half].numpy().copy(),
    )
    return weights, _quantization_error(every, dtype)
