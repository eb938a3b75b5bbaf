"""The Llama family as compiled CPU code: one call for a pass over token trees, one call for a whole proposal.

Llama, Mistral, Qwen2 and Qwen3 in float32, one thread. Weights are stacked over layers with fused projections; each row of
a weight matrix is read once for all rows of a pass. Keys are stored transposed, so that scores are computed over columns
without horizontal sums. Logits equal transformers' within float32 rounding.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numba import njit
from torch import Tensor
from torch.nn import functional as F

from polydraft import tree as trees
from polydraft.core import AuxRows, NoiseKey, Outcome, Scores, TokenTree
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError
from polydraft.models.folder import load_module
from polydraft.models.memory import check_memory
from polydraft.models.supported import check_supported, context_length
from polydraft.noise import choose_row, uniform_at

__all__ = ["CompiledLlama"]

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
TREE_ROOM = 256
CHUNK = 256
_f32 = np.float32
_compiled = njit(cache=True, fastmath=True, error_model="numpy")


class _Weights(NamedTuple):
    """All layers stacked: first axis = layer. Empty arrays stand for parts that a model lacks."""

    embed: np.ndarray  # [V, h]
    head: np.ndarray  # [V, h]
    norm: np.ndarray  # [h]
    attention_norm: np.ndarray  # [L, h]
    mlp_norm: np.ndarray  # [L, h]
    qkv: np.ndarray  # [L, (H + 2 Hk) D, h]
    bias: np.ndarray  # [L, (H + 2 Hk) D] or [L, 0]
    q_norm: np.ndarray  # [L, D] or [L, 0]
    k_norm: np.ndarray  # [L, D] or [L, 0]
    out: np.ndarray  # [L, h, H D]
    gate_up: np.ndarray  # [L, 2 I, h]
    down: np.ndarray  # [L, h, I]
    cos: np.ndarray  # [positions, D]
    sin: np.ndarray  # [positions, D]


class _Sizes(NamedTuple):
    heads: int
    kv_heads: int
    head_size: int
    eps: float


@njit(fastmath=True, error_model="numpy", inline="always")
def _exp(x):  # pragma: no cover - compiled
    """exp for x <= 88 by a polynomial, so that loops over it are vectorised; relative error 1e-7."""
    x = max(x, _f32(-87.0))
    n = np.floor(x * _f32(1.4426950408889634) + _f32(0.5))
    r = (x - n * _f32(0.693359375)) + n * _f32(2.12194440e-4)
    y = _f32(1.9875691500e-4)
    y = y * r + _f32(1.3981999507e-3)
    y = y * r + _f32(8.3334519073e-3)
    y = y * r + _f32(4.1665795894e-2)
    y = y * r + _f32(1.6666665459e-1)
    y = y * r + _f32(5.0000001201e-1)
    y = y * r * r + r + _f32(1.0)
    return y * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@_compiled
def _matmul(x, W, y):  # pragma: no cover - compiled
    """y[T, O] = x[T, I] W[O, I]^T, each row of W read once."""
    T, I = x.shape
    for o in range(W.shape[0]):
        w = W[o]
        t = 0
        while t + 4 <= T:
            x0, x1, x2, x3 = x[t], x[t + 1], x[t + 2], x[t + 3]
            a, b, c, d = _f32(0), _f32(0), _f32(0), _f32(0)
            for i in range(I):
                a += w[i] * x0[i]
                b += w[i] * x1[i]
                c += w[i] * x2[i]
                d += w[i] * x3[i]
            y[t, o], y[t + 1, o], y[t + 2, o], y[t + 3, o] = a, b, c, d
            t += 4
        if t + 2 <= T:
            x0, x1 = x[t], x[t + 1]
            a, b = _f32(0), _f32(0)
            for i in range(I):
                a += w[i] * x0[i]
                b += w[i] * x1[i]
            y[t, o], y[t + 1, o] = a, b
            t += 2
        if t < T:
            x0 = x[t]
            a = _f32(0)
            for i in range(I):
                a += w[i] * x0[i]
            y[t, o] = a


@_compiled
def _rms(x, weight, eps, out):  # pragma: no cover - compiled
    s = _f32(0)
    for i in range(x.size):
        s += x[i] * x[i]
    scale = _f32(1) / np.sqrt(s / _f32(x.size) + _f32(eps))
    for i in range(x.size):
        out[i] = x[i] * scale * weight[i]


@_compiled
def _rotate(x, cos, sin):  # pragma: no cover - compiled
    half = x.size // 2
    for i in range(half):
        a, b = x[i], x[i + half]
        x[i] = a * cos[i] - b * sin[i]
        x[i + half] = b * cos[i + half] + a * sin[i + half]


@_compiled
def _attend(q, K, V, contiguous, path, scores, out):  # pragma: no cover - compiled
    """One head of one row over columns 0 .. contiguous-1 and the columns of `path` (-1 ends it); K [D, C], V [C, D]."""
    D = q.size
    scale = _f32(1) / np.sqrt(_f32(D))
    n = 0
    while n < path.size and path[n] >= 0:
        n += 1
    total_columns = contiguous + n
    scores[:total_columns] = 0
    for d in range(D):
        qd, row = q[d] * scale, K[d]
        for c in range(contiguous):
            scores[c] += qd * row[c]
        for j in range(n):
            scores[contiguous + j] += qd * row[path[j]]
    top = scores[0]
    for c in range(total_columns):
        top = max(top, scores[c])
    s = _f32(0)
    for c in range(total_columns):
        scores[c] = _exp(scores[c] - top)
        s += scores[c]
    out[:] = 0
    for c in range(total_columns):
        weight, value = scores[c] / s, V[c if c < contiguous else path[c - contiguous]]
        for d in range(D):
            out[d] += weight * value[d]


@_compiled
def _forward(weights, sizes, K, V, tokens, positions, slots, columns, contiguous, paths, hidden):  # pragma: no cover - compiled
    """One pass over R rows; writes K and V at `columns`, fills hidden [R, h] with the final normed states."""
    H, Hk, D, eps = sizes
    R, h = tokens.size, weights.embed.shape[1]
    inner = weights.down.shape[2]
    x, normed = np.empty((R, h), _f32), np.empty((R, h), _f32)
    qkv, mixed = np.empty((R, weights.qkv.shape[1]), _f32), np.empty((R, H * D), _f32)
    update, gate_up, act = np.empty((R, h), _f32), np.empty((R, 2 * inner), _f32), np.empty((R, inner), _f32)
    scores = np.empty(K.shape[4], _f32)
    for r in range(R):
        x[r] = weights.embed[tokens[r]]
    for layer in range(weights.qkv.shape[0]):
        for r in range(R):
            _rms(x[r], weights.attention_norm[layer], eps, normed[r])
        _matmul(normed, weights.qkv[layer], qkv)
        for r in range(R):
            if weights.bias.shape[1] > 0:
                qkv[r] += weights.bias[layer]
            cos, sin = weights.cos[positions[r]], weights.sin[positions[r]]
            for j in range(H + Hk):
                part = qkv[r, j * D : (j + 1) * D]
                if weights.q_norm.shape[1] > 0:
                    _rms(part, weights.q_norm[layer] if j < H else weights.k_norm[layer], eps, part)
                _rotate(part, cos, sin)
            for j in range(Hk):
                K[layer, slots[r], j, :, columns[r]] = qkv[r, (H + j) * D : (H + j + 1) * D]
                V[layer, slots[r], j, columns[r]] = qkv[r, (H + Hk + j) * D : (H + Hk + j + 1) * D]
        for r in range(R):
            for j in range(H):
                g = j // (H // Hk)
                _attend(
                    qkv[r, j * D : (j + 1) * D],
                    K[layer, slots[r], g],
                    V[layer, slots[r], g],
                    contiguous[r],
                    paths[r],
                    scores,
                    mixed[r, j * D : (j + 1) * D],
                )
        _matmul(mixed, weights.out[layer], update)
        for r in range(R):
            for i in range(h):
                x[r, i] += update[r, i]
            _rms(x[r], weights.mlp_norm[layer], eps, normed[r])
        _matmul(normed, weights.gate_up[layer], gate_up)
        for r in range(R):
            for i in range(inner):
                z = gate_up[r, i]
                act[r, i] = z / (_f32(1) + _exp(min(-z, _f32(87)))) * gate_up[r, inner + i]
        _matmul(act, weights.down[layer], update)
        for r in range(R):
            for i in range(h):
                x[r, i] += update[r, i]
    for r in range(R):
        _rms(x[r], weights.norm, eps, hidden[r])


@_compiled
def _score(weights, sizes, K, V, tokens, positions, slots, columns, contiguous, paths):  # pragma: no cover - compiled
    hidden = np.empty((tokens.size, weights.embed.shape[1]), _f32)
    _forward(weights, sizes, K, V, tokens, positions, slots, columns, contiguous, paths, hidden)
    logits = np.empty((tokens.size, weights.head.shape[0]), _f32)
    _matmul(hidden, weights.head, logits)
    return logits


@_compiled
def _law(logits, bias, temperature, top_k, top_p, min_p, out):  # pragma: no cover - compiled
    """out = the law that a draft token is drawn from; logits are changed."""
    V = logits.size
    if bias.size > 0:
        logits += bias
    best = 0
    for i in range(V):
        if logits[i] > logits[best]:
            best = i
    if temperature == 0.0:
        out[:] = 0
        out[best] = 1
        return
    top, inverse = logits[best], _f32(1.0 / temperature)
    s = _f32(0)
    for i in range(V):
        out[i] = _exp((logits[i] - top) * inverse)
        s += out[i]
    for i in range(V):
        out[i] /= s
    if 0 < top_k < V:
        least = np.sort(out)[V - top_k]
        for i in range(V):
            if out[i] < least:
                out[i] = 0
    if top_p < 1.0:
        order, s = np.argsort(-out), out.sum()
        kept, mass = 0, _f32(0)
        while kept < V and mass < top_p * s:
            mass += out[order[kept]]
            kept += 1
        out[order[kept:]] = 0
    if min_p > 0.0:
        least = min_p * out[best]
        for i in range(V):
            if out[i] < least:
                out[i] = 0
    s = out.sum()
    for i in range(V):
        out[i] /= s


@njit(cache=True, error_model="numpy")
def _propose(
    weights, sizes, K, V, lengths, slots, pending, counts, keys, widths, depths, law, bias
):  # pragma: no cover - compiled
    """K iid paths for every row. lengths[slot] counts cached tokens; pending [B, P] ends with the root.

    keys [B, 3] = seed, sample, position; law [B, 4] = temperature, top_k, top_p, min_p.
    Returns tokens, parents, rows [B, N] and probs [B, R, V]; nodes lie depth by depth, paths in order.
    """
    B = slots.size
    N = 1
    distinct = 1
    for b in range(B):
        N = max(N, 1 + widths[b] * depths[b])
        if depths[b] > 0:
            distinct = max(distinct, 1 + widths[b] * (depths[b] - 1))
    vocab = weights.head.shape[0]
    tokens, parents, rows = np.zeros((B, N), np.int64), np.full((B, N), -1, np.int64), np.full((B, N), -1, np.int64)
    probs = np.zeros((B, distinct, vocab), _f32)
    row_of = np.full((B, N), -1, np.int64)  # row of probs that belongs to node n
    first = np.zeros((B, N), np.int64)
    used = np.zeros(B, np.int64)
    for b in range(B):
        tokens[b, 0] = pending[b, counts[b] - 1]
    deepest = depths.max()
    for d in range(deepest):
        R = 0
        for b in range(B):
            if d < depths[b]:
                R += counts[b] if d == 0 else widths[b]
        at_b, at_node = np.empty(R, np.int64), np.empty(R, np.int64)
        ids, positions = np.empty(R, np.int64), np.empty(R, np.int64)
        where, columns, contiguous = np.empty(R, np.int64), np.empty(R, np.int64), np.empty(R, np.int64)
        paths = np.full((R, max(d, 1)), -1, np.int64)
        R = 0
        for b in range(B):
            if d >= depths[b]:
                continue
            length = lengths[slots[b]]
            if d == 0:
                for i in range(counts[b]):
                    at_b[R], at_node[R] = b, 0 if i == counts[b] - 1 else -1
                    ids[R], positions[R], where[R], columns[R] = pending[b, i], length + i, slots[b], length + i
                    contiguous[R] = length + i + 1
                    R += 1
                continue
            root = length + counts[b] - 1
            for k in range(widths[b]):
                n = 1 + (d - 1) * widths[b] + k
                if first[b, n] != n:
                    continue
                at_b[R], at_node[R] = b, n
                ids[R], positions[R], where[R], columns[R] = tokens[b, n], root + d, slots[b], root + n
                contiguous[R] = root + 1
                m = n
                for j in range(d):
                    paths[R, d - 1 - j] = root + m
                    m = first[b, parents[b, m]]
                R += 1
        hidden = np.empty((R, weights.embed.shape[1]), _f32)
        _forward(weights, sizes, K, V, ids[:R], positions[:R], where[:R], columns[:R], contiguous[:R], paths[:R], hidden)
        kept = 0
        for r in range(R):
            if at_node[r] >= 0:
                hidden[kept], at_b[kept], at_node[kept] = hidden[r], at_b[r], at_node[r]
                kept += 1
        logits = np.empty((kept, vocab), _f32)
        _matmul(hidden[:kept], weights.head, logits)
        for r in range(kept):
            b = at_b[r]
            row_of[b, at_node[r]] = used[b]
            _law(logits[r], bias[b], law[b, 0], int(law[b, 1]), law[b, 2], law[b, 3], probs[b, used[b]])
            used[b] += 1
        for b in range(B):
            if d >= depths[b]:
                continue
            for k in range(widths[b]):
                n = 1 + d * widths[b] + k
                above = 0 if d == 0 else n - widths[b]
                source = row_of[b, first[b, above]]
                parents[b, n], rows[b, n] = above, source
                tokens[b, n] = choose_row(probs[b, source], uniform_at(keys[b, 0], keys[b, 1], keys[b, 2], 0, n))
                first[b, n] = n
                for j in range(k):
                    m = n - k + j
                    if tokens[b, m] == tokens[b, n] and (d == 0 or first[b, parents[b, m]] == first[b, above]):
                        first[b, n] = first[b, m]
                        break
    return tokens, parents, rows, probs


class CompiledLlama:
    """A Llama-family model in compiled code with slots; see `core.Target`.

    model: the module of transformers whose weights are taken; it is not needed afterwards.
    max_model_len: longest sequence, default the model's own context.  max_num_seqs: slots.

    Raises:
        IncompatibleError: an architecture or option that is not covered; says which.
        ModelLoadError, CapacityError, InvalidInputError: the context asked for does not suit the model or the memory.
    """

    def __init__(self, model: Any, *, max_model_len: int | None = None, max_num_seqs: int = 8) -> None:
        reason = self.why_unsupported(model)
        if reason:
            raise IncompatibleError(f"{type(model).__name__} cannot be compiled: {reason}. Use backend='transformers'.")
        config = model.config
        check_supported(config, max_model_len)
        self.max_model_len, self.max_num_seqs = int(max_model_len or context_length(config) or 0), max_num_seqs
        self.name, self.vocab_size = str(config.name_or_path or type(model).__name__), int(config.vocab_size)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.eos_token_ids, self.bos_token_id = _special_ids(model)
        size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._sizes = _Sizes(config.num_attention_heads, config.num_key_value_heads, size, float(config.rms_norm_eps))
        columns = self.max_model_len + TREE_ROOM
        shape = (config.num_hidden_layers, max_num_seqs, config.num_key_value_heads)
        self.cache_bytes = 2 * int(np.prod(shape)) * columns * size * 4
        check_memory(self.cache_bytes, self.device, max_model_len=self.max_model_len, max_num_seqs=max_num_seqs)
        self._weights = _stack(model, columns, size)
        self._keys, self._values = np.zeros((*shape, size, columns), _f32), np.zeros((*shape, columns, size), _f32)
        self.lengths = np.zeros(max_num_seqs, np.int64)
        self.passes = 0

    @classmethod
    def from_pretrained(cls, name: str, *, max_model_len: int | None = None, max_num_seqs: int = 8) -> "CompiledLlama":
        """From a folder with config.json and safetensors weights; half-precision weights are widened to float32.

        Example:
            >>> from polydraft.models import pair
            >>> CompiledLlama.from_pretrained(str(pair.draft_folder()), max_num_seqs=1).vocab_size
            2048
        """
        module = load_module(name, dtype=torch.float32, device="cpu", max_model_len=max_model_len)
        return cls(module, max_model_len=max_model_len, max_num_seqs=max_num_seqs)

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
        if model.model.layers[0].self_attn.o_proj.bias is not None:
            return "its attention output has a bias"
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if rope.get("rope_type", "default") in {"dynamic", "longrope"}:
            return f"its rope scaling {rope['rope_type']!r} changes with the length"
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            return "it rotates only a part of each head"
        return None

    @torch.inference_mode()
    def prefill(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> Scores:
        """Append committed tokens; see `core.Target.prefill`."""
        self._check_room(slots, [len(ids) for ids in token_ids], self.max_model_len)
        last = torch.stack([self._prefill_one(slot, ids) for slot, ids in zip(slots, token_ids, strict=True)])
        return Scores(TokenTree.roots(torch.tensor([ids[-1] for ids in token_ids])), last[:, None])

    def _prefill_one(self, slot: int, ids: Sequence[int]) -> Float[Tensor, "V"]:
        states = torch.empty(0)
        for begin in range(0, len(ids), CHUNK):
            states = self._wide_pass(slot, torch.tensor(ids[begin : begin + CHUNK]))
        return F.linear(states[-1], torch.from_numpy(self._weights.head))

    def _wide_pass(self, slot: int, ids: Int[Tensor, "T"]) -> Float[Tensor, "T h"]:
        """Many tokens of one text at once: matrix products of torch are faster than ours from some 16 rows on."""
        views: list[Any] = [torch.from_numpy(x) for x in self._weights]
        weights: Any = _Weights(*views)
        H, Hk, D, eps = self._sizes
        T, start = len(ids), int(self.lengths[slot])
        end = start + T
        keys, values = torch.from_numpy(self._keys), torch.from_numpy(self._values)
        cos, sin = weights.cos[start:end, None], weights.sin[start:end, None]
        mask = torch.ones(T, end, dtype=torch.bool).tril(start)
        x = weights.embed[ids]
        for layer in range(len(weights.qkv)):
            normed = F.rms_norm(x, x.shape[-1:], weights.attention_norm[layer], eps)
            bias = weights.bias[layer] if weights.bias.shape[1] else None
            q, k, v = F.linear(normed, weights.qkv[layer], bias).view(T, H + 2 * Hk, D).split((H, Hk, Hk), 1)
            if weights.q_norm.shape[1]:
                q, k = F.rms_norm(q, (D,), weights.q_norm[layer], eps), F.rms_norm(k, (D,), weights.k_norm[layer], eps)
            q, k = (y * cos + torch.cat([-y[..., D // 2 :], y[..., : D // 2]], -1) * sin for y in (q, k))
            keys[layer, slot, :, :, start:end], values[layer, slot, :, start:end] = k.permute(1, 2, 0), v.transpose(0, 1)
            seen = keys[layer, slot, :, :, :end].transpose(1, 2), values[layer, slot, :, :end]
            mixed = F.scaled_dot_product_attention(q.transpose(0, 1)[None], *(s[None] for s in seen), mask, enable_gqa=True)[0]
            x = x + F.linear(mixed.transpose(0, 1).flatten(1), weights.out[layer])
            gate, up = F.linear(F.rms_norm(x, x.shape[-1:], weights.mlp_norm[layer], eps), weights.gate_up[layer]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, weights.down[layer])
        self.lengths[slot] = end
        self.passes += 1
        return F.rms_norm(x, x.shape[-1:], weights.norm, eps)

    def score(
        self,
        slots: Sequence[int],
        tree: TokenTree,
        *,
        hidden: Sequence[int] = (),
        aux: AuxRows | None = None,
        since: int = 0,
    ) -> Scores:
        """One pass over the nodes `since` .. N-1; see `core.Target.score`. Hidden states need the transformers path."""
        if hidden or aux is not None:
            raise InvalidInputError(
                "hidden states or auxiliary rows were asked of the compiled path; use backend='transformers'."
            )
        if tree.num_nodes > TREE_ROOM:
            raise CapacityError(f"a tree of {tree.num_nodes} nodes was given; a pass takes at most {TREE_ROOM}. Draft less.")
        self._check_room(slots, [tree.num_nodes] * len(slots), self.max_model_len + TREE_ROOM)
        real = tree.is_node[:, since:].numpy()
        b, n = np.nonzero(real)
        n = n + since
        base = self.lengths[np.asarray(slots)]
        depth = trees.depths(tree).numpy()
        paths = _path_columns(tree.parents.contiguous().numpy(), b, n, base, int(depth.max()) + 1)
        rows = _score(
            self._weights,
            self._sizes,
            self._keys,
            self._values,
            tree.tokens.numpy()[b, n],
            base[b] + depth[b, n],
            np.asarray(slots)[b],
            base[b] + n,
            base[b],
            paths,
        )
        self.passes += 1
        B, N = real.shape
        scored = TokenTree(tree.tokens[:, since:], tree.parents[:, since:])
        if len(rows) == B * N:
            return Scores(scored, torch.from_numpy(rows).view(B, N, -1))
        logits = torch.zeros(B, N, self.vocab_size)
        logits[torch.from_numpy(b), torch.from_numpy(n - since)] = torch.from_numpy(rows)
        return Scores(scored, logits)

    def propose_paths(
        self,
        slots: Sequence[int],
        pending: Sequence[Sequence[int]],
        key: NoiseKey,
        widths: Sequence[int],
        depths: Sequence[int],
        law: Float[Tensor, "B 4"],
        bias: Float[Tensor, "B _"],
    ) -> tuple[TokenTree, Int[Tensor, "B N"], Float[Tensor, "B R V"]]:
        """K iid paths for every row in one compiled call: tree, row of each node, and the rows drawn from.

        pending: committed tokens that the cache lacks, the root last; they are cached where depths[b] > 0.
        law: temperature, top_k, top_p, min_p.  bias: added to logits, [B, V] or [B, 0].
        """
        counts = np.array([len(p) for p in pending])
        padded = np.array([[*p, *[0] * (counts.max() - len(p))] for p in pending])
        index, deep = np.asarray(slots), np.asarray(depths)
        keys = torch.stack([key.seed, key.sample, key.position], 1).numpy()
        found = _propose(
            self._weights,
            self._sizes,
            self._keys,
            self._values,
            self.lengths,
            index,
            padded,
            counts,
            keys,
            np.asarray(widths),
            deep,
            law.double().numpy(),
            bias.float().numpy(),
        )
        self.lengths[index[deep > 0]] += counts[deep > 0]
        self.passes += int(deep.max(initial=0))
        tokens, parents, rows, probs = map(torch.from_numpy, found)
        return TokenTree(tokens, parents), rows, probs

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

    def keep(self, slot: int, nodes: Sequence[int], root: int) -> None:
        """Move the rows of `nodes` behind the root's column and cut the cache there."""
        for i, n in enumerate(nodes):
            if n != i + 1:
                self._keys[:, slot, :, :, root + 1 + i] = self._keys[:, slot, :, :, root + n]
                self._values[:, slot, :, root + 1 + i] = self._values[:, slot, :, root + n]
        self.lengths[slot] = root + 1 + len(nodes)

    def commit(self, slots: Sequence[int], outcome: Outcome) -> None:
        """Keep the rows of the root and the path of the last `score`."""
        for slot, path, kept in zip(slots, outcome.path.tolist(), outcome.num_accepted.tolist(), strict=True):
            self.keep(slot, path[:kept], int(self.lengths[slot]))

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots."""
        self.lengths[list(slots)] = 0


@njit(cache=True)
def _path_columns(parents, b, n, base, deepest):  # pragma: no cover - compiled
    """Cache columns of each row's path, root first, -1 behind its end."""
    paths = np.full((len(b), deepest), -1, np.int64)
    for r in range(len(b)):
        length, m = 0, n[r]
        while m >= 0:
            length += 1
            m = parents[b[r], m]
        m = n[r]
        for j in range(length - 1, -1, -1):
            paths[r, j] = base[b[r]] + m
            m = parents[b[r], m]
    return paths


def _special_ids(model: Any) -> tuple[list[int], int | None]:
    """End-of-sequence ids (generation config first, one or many) and the BOS id of a model."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    eos = model.config.eos_token_id if eos is None else eos
    return ([] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]), getattr(
        model.config, "bos_token_id", None
    )


def _stack(model: Any, positions: int, head_size: int) -> _Weights:
    """Take a transformers model's weights."""

    def array(x: Tensor) -> np.ndarray:
        return x.detach().float().contiguous().numpy().copy()

    def stack(parts: list[Tensor]) -> np.ndarray:
        return array(torch.stack(parts))

    layers, inner = model.model.layers, model.model
    at = [layer.self_attn for layer in layers]
    nothing = torch.empty(0)
    projections = [(a.q_proj, a.k_proj, a.v_proj) for a in at]
    biased = at[0].q_proj.bias is not None
    normed = hasattr(at[0], "q_norm")
    cos, sin = inner.rotary_emb(torch.zeros(1, 1, head_size), torch.arange(positions)[None])
    return _Weights(
        embed=array(inner.embed_tokens.weight),
        head=array(model.lm_head.weight),
        norm=array(inner.norm.weight),
        attention_norm=stack([layer.input_layernorm.weight for layer in layers]),
        mlp_norm=stack([layer.post_attention_layernorm.weight for layer in layers]),
        qkv=stack([torch.cat([p.weight for p in three]) for three in projections]),
        bias=stack([torch.cat([p.bias for p in three]) if biased else nothing for three in projections]),
        q_norm=stack([a.q_norm.weight if normed else nothing for a in at]),
        k_norm=stack([a.k_norm.weight if normed else nothing for a in at]),
        out=stack([a.o_proj.weight for a in at]),
        gate_up=stack([torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]) for layer in layers]),
        down=stack([layer.mlp.down_proj.weight for layer in layers]),
        cos=array(cos[0]),
        sin=array(sin[0]),
    )
