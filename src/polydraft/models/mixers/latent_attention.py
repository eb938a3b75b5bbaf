"""Latent attention (DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434, section 2.1): all heads attend to one compressed row of each token.

    c = norm(W_c x)   k = rotated(W_k x)                     what the cache holds of a token: R and P numbers, however many heads there are
    q[h] = (q'[h] W_u[h]^T, rotated(q''[h]))                 q', q'' of W_q norm(W_a x), or of W_q x; W_u[h] makes keys of rows: it moves to the query
    y[h] = W_v[h] softmax(scale q[h] . (c, k)) c             and W_v[h], which makes values of rows, behind the sum (section 2.1.2)

So attention is that of many heads over one group of keys, whose first R numbers are the values: a row is kept once, see `row_tiles`, but in bytes, where
keys and values have scales of their own.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from polydraft.models.matrices.kernels import copy_row, norm_part
from polydraft.models.matrices.products import Packed, matmul, rounding_of
from polydraft.models.matrices.rounding import quantize_rows, rounded_bytes
from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.attention.code import Attention, attend_code
from polydraft.models.mixers.cache import SlotMemory, keep_keys, keep_values
from polydraft.models.mixers.layer import LATENT_ATTENTION, Block, LayerWeights, Shapes, Weights, product
from polydraft.models.mixers.program import Items, Part, Work, lasting_code, panel_grain
from polydraft.models.mixers.workspace import CHUNK, Sizes, Workspace, room_of_heads
from polydraft.models.store.places import Stored
from polydraft.numerics.compile_time import inner, unowned
from polydraft.numerics.compiled_code import njit
from polydraft.numerics.exponential import fma

EPSILON = np.float32(1e-6)
"""Of the norms of compressed rows, whatever a configuration says of others."""
KEYS = "self_attn.k_b_proj"
VALUES = "self_attn.v_b_proj"
OF_HEAD = re.compile(r"self_attn\.([kv])_b_proj\.(\d+)\.weight")
"""Of each head, [R, width of its key that does not rotate] and [width of its value, R]: `KEYS.HEAD.weight`."""


class LatentHeads(NamedTuple):
    """rank: R.  turned: P.  plain: width of a key that does not rotate.  value: width of a value.  side_by_side: whether halves of a rotation are."""

    rank: int
    turned: int
    plain: int
    value: int
    side_by_side: bool = True

    @classmethod
    def of(cls, config: Any) -> "LatentHeads":
        """Those of a configuration of DeepSeek's."""
        side_by_side = bool(getattr(config, "rope_interleave", True))
        sizes = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
        return cls(*sizes, side_by_side)


def shapes(config: Any) -> Shapes:
    """Of a layer's weights."""
    heads = config.num_attention_heads
    hidden = config.hidden_size
    rank, turned, plain, value, _ = LatentHeads.of(config)
    queries = heads * (plain + turned)
    of_rank = config.q_lora_rank
    shapes: Shapes = {
        "self_attn.kv_a_proj_with_mqa.weight": (rank + turned, hidden),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }
    if of_rank is None:
        shapes["self_attn.q_proj.weight"] = (queries, hidden)
    else:
        shapes["self_attn.q_a_proj.weight"] = (of_rank, hidden)
        shapes["self_attn.q_a_layernorm.weight"] = (of_rank,)
        shapes["self_attn.q_b_proj.weight"] = (queries, of_rank)
    shapes |= {f"{KEYS}.{head}.weight": (rank, plain) for head in range(heads)}
    return shapes | {f"{VALUES}.{head}.weight": (value, rank) for head in range(heads)}


def in_stack(name: str) -> Stored | None:
    """Where GGUF files have a matrix of a head.

    Example:
        >>> in_stack("self_attn.k_b_proj.3.weight")[:2], in_stack("self_attn.o_proj.weight")
        (('attn_k_b.weight', 3), None)
    """
    match = OF_HEAD.fullmatch(name)
    return match and Stored(f"attn_{match[1]}_b.weight", int(match[2]))


def in_folder(name: str, config: Any) -> Stored | None:
    """Where folders have a matrix of a head: all heads' lie below one another, in each that of keys, transposed, above that of values."""
    match = OF_HEAD.fullmatch(name)
    if match is None:
        return None
    heads = LatentHeads.of(config)
    start = int(match[2]) * (heads.plain + heads.value)
    middle = start + heads.plain
    end = middle + heads.value
    if match[1] == "k":
        return Stored("self_attn.kv_b_proj.weight", part=lambda matrix: matrix[start:middle].T)
    return Stored("self_attn.kv_b_proj.weight", part=lambda matrix: matrix[middle:end])


LATENT_WEIGHTS = LayerWeights(
    LATENT_ATTENTION,
    matrices={
        "latent_in": ("self_attn.q_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        "latent_queries": ("self_attn.q_b_proj",),
        "latent_out": ("self_attn.o_proj",),
    },
    vectors={
        "row_norm": "self_attn.kv_a_layernorm.weight",
        "query_norm": "self_attn.q_a_layernorm.weight",
    },
    names={
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    },
    in_stack=in_stack,
    shapes=shapes,
)
"""DeepSeek's."""


def head_matrices(prefixes: Sequence[str], heads: int) -> dict[str, list[list[str]]]:
    """Matrices of each head of layers, one layer after the other. prefixes: of the layers' weights."""
    names = {"latent_keys": KEYS, "latent_values": VALUES}
    return {
        field: [[f"{prefix}{name}.{head}.weight"] for prefix in prefixes for head in range(heads)]
        for field, name in names.items()
    }


class Places(NamedTuple):
    """Sizes: H heads, those of `LatentHeads`.  compressed: [rows, >= Q + R + P] first product, Q numbers of a query.  first: Q.
    queries: [rows, >= H (plain + P)].  plain: [H, rows, plain] of each head, and rounded.  turned: [rows, (H + 1) P] rotated, the key's last.
    """

    step: np.ndarray
    heads: int
    sizes: LatentHeads
    rows: np.ndarray
    compressed: np.ndarray
    first: int
    queries: np.ndarray
    gain: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    memory: SlotMemory
    plain: np.ndarray
    rounding: int
    rounded: np.ndarray
    turned: np.ndarray


@inner
def _turn(x, begin, out, cos, sin, side_by_side):
    half = len(cos)
    for i in range(half):
        a = x[begin + 2 * i] if side_by_side else x[begin + i]
        b = x[begin + 2 * i + 1] if side_by_side else x[begin + half + i]
        out[i] = fma(a, cos[i], -(b * sin[i]))
        out[half + i] = fma(b, cos[i], a * sin[i])


@unowned
def _place(a, begin, end, thread):
    layer = a.step[0].index
    s = a.sizes
    width = s.plain + s.turned
    for t in range(begin, end):
        row = a.rows[t]
        cos = a.cos[0, row.position]
        sin = a.sin[0, row.position]
        queries = a.queries[t]
        for h in range(a.heads):
            copy_row(queries[h * width : h * width + s.plain], a.plain[h, t])
            quantize_rows(a.plain[h], s.plain, a.rounding, a.rounded[h], t, t + 1)
            out = a.turned[t, h * s.turned : (h + 1) * s.turned]
            _turn(queries, h * width + s.plain, out, cos, sin, s.side_by_side)
        compressed = a.compressed[t]
        norm_part(compressed, a.first, a.gain[layer], EPSILON)
        once = a.memory.keys.shape[4] == 0
        if not once:
            keep_values(a.memory, layer, row.slot, 0, row.column, compressed, a.first, s.rank)
        key = a.first + s.rank
        out = a.turned[t, a.heads * s.turned :]
        _turn(compressed, key, out, cos, sin, s.side_by_side)
        copy_row(out, compressed[key : key + s.turned])
        if once:
            keep_values(a.memory, layer, row.slot, 0, row.column, compressed, a.first, s.rank + s.turned)
        else:
            keep_keys(a.memory, layer, row.slot, 0, row.column, compressed, a.first, s.rank + s.turned)


@njit(cache=True)
def place_code(arguments, address):
    return lasting_code(_place, arguments, address)


OF_SINGLE_HEADS = ("latent_keys", "latent_values")
"""Matrices, too small to be decoded for a prompt."""


class HeadProducts(NamedTuple):
    """y[h] = x[h] W[h]^T of all heads: items are panels of one head after the other. x, rounded, y: [H, rows, ...]."""

    step: np.ndarray
    x: np.ndarray
    w: Packed
    rounded: np.ndarray
    y: np.ndarray


@unowned
def _multiply_heads(a, begin, end, thread):
    step = a.step[0]
    heads = a.x.shape[0]
    while begin < end:
        h = begin // a.w.panels
        panel = begin % a.w.panels
        last = min(a.w.panels, panel + end - begin)
        matmul(
            a.x[h],
            a.w,
            step.index * heads + h,
            a.rounded[h],
            a.y[h],
            panel,
            last,
            step.rows,
            step.of_prompt != 0,
        )
        begin += last - panel


@njit(cache=True)
def multiply_heads_code(arguments, address):
    return lasting_code(_multiply_heads, arguments, address)


class Queries(NamedTuple):
    """Queries of attention, head by head: what was made of plain numbers, and rotated ones behind it. part: P.  out: [rows, H (R + P)]."""

    heads: int
    rank: int
    part: int
    made: np.ndarray
    turned: np.ndarray
    out: np.ndarray


@unowned
def _join_queries(a, begin, end, thread):
    part = a.part
    width = a.rank + part
    for t in range(begin, end):
        for h in range(a.heads):
            out = a.out[t, h * width : (h + 1) * width]
            for i in range(a.rank):
                out[i] = a.made[h, t, i]
            for i in range(part):
                out[a.rank + i] = a.turned[t, h * part + i]


@njit(cache=True)
def join_queries_code(arguments, address):
    return lasting_code(_join_queries, arguments, address)


class Split(NamedTuple):
    """Rows of all heads to those of each, and rounded. x: [rows, H n].  out: [H, rows, n]."""

    x: np.ndarray
    out: np.ndarray
    rounding: int
    rounded: np.ndarray


@unowned
def _split(a, begin, end, thread):
    heads, _, n = a.out.shape
    for t in range(begin, end):
        for h in range(heads):
            copy_row(a.x[t, h * n : (h + 1) * n], a.out[h, t])
            quantize_rows(a.out[h], n, a.rounding, a.rounded[h], t, t + 1)


@njit(cache=True)
def split_code(arguments, address):
    return lasting_code(_split, arguments, address)


class Unite(NamedTuple):
    """Rows of each head to those of all, rounded for the product behind them. x: [H, rows, >= n].  out: [rows, H n]."""

    step: np.ndarray
    x: np.ndarray
    out: np.ndarray
    rounding: int
    rounded: np.ndarray


@unowned
def _unite(a, begin, end, thread):
    heads = a.x.shape[0]
    n = a.out.shape[1] // heads
    for t in range(begin, end):
        for h in range(heads):
            for i in range(n):
                a.out[t, h * n + i] = a.x[h, t, i]
    quantize_rows(a.out, a.out.shape[1], rounding_of(a.rounding, a.step[0].of_prompt), a.rounded, begin, end)


@njit(cache=True)
def unite_code(arguments, address):
    return lasting_code(_unite, arguments, address)


class QueryNorm(NamedTuple):
    """Norm of the first numbers of rows, and rounded for the product behind it. gain: [layers, Q].  out: [rows, Q]."""

    step: np.ndarray
    x: np.ndarray
    gain: np.ndarray
    out: np.ndarray
    rounding: int
    rounded: np.ndarray


@unowned
def _norm_queries(a, begin, end, thread):
    gain = a.gain[a.step[0].index]
    for t in range(begin, end):
        copy_row(a.x[t], a.out[t])
        norm_part(a.out[t], np.int64(0), gain, EPSILON)
    quantize_rows(a.out, len(gain), rounding_of(a.rounding, a.step[0].of_prompt), a.rounded, begin, end)


@njit(cache=True)
def norm_queries_code(arguments, address):
    return lasting_code(_norm_queries, arguments, address)


class LatentArrays(NamedTuple):
    """What one part of such a layer leaves for the next ones. first: where compressed rows have c, behind numbers of a query.

    compressed: [CHUNK, outputs of the first product].  normed, queries: [CHUNK, ...] of queries that have a rank, else `queries` is `compressed`.
    plain: [H, CHUNK, plain] what of queries does not rotate.  turned: [CHUNK, (H + 1) P] what does, the key's last.
    by_head: [H, CHUNK, R] what attention gives.  values: [CHUNK, H value width].  rounded: [H, CHUNK, ...] of `plain` and then of `by_head`.
    """

    first: int
    compressed: np.ndarray
    normed: np.ndarray
    queries: np.ndarray
    plain: np.ndarray
    turned: np.ndarray
    by_head: np.ndarray
    values: np.ndarray
    rounded: np.ndarray


def _latent_arrays(latent: LatentHeads, heads: int, of: Mapping[str, Any]) -> LatentArrays:
    rank = of["query_norm"].shape[1]
    compressed = aligned(CHUNK, of["latent_in"].outputs)
    return LatentArrays(
        first=rank or heads * (latent.plain + latent.turned),
        compressed=compressed,
        normed=aligned(CHUNK, max(rank, 1)),
        queries=aligned(CHUNK, of["latent_queries"].outputs) if rank else compressed,
        plain=aligned(heads, CHUNK, latent.plain),
        turned=aligned(CHUNK, (heads + 1) * latent.turned),
        by_head=aligned(heads, CHUNK, latent.rank),
        values=aligned(CHUNK, heads * latent.value),
        rounded=aligned(heads, CHUNK, rounded_bytes(max(latent.plain, latent.rank)), dtype=np.uint8),
    )


def _head_products(step: np.ndarray, x: np.ndarray, w: Packed, rounded: np.ndarray, threads: int) -> Part:
    heads = len(x)
    y = aligned(heads, CHUNK, w.outputs)
    panels = heads * w.panels
    grain = panel_grain.py_func(panels, w.panel_bytes, threads)
    return Part(
        multiply_heads_code, HeadProducts(step, x, w, rounded, y), Work(Items.FIXED, panels, grain=grain)
    )


def _queries_by_rank(
    of: Mapping[str, Any], arrays: LatentArrays, work: Workspace, step: np.ndarray
) -> tuple[Part, ...]:
    """W_q norm(W_a x) of what the first product left; nothing where that has the queries themselves."""
    if arrays.queries is arrays.compressed:
        return ()
    w = of["latent_queries"]
    norm = QueryNorm(step, arrays.compressed, of["query_norm"], arrays.normed, w.rounding, work.rounded)
    return Part(norm_queries_code, norm), product(step, arrays.normed, w, arrays.queries, work)


def _attending(
    latent: LatentHeads, sizes: Sizes, memory: SlotMemory, work: Workspace, step: np.ndarray
) -> Attention:
    """Attention of all heads over one group of keys, with room of its own."""
    width = latent.rank + latent.turned
    sizes = sizes._replace(groups=1, width=width, value_width=latent.rank)
    room = room_of_heads(sizes, len(work.queries))
    num_layers = len(memory.keys)
    return Attention(
        step,
        sizes,
        windows=np.zeros(num_layers, np.int64),
        sinks=np.zeros((num_layers, 0), np.float32),
        sources=np.arange(num_layers),
        memory=memory,
        work=work._replace(qkv=aligned(CHUNK, sizes.heads * width), **room),
    )


def latent_attention_block(
    weights: Weights, sizes: Sizes, memory: SlotMemory, work: Workspace, step: np.ndarray
) -> Block:
    """Rows are compressed and kept, queries made for them, and what they give is made values."""
    of = weights.others
    latent: LatentHeads = weights.latent
    heads = sizes.heads
    threads = len(work.queries)
    arrays = _latent_arrays(latent, heads, of)
    attention = _attending(latent, sizes, memory, work, step)
    to_rows = _head_products(step, arrays.plain, of["latent_keys"], arrays.rounded, threads)
    to_values = _head_products(step, arrays.by_head, of["latent_values"], arrays.rounded, threads)
    placed = Places(
        step=step,
        heads=heads,
        sizes=latent,
        rows=work.rows,
        compressed=arrays.compressed,
        first=arrays.first,
        queries=arrays.queries,
        gain=of["row_norm"],
        cos=weights.cos,
        sin=weights.sin,
        memory=memory,
        plain=arrays.plain,
        rounding=of["latent_keys"].rounding,
        rounded=arrays.rounded,
        turned=arrays.turned,
    )
    joined = Queries(
        heads, latent.rank, latent.turned, to_rows.arguments.y, arrays.turned, attention.work.qkv
    )
    split = Split(attention.work.mixed, arrays.by_head, of["latent_values"].rounding, arrays.rounded)
    united = Unite(step, to_values.arguments.y, arrays.values, of["latent_out"].rounding, work.rounded)
    by_row = Work(grain=1)
    parts = (
        product(step, work.normed, of["latent_in"], arrays.compressed, work),
        *_queries_by_rank(of, arrays, work, step),
        Part(place_code, placed, by_row),
        to_rows,
        Part(join_queries_code, joined, by_row),
        Part(attend_code, attention, Work(Items.RUNS, 1, heads, grain=1)),
        Part(split_code, split, by_row),
        to_values,
        Part(unite_code, united, by_row),
        product(step, arrays.values, of["latent_out"], work.update, work),
    )
    return Block(of["latent_in"].rounding, parts)
