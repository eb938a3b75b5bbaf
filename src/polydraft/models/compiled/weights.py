"""A checkpoint's weights as a compiled Llama reads them: fused, stacked by layer, packed in panels, perhaps rounded.

Tensors are packed one by one, on all cores, from the mapped file into panels: in memory are the panels and a tensor or two.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from polydraft.models.compiled.packed_file import PackedFile, code_digest
from polydraft.models.compiled.packer import MatrixPart, Packer, is_exact
from polydraft.models.compiled.vectors import (
    final_norm,
    layer_prefix,
    rotation,
    stacked,
    vectors,
    vectors_of_attention,
    vectors_of_recurrent,
)
from polydraft.models.loading.checkpoint import Checkpoint
from polydraft.models.matrices.formats import BLOCKS, raw_blocks
from polydraft.models.matrices.products import SEGMENT_LAYOUT, MatrixFormat, Packed
from polydraft.models.memory import fitting_choice
from polydraft.models.mixers import latent_attention, layer_inputs
from polydraft.models.mixers.experts.block import ExpertWeights, expert_matrices, expert_vectors
from polydraft.models.mixers.experts.names import ROUTER, Experts
from polydraft.models.mixers.layer import (
    LATENT_ATTENTION,
    WIDE_ATTENTION,
    LayerWeights,
    Weights,
    WideAttention,
)
from polydraft.models.networks import ModelSpec, Network
from polydraft.models.networks.base import EMBEDDING, HEAD
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


class FeedForwards(NamedTuple):
    """Which layers have a feed-forward, which of them a mixture of experts. dense, sparse: layers with the one and the other."""

    has_one: tuple[bool, ...]
    is_sparse: tuple[bool, ...]
    dense: list[int]
    sparse: list[int]

    @classmethod
    def of(cls, spec: ModelSpec, mixture: Experts | None) -> "FeedForwards":
        """Those of a model's layers."""
        layers = range(len(spec.mixers))
        is_sparse = (False,) * len(layers) if mixture is None else mixture.layers
        has_one = spec.has_feed_forward or (True,) * len(layers)
        beside = mixture is not None and mixture.beside
        dense = [layer for layer in layers if has_one[layer] and (beside or not is_sparse[layer])]
        return cls(has_one, is_sparse, dense, [layer for layer in layers if is_sparse[layer]])


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
    spec = model.spec
    feed_forwards = FeedForwards.of(spec, model.mixture)
    names = _matrix_names(model, spec, feed_forwards.dense)
    if outer is None:
        names["head"] = [[EMBEDDING if model.tied else HEAD]]
    _check_memory(model, quantization)
    packer = Packer(model, quantization, integers)
    of_experts = _expert_names(model.mixture, feed_forwards.sparse)
    if quantization is None:
        packer.choose_numbers(chain.from_iterable(chain(*names.values(), *of_experts.values())))
    matrices = {part: packer.packed(tensors) for part, tensors in names.items()}
    embed = None if outer is not None else _embedding(model, packer, matrices["head"])
    experts = _experts(model, packer, feed_forwards.sparse, of_experts)
    inputs = _layer_inputs(model, packer, matrices)
    stored = _formats(*matrices.values(), *(() if experts is None else experts.matrices))
    error = _fill(model, packer)
    if embed is not None:
        outer = Ends(embed, matrices.pop("head"), final_norm(model))
    assert outer is not None
    weights = Weights(
        *outer,
        **{name: matrices.pop(name) for name in ("qkv", "out", "gate_up", "down")},
        **vectors(model, spec, columns, length, feed_forwards.dense),
        inners=np.array([model.outlines[down].shape[1] for down, *_ in names["down"]], np.int64),
        is_sparse=feed_forwards.is_sparse,
        has_feed_forward=feed_forwards.has_one,
        experts=experts,
        wide=_wide_attention(model, spec, columns, length, matrices),
        layer_inputs=inputs,
        others=matrices | vectors_of_recurrent(model, spec),
    )
    return PackedModel(weights, quantization or stored, error, packer.rounded)


def _formats(*matrices: Packed) -> str:
    """Names of the formats of some matrices."""
    return ", ".join(sorted(set().union(*(w.formats for w in matrices))))


def _matrix_names(model: Checkpoint, spec: ModelSpec, dense: Sequence[int]) -> dict[str, list[list[str]]]:
    """Of each kind of matrix, for each layer that has one, the weights that lie below one another in it. dense: layers with a feed-forward."""
    attention = model.architecture.attention
    names = {
        name: [_present(model, layer, modules) for layer in of_part]
        for part, of_part in _layers_of_parts(model.architecture, spec, dense)
        for name, modules in part.matrices.items()
    } | layer_inputs.matrices(len(spec.mixers), model.outlines)
    wide = spec.layers(WIDE_ATTENTION)
    if wide:
        for name, modules in attention.matrices.items():
            names[_wide(name)] = [_present(model, layer, modules) for layer in wide]
    if spec.latent is not None:
        prefixes = [layer_prefix(layer) for layer in spec.layers(LATENT_ATTENTION)]
        names |= latent_attention.head_matrices(prefixes, model.config.num_attention_heads)
    return {name: tensors if any(tensors) else [] for name, tensors in names.items()}


def _expert_names(mixture: Experts | None, sparse: Sequence[int]) -> Mapping[str, list[list[str]]]:
    """Likewise of experts. sparse: layers that are mixtures."""
    return {} if mixture is None else expert_matrices(mixture, [layer_prefix(layer) for layer in sparse])


def _present(model: Checkpoint, layer: int, modules: Sequence[str]) -> list[str]:
    """Weights of modules of a layer, of those that it has."""
    names = [f"{layer_prefix(layer)}{module}.weight" for module in modules]
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


def _wide_attention(
    model: Checkpoint, spec: ModelSpec, columns: int, length: int | None, matrices: dict[str, Packed]
) -> WideAttention | None:
    """What layers of wide attention have, None where there are none. matrices: of all layers, of which it takes theirs."""
    if spec.wide is None:
        return None
    fields = {
        **{name: matrices.pop(_wide(name)) for name in model.architecture.attention.matrices},
        **vectors_of_attention(model, spec, WIDE_ATTENTION),
        **rotation(model, spec, columns, length, WIDE_ATTENTION),
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
        stacked(model, [layer_inputs.WEIGHTS.vectors["input_norm"]], everywhere),
    )


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
    packed = packer.empty([[(MatrixFormat(kind), outputs)]] * len(names), inputs, multiplied=multiplied)
    unrounded = Packer(model, None, packer.integers)
    unrounded.writings = packer.writings
    for k, name in enumerate(names):
        unrounded.add_writings(MatrixPart(MatrixFormat(kind), (name,), outputs), packed.panels_of(k))
    return packed


def _experts(
    model: Checkpoint,
    packer: Packer,
    sparse: Sequence[int],
    names: Mapping[str, list[list[str]]],
) -> ExpertWeights | None:
    """Of layers that are mixtures, None where there are none; a router is never rounded. names: of their matrices."""
    mixture = model.mixture
    if mixture is None:
        return None
    prefixes = [layer_prefix(layer) for layer in sparse]
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
