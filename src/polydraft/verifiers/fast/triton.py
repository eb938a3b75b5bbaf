"""Block verification of chains, and races, as Triton kernels over a whole batch: from logits to the outcome's table, noise included.

    measure   (b, n, part)  one pass over a part of a row of logits: maximum, sum of exp(x - maximum), faults
    weigh     (b, n, part)  the weight w_n of a chain's node, then its part of S_n = sum max(0, w_n p - q)
    leave     (b, part)     the stop node, and the part's share of what a token there is drawn from: (w p - q)+, p at the leaf
    settle    (b)           the extra token, from the part in which the uniform falls; path, count and token of the outcome
    arrive    (b, n, part)  races: the first arrival of a part of the vocabulary at a node
    follow    (b)           races: where the picks leave the tree; path, count and token of the outcome

A vocabulary is cut into parts so that few rows still fill a GPU; what is small, such as weights, every program works out for itself. No
law is ever written out: p is made from logits wherever it is needed. Sums and laws are in float64, exponentials in float32.
The symbols are those of `verifiers.block.block`. SPAN and PART are reasoned, not tuned: no kernel has run on a GPU yet.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportCallIssue=false, reportOptionalMemberAccess=false

from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from polydraft import tree
from polydraft.core import Draft, NoiseKey, TokenTree
from polydraft.staging import sent
from polydraft.verifiers.fast import device
from polydraft.verifiers.fast.triton_noise import EXTRA, RACE, STOP, clock, uniform, words

SPAN = 1024
"""Tokens of the vocabulary that a program looks at together: 8 of each of its 128 threads."""
PART = 8192
"""Tokens of a program; at most MOST programs share a row."""
MOST = 32
_BITS = 63

TOKEN, ROW, ABOVE, PARENT, DEPTH, ACTIVE, FACTS = (tl.constexpr(i) for i in range(7))
"""Integers of a node in the table of a round; ABOVE and DEPTH are -1 where there is no context, ACTIVE has a bit for each path in play."""
LAST, KEY = tl.constexpr(0), tl.constexpr(1)
"""Behind those of the nodes: the last node; seed, sample and position."""


@triton.jit
def _fact(facts, b, n, which: tl.constexpr, N):
    return tl.load(facts + b * (N * FACTS + 4) + n * FACTS + which)


@triton.jit
def _whole(tops, sums, row, PARTS: tl.constexpr):
    """Maximum and sum of a row of logits from its parts; NaN where it is faulty."""
    parts = row * PARTS + tl.arange(0, PARTS)
    top, mass = tl.load(tops + parts), tl.load(sums + parts)
    most = tl.max(top, 0)
    sound = (tl.sum((mass != mass).to(tl.int32), 0) == 0) & (most > float("-inf")) & (most < float("inf"))
    share = tl.where(top > float("-inf"), tl.exp(top - most).to(tl.float64), 0.0)
    return most, tl.where(sound, tl.sum(share * mass, 0), float("nan"))


@triton.jit
def measure(logits, tops, sums, V, SPAN: tl.constexpr, PARTS: tl.constexpr):
    """tops[row, part], sums[row, part]; a part with NaN has a sum of NaN, one of -inf alone a sum of 0."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    share = tl.cdiv(tl.cdiv(V, PARTS), SPAN) * SPAN
    x0, places = logits + row * V, tl.arange(0, SPAN)
    end = tl.minimum((part + 1) * share, V)
    highest = tl.full([SPAN], float("-inf"), tl.float32)
    faults = tl.zeros([SPAN], tl.int32)
    for begin in range(part * share, end, SPAN):
        x = tl.load(x0 + begin + places, mask=begin + places < end, other=float("-inf"))
        highest = tl.maximum(highest, x)
        faults += (x != x).to(tl.int32)
    most = tl.max(highest, 0)
    mass = tl.zeros([SPAN], tl.float64)
    for begin in range(part * share, end, SPAN):
        x = tl.load(x0 + begin + places, mask=begin + places < end, other=float("-inf"))
        mass += tl.where(x > float("-inf"), tl.exp(x - most).to(tl.float64), 0.0)
    tl.store(tops + row * PARTS + part, most)
    tl.store(sums + row * PARTS + part, tl.where(tl.sum(faults, 0) == 0, tl.sum(mass, 0), float("nan")))


@triton.jit
def _ratio(logits, probs, facts, tops, sums, b, n, N, R, V, PARTS: tl.constexpr):
    """p(x)/q(x) of the token x drafted below node n of a chain; NaN where q(x) is 0."""
    most, whole = _whole(tops, sums, b * N + n, PARTS)
    x, r = _fact(facts, b, n + 1, TOKEN, N), _fact(facts, b, n + 1, ROW, N)
    px = tl.exp(tl.load(logits + (b * N + n) * V + x) - most).to(tl.float64) / whole
    qx = tl.load(probs + (b * R + r) * V + x).to(tl.float64)
    return tl.where(qx > 0, px / tl.where(qx > 0, qx, 1.0), float("nan"))


@triton.jit
def weigh(logits, probs, facts, tops, sums, weights, lacks, N, R, V, SPAN: tl.constexpr, PARTS: tl.constexpr):
    """weights[b, n] = w_n and lacks[b, n, part], the part's share of S_n; that of the leaf is not made."""
    b, n, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    end = tl.load(facts + b * (N * FACTS + 4) + N * FACTS + LAST)
    if n <= end:
        _, w = _whole(tops, sums, b * N, PARTS)
        w = w * 0.0 + 1.0
        for i in range(n):
            w = w * _ratio(logits, probs, facts, tops, sums, b, i, N, R, V, PARTS)
            w = tl.where(w > 1.0, 1.0, w)
        tl.store(weights + b * N + n, w)
        if n < end:
            share = tl.cdiv(tl.cdiv(V, PARTS), SPAN) * SPAN
            x0, places = logits + (b * N + n) * V, tl.arange(0, SPAN)
            law = probs + (b * R + _fact(facts, b, n + 1, ROW, N)) * V
            most, whole = _whole(tops, sums, b * N + n, PARTS)
            stop, lacking = tl.minimum((part + 1) * share, V), tl.zeros([SPAN], tl.float64)
            for begin in range(part * share, stop, SPAN):
                inside = begin + places < stop
                p = tl.exp(tl.load(x0 + begin + places, mask=inside, other=float("-inf")) - most).to(tl.float64)
                lack = (w / whole) * p - tl.load(law + begin + places, mask=inside, other=0.0).to(tl.float64)
                lacking += tl.where(lack < 0, 0.0, lack)
            tl.store(lacks + (b * N + n) * PARTS + part, tl.sum(lacking, 0))


@triton.jit
def _held(weights, lacks, b, n, end, N, PARTS: tl.constexpr):
    """h_n of a chain; h of the leaf is its w."""
    w = tl.load(weights + b * N + n)
    s = tl.sum(tl.load(lacks + (b * N + n) * PARTS + tl.arange(0, PARTS), mask=tl.arange(0, PARTS) * 0 + n < end, other=0.0), 0)
    spent = s + (1.0 - w)
    return tl.where(n == end, w, tl.where(spent == 0, 1.0, s / tl.where(spent == 0, 1.0, spent)))


@triton.jit
def _stop(weights, lacks, facts, b, end, N, PARTS: tl.constexpr):
    """The stop node of a chain, by the inverse of the cumulative law, root first; -1 where it has no positive finite sum."""
    w = tl.load(weights + b * N)
    alive, every = w * 0.0 + 1.0, w * 0.0
    for j in range(end + 1):  # from the leaf up
        h = _held(weights, lacks, b, end - j, end, N, PARTS)
        every += alive * h
        alive = alive * (1.0 - h)
    key = facts + b * (N * FACTS + 4) + N * FACTS + KEY
    threshold = uniform(key, STOP, end * 0) * every
    n, best, below = end * 0 - 1, end * 0 - 1, w * 0.0
    for i in range(end + 1):
        factor = w * 0.0 + 1.0
        for j in range(i + 1, end + 1):
            factor = factor * (1.0 - _held(weights, lacks, b, j, end, N, PARTS))
        mass = _held(weights, lacks, b, i, end, N, PARTS) * factor
        below += mass
        n = tl.where((n < 0) & (mass > 0) & (below > threshold), i, n)
        best = tl.where(mass > 0, i, best)
    n = tl.where(n < 0, best, n)
    return tl.where((every > 0) & (every < float("inf")), n, -1)


@triton.jit
def _left(logits, law, at, inside, most, scale, taken):
    """Of a span of tokens, scale p - taken q above 0."""
    p = tl.exp(tl.load(logits + at, mask=inside, other=float("-inf")) - most).to(tl.float64)
    x = scale * p - taken * tl.load(law + at, mask=inside, other=0.0).to(tl.float64)
    return tl.where(inside & (x > 0), x, 0.0)


@triton.jit
def leave(logits, probs, facts, tops, sums, weights, lacks, nodes, masses, N, R, V, SPAN: tl.constexpr, PARTS: tl.constexpr):
    """nodes[b], and masses[b, part] of the law that the extra token is drawn from."""
    b, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(facts + b * (N * FACTS + 4) + N * FACTS + LAST)
    n = _stop(weights, lacks, facts, b, end, N, PARTS)
    if part == 0:
        tl.store(nodes + b, n)
    if n >= 0:
        share = tl.cdiv(tl.cdiv(V, PARTS), SPAN) * SPAN
        leaf, places = n == end, tl.arange(0, SPAN)
        most, whole = _whole(tops, sums, b * N + n, PARTS)
        law = probs + (b * R + tl.where(leaf, 0, _fact(facts, b, tl.where(leaf, n, n + 1), ROW, N))) * V
        scale = tl.where(leaf, 1.0, tl.load(weights + b * N + n)) / whole
        stop, found = tl.minimum((part + 1) * share, V), tl.zeros([SPAN], tl.float64)
        for begin in range(part * share, stop, SPAN):
            at = begin + places
            found += _left(logits + (b * N + n) * V, law, at, at < stop, most, scale, tl.where(leaf, 0.0, 1.0).to(tl.float64))
        tl.store(masses + b * PARTS + part, tl.sum(found, 0))


@triton.jit
def _write(table, facts, b, n, token, N):
    """Path, number accepted and extra token of a row; -1 as the number where it is faulty."""
    for j in range(N - 1):
        tl.store(table + b * (N + 1) + j, -1)
    m = tl.where(n < 0, 0, n)
    count = _fact(facts, b, m, DEPTH, N)
    for j in range(N - 1):
        if m > 0:
            tl.store(table + b * (N + 1) + count - 1 - j, m)
            m = _fact(facts, b, m, PARENT, N)
    tl.store(table + b * (N + 1) + N - 1, tl.where((n < 0) | (token < 0), -1, count))
    tl.store(table + b * (N + 1) + N, token)


@triton.jit
def settle(logits, probs, facts, tops, sums, weights, nodes, masses, table, N, R, V, SPAN: tl.constexpr, PARTS: tl.constexpr):
    """table[b]: the outcome."""
    b = tl.program_id(0).to(tl.int64)
    end, n = tl.load(facts + b * (N * FACTS + 4) + N * FACTS + LAST), tl.load(nodes + b)
    found = n * 0 - 1
    if n >= 0:
        leaf, places = n == end, tl.arange(0, SPAN)
        most, whole = _whole(tops, sums, b * N + n, PARTS)
        law = probs + (b * R + tl.where(leaf, 0, _fact(facts, b, tl.where(leaf, n, n + 1), ROW, N))) * V
        scale, taken = tl.where(leaf, 1.0, tl.load(weights + b * N + n)) / whole, tl.where(leaf, 0.0, 1.0).to(tl.float64)
        every = tl.sum(tl.load(masses + b * PARTS + tl.arange(0, PARTS)), 0)
        mark = uniform(facts + b * (N * FACTS + 4) + N * FACTS + KEY, EXTRA, end * 0) * every
        share = tl.cdiv(tl.cdiv(V, PARTS), SPAN) * SPAN
        part, reached, below = n * 0 - 1, whole * 0.0, whole * 0.0
        for i in range(PARTS):  # the part in which the mark falls, else the last one with any mass
            mass = tl.load(masses + b * PARTS + i)
            here = (mass > 0) & (below <= mark)
            part, reached = tl.where(here, i, part), tl.where(here, below, reached)
            below += mass
        stop, final = tl.minimum((part + 1) * share, V), n * 0 - 1
        for begin in range(tl.maximum(part, 0) * share, stop, SPAN):
            at = begin + places
            x = _left(logits + (b * N + n) * V, law, at, at < stop, most, scale, taken)
            first = tl.min(tl.where((x > 0) & (reached + tl.cumsum(x, 0) > mark), at, V), 0)
            found = tl.where((found < 0) & (first < V), first, found)
            final = tl.maximum(final, tl.max(tl.where(x > 0, at, -1), 0))
            reached += tl.sum(x, 0)
        found = tl.where(found < 0, final, found)
        found = tl.where((every > 0) & (every < float("inf")), found, -1)
    _write(table, facts, b, n, found, N)


@triton.jit
def arrive(logits, facts, tops, sums, picks, least, N, V, K, SPAN: tl.constexpr, PARTS: tl.constexpr):
    """picks[b, n, part], least[b, n, part]: the first arrival, the lowest id among equals, and when; -1 where nothing arrives."""
    b, n, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    depth = _fact(facts, b, n, DEPTH, N)
    if depth >= 0:
        most, whole = _whole(tops, sums, b * N + n, PARTS)
        share = tl.cdiv(tl.cdiv(V, PARTS), SPAN) * SPAN
        places, active = tl.arange(0, SPAN), _fact(facts, b, n, ACTIVE, N)
        first, when = tl.full([SPAN], -1, tl.int64), tl.full([SPAN], float("inf"), tl.float64)
        stop = tl.minimum((part + 1) * share, V)
        for begin in range(part * share, stop, SPAN):
            at = begin + places
            mass = tl.exp(tl.load(logits + (b * N + n) * V + at, mask=at < stop, other=float("-inf")) - most).to(tl.float64)
            for k in range(K):
                if (active >> k) & 1 == 1:
                    key = facts + b * (N * FACTS + 4) + N * FACTS + KEY
                    high, low = words(key, RACE, k * V + at, depth)
                    arrival = tl.where(mass > 0, clock(high, low) / tl.where(mass > 0, mass, 1.0), float("inf"))
                    earlier = arrival < when
                    first, when = tl.where(earlier, at, first), tl.where(earlier, arrival, when)
        soonest = tl.min(when, 0)
        pick = tl.min(tl.where((when == soonest) & (first >= 0), first, V), 0)
        sound = (whole == whole) & (pick < V)
        tl.store(picks + (b * N + n) * PARTS + part, tl.where(sound, pick, -1))
        tl.store(least + (b * N + n) * PARTS + part, tl.where(sound, soonest, float("inf")))


@triton.jit
def follow(facts, picks, least, table, N, V, PARTS: tl.constexpr):
    """table[b]: the outcome of the walk along the picks."""
    b = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    n, following, token = b * 0, b * 0, b * 0 - 1
    for _ in range(N):
        if following >= 0:
            n = following
            when = tl.load(least + (b * N + n) * PARTS + parts)
            pick = tl.load(picks + (b * N + n) * PARTS + parts)
            token = tl.min(tl.where((when == tl.min(when, 0)) & (pick >= 0), pick, V), 0)
            token = tl.where(token < V, token, -1)
            following = b * 0 - 1
            for m in range(N):
                child = (_fact(facts, b, m, ABOVE, N) == n) & (_fact(facts, b, m, TOKEN, N) == token) & (token >= 0)
                following = tl.where(child, m, following)
    _write(table, facts, b, n, token, N)


def parts_of(vocab_size: int) -> int:
    """Programs that share a row: a power of two.

    Example:
        >>> [parts_of(V) for V in (100, 32_000, 152_000)]
        [1, 4, 32]
    """
    return min(MOST, triton.next_power_of_2(triton.cdiv(vocab_size, PART)))


def _facts(draft: Draft, key: NoiseKey, active: np.ndarray, where: torch.device) -> Int[Tensor, "B F"]:
    """What the kernels know of the trees and the noise, in one transfer. active: [B, N] bits."""
    tokens, parents = draft.tree.host
    (B, N), first = tokens.shape, tree.first_copies(draft.tree).cpu().numpy()
    depth, real = tree.depths(draft.tree).cpu().numpy(), draft.tree.is_node.cpu().numpy()
    context = (first == np.arange(N)) & real
    above = np.where(context & (parents >= 0), np.take_along_axis(first, np.maximum(parents, 0), 1), -1)
    nodes = np.stack([tokens, draft.rows.cpu().numpy(), above, parents, np.where(context, depth, -1), active], -1)
    ends = np.stack([real.sum(1) - 1, *key.host], 1)
    return sent(torch.from_numpy(np.concatenate([nodes.reshape(B, -1), ends], 1)), where)


def _measured(x: Float[Tensor, "B N V"], parts: int) -> tuple[Tensor, Tensor]:
    B, N, V = x.shape
    tops, sums = x.new_empty(B, N, parts), x.new_empty(B, N, parts, dtype=torch.float64)
    measure[(B * N, parts)](x, tops, sums, V, SPAN, parts)
    return tops, sums


def block(draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Int[Tensor, "B M"]:
    """The outcome of every chain, as `device.decide` gives it."""
    x, (B, N, V) = logits.contiguous(), logits.shape
    q = x if draft.probs is None else sent(draft.probs, x.device).float().contiguous()  # unread without a draft
    facts, parts = _facts(draft, key, np.ones((B, N), np.int64), x.device), parts_of(V)
    tops, sums = _measured(x, parts)
    weights, nodes, masses = sums.new_empty(B, N), facts.new_empty(B), sums.new_empty(B, parts)
    lacks, table = sums.new_empty(B, N, parts), facts.new_empty(B, N + 1)
    given, sizes = (x, q, facts, tops, sums, weights), (N, q.shape[1], V, SPAN, parts)
    weigh[(B, N, parts)](*given, lacks, *sizes)
    leave[(B, parts)](*given, lacks, nodes, masses, *sizes)
    settle[(B,)](*given, nodes, masses, table, *sizes)
    return table


def race(active: Callable[[TokenTree], np.ndarray]) -> Callable[[Draft, Tensor, NoiseKey], Tensor]:
    """The outcome of every race, as `device.decide` gives it. active: as `verifiers.race.Race.active`."""

    def decide(draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey) -> Int[Tensor, "B M"]:
        x, (B, N, V), playing = logits.contiguous(), logits.shape, active(draft.tree)
        if playing.shape[2] > _BITS:
            return device.decide(device.race(active), draft, logits, key)
        bits = (playing.astype(np.int64) << np.arange(playing.shape[2])).sum(-1)
        facts, parts = _facts(draft, key, bits, x.device), parts_of(V)
        tops, sums = _measured(x, parts)
        picks, least, table = facts.new_empty(B, N, parts), torch.empty_like(sums), facts.new_empty(B, N + 1)
        sizes = (N, V, playing.shape[2], SPAN, parts)
        arrive[(B, N, parts)](x, facts, tops, sums, picks, least, *sizes, enable_fp_fusion=False)
        follow[(B,)](facts, picks, least, table, N, V, parts)
        return table

    return decide


_X, _D, _I = "*fp32", "*fp64", "*i64"
_SIZES = {"N": "i32", "R": "i32", "V": "i32", "SPAN": "constexpr", "PARTS": "constexpr"}
_GIVEN = {"logits": _X, "probs": _X, "facts": _I, "tops": _X, "sums": _D, "weights": _D}
SIGNATURES = {
    "measure": {"logits": _X, "tops": _X, "sums": _D, "V": "i32", "SPAN": "constexpr", "PARTS": "constexpr"},
    "weigh": {**_GIVEN, "lacks": _D, **_SIZES},
    "leave": {**_GIVEN, "lacks": _D, "nodes": _I, "masses": _D, **_SIZES},
    "settle": {**_GIVEN, "nodes": _I, "masses": _D, "table": _I, **_SIZES},
    "arrive": {
        "logits": _X,
        "facts": _I,
        "tops": _X,
        "sums": _D,
        "picks": _I,
        "least": _D,
        "N": "i32",
        "V": "i32",
        "K": "i32",
        "SPAN": "constexpr",
        "PARTS": "constexpr",
    },
    "follow": {"facts": _I, "picks": _I, "least": _D, "table": _I, "N": "i32", "V": "i32", "PARTS": "constexpr"},
}
"""Types of the kernels' arguments, for compiling them ahead of time."""
