"""Attention of token trees as Triton kernels: long contexts are split over programs, and how long they are is data.

    over_parts  (s, g; rows; part)  rows of a sequence that share a key head, over the part's share of its committed columns; the last part also
                                    over the tree, whose columns behind them a row sees by its bits (`table.py`)
    joined      (s, g; rows)        the parts weighed by their sums of exponentials

    R  rows of a pair (s, g): T rows of the tree by H / G heads

Keys are read where they lie, in the slot that the table names. The number of parts is fixed for a batch and number of rows; each takes as many blocks
of columns as the sequence has for it. Sums are in float32. BLOCK and PROGRAMS are reasoned, not tuned: no kernel has run on a GPU yet.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportOptionalMemberAccess=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.models.static import table as tables

BLOCK = 64
"""Columns that a program looks at together; the bits of one word of a tree."""
LEAST, MOST_ROWS = 16, 64
"""Rows of a program: matrix units take 16 at least."""
PROGRAMS = 512
"""About as many as fill a GPU of 132 processors; more parts than this would only add to joining them."""

WORDS = tl.constexpr(tables.WORDS)


@triton.jit
def _seen(q, k0, v0, column, seen, width, D: tl.constexpr, most, mass, mixed, scale):
    """One block of columns more. seen: [ROWS, BLOCK] or [1, BLOCK]."""
    d = tl.arange(0, D)
    there = (tl.max(seen.to(tl.int32), 0) > 0)[:, None] & (d < width)[None, :]
    k = tl.load(k0 + column[:, None] + d[None, :], mask=there, other=0.0)
    v = tl.load(v0 + column[:, None] + d[None, :], mask=there, other=0.0)
    x = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
    top = tl.maximum(most, tl.max(x, 1))
    safe = tl.where(top > float("-inf"), top, 0.0)
    share, fade = tl.exp(x - safe[:, None]), tl.exp(most - safe)
    mixed = mixed * fade[:, None] + tl.dot(share.to(v.dtype), v, input_precision="ieee")
    return top, mass * fade + tl.sum(share, 1), mixed


@triton.jit
def over_parts(
    q, keys, values, table, mixes, tops, sums, T, H, G, C, width, scale,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """mixes[s, g, part, row, D], tops and sums [s, g, part, row]: what the part gives each row, its largest score and its sum."""
    pair, tile, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    s, g, each = pair // G, pair % G, H // G
    L = T * (3 + WORDS) + 2
    slot, length = tl.load(table + s * L + L - 2), tl.load(table + s * L + L - 1)
    r, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    t, real = r // each, r < T * each
    at = ((s * T + t) * H + g * each + r % each) * width
    rows = tl.load(q + at[:, None] + d[None, :], mask=real[:, None] & (d < width)[None, :], other=0.0)
    k0, v0 = keys + slot * C * G * width, values + slot * C * G * width
    most = tl.full([ROWS], float("-inf"), tl.float32)
    mass, mixed = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32)
    share = tl.cdiv(tl.cdiv(length, BLOCK), PARTS) * BLOCK
    end = tl.minimum((part + 1) * share, length)
    for begin in range(part * share, end, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        most, mass, mixed = _seen(rows, k0, v0, (c * G + g) * width, (c < end)[None, :], width, D, most, mass, mixed, scale)
    if part == PARTS - 1:
        for word in range(WORDS):
            bits = tl.load(table + s * L + 3 * T + t * WORDS + word, mask=real, other=0)
            if tl.max((bits != 0).to(tl.int32), 0) > 0:
                c = tl.arange(0, BLOCK)
                seen = ((bits[:, None] >> c[None, :].to(tl.int64)) & 1) == 1
                column = ((length + word * BLOCK + c) * G + g) * width
                most, mass, mixed = _seen(rows, k0, v0, column, seen, width, D, most, mass, mixed, scale)
    place = (pair * PARTS + part) * (tl.num_programs(1) * ROWS) + r
    tl.store(tops + place, most)
    tl.store(sums + place, mass)
    tl.store(mixes + place[:, None] * D + d[None, :], mixed)


@triton.jit
def joined(mixes, tops, sums, out, T, H, G, width, D: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """out[s, t, head, width]."""
    pair, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, g, each, padded = pair // G, pair % G, H // G, tl.num_programs(1) * ROWS
    r, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    for part in range(PARTS):
        most = tl.maximum(most, tl.load(tops + (pair * PARTS + part) * padded + r))
    most = tl.where(most > float("-inf"), most, 0.0)
    mass, mixed = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32)
    for part in range(PARTS):
        place = (pair * PARTS + part) * padded + r
        weight = tl.exp(tl.load(tops + place) - most)
        mass += weight * tl.load(sums + place)
        mixed += weight[:, None] * tl.load(mixes + place[:, None] * D + d[None, :])
    at = ((s * T + r // each) * H + g * each + r % each) * width
    found = mixed / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(out + at[:, None] + d[None, :], found.to(out.dtype.element_ty), mask=(r < T * each)[:, None] & (d < width)[None, :])


def tree_attention(
    q: Float[Tensor, "S T H D"],
    keys: Float[Tensor, "slots C G D"],
    values: Float[Tensor, "slots C G D"],
    table: Int[Tensor, "S L"],
) -> Float[Tensor, "S T HD"]:
    """See `attention.tree`."""
    (S, T, H, width), (_, C, G, _) = q.shape, keys.shape
    rows = T * H // G
    ROWS = max(LEAST, min(MOST_ROWS, triton.next_power_of_2(rows)))
    tiles, D = triton.cdiv(rows, ROWS), max(16, triton.next_power_of_2(width))
    parts = max(1, min(PROGRAMS // (S * G * tiles), triton.cdiv(C, 4 * BLOCK)))
    shape = S * G, parts, tiles * ROWS
    mixes, tops, sums = (torch.empty(*shape, *more, device=q.device) for more in ((D,), (), ()))
    x = q.contiguous()
    out = torch.empty_like(x)
    over_parts[(S * G, tiles, parts)](
        x, keys, values, table, mixes, tops, sums, T, H, G, C, width, width**-0.5, D=D, ROWS=ROWS, BLOCK=BLOCK, PARTS=parts
    )
    joined[(S * G, tiles)](mixes, tops, sums, out, T, H, G, width, D=D, ROWS=ROWS, PARTS=parts)
    return out.flatten(2)


def signatures(dtype: str) -> dict[str, dict[str, str]]:
    """Types of the kernels' arguments, for compiling them ahead of time. dtype: of Triton, such as bf16."""
    numbers, sums = f"*{dtype}", dict.fromkeys(("mixes", "tops", "sums"), "*fp32")
    sizes = dict.fromkeys(("T", "H", "G"), "i32")
    constants = dict.fromkeys(("D", "ROWS", "PARTS"), "constexpr")
    return {
        "over_parts": {
            "q": numbers,
            "keys": numbers,
            "values": numbers,
            "table": "*i64",
            **sums,
            **sizes,
            "C": "i32",
            "width": "i32",
            "scale": "fp32",
            **constants,
            "BLOCK": "constexpr",
        },
        "joined": {**sums, "out": numbers, **sizes, "width": "i32", **constants},
    }
