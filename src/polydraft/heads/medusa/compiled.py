"""Medusa's heads in compiled code: each reads the target's last state and says what comes so many tokens behind the next one.

Cai et al. 2024 (arXiv 2401.10774). h is the target's state, behind its final norm, that the root was drawn from:

    head k    x = h, then as many times as there are blocks x + silu(W x + b); output rows: of all heads the same, or its own
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from polydraft.heads.foretold import DepthDistributions
from polydraft.heads.medusa.checkpoint import MedusaCheckpoint
from polydraft.models.compiled.layers import multiply
from polydraft.models.matrices.kernels import copy_row
from polydraft.models.matrices.products import FORMATS, Packed, packed
from polydraft.models.matrices.rounding import rounded_bytes
from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.workspace import CHUNK
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.exponential import exp
from polydraft.numerics.floats import as_float32


class MedusaWeights(NamedTuple):
    """blocks: of the first head, then of the second ...  bias: [K, blocks, h].  heads: one matrix, or K."""

    blocks: Packed
    bias: np.ndarray
    heads: Packed


class MedusaWork(NamedTuple):
    """Activations of up to CHUNK rows. outs: logits."""

    x: np.ndarray
    rows: np.ndarray
    update: np.ndarray
    rounded: np.ndarray
    outs: np.ndarray


@njit(cache=True, error_model="numpy")
def head_distributions(weights, work, slots, states, logits):
    """logits[slots[b], k] = what head k says of states[b], of as many states as heads have rows in work."""
    K, L, h = weights.bias.shape
    B = len(states)
    unit = np.float32(1.0)
    for k in range(K):
        for b in range(B):
            copy_row(states[b], work.x[b])
        for l in range(L):
            multiply(work.x, weights.blocks, k * L + l, work.rounded, work.update, B)
            for b in range(B):
                for i in range(h):
                    z = work.update[b, i] + weights.bias[k, l, i]
                    work.x[b, i] += z / (unit + exp(-z))
        for b in range(B):
            copy_row(work.x[b], work.rows[k * B + b])
        if len(weights.heads.segments) > 1:
            multiply(work.x, weights.heads, k, work.rounded, work.outs[k * B :], B)
    if len(weights.heads.segments) == 1:
        multiply(work.rows, weights.heads, 0, work.rounded, work.outs, K * B)
    for k in range(K):
        for b in range(B):
            copy_row(work.outs[k * B + b], logits[slots[b], k])


class CompiledMedusa(DepthDistributions):
    """Medusa's heads as a draft model; see `DepthDistributions`.

    target: whose output rows they use where they have none of their own.  quantization: of the matrices; it changes no distribution of the output.

    Raises:
        IncompatibleError: heads of another target.
    """

    def __init__(self, head: MedusaCheckpoint, target: Any, *, quantization: str = "int8") -> None:
        head.check(target)
        K = head.num_heads
        L = head.num_blocks
        h = head.config.hidden_size
        super().__init__(target, head.ids, K, "medusa")
        tensors = head.tensors
        kind = FORMATS[quantization]
        outputs = self.arrays.sizes.outputs
        heads = [tensors[f"{k}.{L}.weight"] for k in range(K)] if head.has_own_rows else [head.output(target)]
        linears = [f"{k}.{l}.linear" for k in range(K) for l in range(L)]
        bias = aligned(K * L, h)
        for name, row in zip(linears, bias, strict=True):
            row[:] = as_float32(tensors[f"{name}.bias"])
        blocks = packed([tensors[f"{name}.weight"] for name in linears] or [np.zeros((h, h))], kind)
        rows = packed([matrix[: len(self.draft_ids)] for matrix in heads], kind)
        self.weight_bytes = blocks.nbytes + rows.nbytes
        self.weights = MedusaWeights(blocks, bias.reshape(K, L, h), rows)
        x, rows_in, update, logits = (aligned(CHUNK, width) for width in (h, h, blocks.outputs, outputs))
        self.work = MedusaWork(x, rows_in, update, aligned(CHUNK, rounded_bytes(h), dtype=np.uint8), logits)

    def know(self, slots: Sequence[int], states: Float[np.ndarray, "B h"]) -> None:
        """What the heads say of these states."""
        rows = np.ascontiguousarray(states, np.float32)
        most = max(CHUNK // self.depths, 1)
        for i in range(0, len(slots), most):
            head_distributions(
                self.weights, self.work, np.array(slots[i : i + most]), rows[i : i + most], self.arrays.logits
            )
        self.passes += 1
