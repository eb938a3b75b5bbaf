"""A checkpoint's weights as a compiled Llama reads them: fused, stacked by layer, packed in panels, perhaps rounded.

They are read and packed one layer's matrix after the other: in memory are what is packed and that one matrix.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from polydraft.models.checkpoint import EMBEDDING, HEAD, Checkpoint, rotary
from polydraft.models.compiled.formats import BLOCKS, pack, pack_blocks, panels_for, raw_blocks
from polydraft.models.compiled.layers import Weights
from polydraft.models.compiled.products import FORMATS, Packed

__all__ = ["packed_weights"]

MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def _exact(model: Checkpoint, names: Iterable[str]) -> bool:
    """Whether bfloat16 loses nothing of these weights."""
    return all(
        model.outlines[n].dtype == torch.bfloat16 or torch.equal((w := model.read(n).float()), w.bfloat16().float())
        for n in names
    )


def _below_one_another(model: Checkpoint, names: Sequence[str]) -> Tensor:
    return model.read(names[0]) if len(names) == 1 else torch.cat([model.read(name) for name in names])


def packed_weights(model: Checkpoint, columns: int, quantization: str | None) -> tuple[Weights, str, float]:
    """Pack a model's weights; also returns their format, and their relative error: the root of sum |W - W'|^2 / sum |W|^2.

    columns: positions to prepare the rotation for.
    """
    prefixes = [f"model.layers.{layer}." for layer in range(model.config.num_hidden_layers)]
    names = {part: [[f"{prefix}{n}.weight" for n in group] for prefix in prefixes] for part, group in MATRICES.items()}
    names["head"] = [[EMBEDDING if model.tied else HEAD]]
    blocks_of = model.blocks if quantization in (None, "int8", "int4") else None
    found = {part: _blocks(blocks_of, layers) for part, layers in names.items()}
    others = [name for part, layers in names.items() if not found[part] for layer in layers for name in layer]
    stored = quantization or ("bfloat16" if _exact(model, others) else "float32")
    errors: list[tuple[float, float]] = []

    def stacked(*parts: str) -> np.ndarray:
        """Of each layer, one below another; empty where a model has none."""
        if f"{prefixes[0]}{parts[0]}" not in model.outlines:
            return np.zeros((len(prefixes), 0), np.float32)
        return torch.stack([torch.cat([model.read(f"{prefix}{part}").float() for part in parts]) for prefix in prefixes]).numpy()

    def packed(layers: Sequence[Sequence[str]], blocks: str | None) -> Packed:
        """The matrices of each layer below one another, in panels; blocks: their format in the file, if they stay as they are."""
        shapes = [model.outlines[name].shape for name in layers[0]]
        kind = BLOCKS[blocks] if blocks else FORMATS[stored].weights
        out = panels_for(sum(outputs for outputs, _ in shapes), shapes[0][1], kind, len(layers))
        for layer, panels in zip(layers, out, strict=True):
            if blocks and blocks_of:
                raw = np.concatenate([blocks_of(name)[1] for name in layer])
                pack_blocks(raw.view(raw_blocks(blocks)), panels)
            else:
                errors.append(pack(_below_one_another(model, layer), panels))
        return Packed.of(out, FORMATS[quantization or "float32"].activations)

    matrices = {part: packed(layers, found[part]) for part, layers in names.items()}
    lost, whole = (sum(each) for each in zip((0.0, 0.0), *errors, strict=True))
    cos, sin = rotary(model.config, columns, model.rope_factors)
    weights = Weights(
        embed=_embedding(model),
        norm=model.read("model.norm.weight").to(torch.float32, copy=True).numpy(),
        attention_norm=stacked("input_layernorm.weight"),
        mlp_norm=stacked("post_attention_layernorm.weight"),
        bias=stacked(*(f"{name}.bias" for name in MATRICES["qkv"])),
        q_norm=stacked("self_attn.q_norm.weight"),
        k_norm=stacked("self_attn.k_norm.weight"),
        **matrices,
        cos=cos.numpy(),
        sin=sin.numpy(),
    )
    kinds = sorted({kind for kind in found.values() if kind})
    told = stored if quantization or not kinds else ", ".join([*kinds, stored] if others else kinds)
    return weights, told, (lost / whole) ** 0.5 if lost else 0.0


def _blocks(blocks_of: Callable[[str], tuple[str, np.ndarray]] | None, layers: Sequence[Sequence[str]]) -> str | None:
    """The format of these matrices' blocks in a file, if all have the same."""
    if blocks_of is None:
        return None
    kinds = {blocks_of(name)[0] for layer in layers for name in layer}
    return kinds.pop() if len(kinds) == 1 and kinds <= BLOCKS.keys() else None


def _embedding(model: Checkpoint) -> np.ndarray:
    """Of all tokens, in bfloat16 where that loses nothing."""
    kept = torch.bfloat16 if _exact(model, [EMBEDDING]) else torch.float32
    return model.read(EMBEDDING).to(kept, copy=True).view(torch.uint16).numpy()
