"""A checkpoint's weights as a compiled Llama reads them: fused, stacked by layer, packed in panels, perhaps rounded.

Tensors are packed one by one, on all cores, from the mapped file into panels: in memory are the panels and a tensor or two.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from polydraft.models.compiled.packed_file import PackedFile, code_digest
from polydraft.models.compiled.packer import MatrixPart, Packer, is_exact
from polydraft.models.loading.checkpoint import Checkpoint
from polydraft.models.matrices.formats import BLOCKS, raw_blocks
from polydraft.models.matrices.products import SEGMENT_LAYOUT, Format, Packed
from polydraft.models.memory import fitting_choice
from polydraft.models.mixers import latent_attention, layer_inputs
from polydraft.models.mixers.experts.block import ExpertWeights, expert_matrices, expert_vectors
from polydraft.models.mixers.experts.names import ROUTER, Experts
from polydraft.models.mixers.layer import (
    ATTENTION,
    LATENT_ATTENTION,
    NO_BIAS,
    WIDE_ATTENTION,
    LayerWeights,
    Weights,
    WideAttention,
)
from polydraft.models.networks import ModelSpec, Network
from polydraft.models.networks.base import EMBEDDING, HEAD, HEAD_BIAS
from polydraft.models.rotary import rotary
from polydraft.models.store.mapped import stamp
from polydraft.numerics.floats import as_float32


class PackedModel(NamedTuple):
    """format: names of the matrices' formats.  error: root of sum |W - W'|^2 / sum |W|^2 of what was rounded.
    rounded: name of the format that blocks of a file were rounded to once more -> the formats that they had."""

    weights: Weights
    format: str
    error: float
    rounded: dict[str, set[str]]


class Ends(NamedTuple):
    """What is around the layers, see `mixers.layer.Weights`."""

    embed: Packed
    head: Packed
    norm: np.ndarray


def packed_weights(
    model: Checkpoint,
    columns: int,
    quantization: str | None,
    *,
    integers: bool = True,
    length: int | None = None,
    outer: Ends | None = None,
) -> PackedModel:
    """Pack a model's weights.

    columns: positions to prepare the rotation for.  integers: whether products with blocks take activations rounded to eight bits.
    length: of the longest text, which some kinds of rotation depend on, see `models.rotary`.  outer: of a checkpoint that has layers alone.

    Raises:
        CapacityError: less memory is free than the weights take.
    """
    network = model.architecture
    spec = model.spec
    mixture = model.mixture
    layers = range(len(spec.mixers))
    is_sparse = (False,) * len(layers) if mixture is None else mixture.layers
    has_feed_forward = spec.has_feed_forward or (True,) * len(layers)
    sparse = [layer for layer in layers if is_sparse[layer]]
    beside = mixture is not None and mixture.beside
    dense = [layer for layer in layers if has_feed_forward[layer] and (beside or not is_sparse[layer])]
    names = {
        name: [_present(model, layer, modules) for layer in of_part]
        for part, of_part in _layers_of_parts(network, spec, dense)
        for name, modules in part.matrices.items()
    } | layer_inputs.matrices(len(layers), model.outlines)
    wide = spec.layers(WIDE_ATTENTION)
    names |= {
        _wide(name): [_present(model, layer, modules) for layer in wide]
        for name, modules in network.attention.matrices.items()
        if wide
    }
    if spec.latent is not None:
        prefixes = [_layer(layer) for layer in spec.layers(LATENT_ATTENTION)]
        names |= latent_attention.head_matrices(prefixes, model.config.num_attention_heads)
    names = {name: tensors if any(tensors) else [] for name, tensors in names.items()}
    if outer is None:
        names["head"] = [[EMBEDDING if model.tied else HEAD]]
    _check_memory(model, quantization)
    packer = Packer(model, quantization, integers)
    prefixes = [_layer(layer) for layer in sparse]
    of_experts = {} if mixture is None else expert_matrices(mixture, prefixes)
    if quantization is None:
        matrices_of_all = (names | of_experts).values()
        packer.choose_numbers(name for matrices in matrices_of_all for matrix in matrices for name in matrix)
    matrices = {part: packer.packed(tensors) for part, tensors in names.items()}
    embed = None if outer is not None else _embedding(model, packer, matrices["head"])
    experts = None if mixture is None else _experts(model, packer, mixture, prefixes, of_experts)
    inputs = _layer_inputs(model, packer, matrices)
    packed_matrices = *matrices.values(), *(() if experts is None else experts.matrices)
    stored = ", ".join(sorted(set().union(*(w.formats for w in packed_matrices))))
    error = _fill(model, packer)
    if embed is not None:
        outer = Ends(embed, matrices.pop("head"), _final_norm(model))
    assert outer is not None
    weights = Weights(
        *outer,
        **_vectors_of_layers(model, spec),
        **_vectors_of_attention(model, spec, ATTENTION),
        **_vectors_of_feed_forwards(model, dense),
        **_biases_of_ends(model),
        **{name: matrices.pop(name) for name in ("qkv", "out", "gate_up", "down")},
        **_rotation(model, spec, columns, length, ATTENTION),
        inners=np.array([model.outlines[names["down"][k][0]].shape[1] for k in range(len(dense))], np.int64),
        mixers=spec.mixers,
        is_sparse=is_sparse,
        has_feed_forward=has_feed_forward,
        parallel=spec.parallel,
        head_norms=network.attention.norm_form,
        query_scales=query_scales(spec, columns),
        experts=experts,
        wide=_wide_attention(model, spec, columns, length, matrices),
        latent=spec.latent,
        layer_inputs=inputs,
        others=matrices | _vectors_of_recurrent(model, spec),
    )
    return PackedModel(weights, quantization or stored, error, packer.rounded)


def _present(model: Checkpoint, layer: int, modules: Sequence[str]) -> list[str]:
    """Weights of modules of a layer, of those that it has."""
    names = [f"{_layer(layer)}{module}.weight" for module in modules]
    return [name for name in names if name in model.outlines]


def _wide(name: str) -> str:
    """A matrix of layers of wide attention among those of all."""
    return f"wide_{name}"


def _layers_of_parts(
    network: Network, spec: ModelSpec, dense: Sequence[int]
) -> list[tuple[LayerWeights, Sequence[int]]]:
    """Mixers and feed-forwards, with the layers that have them."""
    mixers = [(part, spec.layers(part.kind)) for part in (network.attention, network.recurrent)]
    return [*mixers, (network.feed_forward, dense)]


def _stacked(
    model: Checkpoint, parts: Sequence[str], layers: Sequence[int], offset: float = 0.0
) -> np.ndarray:
    """Vectors of each layer, those of several names one behind another; empty where its first one has none, and zero in others that have none."""
    if not parts or not layers or f"{_layer(layers[0])}{parts[0]}" not in model.outlines:
        return np.zeros((len(layers), 0), np.float32)
    shapes = {part: model.outlines[f"{_layer(layers[0])}{part}"].shape for part in parts}

    def read(layer: int, part: str) -> np.ndarray:
        name = f"{_layer(layer)}{part}"
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
        else _stacked(
            model,
            [f"{names[role]}.weight"] if role in names else [],
            everywhere,
            model.norm_offset,
        )
        for role in ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
    }
    norm_biases = {
        f"{role}_bias": _stacked(model, [f"{names[role]}.bias"] if role in names else [], everywhere)
        for role in ("attention_norm", "mlp_norm")
    }
    scale = [name for name in [network.beside.vectors.get("layer_scale")] if name]
    return {
        **norms,
        **norm_biases,
        "out_bias": _stacked(model, out_biases, everywhere),
        "layer_scale": _stacked(model, scale, everywhere),
    }


def _vectors_of_attention(model: Checkpoint, spec: ModelSpec, kind: str) -> dict[str, Any]:
    """What layers of a kind of attention have beside their products, by the fields of `Weights`."""
    attention = model.architecture.attention
    attending = spec.layers(kind)
    own = spec.layers_with_keys(kind)
    sources = [spec.sources[layer] if spec.sources else layer for layer in attending]
    head_norms = {
        role: _of_all_heads(_stacked(model, [f"{name}.weight"] if name else [], attending, model.norm_offset))
        for role, name in zip_longest(("q_norm", "k_norm"), attention.norms)
    }
    biases = [f"{name}.bias" for name in attention.matrices["qkv"]]
    return {
        **head_norms,
        "bias": _stacked(model, biases, attending),
        "sinks": _stacked(model, ["self_attn.sinks"], attending),
        "stores": np.array([own.index(layer) if layer in own else -1 for layer in attending], np.int64),
        "sources": np.array([own.index(layer) for layer in sources], np.int64),
    }


def _wide_attention(
    model: Checkpoint, spec: ModelSpec, columns: int, length: int | None, matrices: dict[str, Packed]
) -> WideAttention | None:
    """What layers of wide attention have, None where there are none. matrices: of all layers, of which it takes theirs."""
    if spec.wide is None:
        return None
    fields = {
        **{name: matrices.pop(_wide(name)) for name in model.architecture.attention.matrices},
        **_vectors_of_attention(model, spec, WIDE_ATTENTION),
        **_rotation(model, spec, columns, length, WIDE_ATTENTION),
    }
    return WideAttention(fields, *spec.wide)


def _layer_inputs(
    model: Checkpoint, packer: Packer, matrices: dict[str, Packed]
) -> layer_inputs.LayerInputs | None:
    """Inputs of each layer, None where a model has none. matrices: of all layers, of which it takes theirs."""
    name = f"{layer_inputs.TOKENS}.weight"
    if name not in model.outlines:
        return None
    kind = _lossless(model, name)
    names = ("input_projection", "input_gate", "input_up")
    projection, gate, up = (matrices.pop(name) for name in names)
    everywhere = range(len(model.spec.mixers))
    return layer_inputs.LayerInputs(
        _unrounded(model, packer, [name], kind, multiplied=False),
        projection,
        as_float32(model.read(f"{layer_inputs.NORM}.weight")),
        gate,
        up,
        _stacked(model, [layer_inputs.WEIGHTS.vectors["input_norm"]], everywhere),
    )


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
    of_layers = {role: _stacked(model, parts, layers) for role, parts in biases.items()}
    return {**of_layers, "alphas": np.array(alphas or np.zeros((0, 0)), np.float32)}


def _alphas(model: Checkpoint, layer: int) -> list[float]:
    """Those of xIELU as its formula has them: what is stored are logarithms of e^alpha - 1, of the second one less beta."""
    names = [f"{_layer(layer)}{name}" for name in model.architecture.feed_forward.alphas]
    numbers = [float(as_float32(model.read(name)).reshape(())) for name in names]
    if not numbers:
        return []
    positive, negative, beta, _ = numbers
    return [float(np.logaddexp(0.0, positive)), beta + float(np.logaddexp(0.0, negative)), beta]


def _final_norm(model: Checkpoint) -> np.ndarray:
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


def _vectors_of_recurrent(model: Checkpoint, spec: ModelSpec) -> dict[str, np.ndarray]:
    """What recurrent mixers have beside their products."""
    recurrent = model.architecture.recurrent
    layers = spec.layers(recurrent.kind)
    return {name: _stacked(model, [part], layers) for name, part in recurrent.vectors.items()}


def _rotation(
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


def _about(model: Checkpoint, packer: Packer) -> dict[str, Any] | None:
    """What the panels follow from, None of a model that is in no files."""
    stamps = [[*stamp(path.resolve())] for path in model.weights.files]
    layouts = sha256(
        json.dumps([w.segments[[*SEGMENT_LAYOUT]].tolist() for w in packer.made]).encode()
    ).hexdigest()
    options = {"quantization": packer.quantization, "integers": packer.integers}
    return {"files": stamps, **options, "layouts": layouts, "code": code_digest()} if stamps else None


def _fill(model: Checkpoint, packer: Packer) -> float:
    """Pack all matrices, or read them where they were stored; returns the error of what was rounded."""
    file = PackedFile(_about(model, packer), [w.data for w in packer.made])
    if file.read():
        return file.figures["error"]
    lost, whole = packer.run(_name(model))
    error = (lost / whole) ** 0.5 if lost else 0.0
    file.write(error=error)
    return error


def _layer(layer: int) -> str:
    return f"model.layers.{layer}."


def _name(model: Checkpoint) -> str:
    return str(getattr(model.config, "name_or_path", "") or "the model")


def _embedding(model: Checkpoint, packer: Packer, head: Packed) -> Packed:
    """Embeddings of all tokens, which no product reads: never rounded, and the head itself where that holds the same numbers."""
    kind = _lossless(model, EMBEDDING)
    if model.tied and head.formats == {kind}:
        return head
    return _unrounded(model, packer, [EMBEDDING], kind, multiplied=False)


def _lossless(model: Checkpoint, name: str) -> str:
    """A format that loses nothing of a weight."""
    blocks = model.weights.kind(name)
    return blocks if blocks in BLOCKS else "bfloat16" if is_exact(model, [name]) else "float32"


def _unrounded(
    model: Checkpoint, packer: Packer, names: Sequence[str], kind: str, *, multiplied: bool = True
) -> Packed:
    """Matrices of one tensor each, of one shape, in a format that loses nothing of them."""
    outputs, inputs = model.outlines[names[0]].shape
    packed = packer.empty([[(Format(kind), outputs)]] * len(names), inputs, multiplied=multiplied)
    unrounded = Packer(model, None, packer.integers)
    unrounded.writings = packer.writings
    for k, name in enumerate(names):
        unrounded.add_writings(MatrixPart(Format(kind), (name,), outputs), packed.panels_of(k))
    return packed


def _experts(
    model: Checkpoint,
    packer: Packer,
    mixture: Experts,
    prefixes: Sequence[str],
    names: Mapping[str, list[list[str]]],
) -> ExpertWeights:
    """Of layers that are mixtures; a router is never rounded."""
    routers = [f"{prefix}{ROUTER}.weight" for prefix in prefixes]
    router = _unrounded(model, packer, routers, "bfloat16" if is_exact(model, routers) else "float32")
    fields: dict[str, Any] = {
        part: packer.packed(names.get(part, []))
        for part in ("gate_up", "down", "shared_gate_up", "shared_down")
    }
    return ExpertWeights(
        mixture, router, **fields, **expert_vectors(model.read, model.config.hidden_size, mixture, prefixes)
    )


def _check_memory(model: Checkpoint, quantization: str | None) -> None:
    """Refuse weights that memory does not hold, before any of them is read."""
    bits = {"int8": 8.5, "int4": 4.5}.get(quantization or "", 16)

    def size(name: str) -> float:
        outline = model.outlines[name]
        kind = model.weights.kind(name)
        if kind in BLOCKS and not quantization:
            return outline.size // BLOCKS[kind].inputs * raw_blocks(kind).itemsize
        return (
            outline.size * (32 if outline.dtype == np.float16 and not quantization else bits) / 8
        )  # float16 is no bfloat16

    fitting_choice(_name(model), {quantization or "its own format": int(sum(map(size, model.outlines)))})
