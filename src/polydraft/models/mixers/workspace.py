"""The memory that the rows of a forward pass are in, and the numbers that all parts of a model know.

column   place of one token in a slot: committed tokens first, then the nodes of the tree being scored
seen     the columns of the tree that a row attends to beside all committed ones: its ancestors' and its own
"""

from typing import Any, NamedTuple

import numpy as np

from polydraft.models.matrices.kernels import SILU
from polydraft.models.matrices.rounding import rounded_bytes
from polydraft.models.matrices.tiles import UNROLL
from polydraft.models.matrices.vectors import PANEL, aligned
from polydraft.models.mixers.cache import COLUMNS, whole
from polydraft.models.mixers.cache_tiles import QUERY
from polydraft.models.mixers.softmax import LANES_OF_TOTAL, TERMS
from polydraft.models.slots import TREE_ROOM
from polydraft.numerics.compile_time import inner
from polydraft.numerics.threads import sync

CHUNK = 64
"""Most rows that are in work at once; a forward pass over more reads the weights again."""
RUN = 16
"""Rows of a slot whose attention is one unit of work."""
SPAN = whole(TREE_ROOM + COLUMNS, 2 * COLUMNS)
"""Most columns whose scores are in work at once: a tree, and committed ones before it up to a multiple of COLUMNS."""
ROW = np.dtype(
    [(name, np.int64) for name in ("token", "slot", "position", "column", "length", "num_seen", "has_logits")]
)
"""A row of a forward pass. length: committed tokens of its slot.  num_seen: columns beyond them that it attends to.  has_logits: whether they are asked for."""
ONE = np.float32(1.0)
NONE = np.float32(0.0)


class Sizes(NamedTuple):
    """H heads of q, G heads of k and v, D their width, I the width between gate and down, outputs: V in whole panels.

    attention_scale: of scores.  activation: of `kernels`.  caps: soft caps of scores and logits, 0 for none.
    gated: whether each head of q has another one behind it, whose sigmoid its output is multiplied by.
    value_norm: whether values are divided by the root of their mean square.  keys_as_values: whether they are the keys before norm and rotation.
    value_width: of values, where it is another one than D; else 0.
    ungated: whether feed-forwards have no gate.  centred: whether norms take the mean away.
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
    value_norm: bool = False
    keys_as_values: bool = False
    value_width: int = 0
    ungated: bool = False
    centred: bool = False


class Workspace(NamedTuple):
    """Activations of up to CHUNK rows, and what each is."""

    x: np.ndarray
    normed: np.ndarray
    qkv: np.ndarray
    mixed: np.ndarray
    update: np.ndarray
    gate_up: np.ndarray
    act: np.ndarray
    rounded: np.ndarray  # [CHUNK, bytes] the input of the next product as `quantize_rows` leaves it
    queries: np.ndarray  # [threads, RUN H / G, D], zeros up to whole steps of a product
    words: (
        np.ndarray
    )  # [threads, RUN H / G, words] queries rounded to bytes, see `cache_tiles.QUERY`, or to bfloat16
    scores: np.ndarray  # [threads, RUN H / G, SPAN]
    blend: np.ndarray  # [threads, RUN H / G, D up to whole panels] sums of weights times values
    tops: np.ndarray  # [threads, RUN H / G]; this and the next: see `softmax`
    totals: np.ndarray  # [threads, RUN H / G, LANES_OF_TOTAL]
    block_tops: np.ndarray  # [threads, SPAN / TERMS]
    inverses: np.ndarray  # [threads, SPAN] of scales of values
    path_scores: np.ndarray  # [threads, H / G, SPAN] of one row, by position
    path_values: np.ndarray  # [threads, D up to whole panels times SPAN] words, as in the cache, by position
    turned_keys: np.ndarray  # [threads, words] a panel of keys that lie as values do, see `row_tiles`
    path_logs: np.ndarray  # [threads, SPAN]
    runs: np.ndarray  # [CHUNK + 1]
    sync: np.ndarray  # see `threads`
    rows: np.ndarray  # [CHUNK] of ROW
    seen_columns: np.ndarray  # [CHUNK, TREE_ROOM]


@inner
def cut_runs(rows, count, runs):
    """Cut rows into runs of the same slot, few enough to share; returns how many: run k is runs[k] .. runs[k + 1] - 1."""
    num = np.int64(0)
    runs[0] = 0
    for t in range(1, count + 1):
        if t == count or rows[t].slot != rows[t - 1].slot or t - runs[num] == RUN:
            num += 1
            runs[num] = t
    return num


def room_of_heads(sizes: Sizes, threads: int) -> dict[str, np.ndarray]:
    """Fields of `Workspace` whose shapes follow from heads of attention."""
    values = sizes.value_width or sizes.width
    inputs = whole(sizes.width, PANEL if sizes.value_width else UNROLL)
    words = max(-(-sizes.width // TERMS) * QUERY.itemsize // 4, inputs // 2)
    queries = RUN * sizes.heads // sizes.groups
    return {
        "mixed": aligned(CHUNK, sizes.heads * values),
        "queries": aligned(threads, queries, inputs),
        "words": aligned(threads, queries, words, dtype=np.int32),
        "scores": aligned(threads, queries, SPAN),
        "blend": aligned(threads, queries, whole(values)),
        "tops": aligned(threads, queries),
        "totals": aligned(threads, queries, LANES_OF_TOTAL),
        "path_scores": aligned(threads, queries // RUN, SPAN),
        "path_values": aligned(threads, whole(values) * SPAN, dtype=np.uint32),
        "turned_keys": aligned(threads, whole(sizes.width) * PANEL, dtype=np.uint32),
    }


def workspace(weights: Any, sizes: Sizes, threads: int, widest: int = 0) -> Workspace:
    """widest: activations that are none of a layer's."""
    hidden = len(weights.norm)
    widest = max(hidden, sizes.heads * sizes.width, sizes.inner, widest)
    return Workspace(
        x=aligned(CHUNK, hidden),
        normed=aligned(CHUNK, hidden),
        qkv=aligned(CHUNK, weights.qkv.outputs),
        update=aligned(CHUNK, whole(hidden)),
        gate_up=aligned(CHUNK, weights.gate_up.outputs),
        act=aligned(CHUNK, sizes.inner),
        rounded=aligned(CHUNK, rounded_bytes(widest), dtype=np.uint8),
        **room_of_heads(sizes, threads),
        block_tops=aligned(threads, SPAN // TERMS),
        inverses=aligned(threads, SPAN),
        path_logs=aligned(threads, SPAN),
        runs=np.zeros(CHUNK + 1, np.int64),
        sync=sync,
        rows=np.zeros(CHUNK, ROW),
        seen_columns=np.zeros((CHUNK, TREE_ROOM), np.int64),
    )
