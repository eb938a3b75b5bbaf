"""A checkpoint's weights as a compiled Llama reads them: fused, stacked by layer, packed in panels, perhaps rounded.

They are read and packed one layer's matrix after the other: in memory are what is packed and that one matrix.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from polydraft.models.checkpoint import EMBEDDING, HEAD, Checkpoint, rotary
from polydraft.models.compiled.forward import Weights
from polydraft.models.compiled.kernels import PANEL, aligned, pack

__all__ = ["packed_weights"]

MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
BLOCK = 4096
"""Rows of a matrix that are rounded at a time, to see what that loses."""


def _exact(model: Checkpoint, names: Iterable[str]) -> bool:
    """Whether bfloat16 loses nothing of these weights."""
    return all(
        model.outlines[n].dtype == torch.bfloat16 or torch.equal((w := model.read(n).float()), w.bfloat16().float())
        for n in names
    )


def _storage(model: Checkpoint, names: Sequence[str], quantization: str | None) -> type[np.generic]:
    """How matrices are stored: int8 if asked for; bfloat16 if asked for or if it loses nothing; else float32."""
    if quantization == "int8":
        return np.int8
    return np.uint16 if quantization == "bfloat16" or _exact(model, names) else np.float32


def _quantization_error(matrices: Iterable[Tensor], dtype: type[np.generic]) -> float:
    """Relative error of all matrices as they are stored: the root of sum |W - W'|^2 / sum |W|^2."""
    lost, whole = 0.0, 0.0
    for w in (rows.float() for matrix in matrices for rows in matrix.split(BLOCK)):
        step = w.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        stored = w.bfloat16().float() if dtype is np.uint16 else (w / step).round() * step
        lost, whole = lost + float((w - stored).square().sum()), whole + float(w.square().sum())
    return (lost / whole) ** 0.5


def _below_one_another(model: Checkpoint, names: Sequence[str]) -> Tensor:
    return model.read(names[0]) if len(names) == 1 else torch.cat([model.read(name) for name in names])


def _packed(model: Checkpoint, layers: Sequence[Sequence[str]], dtype: type[np.generic]) -> tuple[np.ndarray, np.ndarray]:
    """The matrices of each layer below one another, in panels [L, panels, inputs, PANEL], and their factors [L, outputs or 0].

    layers: names of each layer's matrices.
    """
    (outputs, inputs), *more = (model.outlines[name].shape for name in layers[0])
    outputs += sum(rows for rows, _ in more)
    out = aligned(len(layers), -(-outputs // PANEL), inputs, PANEL, dtype=dtype, huge=True)
    factors = [pack(_below_one_another(model, names), out[layer]) for layer, names in enumerate(layers)]
    return out, np.stack(factors) if dtype is np.int8 else np.zeros((len(layers), 0), np.float32)


def packed_weights(model: Checkpoint, columns: int, quantization: str | None) -> tuple[Weights, float]:
    """Pack a model's weights; also returns what storing them lost.

    columns: positions to prepare the rotation for.
    """
    prefixes = [f"model.layers.{layer}." for layer in range(model.config.num_hidden_layers)]
    names = {part: [[f"{prefix}{n}.weight" for n in group] for prefix in prefixes] for part, group in MATRICES.items()}
    head_name = EMBEDDING if model.tied else HEAD
    every = [name for layers in names.values() for layer in layers for name in layer] + [head_name]
    dtype = _storage(model, every, quantization)
    whole = dtype is np.float32 or (dtype is np.uint16 and (quantization is None or _exact(model, every)))

    def stacked(*parts: str) -> np.ndarray:
        """Of each layer, one below another; empty where a model has none."""
        if f"{prefixes[0]}{parts[0]}" not in model.outlines:
            return np.zeros((len(prefixes), 0), np.float32)
        return torch.stack([torch.cat([model.read(f"{prefix}{part}").float() for part in parts]) for prefix in prefixes]).numpy()

    packed = {part: _packed(model, layers, dtype) for part, layers in names.items()}
    head, head_factors = _packed(model, [[head_name]], dtype)
    shared = dtype is np.float32 and model.tied
    cos, sin = rotary(model.config, columns, model.rope_factors)
    weights = Weights(
        embed=np.zeros((0, model.config.hidden_size), np.float32)
        if shared
        else model.read(EMBEDDING).to(torch.float32, copy=True).numpy(),
        head=head[0],
        norm=model.read("model.norm.weight").to(torch.float32, copy=True).numpy(),
        attention_norm=stacked("input_layernorm.weight"),
        mlp_norm=stacked("post_attention_layernorm.weight"),
        bias=stacked(*(f"{name}.bias" for name in MATRICES["qkv"])),
        q_norm=stacked("self_attn.q_norm.weight"),
        k_norm=stacked("self_attn.k_norm.weight"),
        head_factors=head_factors[0],
        **{part: matrix for part, (matrix, _) in packed.items()},
        **{f"{part}_factors": factors for part, (_, factors) in packed.items()},
        cos=cos.numpy(),
        sin=sin.numpy(),
    )
    return weights, 0.0 if whole else _quantization_error(map(model.read, every), dtype)
