"""Hidden transfer in compiled code: pseudo states of the next positions, run through the target's remaining layers behind the committed tokens.

Wu et al. 2024 (arXiv 2404.12022).
    n        the newest token that the target has read          h^l[n]   the target's state there behind layer l
    row i    begins behind layer t_i as W_i h^(t_i)[n], at position n + i; it attends to committed columns and to rows 1 .. i
    distribution i    of token n + 1 + i: softmax(H norm(row i behind the last layer)), H the target's output rows at the draft vocabulary

The rows are one forward pass of their own behind the accepted node, through layers t_1 + 1 .. L. They lie in columns behind the committed ones, which no
row of the target sees and which its next forward pass writes anew: nothing of them is ever committed, and the target's rows have their very bits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from polydraft.heads.foretold import DepthDistributions
from polydraft.models.compiled.layers import ModelArrays, multiply_shared, run_layer
from polydraft.models.matrices.kernels import copy_row, rms_norm
from polydraft.models.matrices.products import FORMATS, Packed, packed
from polydraft.models.matrices.rounding import rounded_bytes
from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.workspace import CHUNK, cut_runs
from polydraft.numerics.compiled_code import njit
from polydraft.papers.hidden_transfer.network import TransferCheckpoint
from polydraft.papers.target_layers import compiled


class TransferArrays(NamedTuple):
    """first_layers: [k] t_i, rising.  maps: k matrices W_i.  head: the target's output rows at the draft vocabulary."""

    target: ModelArrays
    first_layers: np.ndarray
    maps: Packed
    head: Packed
    rounded: np.ndarray  # as of `Workspace`
    mapped: np.ndarray  # [CHUNK, h]


@njit(cache=True, nogil=True)
def transfer_forward(model, slots, states, distributions):
    """states: [k, B, h] of the newest token of each slot behind layer t_i.  distributions: [k B, D] logits, row i of all slots after row i - 1 of all."""
    target = model.target
    work = model.target.work
    B = len(slots)
    k = len(model.first_layers)
    zero = np.int64(0)
    for i in range(k):
        for b in range(B):
            t = i * B + b
            length = target.memory.lengths[slots[b]]
            row = work.rows[t]
            row.token = zero
            row.slot = slots[b]
            row.position = length + i
            row.column = length + i
            row.length = length
            row.num_seen = i + 1
            row.has_logits = 1
            for j in range(i + 1):
                work.seen_columns[t, j] = length + j
    rows = zero
    layers = len(target.program.layers) - 2
    for layer in range(model.first_layers[0], layers + 1):
        if rows < k * B and model.first_layers[rows // B] == layer:
            i = rows // B
            multiply_shared(work, states[i], model.maps, i, model.rounded, model.mapped, np.int64(B))
            for b in range(B):
                copy_row(model.mapped[b], work.x[rows + b])
            rows += B
        if layer < layers:
            run_layer(target, layer, rows, cut_runs(work.rows, rows, work.runs))
    rms_norm(work.x, target.norm, target.sizes.epsilon, work.normed, zero, rows)  # pyright: ignore[reportArgumentType]
    multiply_shared(work, work.normed, model.head, 0, model.rounded, distributions, rows)


class CompiledTransfer(DepthDistributions):
    """Maps of a target's states, and its own remaining layers, as a draft model in the target's slots; see `DepthDistributions`.

    quantization: of the maps and of the output rows; it changes no distribution.

    Raises:
        IncompatibleError: a target that is not compiled, or maps of another target.
        InvalidInputError: maps behind layers that it does not have.
    """

    def __init__(self, head: TransferCheckpoint, target: Any, *, quantization: str = "int8") -> None:
        net = compiled(target, "hidden-transfer").arrays
        head.check(target)
        super().__init__(target, head.ids, len(head.layers), "hidden-transfer")
        kind = FORMATS[quantization]
        h = len(net.norm)
        maps = packed([head.tensors[f"maps.{i}.weight"] for i in range(self.depths)], kind)
        output = packed([head.output(target)[: len(self.draft_ids)]], kind)
        rounded = aligned(CHUNK, rounded_bytes(h), dtype=np.uint8)
        self.weight_bytes = maps.nbytes + output.nbytes
        self.net = TransferArrays(
            net, np.array(head.layers), maps, output, rounded, aligned(CHUNK, maps.outputs)
        )

    def know(self, slots: Sequence[int], states: Float[np.ndarray, "B F"]) -> None:
        """Make the distributions of the next tokens. states: of each slot's newest token behind layers t_1 .. t_k."""
        most = CHUNK // self.depths
        for begin in range(0, len(slots), most):
            here = np.array(slots[begin : begin + most])
            by_depth = states[begin : begin + most].reshape(len(here), self.depths, -1).swapaxes(0, 1)
            rows = np.ascontiguousarray(by_depth, np.float32)
            distributions = np.empty((rows.shape[0] * len(here), self.arrays.logits.shape[2]), np.float32)
            with self.target.pool:
                transfer_forward(self.net, here, rows, distributions)
            self.arrays.logits[here] = distributions.reshape(self.depths, len(here), -1).swapaxes(0, 1)
        self.passes += 1
