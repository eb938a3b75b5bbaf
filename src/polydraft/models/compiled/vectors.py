"""What layers of a compiled model have beside the matrices of products: norms, biases, sinks, tables of rotary positions; stacked by layer."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from polydraft.models.loading.checkpoint import Checkpoint
from polydraft.models.mixers.layer import ATTENTION, NO_BIAS
from polydraft.models.networks import ModelSpec
from polydraft.models.networks.base import HEAD_BIAS
from polydraft.models.rotary import rotary
from polydraft.numerics.floats import as_float32


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def vectors(
    model: Checkpoint, spec: ModelSpec, columns: int, length: int | None, dense: Sequence[int]
) -> dict[str, Any]:
    """Fields of `Weights` that are no matrices. columns, length: as of `packed_weights`.  dense: layers with a feed-forward that is no mixture."""
    return {
        **_vectors_of_layers(model, spec),
        **vectors_of_attention(model, spec, ATTENTION),
        **_vectors_of_feed_forwards(model, dense),
        **_biases_of_ends(model),
        **rotation(model, spec, columns, length, ATTENTION),
        "mixers": spec.mixers,
        "parallel": spec.parallel,
        "latent": spec.latent,
        "head_norms": model.architecture.attention.norm_form,
        "query_scales": query_scales(spec, columns),
    }


def stacked(
    model: Checkpoint, parts: Sequence[str], layers: Sequence[int], offset: float = 0.0
) -> np.ndarray:
    """Vectors of each layer, those of several names one behind another; empty where its first one has none, and zero in others that have none."""
    if not parts or not layers or f"{layer_prefix(layers[0])}{parts[0]}" not in model.outlines:
        return np.zeros((len(layers), 0), np.float32)
    shapes = {part: model.outlines[f"{layer_prefix(layers[0])}{part}"].shape for part in parts}

    def read(layer: int, part: str) -> np.ndarray:
        name = f"{layer_prefix(layer)}{part}"
        if name not in model.outlines:
            return np.zeros(shapes[part], np.float32)
        return as_float32(model.read(name)).reshape(model.outlines[name].shape)

    vectors = [np.concatenate([read(layer, part) for part in parts]) for layer in layers]
    return np.stack(vectors) + np.float32(offset)


def _vectors_of_layers(model: Checkpoint, spec: ModelSpec) -> dict[str, Any]:
    """Norms of all layers, and what else all of them have that is no product, by the fields of `Weights`."""
    network = model.architecture
    names = network.norms_of(model.config)
    everywhere = range(len(spec.mixers))
    out_biases = [f"{name}.bias" for name in network.attention.matrices["out"]]
    plain = np.ones((len(everywhere), model.config.hidden_size), np.float32)
    norms = {
        role: plain
        if network.plain_norms and role in names
        else stacked(
            model,
            [f"{names[role]}.weight"] if role in names else [],
            everywhere,
            model.norm_offset,
        )
        for role in ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
    }
    norm_biases = {
        f"{role}_bias": stacked(model, [f"{names[role]}.bias"] if role in names else [], everywhere)
        for role in ("attention_norm", "mlp_norm")
    }
    scale = [name for name in [network.beside.vectors.get("layer_scale")] if name]
    return {
        **norms,
        **norm_biases,
        "out_bias": stacked(model, out_biases, everywhere),
        "layer_scale": stacked(model, scale, everywhere),
    }


def vectors_of_attention(model: Checkpoint, spec: ModelSpec, kind: str) -> dict[str, Any]:
    """What layers of a kind of attention have beside their products, by the fields of `Weights`."""
    attention = model.architecture.attention
    attending = spec.layers(kind)
    own = spec.layers_with_keys(kind)
    sources = [spec.sources[layer] if spec.sources else layer for layer in attending]
    head_norms = {
        role: _of_all_heads(stacked(model, [f"{name}.weight"] if name else [], attending, model.norm_offset))
        for role, name in zip_longest(("q_norm", "k_norm"), attention.norms)
    }
    biases = [f"{name}.bias" for name in attention.matrices["qkv"]]
    return {
        **head_norms,
        "bias": stacked(model, biases, attending),
        "sinks": stacked(model, ["self_attn.sinks"], attending),
        "stores": np.array([own.index(layer) if layer in own else -1 for layer in attending], np.int64),
        "sources": np.array([own.index(layer) for layer in sources], np.int64),
    }


def _of_all_heads(gains: np.ndarray) -> np.ndarray:
    """Gains of heads, one behind another where each has its own: [L, H D] of [L, H, D]."""
    return gains if gains.ndim == 2 else gains.reshape(len(gains), -1)


def _vectors_of_feed_forwards(model: Checkpoint, layers: Sequence[int]) -> dict[str, np.ndarray]:
    """What feed-forwards have beside their products, by the fields of `Weights`."""
    part = model.architecture.feed_forward
    biases = {
        f"{role}_bias": [f"{name}.bias" for name in part.matrices[role]] for role in ("gate_up", "down")
    }
    alphas = [_alphas(model, layer) for layer in layers]
    of_layers = {role: stacked(model, parts, layers) for role, parts in biases.items()}
    return {**of_layers, "alphas": np.array(alphas or np.zeros((0, 0)), np.float32)}


def _alphas(model: Checkpoint, layer: int) -> list[float]:
    """Those of xIELU as its formula has them: what is stored are logarithms of e^alpha - 1, of the second one less beta."""
    names = [f"{layer_prefix(layer)}{name}" for name in model.architecture.feed_forward.alphas]
    numbers = [float(as_float32(model.read(name)).reshape(())) for name in names]
    if not numbers:
        return []
    positive, negative, beta, _ = numbers
    return [float(np.logaddexp(0.0, positive)), beta + float(np.logaddexp(0.0, negative)), beta]


def final_norm(model: Checkpoint) -> np.ndarray:
    name = f"{model.architecture.final_norm}.weight"
    if name not in model.outlines:
        return np.ones(model.config.hidden_size, np.float32)
    return as_float32(model.read(name)) + np.float32(model.norm_offset)


def _biases_of_ends(model: Checkpoint) -> dict[str, np.ndarray]:
    """Of the norm before the head, and of the head."""
    names = {"norm_bias": f"{model.architecture.final_norm}.bias", "head_bias": HEAD_BIAS}
    return {
        role: as_float32(model.read(name)) if name in model.outlines else NO_BIAS
        for role, name in names.items()
    }


def query_scales(spec: ModelSpec, columns: int) -> np.ndarray:
    """What queries are multiplied by, by position: 1 + beta log(1 + floor(position / length)), as Llama 4 has it; [0] where they are not."""
    beta, length = spec.query_growth
    if not beta:
        return NO_BIAS
    positions = np.arange(columns, dtype=np.float64)
    return (1 + beta * np.log1p(positions // length)).astype(np.float32)


def vectors_of_recurrent(model: Checkpoint, spec: ModelSpec) -> dict[str, np.ndarray]:
    """What recurrent mixers have beside their products."""
    recurrent = model.architecture.recurrent
    layers = spec.layers(recurrent.kind)
    return {name: stacked(model, [part], layers) for name, part in recurrent.vectors.items()}


def rotation(
    model: Checkpoint, spec: ModelSpec, columns: int, length: int | None, kind: str
) -> dict[str, Any]:
    """Tables of rotary positions, and which of them, and what window, each layer of a kind of attention has."""
    attending = spec.layers(kind)
    used = sorted({spec.rotary_of_layer[layer] for layer in attending} - {-1}) or [0]
    ropes = [spec.rotaries[rope] for rope in used]
    tables = [rotary(model.config, columns, model.rope_factors, rope, length) for rope in ropes]
    return {
        "cos": np.stack([cos for cos, _ in tables]),
        "sin": np.stack([sin for _, sin in tables]),
        "rotaries": np.array(
            [-1 if (rope := spec.rotary_of_layer[layer]) < 0 else used.index(rope) for layer in attending],
            np.int64,
        ),
        "windows": np.array([spec.windows[layer] for layer in attending], np.int64),
    }
