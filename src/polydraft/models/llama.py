"""The Llama family as one compiled call a pass: float32 arithmetic on a CPU, one thread.

Llama, Mistral, Qwen2 and Qwen3, with grouped queries, biases of q, k and v, norms of q and k, and any rotary scaling that
does not change with the length. Projections are fused (q, k, v; gate and up) and packed for `models.kernels`; the cache is
allocated once. A pass takes the nodes of many trees, in slots with lengths of their own, as rows of one matrix.

    column   place of one token in a slot: committed tokens first, then the nodes of the tree being scored
    seen     the columns of the tree that a row attends to beside all committed ones: its ancestors' and its own

A row's bits depend on its own tokens alone, not on the batch, the tree around it or the chunks of a prompt: the same
context has the same logits in plain and in speculative decoding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numba import njit
from torch import Tensor

from polydraft.core import AuxRows, Outcome, Scores, TokenTree
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError
from polydraft.models.kernels import PANEL, add, aligned, matmul, norm_part, pack, product, rms_norm, soften, swiglu
from polydraft.models.memory import check_memory, fitting_length
from polydraft.models.supported import check_supported, context_length

__all__ = ["CompiledLlama", "Parts", "compiled_pass"]

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
QUANTIZATIONS = (None, "bfloat16", "int8")
TREE_ROOM = 256
"""Most nodes of one tree."""
CHUNK = 64
"""Most rows that are in work at once; a pass over more reads the weights again."""
STRETCH = 256
"""Tokens of a prompt that become committed at a time."""


class Weights(NamedTuple):
    """All layers stacked: first axis = layer. Packed matrices are [panels, inputs, PANEL]; absent parts are empty.

    factors: of the outputs of qkv, out, gate_up, down and head; empty where weights are stored as they are.
    """

    embed: np.ndarray  # [V, h], or [0, h] where the head serves for both
    head: np.ndarray
    norm: np.ndarray  # [h]
    attention_norm: np.ndarray  # [L, h]
    mlp_norm: np.ndarray  # [L, h]
    qkv: np.ndarray
    bias: np.ndarray  # [L, (H + 2 G) D] or [L, 0]
    q_norm: np.ndarray  # [L, D] or [L, 0]
    k_norm: np.ndarray  # [L, D] or [L, 0]
    out: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray
    head_factors: np.ndarray
    qkv_factors: np.ndarray
    out_factors: np.ndarray
    gate_up_factors: np.ndarray
    down_factors: np.ndarray
    cos: np.ndarray  # [columns, D / 2]
    sin: np.ndarray  # [columns, D / 2]


class Sizes(NamedTuple):
    """H heads of q, G heads of k and v, D their width, I the width between gate and down."""

    heads: int
    groups: int
    width: int
    inner: int
    epsilon: np.float32


class SlotMemory(NamedTuple):
    """Panels over columns for keys, over the width for values, so that attention is two packed products.

    keys: [L, slots, G, columns / PANEL, D, PANEL].  values: [L, slots, G, D / PANEL, columns, PANEL].
    lengths: [slots] committed columns.
    """

    keys: np.ndarray
    values: np.ndarray
    lengths: np.ndarray


class Workspace(NamedTuple):
    """Activations of up to CHUNK rows, and what each is: token, slot, position, column, length of its slot, seen beyond it, wanted."""

    x: np.ndarray
    normed: np.ndarray
    qkv: np.ndarray
    mixed: np.ndarray
    update: np.ndarray
    gate_up: np.ndarray
    act: np.ndarray
    queries: np.ndarray  # [CHUNK H / G, D]
    scores: np.ndarray  # [CHUNK H / G, columns]
    blend: np.ndarray  # [CHUNK H / G, D up to whole panels]
    totals: np.ndarray  # [CHUNK H / G]
    lanes: np.ndarray  # [16]
    found: np.ndarray  # [TREE_ROOM]
    rows: np.ndarray  # [CHUNK, 7]
    seen: np.ndarray  # [CHUNK, TREE_ROOM]


class Parts(NamedTuple):
    """All that a compiled function needs of a model."""

    weights: Weights
    sizes: Sizes
    memory: SlotMemory
    work: Workspace


@njit(fastmath={"contract"})
def _rotate(x, begin, cos, sin):
    half = len(cos)
    for i in range(half):
        a, b = x[begin + i], x[begin + i + half]
        x[begin + i] = a * cos[i] - b * sin[i]
        x[begin + i + half] = b * cos[i] + a * sin[i]


@njit
def _place_heads(qkv, bias, q_norm, k_norm, sizes, cos, sin, keys, values, column):
    """Bias, norms and rotation of one row's q and k; its keys and values go to one column of the cache."""
    H, G, D = sizes.heads, sizes.groups, sizes.width
    for i in range(len(bias)):
        qkv[i] += bias[i]
    for j in range(H + G):
        if len(q_norm) > 0:
            norm_part(qkv, j * D, q_norm if j < H else k_norm, sizes.epsilon)
        _rotate(qkv, j * D, cos, sin)
    panel, lane = column // PANEL, column % PANEL
    for j in range(G):
        for i in range(D):
            keys[j, panel, i, lane] = qkv[(H + j) * D + i]
            values[j, i // PANEL, column, i % PANEL] = qkv[(H + G + j) * D + i]


@njit(fastmath={"contract"}, error_model="numpy")
def _attend(sizes, memory, work, layer, first, last):
    """Rows first .. last-1, all of one slot: softmax(q . keys / sqrt(D)) values, every head of a group in one product."""
    D, G = sizes.width, sizes.groups
    heads, slots, padded = sizes.heads // G, memory.keys.shape[1], memory.values.shape[3] * PANEL
    columns, slot, end, zero = memory.values.shape[4], work.rows[first, 1], np.int64(0), np.int64(0)
    for t in range(first, last):
        end = max(end, work.rows[t, 3] + 1)
    panels = (end + PANEL - 1) // PANEL
    rows, scale = (last - first) * heads, np.float32(1.0 / np.sqrt(D))
    for g in range(G):
        for t in range(first, last):
            for h in range(heads):
                r, begin = (t - first) * heads + h, (g * heads + h) * D
                for i in range(D):
                    work.queries[r, i] = work.qkv[t, begin + i] * scale
        at = ((layer * slots + slot) * G + g) * columns
        product(work.queries, zero, D, memory.keys, at * D, D * PANEL, panels, D, work.scores, zero, columns, rows)
        for t in range(first, last):
            base, count = work.rows[t, 4], work.rows[t, 5]
            for h in range(heads):
                r = (t - first) * heads + h
                work.totals[r] = soften(work.scores[r], base, work.seen[t], count, panels * PANEL, work.lanes, work.found)
        product(
            work.scores,
            zero,
            columns,
            memory.values,
            at * padded,
            columns * PANEL,
            padded // PANEL,
            panels * PANEL,
            work.blend,
            zero,
            padded,
            rows,
        )
        for t in range(first, last):
            for h in range(heads):
                r, begin = (t - first) * heads + h, (g * heads + h) * D
                share = np.float32(1.0) / work.totals[r]
                for i in range(D):
                    work.mixed[t, begin + i] = work.blend[r, i] * share


@njit
def _embed(embed, head, token, out):
    for i in range(len(out)):
        out[i] = embed[token, i] if len(embed) > 0 else np.float32(head[token // PANEL, i, token % PANEL])


@njit
def _copy(source, begin, end, target, first):
    for t in range(begin, end):
        for i in range(source.shape[1]):
            target[first + t - begin, i] = source[t, i]


@njit
def _run_rows(parts, rows, logits, done, hidden, taken, first):
    """Run the rows in work; the logits wanted go to logits[done:]. Returns how many logits there are now.

    hidden[taken[l], first + t] = what enters layer l.
    """
    weights, sizes, memory, work = parts
    layers, zero = len(weights.attention_norm), np.int64(0)  # a literal 0 would compile everything below twice
    for t in range(rows):
        _embed(weights.embed, weights.head, work.rows[t, 0], work.x[t])
    for l in range(layers):
        if taken[l] >= 0:
            _copy(work.x, zero, rows, hidden[taken[l]], first)
        rms_norm(work.x, weights.attention_norm[l], sizes.epsilon, work.normed, rows)
        matmul(work.normed, weights.qkv[l], weights.qkv_factors[l], work.qkv, rows)
        for t in range(rows):
            slot, position, column = work.rows[t, 1], work.rows[t, 2], work.rows[t, 3]
            keys, values = memory.keys[l, slot], memory.values[l, slot]
            cos, sin = weights.cos[position], weights.sin[position]
            _place_heads(
                work.qkv[t], weights.bias[l], weights.q_norm[l], weights.k_norm[l], sizes, cos, sin, keys, values, column
            )
        t = zero
        while t < rows:
            last = t + 1
            while last < rows and work.rows[last, 1] == work.rows[t, 1]:
                last += 1
            _attend(sizes, memory, work, l, t, last)
            t = last
        matmul(work.mixed, weights.out[l], weights.out_factors[l], work.update, rows)
        add(work.x, work.update, rows)
        rms_norm(work.x, weights.mlp_norm[l], sizes.epsilon, work.normed, rows)
        matmul(work.normed, weights.gate_up[l], weights.gate_up_factors[l], work.gate_up, rows)
        swiglu(work.gate_up, sizes.inner, work.act, rows)
        matmul(work.act, weights.down[l], weights.down_factors[l], work.update, rows)
        add(work.x, work.update, rows)
    rms_norm(work.x, weights.norm, sizes.epsilon, work.normed, rows)
    if taken[layers] >= 0:
        _copy(work.normed, zero, rows, hidden[taken[layers]], first)
    wanted = zero
    for t in range(rows):
        if work.rows[t, 6]:
            _copy(work.normed, t, t + 1, work.normed, wanted)
            wanted += 1
    if wanted > 0:
        matmul(work.normed, weights.head, weights.head_factors, logits[done:], wanted)
    return done + wanted


@njit
def _describe(row, seen, token, slot, length, parents, n, wanted):
    """What row of the pass node n of a tree is."""
    depth, m = 0, parents[n]
    while m >= 0:
        depth += 1
        m = parents[m]
    m = n
    for j in range(depth, -1, -1):
        seen[j] = length + m
        m = parents[m]
    row[0], row[1], row[2], row[3], row[4], row[5], row[6] = token, slot, length + depth, length + n, length, depth + 1, wanted


@njit
def _describe_extra(row, seen, token, slot, length, parents, node, position, mask, x):
    """What auxiliary row x is: it sees the path of its node, the auxiliary rows of its mask, and itself."""
    count, m, N = np.int64(0), node, len(parents)
    while m >= 0:
        seen[count] = length + m
        count += 1
        m = parents[m]
    for y in range(len(mask)):
        if mask[y] or y == x:
            seen[count] = length + N + y
            count += 1
    row[0], row[1], row[2], row[3], row[4], row[5], row[6] = token, slot, length + position, length + N + x, length, count, 1


@njit(cache=True)
def compiled_pass(parts, slots, tokens, parents, begins, ends, wanted, logits, hidden, taken, extra, mask):
    """One pass over nodes begins[b] .. ends[b]-1 of every tree; the nodes before were fed by the passes before.

    tokens, parents: [B, N]; nodes below 0 in `parents`, but for node 0, are padding.  logits[r]: of the r-th node, row by
    row, that is no padding and at or behind wanted[b].  hidden: [layers asked for, nodes, h].  taken: [L + 1] its index, or -1.
    extra: [B, 3, X] token, position and node of auxiliary rows, which follow each tree's nodes; mask: [B, X, X], see `AuxRows`.
    """
    work, lengths = parts.work, parts.memory.lengths
    rows, done, first = np.int64(0), np.int64(0), np.int64(0)
    for b in range(len(slots)):
        for n in range(begins[b], ends[b]):
            if rows == len(work.rows):
                done = _run_rows(parts, rows, logits, done, hidden, taken, first)
                first, rows = first + rows, np.int64(0)
            if n == 0 or parents[b, n] >= 0:
                _describe(
                    work.rows[rows], work.seen[rows], tokens[b, n], slots[b], lengths[slots[b]], parents[b], n, n >= wanted[b]
                )
                rows += 1
        for x in range(extra.shape[2]):
            if rows == len(work.rows):
                done = _run_rows(parts, rows, logits, done, hidden, taken, first)
                first, rows = first + rows, np.int64(0)
            token, position, node = extra[b, 0, x], extra[b, 1, x], extra[b, 2, x]
            row, seen, length = work.rows[rows], work.seen[rows], lengths[slots[b]]
            _describe_extra(row, seen, token, slots[b], length, parents[b], node, position, mask[b, x], x)
            rows += 1
    if rows > 0:
        _run_rows(parts, rows, logits, done, hidden, taken, first)


@njit
def _move(keys, values, source, target):
    for g in range(keys.shape[0]):
        for i in range(keys.shape[2]):
            keys[g, target // PANEL, i, target % PANEL] = keys[g, source // PANEL, i, source % PANEL]
        for p in range(values.shape[1]):
            for i in range(PANEL):
                values[g, p, target, i] = values[g, p, source, i]


@njit(cache=True)
def _keep(memory, slots, roots, paths, counts):
    """Move the columns of each path behind its root's and cut there. Nodes grow along a path: no source is overwritten."""
    for b in range(len(slots)):
        for i in range(counts[b]):
            source, target = roots[b] + paths[b, i], roots[b] + 1 + i
            if source != target:
                for layer in range(len(memory.keys)):
                    _move(memory.keys[layer, slots[b]], memory.values[layer, slots[b]], source, target)
        memory.lengths[slots[b]] = roots[b] + 1 + counts[b]


def _whole(size: int) -> int:
    """Up to whole panels."""
    return -(-size // PANEL) * PANEL


class CompiledLlama:
    """A Llama-family model in compiled code, with slots; see `core.Target`.

    model: the module of transformers whose weights are taken; it is not needed afterwards.
    max_model_len: longest sequence, default the model's own context.  max_num_seqs: slots.
    quantization: "bfloat16" or "int8" (one factor a row) for the matrices; all arithmetic stays float32. None changes no weight:
        those of a checkpoint in bfloat16 are stored as such, which halves what a pass reads and gives the same bits.
    `weight_format` says how they are stored, `quantization_error` what that lost, relative to all matrices' norm.

    Raises:
        IncompatibleError: an architecture or option that is not covered; says which.
        ModelLoadError, CapacityError, InvalidInputError: the context asked for does not suit the model or the memory.
    """

    def __init__(
        self, model: Any, *, max_model_len: int | None = None, max_num_seqs: int = 8, quantization: str | None = None
    ) -> None:
        if quantization not in QUANTIZATIONS:
            raise InvalidInputError(
                f"quantization={quantization!r} was given; expected one of {', '.join(map(repr, QUANTIZATIONS))}."
            )
        reason = self.why_unsupported(model)
        if reason:
            raise IncompatibleError(f"{type(model).__name__} cannot be compiled: {reason}. Use backend='transformers'.")
        config = model.config
        check_supported(config, max_model_len)
        self.name, self.vocab_size = str(config.name_or_path or type(model).__name__), int(config.vocab_size)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.eos_token_ids, self.bos_token_id = _special_ids(model)
        width = model.model.layers[0].self_attn.head_dim
        sizes = Sizes(
            config.num_attention_heads,
            config.num_key_value_heads,
            width,
            config.intermediate_size,
            np.float32(config.rms_norm_eps),
        )
        self.max_num_seqs = max_num_seqs
        each_token = 8 * config.num_hidden_layers * max_num_seqs * sizes.groups * width
        self.max_model_len = int(max_model_len or fitting_length(context_length(config) or 0, each_token, TREE_ROOM, self.device))
        columns = _whole(self.max_model_len + TREE_ROOM)
        each = (config.num_hidden_layers, max_num_seqs, sizes.groups)
        keys, values = (*each, columns // PANEL, width, PANEL), (*each, _whole(width) // PANEL, columns, PANEL)
        self.cache_bytes = 4 * int(np.prod(keys) + np.prod(values))
        check_memory(self.cache_bytes, self.device, max_model_len=self.max_model_len, max_num_seqs=max_num_seqs)
        memory = SlotMemory(aligned(*keys), aligned(*values), np.zeros(max_num_seqs, np.int64))
        weights, self.quantization_error = _weights(model, columns, quantization)
        self.weight_format = {np.float32: "float32", np.uint16: "bfloat16", np.int8: "int8"}[weights.qkv.dtype.type]
        self.parts = Parts(weights, sizes, memory, _workspace(weights, sizes, columns))
        self.lengths = memory.lengths
        self.passes = 0

    @classmethod
    def from_pretrained(
        cls, name: str, *, max_model_len: int | None = None, max_num_seqs: int = 8, quantization: str | None = None
    ) -> "CompiledLlama":
        """From a folder with config.json and safetensors weights.

        Example:
            >>> from polydraft.models import pair
            >>> CompiledLlama.from_pretrained(str(pair.draft_folder()), max_num_seqs=1).vocab_size
            2048
        """
        from polydraft.models.folder import load_module

        module = load_module(name, dtype=torch.float32, device="cpu", max_model_len=max_model_len)
        return cls(module, max_model_len=max_model_len, max_num_seqs=max_num_seqs, quantization=quantization)

    @staticmethod
    def why_unsupported(model: Any) -> str | None:
        """Why a module of transformers is not covered, or None if it is."""
        config = model.config
        if config.model_type not in FAMILY:
            return f"its type {config.model_type!r} is not one of {', '.join(sorted(FAMILY))}"
        if model.device.type != "cpu" or model.dtype != torch.float32:
            return f"it is {model.dtype} on {model.device}, and the compiled path is float32 on a CPU"
        if config.hidden_act != "silu" or getattr(config, "mlp_bias", False):
            return "its feed-forward is not a plain SiLU gate"
        attention = model.model.layers[0].self_attn
        if attention.o_proj.bias is not None:
            return "its attention output has a bias"
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if rope.get("rope_type", "default") in {"dynamic", "longrope"}:
            return f"its rope scaling {rope['rope_type']!r} changes with the length"
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            return "it rotates only a part of each head"
        sizes = (config.hidden_size, config.intermediate_size, config.num_attention_heads * attention.head_dim)
        if any(size % 8 for size in sizes):
            return f"its widths {sizes} are not all multiples of 8"
        return None

    def _run(
        self,
        slots: Sequence[int],
        tree: TokenTree,
        since: int,
        wanted: np.ndarray,
        logits: np.ndarray,
        layers: Sequence[int] = (),
        aux: AuxRows | None = None,
    ) -> np.ndarray:
        """One compiled pass over the nodes from `since` on; returns the states asked for, [layers, rows, h]."""
        tokens, parents = (x.contiguous().numpy() for x in (tree.tokens, tree.parents))
        B, N = tokens.shape
        extra, mask = np.zeros((B, 3, 0), np.int64), np.zeros((B, 0, 0), np.bool_)
        if aux is not None:
            extra, mask = torch.stack([aux.inputs, aux.positions, aux.nodes], 1).numpy(), aux.mask.contiguous().numpy()
        taken = np.full(len(self.parts.weights.attention_norm) + 1, -1, np.int64)
        taken[list(layers)] = range(len(layers))
        size = B * (N - since + extra.shape[2]) if layers else 0
        hidden = np.empty((len(layers), size, len(self.parts.weights.norm)), np.float32)
        begins, ends = np.full(B, since), np.full(B, N)
        compiled_pass(self.parts, np.asarray(slots), tokens, parents, begins, ends, wanted, logits, hidden, taken, extra, mask)
        self.passes += 1
        return hidden

    def new_logits(self, rows: int) -> np.ndarray:
        """Room for the logits of some rows, as `compiled_pass` writes them: the vocabulary is filled up to whole panels."""
        return np.empty((rows, len(self.parts.weights.head) * PANEL), np.float32)

    def prefill(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> Scores:
        """Append committed tokens; see `core.Target.prefill`."""
        self._check_room(slots, [len(ids) for ids in token_ids], self.max_model_len)
        logits = self.new_logits(len(slots))
        for b, (slot, ids) in enumerate(zip(slots, token_ids, strict=True)):
            for begin in range(0, len(ids), STRETCH):
                chain = TokenTree.chain(torch.tensor([ids[begin : begin + STRETCH]]))
                last = begin + STRETCH >= len(ids)
                self._run([slot], chain, 0, np.array([chain.num_nodes - last]), logits[b : b + 1])
                self.lengths[slot] += chain.num_nodes
        roots = TokenTree.roots(torch.tensor([ids[-1] for ids in token_ids]))
        return Scores(roots, torch.from_numpy(logits)[:, None, : self.vocab_size])

    def score(
        self,
        slots: Sequence[int],
        tree: TokenTree,
        *,
        hidden: Sequence[int] = (),
        aux: AuxRows | None = None,
        since: int = 0,
    ) -> Scores:
        """One pass over the nodes `since` .. N-1; see `core.Target.score`.

        since: the earlier nodes of this tree were scored by the calls before (a draft that grows depth by depth).
        hidden: 0 is the embedding, l what layer l puts out, the last one after the final norm.

        Raises:
            InvalidInputError: auxiliary rows of embeddings, which only the transformers path takes.
            CapacityError: a slot, a tree or a context beyond what there is room for.
        """
        if aux is not None and aux.inputs.is_floating_point():
            raise InvalidInputError(
                "auxiliary rows of embeddings were given to a compiled model, which takes token ids. Load it with backend='transformers'."
            )
        X = 0 if aux is None else aux.nodes.shape[1]
        if tree.num_nodes + X > TREE_ROOM:
            raise CapacityError(
                f"a tree of {tree.num_nodes} nodes and {X} auxiliary rows was given; a pass takes at most {TREE_ROOM}. Draft less."
            )
        self._check_room(slots, [tree.num_nodes + X] * len(slots), self.max_model_len + TREE_ROOM)
        scored = TokenTree(tree.tokens[:, since:], tree.parents[:, since:])
        B, N = scored.tokens.shape
        buffer = self.new_logits(B * (N + X))
        states = self._run(slots, tree, since, np.full(B, since), buffer, hidden, aux)
        rows = torch.from_numpy(buffer)[:, : self.vocab_size]
        parents, roots, seen = tree.parents.numpy()[:, since:], since == 0, dict[int, Tensor]()
        rows = _place(rows, parents, roots, X)
        if hidden:
            found = torch.from_numpy(states)
            seen = {layer: _place(x, parents, roots, X)[:, :N] for layer, x in zip(hidden, found, strict=True)}
        return Scores(scored, rows[:, :N], seen, rows[:, N:] if aux is not None else None)

    def _check_room(self, slots: Sequence[int], counts: Sequence[int], columns: int) -> None:
        for slot, count in zip(slots, counts, strict=True):
            if not 0 <= slot < self.max_num_seqs:
                raise CapacityError(
                    f"slot {slot} was given; there are max_num_seqs={self.max_num_seqs}. Release a slot or raise it."
                )
            if self.lengths[slot] + count > columns:
                raise CapacityError(
                    f"{count} tokens after {self.lengths[slot]} committed ones were given; the context holds {self.max_model_len}. Shorten the text."
                )

    def commit(self, slots: Sequence[int], outcome: Outcome) -> None:
        """Keep the columns of the root and the path of the last `score`."""
        index = np.asarray(slots)
        _keep(self.parts.memory, index, self.lengths[index], outcome.path.contiguous().numpy(), outcome.num_accepted.numpy())

    def keep(self, slot: int, nodes: Sequence[int], root: int) -> None:
        """Move the columns of `nodes` behind column `root` and cut the cache there: for a draft that was grown below it."""
        path = np.array([nodes], np.int64).reshape(1, len(nodes))
        _keep(self.parts.memory, np.array([slot]), np.array([root]), path, np.array([len(nodes)]))

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots."""
        self.lengths[list(slots)] = 0


def _place(rows: Float[Tensor, "R _"], parents: np.ndarray, roots: bool, extra: int) -> Float[Tensor, "B T _"]:
    """Rows of what is real -> rows of all places, zero where there is padding. parents: [B, T - extra], roots first or not."""
    B, N = parents.shape
    if parents[:, int(roots) :].min(initial=0) >= 0:
        return rows.unflatten(0, (B, N + extra))
    real = np.concatenate([parents >= 0, np.ones((B, extra), np.bool_)], 1)
    real[:, 0] |= roots
    placed = torch.zeros(*real.shape, rows.shape[-1])
    placed[torch.from_numpy(real)] = rows[: int(real.sum())]
    return placed


def _special_ids(model: Any) -> tuple[list[int], int | None]:
    """End-of-sequence ids (generation config first, one or many) and the BOS id of a model."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    eos = model.config.eos_token_id if eos is None else eos
    return ([] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]), getattr(
        model.config, "bos_token_id", None
    )


def _stack(parts: Sequence[Tensor]) -> np.ndarray:
    return torch.stack([x.detach() for x in parts]).float().numpy()


def _quantization_error(matrices: Sequence[Tensor], dtype: type[np.generic]) -> float:
    """Relative error of all matrices as they are stored: the root of sum |W - W'|^2 / sum |W|^2."""
    if dtype is np.float32:
        return 0.0
    lost, whole = 0.0, 0.0
    for matrix in matrices:
        w = matrix.detach().float()
        step = w.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        stored = w.bfloat16().float() if dtype is np.uint16 else (w / step).round() * step
        lost, whole = lost + float((w - stored).square().sum()), whole + float(w.square().sum())
    return (lost / whole) ** 0.5


def _packed(layers: Sequence[Sequence[Tensor]], dtype: type[np.generic]) -> tuple[np.ndarray, np.ndarray]:
    """The matrices of each layer below one another, in panels [L, panels, inputs, PANEL], and their factors [L, outputs or 0]."""
    outputs, inputs = sum(len(w) for w in layers[0]), layers[0][0].shape[1]
    out = aligned(len(layers), -(-outputs // PANEL), inputs, PANEL, dtype=dtype)
    factors = [pack(torch.cat([w.detach() for w in matrices]), out[layer]) for layer, matrices in enumerate(layers)]
    return out, np.stack(factors) if dtype is np.int8 else np.zeros((len(layers), 0), np.float32)


def _storage(matrices: Sequence[Tensor], quantization: str | None) -> type[np.generic]:
    """How matrices are stored: int8 if asked for; bfloat16 if asked for or if it loses nothing; else float32."""
    if quantization == "int8":
        return np.int8
    exact = all(torch.equal(w.detach().float(), w.detach().bfloat16().float()) for w in matrices)
    return np.uint16 if quantization == "bfloat16" or exact else np.float32


def _weights(model: Any, columns: int, quantization: str | None) -> tuple[Weights, float]:
    """Take a transformers model's weights; also returns what storing them lost."""
    inner = model.model
    layers = inner.layers
    attention, mlp = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
    projections = [(a.q_proj, a.k_proj, a.v_proj) for a in attention]
    biased, normed = attention[0].q_proj.bias is not None, hasattr(attention[0], "q_norm")
    none = torch.empty(0)
    half = attention[0].head_dim // 2
    cos, sin = inner.rotary_emb(torch.zeros(1), torch.arange(columns)[None])
    matrices = {
        "qkv": [[p.weight for p in three] for three in projections],
        "out": [[a.o_proj.weight] for a in attention],
        "gate_up": [[m.gate_proj.weight, m.up_proj.weight] for m in mlp],
        "down": [[m.down_proj.weight] for m in mlp],
    }
    every = [w for parts in matrices.values() for layer in parts for w in layer]
    every.append(model.lm_head.weight)
    dtype = _storage(every, quantization)
    tied = dtype is np.float32 and model.lm_head.weight is inner.embed_tokens.weight
    packed = {name: _packed(parts, dtype) for name, parts in matrices.items()}
    head, head_factors = _packed([[model.lm_head.weight]], dtype)
    weights = Weights(
        embed=np.zeros((0, model.config.hidden_size), np.float32)
        if tied
        else inner.embed_tokens.weight.detach().float().numpy().copy(),
        head=head[0],
        norm=_stack([inner.norm.weight])[0],
        attention_norm=_stack([layer.input_layernorm.weight for layer in layers]),
        mlp_norm=_stack([layer.post_attention_layernorm.weight for layer in layers]),
        bias=_stack([torch.cat([p.bias for p in three]) if biased else none for three in projections]),
        q_norm=_stack([a.q_norm.weight if normed else none for a in attention]),
        k_norm=_stack([a.k_norm.weight if normed else none for a in attention]),
        head_factors=head_factors[0],
        **{name: matrix for name, (matrix, _) in packed.items()},
        **{f"{name}_factors": factors for name, (_, factors) in packed.items()},
        cos=cos[0, :, :half].numpy().copy(),
        sin=sin[0, :, :half].numpy().copy(),
    )
    return weights, _quantization_error(every, dtype)


def _workspace(weights: Weights, sizes: Sizes, columns: int) -> Workspace:
    hidden, wide = len(weights.norm), weights.gate_up.shape[1] * PANEL
    queries = CHUNK * sizes.heads // sizes.groups
    return Workspace(
        x=aligned(CHUNK, hidden),
        normed=aligned(CHUNK, hidden),
        qkv=aligned(CHUNK, weights.qkv.shape[1] * PANEL),
        mixed=aligned(CHUNK, sizes.heads * sizes.width),
        update=aligned(CHUNK, weights.out.shape[1] * PANEL),
        gate_up=aligned(CHUNK, wide),
        act=aligned(CHUNK, sizes.inner),
        queries=aligned(queries, sizes.width),
        scores=aligned(queries, columns),
        blend=aligned(queries, _whole(sizes.width)),
        totals=aligned(queries),
        lanes=aligned(16),
        found=aligned(TREE_ROOM),
        rows=np.zeros((CHUNK, 7), np.int64),
        seen=np.zeros((CHUNK, TREE_ROOM), np.int64),
    )
