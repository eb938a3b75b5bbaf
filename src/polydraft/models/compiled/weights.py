"""A checkpoint's weights as a compiled Llama reads them: fused, stacked by layer, packed in panels, perhaps rounded.

Tensors are packed one by one, on all cores, from the mapped file into panels: in memory are the panels and a tensor or two.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from polydraft.errors import CapacityError
from polydraft.files.progress import report
from polydraft.models.compiled.packed_file import PackedFile, code_digest
from polydraft.models.loading.checkpoint import Checkpoint
from polydraft.models.matrices.dequantising import RECODED, recode
from polydraft.models.matrices.formats import BLOCKS, NUMBERS, pack, pack_blocks, raw_blocks
from polydraft.models.matrices.products import BYTES, EXACT, FORMATS, SEGMENT_LAYOUT, Format, Packed
from polydraft.models.matrices.vectors import LANES, PANEL
from polydraft.models.memory import available_bytes
from polydraft.models.mixers.experts.block import ExpertWeights, expert_matrices, expert_vectors
from polydraft.models.mixers.experts.names import ROUTER, Experts
from polydraft.models.mixers.layer import ATTENTION, LayerWeights, Weights
from polydraft.models.networks import ModelSpec, Network
from polydraft.models.networks.base import EMBEDDING, HEAD
from polydraft.models.rotary import rotary
from polydraft.numerics.floats import BFLOAT16, as_float32
from polydraft.numerics.processor import usable_cores

SLICE = 256 * PANEL
"""Outputs that are packed at a time: 8 MB of Q4_K at a width of 1,536. Cores then end together, and little of the file is in memory beside its panels."""


class PackedModel(NamedTuple):
    """format: names of the matrices' formats.  error: root of sum |W - W'|^2 / sum |W|^2 of what was rounded.
    rounded: name of the format that blocks of a file were rounded to once more -> the formats that they had."""

    weights: Weights
    format: str
    error: float
    rounded: dict[str, set[str]]


class _Part(NamedTuple):
    """Tensors of one format that lie below one another in a matrix."""

    format: Format
    names: tuple[str, ...]
    outputs: int


class _Packer:
    """Chooses the format of each matrix, and packs it. integers: whether blocks take rounded activations."""

    def __init__(self, model: Checkpoint, quantization: str | None, integers: bool) -> None:
        self.model = model
        self.quantization = quantization
        self.integers = integers
        self.stored: Format | None = None
        self.jobs: list[Callable[[], tuple[float, float]]] = []
        self.rounded: dict[str, set[str]] = {}
        self.made: list[Packed] = []

    def empty(
        self, matrices: Sequence[Sequence[tuple[Format, int]]], inputs: int, *, multiplied: bool = True
    ) -> Packed:
        """Memory for matrices, see `Packed.empty`."""
        self.made.append(Packed.empty(matrices, inputs, multiplied=multiplied))
        return self.made[-1]

    def block_format(self, name: str) -> str | None:
        """The format of a tensor's blocks in the file, if they stay as they are."""
        kind = self.model.weights.kind(name)
        if kind not in BLOCKS or self.quantization not in (None, "int8", "int4"):
            return None
        if self.quantization and BLOCKS[kind].bits > BLOCKS[FORMATS[self.quantization].weights].bits:
            self.rounded.setdefault(FORMATS[self.quantization].weights, set()).add(kind)
            return None
        return kind

    def format_of(self, name: str) -> Format:
        kind = self.block_format(name)
        if kind:
            return Format(kind, BYTES if self.integers else EXACT)
        if self.quantization:
            chosen = FORMATS[self.quantization]
            return chosen if self.integers or chosen.rounding != BYTES else Format(chosen.weights)
        return Format("float32") if self.stored is None else self.stored

    def choose_numbers(self, names: Iterable[str]) -> None:
        """How numbers are stored: in bfloat16 where that loses nothing."""
        numbers = [name for name in names if not self.block_format(name)]
        self.stored = FORMATS["bfloat16" if _exact(self.model, numbers) else "float32"]

    def parts(self, names: Sequence[str]) -> list[_Part]:
        """A matrix from top to bottom. Formats that differ where outputs are no whole panels: float32, which holds all of them."""
        parts: list[_Part] = []
        for name in names:
            kind = self.format_of(name)
            outputs = self.model.outlines[name].shape[0]
            if parts and parts[-1].format == kind:
                parts[-1] = _Part(kind, (*parts[-1].names, name), parts[-1].outputs + outputs)
            else:
                parts.append(_Part(kind, (name,), outputs))
        if any(part.outputs % PANEL for part in parts[:-1]):
            return [_Part(Format("float32"), tuple(names), sum(part.outputs for part in parts))]
        return parts

    def packed(self, matrices: Sequence[Sequence[str]]) -> Packed:
        """Memory for matrices, each of some tensors below one another; packing them is left to the jobs."""
        if not matrices:
            return Packed.none()
        parts = [self.parts(names) for names in matrices]
        inputs = self.model.outlines[matrices[0][0]].shape[1]
        w = self.empty([[(part.format, part.outputs) for part in matrix] for matrix in parts], inputs)
        for k, matrix in enumerate(parts):
            for number, part in enumerate(matrix):
                self.add_jobs(part, w.panels_of(k, number))
        return w

    def add_jobs(self, part: _Part, panels: np.ndarray) -> None:
        """Add a job for each slice of each tensor; tensors whose outputs are no whole panels, or that no file has in rows, are one job together."""
        sizes = [self.model.outlines[name].shape[0] for name in part.names]
        stored = part.format.weights
        copied = [self.block_format(name) == stored for name in part.names]
        width = PANEL if stored in NUMBERS else LANES
        if any(size % width for size in sizes[:-1]) or not self.model.weights.has_rows:
            self.jobs.append(lambda: self._pack_together(part.names, panels, all(copied)))
            return
        first = 0
        for name, size, is_copied in zip(part.names, sizes, copied, strict=True):
            pack_rows = (
                self._copy_rows
                if is_copied
                else self._recode_rows
                if self._recodes(name, stored)
                else self._convert_rows
            )
            for begin in range(0, size, SLICE):
                end = min(size, begin + SLICE)
                last = first + -(-end // width) if end < size or name != part.names[-1] else len(panels)
                some = panels[first + begin // width : last]
                self.jobs.append(
                    lambda pack_rows=pack_rows, name=name, rows=slice(begin, end), some=some: pack_rows(
                        name, rows, some
                    )
                )
            first += size // width

    def _recodes(self, name: str, stored: str) -> bool:
        """Whether the stored blocks of a tensor come of rounding in compiled code."""
        return stored == RECODED and self.model.weights.kind(name) in BLOCKS

    def _copy_rows(self, name: str, rows: slice, panels: np.ndarray) -> tuple[float, float]:
        kind, blocks = self.model.weights.blocks(name)
        pack_blocks(np.ascontiguousarray(blocks[rows]).view(raw_blocks(kind)), panels)
        self.model.weights.forget([name], rows)
        return 0.0, 0.0

    def _recode_rows(self, name: str, rows: slice, panels: np.ndarray) -> tuple[float, float]:
        kind, blocks = self.model.weights.blocks(name)
        sums = recode(kind, blocks[rows], panels)
        self.model.weights.forget([name], rows)
        return sums

    def _convert_rows(self, name: str, rows: slice, panels: np.ndarray) -> tuple[float, float]:
        sums = pack(self.model.weights.rows(name, rows), panels)
        self.model.weights.forget([name], rows)
        return sums

    def _pack_together(self, names: Sequence[str], panels: np.ndarray, copied: bool) -> tuple[float, float]:
        sums = 0.0, 0.0
        if copied:
            kinds, blocks = zip(*(self.model.weights.blocks(name) for name in names), strict=True)
            pack_blocks(np.ascontiguousarray(np.concatenate(blocks)).view(raw_blocks(kinds[0])), panels)
        else:
            weights = [self.model.read(name) for name in names]
            sums = pack(_joined(weights), panels)
        self.model.weights.forget(names, slice(None))
        return sums


def _exact(model: Checkpoint, names: Iterable[str]) -> bool:
    """Whether bfloat16 loses nothing of these weights."""
    return all(
        model.outlines[name].dtype == BFLOAT16 or _survives_bfloat16(as_float32(model.read(name)))
        for name in names
    )


def _survives_bfloat16(weight: np.ndarray) -> bool:
    return np.array_equal(weight, as_float32(weight.astype(BFLOAT16)))


def _joined(weights: Sequence[np.ndarray]) -> np.ndarray:
    """Matrices below one another, in float32 where their types differ."""
    if len({weight.dtype for weight in weights}) > 1:
        weights = list(map(as_float32, weights))
    return np.concatenate(weights) if len(weights) > 1 else weights[0]


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
    sparse = [layer for layer in layers if is_sparse[layer]]
    dense = [layer for layer in layers if not is_sparse[layer]]
    names = {
        name: [[f"{_layer(layer)}{module}.weight" for module in modules] for layer in of_part]
        for part, of_part in _layers_of_parts(network, spec, dense)
        for name, modules in part.matrices.items()
    }
    if outer is None:
        names["head"] = [[EMBEDDING if model.tied else HEAD]]
    _check_memory(model, quantization)
    packer = _Packer(model, quantization, integers)
    prefixes = [_layer(layer) for layer in sparse]
    of_experts = {} if mixture is None else expert_matrices(mixture, prefixes)
    if quantization is None:
        matrices_of_all = (names | of_experts).values()
        packer.choose_numbers(name for matrices in matrices_of_all for matrix in matrices for name in matrix)
    matrices = {part: packer.packed(tensors) for part, tensors in names.items()}
    embed = None if outer is not None else _embedding(model, packer, matrices["head"])
    experts = None if mixture is None else _experts(model, packer, mixture, prefixes, of_experts)
    packed_matrices = *matrices.values(), *(() if experts is None else experts.matrices)
    stored = ", ".join(sorted(set().union(*(w.formats for w in packed_matrices))))
    error = _fill(model, packer)
    if embed is not None:
        norm = as_float32(model.read(f"{network.final_norm}.weight")) + np.float32(model.norm_offset)
        outer = Ends(embed, matrices.pop("head"), norm)
    assert outer is not None
    weights = Weights(
        *outer,
        **_vectors_of_layers(model, spec),
        **{name: matrices.pop(name) for name in ("qkv", "out", "gate_up", "down")},
        **_rotation(model, spec, columns, length),
        mixers=spec.mixers,
        is_sparse=is_sparse,
        experts=experts,
        others=matrices | _vectors_of_recurrent(model, spec),
    )
    return PackedModel(weights, quantization or stored, error, packer.rounded)


def _layers_of_parts(
    network: Network, spec: ModelSpec, dense: Sequence[int]
) -> list[tuple[LayerWeights, Sequence[int]]]:
    """Mixers and feed-forwards, with the layers that have them."""
    mixers = [(part, spec.layers(part.kind)) for part in (network.attention, network.recurrent)]
    return [*mixers, (network.feed_forward, dense)]


def _stacked(
    model: Checkpoint, parts: Sequence[str], layers: Sequence[int], offset: float = 0.0
) -> np.ndarray:
    """Vectors of each layer, those of several names one behind another; empty where a model has none."""
    if not parts or not layers or f"{_layer(layers[0])}{parts[0]}" not in model.outlines:
        return np.zeros((len(layers), 0), np.float32)

    def read(name: str) -> np.ndarray:
        return as_float32(model.read(name)).reshape(model.outlines[name].shape)

    vectors = [np.concatenate([read(f"{_layer(layer)}{part}") for part in parts]) for layer in layers]
    return np.stack(vectors) + np.float32(offset)


def _vectors_of_layers(model: Checkpoint, spec: ModelSpec) -> dict[str, Any]:
    """Norms of all layers, and what attention has beside its products, by the fields of `Weights`."""
    network = model.architecture
    attention = network.attention
    everywhere = range(len(spec.mixers))
    attending = spec.layers(ATTENTION)
    norms = {
        role: _stacked(
            model,
            [f"{network.norms[role]}.weight"] if role in network.norms else [],
            everywhere,
            model.norm_offset,
        )
        for role in ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
    }
    head_norms = {
        role: _stacked(model, [f"{name}.weight"] if name else [], attending, model.norm_offset)
        for role, name in zip_longest(("q_norm", "k_norm"), attention.norms)
    }
    biases = [f"{name}.bias" for name in attention.matrices["qkv"]]
    out_biases = [f"{name}.bias" for name in attention.matrices["out"]]
    return {
        **norms,
        **head_norms,
        "bias": _stacked(model, biases, attending),
        "out_bias": _stacked(model, out_biases, everywhere),
        "sinks": _stacked(model, ["self_attn.sinks"], attending),
    }


def _vectors_of_recurrent(model: Checkpoint, spec: ModelSpec) -> dict[str, np.ndarray]:
    """What recurrent mixers have beside their products."""
    recurrent = model.architecture.recurrent
    layers = spec.layers(recurrent.kind)
    return {name: _stacked(model, [part], layers) for name, part in recurrent.vectors.items()}


def _rotation(model: Checkpoint, spec: ModelSpec, columns: int, length: int | None) -> dict[str, Any]:
    """Tables of rotary positions, and which of them, and what window, each layer of attention has."""
    tables = [rotary(model.config, columns, model.rope_factors, rope, length) for rope in spec.rotaries]
    attending = spec.layers(ATTENTION)
    return {
        "cos": np.stack([cos for cos, _ in tables]),
        "sin": np.stack([sin for _, sin in tables]),
        "rotaries": np.array([spec.rotary_of_layer[layer] for layer in attending], np.int64),
        "windows": np.array([spec.windows[layer] for layer in attending], np.int64),
    }


def _about(model: Checkpoint, packer: _Packer) -> dict[str, Any] | None:
    """What the panels follow from, None of a model that is in no files."""
    stamps = [
        [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in model.weights.files
    ]
    layouts = sha256(
        json.dumps([w.segments[[*SEGMENT_LAYOUT]].tolist() for w in packer.made]).encode()
    ).hexdigest()
    options = {"quantization": packer.quantization, "integers": packer.integers}
    return {"files": stamps, **options, "layouts": layouts, "code": code_digest()} if stamps else None


def _fill(model: Checkpoint, packer: _Packer) -> float:
    """Pack all matrices, or read them where they were stored; returns the error of what was rounded."""
    file = PackedFile(_about(model, packer), [w.data for w in packer.made])
    if file.read():
        return file.figures["error"]
    lost, whole = _run(packer, _name(model), sum(w.nbytes for w in packer.made))
    error = (lost / whole) ** 0.5 if lost else 0.0
    file.write(error=error)
    return error


def _layer(layer: int) -> str:
    return f"model.layers.{layer}."


def _name(model: Checkpoint) -> str:
    return str(getattr(model.config, "name_or_path", "") or "the model")


def _embedding(model: Checkpoint, packer: _Packer, head: Packed) -> Packed:
    """Embeddings of all tokens, which no product reads: never rounded, and the head itself where that holds the same numbers."""
    blocks = model.weights.kind(EMBEDDING)
    kind = blocks if blocks in BLOCKS else "bfloat16" if _exact(model, [EMBEDDING]) else "float32"
    if model.tied and head.formats == {kind}:
        return head
    return _unrounded(model, packer, [EMBEDDING], kind, multiplied=False)


def _unrounded(
    model: Checkpoint, packer: _Packer, names: Sequence[str], kind: str, *, multiplied: bool = True
) -> Packed:
    """Matrices of one tensor each, of one shape, in a format that loses nothing of them."""
    outputs, inputs = model.outlines[names[0]].shape
    packed = packer.empty([[(Format(kind), outputs)]] * len(names), inputs, multiplied=multiplied)
    unrounded = _Packer(model, None, packer.integers)
    unrounded.jobs = packer.jobs
    for k, name in enumerate(names):
        unrounded.add_jobs(_Part(Format(kind), (name,), outputs), packed.panels_of(k))
    return packed


def _experts(
    model: Checkpoint,
    packer: _Packer,
    mixture: Experts,
    prefixes: Sequence[str],
    names: Mapping[str, list[list[str]]],
) -> ExpertWeights:
    """Of layers that are mixtures; a router is never rounded."""
    routers = [f"{prefix}{ROUTER}.weight" for prefix in prefixes]
    router = _unrounded(model, packer, routers, "bfloat16" if _exact(model, routers) else "float32")
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

    needed = int(sum(map(size, model.outlines)))
    free = available_bytes()
    if needed > free:
        raise CapacityError(
            f"the weights of {_name(model)!r} take {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB of memory are free. "
            "Free some, or give a smaller model or a file of fewer bits."
        )


def _run(packer: _Packer, name: str, total: int) -> tuple[float, float]:
    """Do all jobs, on all cores; returns what was lost, and of how much, summed."""
    lost = 0.0
    whole = 0.0
    with ThreadPoolExecutor(usable_cores()) as pool:
        for k, (error, size) in enumerate(pool.map(lambda job: job(), packer.jobs), 1):
            lost = lost + error
            whole = whole + size
            report(name, total * k // len(packer.jobs), total)
    return lost, whole
