"""Layers of compiled heads as checkpoints of layers alone, which are packed and run as a model's; and what is around them, the head's own or the target's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polydraft.heads.checkpoint import HeadCheckpoint, embeddings
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.compiled.weights import Ends, packed_weights
from polydraft.models.loading.checkpoint import Checkpoint
from polydraft.models.matrices.products import BYTES, FORMATS, MatrixFormat, Packed, packed
from polydraft.models.mixers.cache import CachedHeads, SlotMemory, fitting_dtype
from polydraft.models.mixers.layer import ATTENTION, Weights
from polydraft.models.mixers.workspace import ONE, Sizes, Workspace, workspace
from polydraft.models.networks import QWEN3, ModelSpec, Network
from polydraft.models.rotary import head_width, rope_parameters
from polydraft.models.store.weights import InMemory
from polydraft.numerics.floats import as_float32


@dataclass(frozen=True)
class HeadLayers(Checkpoint):
    """Layers of a head in Llama's form. windows: of each, or 0."""

    windows: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        config: Any,
        tensors: Mapping[str, np.ndarray],
        prefixes: Sequence[str],
        windows: Sequence[int] | None = None,
    ) -> "HeadLayers":
        """Those whose tensors have these prefixes."""
        weights = {
            f"model.layers.{l}.{name.removeprefix(prefix)}": as_float32(x)
            for l, prefix in enumerate(prefixes)
            for name, x in tensors.items()
            if name.startswith(prefix)
        }
        several = tuple(windows or (0,) * len(prefixes))
        return cls(config, weights, InMemory(weights), windows=several)

    @property
    def architecture(self) -> Network:
        """Llama's, with norms of queries and keys where there are any."""
        return QWEN3

    @property
    def spec(self) -> ModelSpec:
        """Of attention alone."""
        config = self.config
        layers = len(self.windows)
        numbers = {"rotary_of_layer": (0,) * layers, "attention_scale": head_width(config) ** -0.5}
        return ModelSpec(
            config.rms_norm_eps,
            (ATTENTION,) * layers,
            {},
            self.windows,
            rotaries=(rope_parameters(config),),
            **numbers,
        )


def sizes_of(config: Any, outputs: int) -> Sizes:
    """Of layers of a head's configuration. outputs: of its head, in whole panels."""
    width = head_width(config)
    heads = config.num_attention_heads, config.num_key_value_heads, width
    return Sizes(
        *heads, config.intermediate_size, outputs, np.float32(config.rms_norm_eps), np.float32(width**-0.5)
    )


def cached_heads(parts: Sequence[Checkpoint]) -> CachedHeads:
    """What the cache holds of a token in each layer of a head, which all are of one kind."""
    heads = [each for part in parts for each in part.spec.heads(part.config).values()]
    return heads[0]


def packed_layers(
    parts: Sequence[Checkpoint],
    ends: Ends,
    sizes: Sizes,
    target: Any,
    lengths: np.ndarray,
    columns: int,
    quantization: str,
    inputs: int,
) -> tuple[list[Weights], SlotMemory, Workspace]:
    """Weights of each part, the memory of all its layers, and what they run in. lengths, columns: of slots.  inputs: the widest row that is multiplied."""
    stored = None if quantization == "float32" else quantization
    layers = [
        packed_weights(part, columns, stored, length=target.max_model_len, outer=ends).weights
        for part in parts
    ]
    heads = cached_heads(parts)
    dtype = fitting_dtype(target.cache_dtype, heads.width)
    num_layers = sum(len(part.spec.mixers) for part in parts)
    memory = heads.memory(num_layers, len(lengths), columns, lengths, dtype)
    return layers, memory, workspace(layers[0], sizes, target.num_threads, inputs)


def layer_bytes(layers: Sequence[Weights]) -> int:
    """Of the matrices of packed layers."""
    matrices = list[Packed]()
    for weights in layers:
        matrices += [weights.qkv, weights.out, weights.gate_up, weights.down]
        matrices += () if weights.experts is None else weights.experts.matrices
        matrices += [matrix for matrix in weights.others.values() if isinstance(matrix, Packed)]
    return sum(matrix.nbytes for matrix in matrices)


def ends_of(head: HeadCheckpoint, target: Any, num_drafts: int, kind: MatrixFormat) -> Ends:
    """Embeddings, output rows of the draft vocabulary and the norm before them. num_drafts: 0 for all tokens.  kind: of output rows that are packed."""
    return Ends(
        _embedding(head, target, kind),
        _outputs(head, target, num_drafts, kind),
        as_float32(head.tensors["norm.weight"]),
    )


def _embedding(head: HeadCheckpoint, target: Any, kind: MatrixFormat) -> Packed:
    """Of the head where it has one, else the target's: the very memory of a compiled one that does not scale it."""
    rows = head.tensors.get("embed_tokens.weight")
    if rows is None and isinstance(target, CompiledModel) and target.arrays.sizes.embedding_scale == ONE:
        return target.arrays.embed
    exact = rows is not None and rows.dtype == np.float32 and kind == FORMATS["float32"]
    embedded = embeddings(target) if rows is None else rows
    return packed([embedded], FORMATS["float32" if exact else "bfloat16"])


def _outputs(head: HeadCheckpoint, target: Any, num_drafts: int, kind: MatrixFormat) -> Packed:
    """The head's own, or the target's: the very memory of a compiled one that has as few bits."""
    if head.shares_rows:
        return target.arrays.head
    if (
        isinstance(target, CompiledModel)
        and "lm_head.weight" not in head.tensors
        and num_drafts == target.vocab_size
    ):
        theirs = target.arrays.head
        if target.arrays.sizes.logit_scale == ONE and (theirs.rounding == BYTES or kind.rounding != BYTES):
            return theirs
    return packed([head.output(target)[:num_drafts]], kind)
