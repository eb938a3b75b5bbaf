"""Block verification of a batch of chains in three Triton kernels; the symbols are those of `verifiers.block.block`.

    measure   (b, n)  one pass over a row of logits: its maximum and sum, and p and q of the token drafted there
    weigh     (b, n)  the weight w_n from those ratios, then S_n = sum max(0, w_n p - q) in one pass over both rows
    settle    (b)     stop probabilities, the stop node, and the extra token from N((w p - q)+), or from p at the leaf

No law is ever written out: p is made from logits wherever it is needed. Sums and laws are in float64, exponentials in float32.
The two draws use the uniforms of `polydraft.noise`. Nothing but these kernels differs from `device.block`.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from polydraft import noise
from polydraft.verifiers.fast.device import Nodes

SPAN = 1024
"""Tokens of the vocabulary that a program looks at together."""

_ROWS = {"logits": "*fp32", "probs": "*fp32", "tokens": "*i64", "rows": "*i64", "last": "*i64"}
_FOUND = {"top": "*fp32", "total": "*fp64"}
_SIZES = {"N": "i32", "R": "i32", "V": "i32"}
SIGNATURES = {
    "measure": {**_ROWS, **_FOUND, "ratio": "*fp64", **_SIZES, "SPAN": "constexpr"},
    "weigh": {**_ROWS, **_FOUND, "ratio": "*fp64", "weights": "*fp64", "keep": "*fp64", **_SIZES, "SPAN": "constexpr"},
    "settle": {
        **_ROWS,
        **_FOUND,
        "weights": "*fp64",
        "keep": "*fp64",
        "uniform": "*fp64",
        "node": "*i64",
        "token": "*i64",
        **_SIZES,
        "SPAN": "constexpr",
    },
}
"""Types of the kernels' arguments, for compiling them ahead of time."""


@triton.jit
def measure(logits, probs, tokens, rows, last, top, total, ratio, N, R, V, SPAN: tl.constexpr):
    """ratio[b, n] = p(x)/q(x) of the token x drafted below node n; NaN where q(x) is 0."""
    b, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(last + b)
    if n <= end:
        row = logits + (b * N + n) * V
        places = tl.arange(0, SPAN)
        highest = tl.full([SPAN], float("-inf"), tl.float32)
        faults = tl.zeros([SPAN], tl.int32)
        for begin in range(0, V, SPAN):
            x = tl.load(row + begin + places, mask=begin + places < V, other=float("-inf"))
            highest = tl.maximum(highest, x)
            faults += (x != x).to(tl.int32)
        most = tl.max(highest, 0)
        mass = tl.zeros([SPAN], tl.float64)
        for begin in range(0, V, SPAN):
            x = tl.load(row + begin + places, mask=begin + places < V, other=float("-inf"))
            mass += tl.exp(x - most).to(tl.float64)
        sound = (tl.sum(faults, 0) == 0) & (most > float("-inf")) & (most < float("inf"))
        whole = tl.where(sound, tl.sum(mass, 0), float("nan"))
        tl.store(top + b * N + n, most)
        tl.store(total + b * N + n, whole)
        if n < end:
            x = tl.load(tokens + b * N + n + 1)
            r = tl.load(rows + b * N + n + 1)
            px = tl.exp(tl.load(row + x) - most).to(tl.float64) / whole
            qx = tl.load(probs + (b * R + r) * V + x).to(tl.float64)
            tl.store(ratio + b * N + n, tl.where(qx > 0, px / tl.where(qx > 0, qx, 1.0), float("nan")))


@triton.jit
def weigh(logits, probs, tokens, rows, last, top, total, ratio, weights, keep, N, R, V, SPAN: tl.constexpr):
    """weights[b, n] = w_n and keep[b, n] = h_n; h of the leaf is its w."""
    b, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(last + b)
    if n <= end:
        w = tl.load(total + b * N) * 0.0 + 1.0
        for i in range(n):
            w = w * tl.load(ratio + b * N + i)
            w = tl.where(w > 1.0, 1.0, w)
        tl.store(weights + b * N + n, w)
        h = w
        if n < end:
            row, places = logits + (b * N + n) * V, tl.arange(0, SPAN)
            law = probs + (b * R + tl.load(rows + b * N + n + 1)) * V
            most, scale = tl.load(top + b * N + n), w / tl.load(total + b * N + n)
            lacking = tl.zeros([SPAN], tl.float64)
            for begin in range(0, V, SPAN):
                inside = begin + places < V
                p = tl.exp(tl.load(row + begin + places, mask=inside, other=float("-inf")) - most).to(tl.float64)
                lack = scale * p - tl.load(law + begin + places, mask=inside, other=0.0).to(tl.float64)
                lacking += tl.where(lack < 0, 0.0, lack)
            surplus = tl.sum(lacking, 0)
            spent = surplus + (1.0 - w)
            h = tl.where(spent == 0, 1.0, surplus / tl.where(spent == 0, 1.0, spent))
        tl.store(keep + b * N + n, h)


@triton.jit
def settle(logits, probs, tokens, rows, last, top, total, weights, keep, uniform, node, token, N, R, V, SPAN: tl.constexpr):
    """node[b], token[b]; uniform: [B, 2] for the stop node and the extra token. -1 where a law has no positive finite sum."""
    b = tl.program_id(0).to(tl.int64)
    end = tl.load(last + b)
    alive, sum_of_stops = tl.load(uniform + 2 * b) * 0.0 + 1.0, tl.load(uniform + 2 * b) * 0.0
    for j in range(end + 1):  # from the leaf up: the mass of stopping at a node or below it
        h = tl.load(keep + b * N + end - j)
        sum_of_stops += alive * h
        alive = alive * (1.0 - h)
    # Inverse of the cumulative law, root first: what lies above node n is sum_of_stops less the mass of n and below.
    threshold = tl.load(uniform + 2 * b) * sum_of_stops
    n, best, below = end * 0 - 1, end * 0 - 1, tl.load(uniform + 2 * b) * 0.0
    for i in range(end + 1):
        factor = below * 0.0 + 1.0
        for j in range(i + 1, end + 1):
            factor = factor * (1.0 - tl.load(keep + b * N + j))
        mass = tl.load(keep + b * N + i) * factor
        below += mass
        n = tl.where((n < 0) & (mass > 0) & (below > threshold), i, n)
        best = tl.where(mass > 0, i, best)
    n = tl.where(n < 0, best, n)
    n = tl.where((sum_of_stops > 0) & (sum_of_stops < float("inf")), n, -1)
    tl.store(node + b, n)
    found = n * 0 - 1
    if n >= 0:
        row, places = logits + (b * N + n) * V, tl.arange(0, SPAN)
        leaf = n == end
        r = tl.load(rows + b * N + tl.where(leaf, n, n + 1))
        law = probs + (b * R + tl.where(leaf, 0, r)) * V
        most, scale = tl.load(top + b * N + n), tl.load(weights + b * N + n) / tl.load(total + b * N + n)
        scale = tl.where(leaf, 1.0 / tl.load(total + b * N + n), scale)
        taken = tl.where(leaf, 0.0, 1.0).to(tl.float64)
        sums = tl.zeros([SPAN], tl.float64)
        for begin in range(0, V, SPAN):
            inside = begin + places < V
            p = tl.exp(tl.load(row + begin + places, mask=inside, other=float("-inf")) - most).to(tl.float64)
            x = scale * p - taken * tl.load(law + begin + places, mask=inside, other=0.0).to(tl.float64)
            sums += tl.where(x < 0, 0.0, x)
        whole = tl.sum(sums, 0)
        mark = tl.load(uniform + 2 * b + 1) * whole
        reached, final = whole * 0.0, n * 0 - 1
        for begin in range(0, V, SPAN):
            inside = begin + places < V
            p = tl.exp(tl.load(row + begin + places, mask=inside, other=float("-inf")) - most).to(tl.float64)
            x = scale * p - taken * tl.load(law + begin + places, mask=inside, other=0.0).to(tl.float64)
            x = tl.where(inside & (x > 0), x, 0.0)
            crossed = (x > 0) & (reached + tl.cumsum(x, 0) > mark)
            first = tl.min(tl.where(crossed, begin + places, V), 0)
            found = tl.where((found < 0) & (first < V), first, found)
            final = tl.maximum(final, tl.max(tl.where(x > 0, begin + places, -1), 0))
            reached += tl.sum(x, 0)
        found = tl.where(found < 0, final, found)
        found = tl.where((whole > 0) & (whole < float("inf")), found, -1)
    tl.store(token + b, found)


def block(logits: Float[Tensor, "B N V"], laws: Tensor | None, nodes: Nodes) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """Stop node and extra token of every chain; a `device.Rule`."""
    B, N, V = logits.shape
    x = logits.contiguous()
    q = x if laws is None else laws.float().contiguous()  # without laws there is no draft and no kernel reads them
    top, total = x.new_empty(B, N), x.new_empty(B, N, dtype=torch.float64)
    ratio, weights, keep = (torch.empty_like(total) for _ in range(3))
    node, token = torch.empty_like(nodes.last), torch.empty_like(nodes.last)
    uniform = torch.stack([nodes.uniform(noise.Stream.STOP), nodes.uniform(noise.Stream.EXTRA)], 1)
    rows = (x, q, nodes.tokens.contiguous(), nodes.rows.contiguous(), nodes.last.contiguous(), top, total)
    sizes = (N, q.shape[1], V, SPAN)
    measure[(B, N)](*rows, ratio, *sizes)
    weigh[(B, N)](*rows, ratio, weights, keep, *sizes)
    settle[(B,)](*rows, weights, keep, uniform, node, token, *sizes)
    return node, token
