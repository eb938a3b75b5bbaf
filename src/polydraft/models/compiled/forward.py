"""Forward passes of a compiled Llama: rows of many trees through all layers in one call."""

import numpy as np
from numba.extending import overload

from polydraft.models.compiled.layers import (
    ModelArrays,
    finish_logits,
    multiply,
    norm_states,
    run_head,
    run_layer,
)
from polydraft.models.growing.rows import draft_forward
from polydraft.models.matrices.kernels import scale_row
from polydraft.models.matrices.products import output_row
from polydraft.models.mixers.workspace import cut_runs
from polydraft.numerics.compile_time import inner
from polydraft.numerics.compiled_code import njit


@njit(cache=True, nogil=True)
def embed_rows(embed, scale, tokens, out):
    """Embeddings of some tokens."""
    for t in range(len(tokens)):
        output_row(embed, np.int64(0), tokens[t], out[t])
        scale_row(out[t], scale)


@njit(cache=True, nogil=True)
def head_rows(head, sizes, bias, rounded, states, logits):
    """Logits of some states behind the final norm, at most as many as are in work at once."""
    multiply(states, head, 0, rounded, logits, np.int64(len(states)))
    finish_logits(sizes, bias, logits, np.int64(len(states)))


@inner
def _copy(source, begin, end, target, first):
    for t in range(begin, end):
        for i in range(source.shape[1]):
            target[first + t - begin, i] = source[t, i]


@inner
def _run_rows(model, rows, logits, done, hidden, state_index, first):
    """Run the rows in work, all of prompts or none; their logits go to logits[done:]. Returns how many logits there are now.

    hidden[state_index[l], first + t] = what enters layer l.
    """
    sizes = model.sizes
    work = model.work
    layers = len(model.program.layers) - 2
    zero = np.int64(0)
    runs = cut_runs(work.rows, rows, work.runs)
    for t in range(rows):
        output_row(model.embed, zero, work.rows[t].token, work.x[t])
        scale_row(work.x[t], sizes.embedding_scale)
    step = model.program.step[0]
    step.of_prompt = work.rows[0].position < model.prompt_lengths[work.rows[0].slot]
    for l in range(layers):
        if state_index[l] >= 0:
            _copy(work.x, zero, rows, hidden[state_index[l]], first)
        run_layer(model, l, rows, runs)
    step.of_prompt = 0
    norm_states(model, rows)
    if state_index[layers] >= 0:
        _copy(work.normed, zero, rows, hidden[state_index[layers]], first)
    num_logits = zero
    for t in range(rows):
        if work.rows[t].has_logits:
            _copy(work.normed, t, t + 1, work.normed, num_logits)
            num_logits += 1
    if num_logits > 0:
        run_head(model, num_logits, logits[done:])
    return done + num_logits


@inner
def _depth(parents, n):
    depth = 0
    m = parents[n]
    while m >= 0:
        depth += 1
        m = parents[m]
    return depth


@inner
def describe(row, columns, token, slot, length, parents, n, has_logits):
    """What row of the forward pass node n of a tree is."""
    depth = _depth(parents, n)
    m = n
    for j in range(depth, -1, -1):
        columns[j] = length + m
        m = parents[m]
    row.token = token
    row.slot = slot
    row.position = length + depth
    row.column = length + n
    row.length = length
    row.num_seen = depth + 1
    row.has_logits = has_logits


@njit(cache=True, nogil=True, _nrt=False)
def compiled_forward(
    model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits, hidden, state_index
):
    """One forward pass over nodes first_nodes[b] .. node_ends[b]-1 of every tree; the nodes before were fed earlier.

    tokens, parents: [B, N]; nodes below 0 in `parents`, but for node 0, are padding.  logits[r]: of the r-th node, row by
    row, that is no padding and at or behind logits_from[b].  hidden: [layers asked for, nodes, h].  state_index: [L + 1] its index, or -1.
    """
    work = model.work
    lengths = model.memory.lengths
    rows = np.int64(0)
    done = np.int64(0)
    first = np.int64(0)
    reads = False
    total = 0
    for b in range(len(slots)):
        for n in range(first_nodes[b], node_ends[b]):
            total += n == 0 or parents[b, n] >= 0
    for b in range(len(slots)):
        slot = slots[b]
        length = lengths[slot]
        for n in range(first_nodes[b], node_ends[b]):
            if n > 0 and parents[b, n] < 0:
                continue
            is_read = length + _depth(parents[b], n) < model.prompt_lengths[slot]
            if rows > 0 and is_read != reads:
                done = _run_rows(model, rows, logits, done, hidden, state_index, first)
                first = first + rows
                rows = np.int64(0)
            reads = is_read
            describe(
                work.rows[rows],
                work.seen_columns[rows],
                tokens[b, n],
                slot,
                length,
                parents[b],
                n,
                n >= logits_from[b],
            )
            model.memory.tokens[slot, work.rows[rows].column] = work.rows[rows].token
            rows += 1
            if rows == len(work.rows) or first + rows == total:
                done = _run_rows(model, rows, logits, done, hidden, state_index, first)
                first = first + rows
                rows = np.int64(0)


@overload(draft_forward)
def _(model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits):
    if model.instance_class is not ModelArrays:
        return None

    def run(model, slots, tokens, parents, first_nodes, node_ends, logits_from, logits):
        hidden = np.empty((0, 0, 0), np.float32)
        places = np.full(len(model.program.layers) - 1, -1, np.int64)
        compiled_forward(
            model,
            slots,
            tokens,
            parents,
            first_nodes,
            node_ends,
            logits_from,
            logits,
            hidden,
            places,
        )

    return run
