"""The memory that the rows of a pass are in, and the numbers that all parts of a model know.

column   place of one token in a slot: committed tokens first, then the nodes of the tree being scored
seen     the columns of the tree that a row attends to beside all committed ones: its ancestors' and its own
"""

from typing import Any, NamedTuple

import numpy as np

from polydraft.models.compiled.cache import whole
from polydraft.models.compiled.kernels import SILU
from polydraft.models.compiled.rounding import rounded_bytes
from polydraft.models.compiled.tiles import UNROLL
from polydraft.models.compiled.vectors import aligned
from polydraft.models.slots import TREE_ROOM
from polydraft.numerics.compile_time import inner
from polydraft.numerics.threads import sync

__all__ = ["CHUNK", "NONE", "ONE", "ROW", "Sizes", "Workspace", "cut_runs", "workspace"]

CHUNK = 64
"""Most rows that are in work at once; a pass over more reads the weights again."""
RUN = 16
"""Rows of a slot whose attention is one unit of work."""
ROW = np.dtype([(name, np.int64) for name in ("token", "slot", "position", "column", "length", "num_seen", "has_logits")])
"""A row of a pass. length: committed tokens of its slot.  num_seen: columns beyond them that it attends to.  has_logits: whether they are asked for."""
ONE, NONE = np.float32(1.0), np.float32(0.0)


class Sizes(NamedTuple):
    """H heads of q, G heads of k and v, D their width, I the width between gate and down, outputs: V in whole panels.

    attention_scale: of scores.  activation: SILU or GELU.  caps: soft caps of scores and logits, 0 for none.
    gated: whether each head of q has another one behind it, whose sigmoid its output is multiplied by.
    """

    heads: int
    groups: int
    width: int
    inner: int
    outputs: int
    epsilon: np.float32
    attention_scale: np.float32
    embedding_scale: np.float32 = ONE
    residual_scale: np.float32 = ONE
    logit_scale: np.float32 = ONE
    attention_cap: np.float32 = NONE
    logit_cap: np.float32 = NONE
    activation: int = SILU
    gated: bool = False


class Workspace(NamedTuple):
    """Activations of up to CHUNK rows, and what each is."""

    x: np.ndarray
    normed: np.ndarray
    qkv: np.ndarray
    mixed: np.ndarray
    update: np.ndarray
    gate_up: np.ndarray
    act: np.ndarray
    rounded: np.ndarray  # [CHUNK, bytes] the input of the next product as `round_rows` leaves it
    queries: np.ndarray  # [threads, RUN H / G, D], zeros up to whole steps of a product
    scores: np.ndarray  # [threads, RUN H / G, columns]
    blend: np.ndarray  # [threads, RUN H / G, D up to whole panels]
    totals: np.ndarray  # [threads, RUN H / G]
    lanes: np.ndarray  # [threads, 16]
    scores_seen: np.ndarray  # [threads, TREE_ROOM]
    runs: np.ndarray  # [CHUNK + 1]
    sync: np.ndarray  # see `threads`
    rows: np.ndarray  # [CHUNK] of ROW
    seen_columns: np.ndarray  # [CHUNK, TREE_ROOM]


@inner
def cut_runs(rows, count, runs):
    """Cut rows into runs of the same slot, few enough to share; returns how many: run k is runs[k] .. runs[k + 1] - 1."""
    num, runs[0] = np.int64(0), 0
    for t in range(1, count + 1):
        if t == count or rows[t].slot != rows[t - 1].slot or t - runs[num] == RUN:
            num += 1
            runs[num] = t
    return num


def workspace(weights: Any, sizes: Sizes, columns: int, threads: int, widest: int = 0) -> Workspace:
    """widest: activations that are none of a layer's."""
    hidden, mixed = len(weights.norm), sizes.heads * sizes.width
    queries, widest = RUN * sizes.heads // sizes.groups, max(hidden, mixed, sizes.inner, widest)
    return Workspace(
        x=aligned(CHUNK, hidden),
        normed=aligned(CHUNK, hidden),
        qkv=aligned(CHUNK, weights.qkv.outputs),
        mixed=aligned(CHUNK, mixed),
        update=aligned(CHUNK, weights.out.outputs),
        gate_up=aligned(CHUNK, weights.gate_up.outputs),
        act=aligned(CHUNK, sizes.inner),
        rounded=aligned(CHUNK, rounded_bytes(widest), dtype=np.uint8),
        queries=aligned(threads, queries, whole(sizes.width, UNROLL)),
        scores=aligned(threads, queries, columns),
        blend=aligned(threads, queries, whole(sizes.width)),
        totals=aligned(threads, queries),
        lanes=aligned(threads, 16),
        scores_seen=aligned(threads, TREE_ROOM),
        runs=np.zeros(CHUNK + 1, np.int64),
        sync=sync,
        rows=np.zeros(CHUNK, ROW),
        seen_columns=np.zeros((CHUNK, TREE_ROOM), np.int64),
    )
