"""The first layers of a compiled target as its draft model: they read and write the target's own columns, of which nothing stays.

Elhoushi et al. 2024, LayerSkip (arXiv 2404.16710); Zhang et al. 2023, Draft & Verify (arXiv 2309.08168).

    x      the state behind layer E of a row that went through layers 1 .. E of the target
    distribution    softmax(H norm(x + feed_forward(x))), H the target's own output rows at the draft vocabulary

Committed tokens were run through those layers by the target, and never are again. A row's bits do not depend on what else is in a forward pass: the
columns that a proposal leaves behind the committed ones are those that the scoring forward pass writes there again.
"""

from typing import Any

import numpy as np

from polydraft.heads.compiled import HEADS, CompiledHead
from polydraft.heads.target_slots import ExitArrays, TargetSlots
from polydraft.models.compiled.layers import multiply_shared, run_layer
from polydraft.models.matrices.kernels import add, copy_row, gate, rms_norm, scale_row
from polydraft.models.matrices.products import FORMATS, Packed, output_row, packed
from polydraft.models.matrices.rounding import rounded_bytes
from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.workspace import CHUNK, NONE, ONE, Sizes, cut_runs
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.floats import as_float32
from polydraft.papers.early_exit.network import ExitCheckpoint
from polydraft.papers.target_layers import compiled


@njit
def _run(model, rows, logits, done):
    """Run the rows in work; the logits wanted go to logits[done:]. Returns how many logits there are now."""
    target = model.target
    work = model.work
    sizes = model.sizes
    zero: Any = np.int64(0)  # a literal 0 would compile everything below twice
    runs = cut_runs(work.rows, rows, work.runs)
    for t in range(rows):
        output_row(target.embed, zero, work.rows[t].token, work.x[t])
        scale_row(work.x[t], target.sizes.embedding_scale)
    for layer in range(model.layer):
        run_layer(target, layer, rows, runs)
    num_logits = zero
    for t in range(rows):
        if work.rows[t].has_logits:
            copy_row(work.x[t], work.x[num_logits])
            num_logits += 1
    if num_logits == 0:
        return done
    if len(model.mlp_norm) > 0:
        rms_norm(work.x, model.mlp_norm, sizes.epsilon, model.normed, zero, num_logits)
        multiply_shared(work, model.normed, model.gate_up, 0, model.rounded, model.inner, num_logits)
        gate(model.inner, sizes.inner, sizes.activation, model.act, zero, num_logits)
        multiply_shared(work, model.act, model.down, 0, model.rounded, model.update, num_logits)
        add(work.x, model.update, ONE, zero, num_logits)
    rms_norm(work.x, model.norm, sizes.epsilon, model.normed, zero, num_logits)
    multiply_shared(work, model.normed, model.head, 0, model.rounded, logits[done:], num_logits)
    return done + num_logits


HEADS[ExitArrays] = _run


class CompiledExit(TargetSlots, CompiledHead):
    """The first layers of a target and an exit behind them, as a draft model in the target's own slots; see `core.Target`.

    quantization: of the exit's own matrices; it changes no distribution. Without a trained exit there are none: it is the target's own norm and head.
    `weight_bytes`: of the exit, the target's not counted.

    Raises:
        IncompatibleError: a target that is not compiled, an exit of another target, or behind no layer of it.
    """

    def __init__(self, exit_: ExitCheckpoint, target: Any, *, quantization: str = "int8") -> None:
        self.share(compiled(target, "early-exit"))
        self.name = "early-exit"
        self.pool = target.pool
        exit_.check(target)
        net = target.arrays
        tensors = exit_.tensors
        h = len(net.norm)
        inner = exit_.config.intermediate_size if tensors else 0
        if tensors:
            epsilon = exit_.config.rms_norm_eps
            self.draft_ids = exit_.ids[exit_.ids < target.vocab_size]
            head = packed([exit_.output(target)[: len(self.draft_ids)]], FORMATS[quantization])
            mlp_norm, norm = (as_float32(tensors[f"{name}.weight"]) for name in ("mlp_norm", "norm"))
        else:
            epsilon = net.sizes.epsilon
            head = net.head
            norm = net.norm
            mlp_norm = np.empty(0, np.float32)

        def matrix(*names: str) -> Packed:
            parts = [tensors[f"mlp.{name}.weight"] for name in names] if tensors else [np.zeros((0, h))]
            return packed([np.concatenate(parts)], FORMATS[quantization])

        gate_up = matrix("gate_proj", "up_proj")
        down = matrix("down_proj")
        self.weight_bytes = sum(x.nbytes for x in (gate_up, down, head) if x is not net.head)
        sizes = Sizes(0, 0, 0, inner, head.outputs, np.float32(epsilon), NONE)
        shared = sizes, net.memory, net.work
        rooms = (aligned(CHUNK, width) for width in (h, gate_up.outputs, inner, down.outputs))
        rounded = aligned(CHUNK, rounded_bytes(max(h, inner)), dtype=np.uint8)
        matrices = mlp_norm, gate_up, down, norm, head
        self.arrays = ExitArrays(net, exit_.layers[0], *shared, *matrices, *rooms, rounded)
