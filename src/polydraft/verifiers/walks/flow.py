"""The walk of flow verification (`verifiers.flow`): softmax, transport and visits of a step in one compiled call, in linear time and memory.

    pieces     by k pointers into the row, each at its own (u + j)/k: the one whose token ends first moves on
    scaling    a sweep over the pieces for each step, equal tokens of a tuple counted once
    fill       a sweep for each draw over tuples sorted by q

From the start that is used E never exceeds w p by more than SMALLEST (`tests/exactness/test_flow.py`), so that the cap phi is left to the readable
form; tokens without mass have a = 0. Rows are float32 and sums float64. Visits end where the stop's uniform falls: rows beyond that are not looked at.
"""

import numpy as np

from polydraft.numerics.compiled_code import njit
from polydraft.numerics.shared_code import shared_code
from polydraft.numerics.threads import PIECE, num_pieces, share_row
from polydraft.sampling.categorical import last_nonzero
from polydraft.verifiers.walks.rows import compiled, reweight, total
from polydraft.verifiers.walks.visits import visit_trees

STEPS = 4
"""Of the scaling; two lose 0.1 to 0.4% of the tokens."""
SMALLEST = 1e-12
LARGEST = 1e4
"""Of a."""


@njit(cache=True, error_model="numpy")
def _place_pointers(q, k, last, scale, at, sums, sum_ends):
    """Where each of k draws stands at u = 0: its token, the sum of q to its end, and the u at which it goes on."""
    below = 0.0
    j = 0
    for x in range(last + 1):
        below += np.float64(q[x])
        while j < k and (below * scale > j or x == last):
            at[j] = x
            sums[j] = below
            sum_ends[j] = below * scale - j
            j += 1
        if j == k:
            break


@njit(cache=True, error_model="numpy")
def _pieces(q, k, work):
    """Fill widths and tuples; returns how many pieces there are. Sums are those of the draws."""
    tuples = work.tuples
    widths = work.widths
    whole = 0.0
    last = last_nonzero(q)
    for x in range(last + 1):
        whole += np.float64(q[x])
    scale = k / whole
    at = np.empty(k, np.int64)
    sum_ends = np.empty(k)
    sums = np.empty(k)
    _place_pointers(q, k, last, scale, at, sums, sum_ends)
    u = 0.0
    m = 0
    while True:
        j = 0
        end = sum_ends[0]
        for i in range(k):
            tuples[i, m] = at[i]
            if sum_ends[i] < end:
                j = i
                end = sum_ends[i]
        x = at[j] + 1
        if end >= 1.0 or x > last:
            widths[m] = 1.0 - u
            return m + 1
        widths[m] = max(end - u, 0.0)
        u = max(end, u)
        while q[x] == 0.0:
            x += 1
        sums[j] += np.float64(q[x])
        sum_ends[j] = sums[j] * scale - j
        at[j] = x
        m += 1


@compiled
def _add_distinct(a, tokens, before, left):
    for m in range(left.size):
        left[m] += a[tokens[m]] if tokens[m] != before[m] else 0.0


@compiled
def _invert(widths, left, share):
    for m in range(left.size):
        left[m] = 1.0 / left[m]
        share[m] = widths[m] * left[m]


@njit(cache=True, error_model="numpy")
def _sum_runs(tokens, before, share, E, ends):
    """E = sums of the shares of tuples whose draw is a token, and the one before is another; the tokens of a draw rise, so that they stand in runs.
    ends: the sums of the first and of the last run, which go on elsewhere."""
    x = tokens[0]
    s = 0.0
    is_first = True
    ends[:] = 0.0
    for m in range(tokens.size):
        if tokens[m] != x:
            if is_first:
                ends[0] = s
            else:
                E[x] = s
            x = tokens[m]
            s = 0.0
            is_first = False
        s += share[m] if before[m] != x else 0.0
    ends[0 if is_first else 1] = s


@njit(cache=True, error_model="numpy")
def _sum_shares(arguments, begin, end, thread):
    a, tuples, widths, spare, share, E, run_ends, nobody = arguments
    for start in range(begin, end, PIECE):
        last = min(start + PIECE, end)
        spare[start:last] = 1.0
        for j in range(len(tuples)):  # tokens of a tuple rise, so that equal ones are neighbours
            before = tuples[j - 1, start:last] if j > 0 else nobody[: last - start]
            _add_distinct(a, tuples[j, start:last], before, spare[start:last])
        _invert(widths[start:last], spare[start:last], share[start:last])
        for j in range(len(tuples)):
            before = tuples[j - 1, start:last] if j > 0 else nobody[: last - start]
            _sum_runs(tuples[j, start:last], before, share[start:last], E, run_ends[start // PIECE, j])


@njit(cache=True, error_model="numpy")
def _expected(sync, k, count, work):
    """E over a, of the shares a / (1 + sum of a over the tuple); `left` is what they leave, 1 / (1 + sum)."""
    tuples = work.tuples[:k]
    E = work.E
    pieces = num_pieces(count)
    run_ends = np.empty((pieces, k, 2))
    nobody = np.full(PIECE, -1, np.int32)
    arguments = work.a, tuples, work.widths, work.spare, work.share, E, run_ends, nobody
    share_row(sync, shared_code(_sum_shares, arguments), arguments, count)
    for clears in (True, False):
        for piece in range(pieces):
            for j in range(k):
                first = tuples[j, piece * PIECE]
                last = tuples[j, min((piece + 1) * PIECE, count) - 1]
                if clears:
                    E[first] = E[last] = 0.0
                else:
                    E[first] += run_ends[piece, j, 0]
                    E[last] += run_ends[piece, j, 1]


@compiled
def _fill_start(arguments, begin, end, thread):
    """a of the start; E is nothing."""
    w, p, k, q, whole, a, E = arguments
    p = p[begin:end]
    q = q[begin:end]
    a = a[begin:end]
    E = E[begin:end]
    for x in range(p.size):
        g = w * p[x]
        r = min(1.0, k * (q[x] / whole))
        a[x] = min(max(g / (r - min(g, 0.9 * r)), SMALLEST), LARGEST) if g * r > 0.0 else 0.0
        E[x] = 0.0


@compiled
def _step(arguments, begin, end, thread):
    w, p, a, E = arguments
    p = p[begin:end]
    a = a[begin:end]
    E = E[begin:end]
    for x in range(p.size):
        if a[x] * E[x] > 0.0:
            a[x] = min(max((w * p[x]) / E[x], SMALLEST), LARGEST)


@compiled
def _fill_rest(arguments, begin, end, thread):
    """What is left of w p."""
    w, p, a, E, rest = arguments
    p = p[begin:end]
    a = a[begin:end]
    E = E[begin:end]
    rest = rest[begin:end]
    for x in range(p.size):
        rest[x] = max(w * p[x] - a[x] * E[x], 0.0)


@compiled
def _swap(x, y, key, other):
    """The lower key first; equal ones stay."""
    for m in range(x.size):
        a = x[m]
        b = y[m]
        low = key[m]
        high = other[m]
        x[m], key[m] = b if high < low else a, min(low, high)
        y[m], other[m] = a if high < low else b, max(low, high)


@njit(cache=True, error_model="numpy")
def _sort(arguments, begin, end, thread):
    """The tokens of each piece in ascending q, the first draw first among equals; by neighbours that swap."""
    q, tuples, keys = arguments
    for j in range(len(tuples)):
        tokens = tuples[j, begin:end]
        key = keys[j, begin:end]
        for m in range(tokens.size):
            key[m] = q[tokens[m]]
    for turn in range(len(tuples)):
        for i in range(turn % 2, len(tuples) - 1, 2):
            _swap(tuples[i, begin:end], tuples[i + 1, begin:end], keys[i, begin:end], keys[i + 1, begin:end])


@njit(error_model="numpy")
def _insert(order, size, j, at, q):
    """Pointer j joins the first `size` ones of the order."""
    x = at[j]
    i = size
    while i > 0 and (q[at[order[i - 1]]] > q[x] or (q[at[order[i - 1]]] == q[x] and order[i - 1] > j)):
        order[i] = order[i - 1]
        i -= 1
    order[i] = j


@njit(cache=True, error_model="numpy")
def _offer(turn, count, work):
    """E = what is offered to each token as number `turn` of its tuples, which have given `part` = a to the number before."""
    part = work.a
    offered = work.E
    widths = work.widths
    remaining = work.spare
    tuples = work.tuples
    offered[:] = 0.0
    for m in range(count):
        if turn > 0:
            remaining[m] *= 1.0 - part[tuples[turn - 1, m]]
        offered[tuples[turn, m]] += widths[m] * remaining[m]


@compiled
def _take(arguments, begin, end, thread):
    """The part of what it is offered that each token takes, and its rest after that."""
    rest, offered, part = arguments
    rest = rest[begin:end]
    offered = offered[begin:end]
    part = part[begin:end]
    for x in range(rest.size):
        part[x] = min(1.0, rest[x] / offered[x]) if offered[x] > 0.0 else 0.0
        rest[x] = max(rest[x] - part[x] * offered[x], 0.0)


@njit(cache=True, error_model="numpy")
def _scale(sync, w, p, q, k, count, work, rest):
    """Find a, the scale of each token's shares, and what they leave of w p."""
    start = w, p, k, q, total(q), work.a, work.E
    share_row(sync, shared_code(_fill_start, start), start, p.size)
    for _ in range(STEPS):
        _expected(sync, k, count, work)
        step = w, p, work.a, work.E
        share_row(sync, shared_code(_step, step), step, p.size)
    _expected(sync, k, count, work)
    arguments = w, p, work.a, work.E, rest
    share_row(sync, shared_code(_fill_rest, arguments), arguments, p.size)


@njit(cache=True, error_model="numpy")
def _order_visits(q, draws, a, order, mass):
    """(number of tokens, 1 + sum of their a): places of the first draw of each token by rising q, and their shares."""
    s = 1.0
    for j in range(len(draws)):
        _insert(order, j, j, draws, q)
        s += 0.0 if j > 0 and draws[j] == draws[j - 1] else a[draws[j]]
    size = 0
    for i in range(len(draws)):
        x = draws[order[i]]
        if i > 0 and x == draws[order[i - 1]]:
            continue
        order[size] = order[i]
        mass[size] = a[x] / s
        size += 1
    return size, s


@njit(cache=True, error_model="numpy")
def transport(sync, w, p, q, draws, work, order, mass, rest):
    """`verifiers.flow.transport`: places of the draws in the order of visits, their mass, and what the context emits.

    Returns how many places there are: one for each token.
    """
    k = len(draws)
    count = _pieces(q, k, work)
    _scale(sync, w, p, q, k, count, work, rest)
    size, s = _order_visits(q, draws, work.a, order, mass)
    sorting = q, work.tuples[:k], work.keys[:k]
    share_row(sync, shared_code(_sort, sorting), sorting, count)
    remaining = 1.0 / s
    place = -1
    copies = 0
    for turn in range(k):
        _offer(turn, count, work)
        taking = rest, work.E, work.a
        share_row(sync, shared_code(_take, taking), taking, rest.size)
        if copies == 0:
            place += 1
            for j in range(k):
                copies += draws[j] == draws[order[place]]
        copies -= 1
        share = work.a[draws[order[place]]] * remaining
        mass[place] += share
        remaining -= share
    return size


@njit(cache=True, error_model="numpy")
def _begin(u, at, order, rest):
    """Whether a context's draws are such; the order of the visits, each with its part of what is left before it."""
    kids = at.kids[u, : at.counts[u]]
    tokens = at.tokens[kids]
    q = at.q[at.rows[kids[0]]]
    for x in tokens:
        if not q[x] > 0.0:
            return False
    mass = at.shares[u]
    remaining = 1.0
    order[:] = 0
    mass[:] = 0.0
    many = transport(at.sync, at.weight[u], at.p[u], q, tokens, at.work, order, mass, rest)
    order[many:] = -1
    for i in range(many):
        part_here = mass[i]
        mass[i] = min(part_here / remaining, 1.0) if remaining > 0.0 else 0.0
        remaining -= part_here
    return True


@njit(cache=True, error_model="numpy")
def try_next(u, at):
    """See `walks.traversal.try_next`; at.status has the draws in the order of the visits, -1 behind the last."""
    d = at.depth[u]
    turn = at.turn[u]
    order = at.status[u]
    p = at.p[u]
    rest = at.work.rest[d]
    if turn == 0 and not _begin(u, at, order, rest):
        return 0, np.nan
    if turn < order.size and order[turn] >= 0:
        at.turn[u] += 1
        return order[turn], at.shares[u, turn]
    spare = total(rest)
    if spare > 0.0:
        p[:] = rest
    at.weight[u] = reweight(at.weight[u], spare)
    return -1, 0.0


@njit(cache=True, error_model="numpy")
def walk(trees):
    """See `walks.visits.visit_trees`."""
    visit_trees(try_next, True, trees)
