"""Hidden transfer in compiled code: pseudo states of the next positions, run through the target's remaining layers behind the committed tokens.

Wu et al. 2024 (arXiv 2404.12022).
    n        the newest token that the target has read          h^l[n]   the target's state there behind layer l
    row i    begins behind layer t_i as W_i h^(t_i)[n], at position n + i; it attends to committed columns and to rows 1 .. i
    law i    of token n + 1 + i: softmax(H norm(row i behind the last layer)), H the target's output rows at the draft vocabulary

The rows are one pass of their own behind the accepted node, through layers t_1 + 1 .. L. They lie in columns behind the committed ones, which no
row of the target sees and which its next pass writes anew: nothing of them is ever committed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numba import njit
from torch import Tensor

from polydraft.errors import IncompatibleError
from polydraft.models.compiled.by_depth import CompiledByDepth
from polydraft.models.compiled.formats import BLOCK, ROUNDED, num_outputs
from polydraft.models.compiled.forward import CHUNK, ModelArrays, cut_runs, multiply, run_layer
from polydraft.models.compiled.kernels import rms_norm
from polydraft.models.compiled.llama import CompiledLlama
from polydraft.models.compiled.vectors import aligned
from polydraft.models.compiled.weights import FORMATS

__all__ = ["CompiledTransfer"]


class TransferArrays(NamedTuple):
    """begins: [k] t_i, not falling.  maps: [k, panels ...] W_i.  head: the target's output rows at the draft vocabulary."""

    target: ModelArrays
    begins: np.ndarray
    maps: np.ndarray
    head: np.ndarray
    rounded: np.ndarray  # as of `forward.Workspace`
    mapped: np.ndarray  # [CHUNK, h]


@njit(cache=True, nogil=True)
def transfer_pass(model, slots, states, laws):
    """states: [k, B, h] of the newest token of each slot behind layer t_i.  laws: [k B, D] logits, row i of all slots after row i - 1 of all."""
    target, work = model.target, model.target.work
    B, k, h, zero = len(slots), len(model.begins), states.shape[2], np.int64(0)
    for i in range(k):
        for b in range(B):
            t, length = i * B + b, target.memory.lengths[slots[b]]
            work.rows[t, 0], work.rows[t, 1], work.rows[t, 2], work.rows[t, 3] = zero, slots[b], length + i, length + i
            work.rows[t, 4], work.rows[t, 5], work.rows[t, 6] = length, i + 1, 1
            for j in range(i + 1):
                work.seen[t, j] = length + j
    rows = zero
    layers = len(target.weights.attention_norm)
    for layer in range(model.begins[0], layers + 1):
        while rows < k * B and model.begins[rows // B] == layer:
            i = rows // B
            multiply(states[i], model.maps[i], model.rounded, model.mapped, np.int64(B))
            for b in range(B):
                work.x[rows + b] = model.mapped[b, :h]
            rows += B
        if layer < layers:
            run_layer(target, layer, rows, cut_runs(work.rows, rows, work.runs))
    rms_norm(work.x, target.weights.norm, target.sizes.epsilon, work.normed, zero, rows)
    multiply(work.normed, model.head, model.rounded, laws, rows)


class CompiledTransfer(CompiledByDepth, SharedSlots):
    """Maps of a target's states, and its own remaining layers, as a draft model in the target's slots; see `core.Target`.

    quantization: of the maps and of the output rows; it changes no law.

    Raises:
        IncompatibleError: a target that is not compiled, or maps of another target.
        InvalidInputError: maps behind layers that it does not have.
    """

    def __init__(self, head: TransferCheckpoint, target: Any, *, quantization: str = "int8") -> None:
        self.share(target, "hidden-transfer")
        head.check(target)
        kind = FORMATS[quantization].weights
        self.draft_ids = head.ids[head.ids < target.vocab_size]
        h = len(target.arrays.weights.norm)
        maps = np.stack([packed(matrix, kind) for matrix in head.maps])
        output = packed(head.output(target)[: len(self.draft_ids)], kind)
        rounded = aligned(CHUNK, -(-h // BLOCK), dtype=ROUNDED)
        mapped = aligned(CHUNK, num_outputs(maps))
        self.weight_bytes = maps.nbytes + output.nbytes
        self._net = TransferArrays(target.arrays, np.array(head.layers), maps, output, rounded, mapped)
        self.open_laws(len(maps), num_outputs(output[None]), target.arrays.memory.lengths)

    def foretell(self, slots: Sequence[int], states: Float[Tensor, "B k h"]) -> None:
        """Make the laws of the next tokens. states: of each slot's newest token behind layers t_1 .. t_k."""
        some = CHUNK // self.depth
        for begin in range(0, len(slots), some):
            here, given = np.array(slots[begin : begin + some]), states[begin : begin + some]
            laws = np.empty((self.depth * len(here), self.arrays.sizes.outputs), np.float32)
            with self.pool:
                transfer_pass(self._net, here, given.float().transpose(0, 1).contiguous().numpy(), laws)
            self.arrays.laws[here] = laws.reshape(self.depth, len(here), -1).swapaxes(0, 1)
            self.passes += 1
