"""The Llama family in torch with static shapes: for GPUs, where a pass is one replayed CUDA graph; eager elsewhere.

Llama, Mistral, Qwen2 and Qwen3, in the number format of their weights. Projections are fused (q, k, v; gate and up) and the
cache is allocated once. Every shape comes from a few buckets, so that passes of a shape run the very same kernels on the very
same memory: on a GPU they are captured once and replayed.

    S  slots of a pass, a prefix of the cache: 1, 2, 4, ... up to max_num_seqs      T  rows of each slot: 1, 2, 4, ... 256
    W  nodes and auxiliary rows of a tree                                           C  columns that are attended over
    column   place of one token in a slot: committed tokens first, then the nodes of the tree being scored

All that a pass needs to know of its trees is one table of integers, copied to the device in one go; ancestors, positions,
columns and the mask are made from it there. Rows that are padding see column 0 and write to the last column, which no row sees.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from polydraft.core import AuxRows, Needs, Scores, TokenTree
from polydraft.errors import IncompatibleError
from polydraft.models.checkpoint import why_not_family
from polydraft.models.memory import weight_bytes
from polydraft.models.slots import TREE_ROOM, special_ids
from polydraft.models.static.cuda_graph import Replay
from polydraft.models.static.paths import StaticProposals
from polydraft.models.static.weights import fused_layer
from polydraft.models.supported import check_supported, context_length
from polydraft.models.tree_attention import visible

__all__ = ["StaticLlama", "bucket"]

NARROWEST = 256
"""Fewest columns that a pass attends over."""


def bucket(size: int, smallest: int = 1) -> int:
    """The next power of two.

    Example:
        >>> [bucket(n) for n in (1, 3, 8, 9)], bucket(3, 256)
        ([1, 4, 8, 16], 256)
    """
    return max(smallest, 1 << (size - 1).bit_length())


class Shape(NamedTuple):
    """What tells one pass's kernels from another's; `last`: the head is only applied to one row of each slot."""

    slots: int
    rows: int
    width: int
    columns: int
    hidden: tuple[int, ...]
    last: bool


class StaticLlama(StaticProposals):
    """A Llama-family target of torch with static shapes; see `core.Target`.

    model: a module of transformers; from now on its q, k, v and gate, up weights are views of the fused matrices here, equal
        to what they were, so that nothing is held twice.
    max_model_len: default the model's context, or as much of it as fits half the free memory.

    Attributes: max_model_len, max_num_seqs, vocab_size, eos_token_ids, bos_token_id, name, cache_bytes, dtype, device.
    weight_format: the weights' number format.  graphed: whether passes are CUDA graphs.  passes: forward passes so far.

    Raises:
        IncompatibleError: a model that is not covered, with the reason.
        ModelLoadError, CapacityError, InvalidInputError: see `check_supported` and `check_memory`.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> target = StaticLlama(LlamaForCausalLM(config).eval(), max_model_len=64, max_num_seqs=2)
        >>> _ = target.prefill([0], [[3, 1, 4]])
        >>> target.score([0], TokenTree(torch.tensor([[1, 5, 9]]), torch.tensor([[-1, 0, 0]]))).logits.shape
        torch.Size([1, 3, 32])
        >>> from polydraft.core import Outcome
        >>> target.commit([0], Outcome(torch.tensor([[2]]), torch.tensor([1]), torch.tensor([2])))
        >>> target.lengths.tolist()
        [5, 0]
    """

    def __init__(self, model: Any, *, max_model_len: int | None = None, max_num_seqs: int = 8) -> None:
        reason = self.why_unsupported(model)
        if reason:
            raise IncompatibleError(f"{type(model).__name__} was given to the static path, but {reason}. Use HFTarget.")
        config = model.config
        check_supported(config, max_model_len, model)
        attention = model.model.layers[0].self_attn
        self.name = getattr(config, "name_or_path", "") or type(model).__name__
        self.dtype, self.device, self.weight_bytes = model.dtype, model.device, weight_bytes(model)
        self.weight_format = str(self.dtype).removeprefix("torch.")
        self.graphed = self.device.type == "cuda"
        self.vocab_size = model.lm_head.weight.shape[0]
        self.eos_token_ids, self.bos_token_id = special_ids(model)
        self._width, self._groups = attention.head_dim, config.num_key_value_heads
        self._heads, self._epsilon = config.num_attention_heads, config.rms_norm_eps
        self._columns = self.open_slots(
            max_model_len,
            max_num_seqs,
            context=context_length(config) or 0,
            bytes_per_token=2 * len(model.model.layers) * self._groups * self._width * self.dtype.itemsize,
            device=self.device,
            multiple=64,
            spare=1,
        )
        place = (max_num_seqs, self._columns, self._groups, self._width)
        with torch.no_grad():
            self._layers = [fused_layer(layer) for layer in model.model.layers]
            self._embed, self._head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
            self._norm = model.model.norm.weight.detach()
            self._keys, self._values = (
                [torch.zeros(place, dtype=self.dtype, device=self.device) for _ in self._layers] for _ in range(2)
            )
            positions = torch.arange(self._columns, device=self.device)[None]
            turns = model.model.rotary_emb(torch.zeros(1, device=self.device), positions)
            self._cos, self._sin = (x[0].to(self.dtype) for x in turns)
        self._graphs: dict[tuple[Shape, bool], Replay] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.graphed else None

    @staticmethod
    def why_unsupported(model: Any) -> str | None:
        """Why a module of transformers is not covered, or None if it is.

        Example:
            >>> from transformers import GPT2Config, GPT2LMHeadModel
            >>> StaticLlama.why_unsupported(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8)))[:18]
            "its type 'gpt2' is"
        """
        config = model.config
        if reason := why_not_family(config):
            return reason
        if config.hidden_act != "silu":
            return "its feed-forward is not a SiLU gate"
        if len({(x.device, x.dtype) for x in model.parameters()}) != 1:
            return "its weights are not all in one number format on one device"
        return None

    # A pass, on the device

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)).to(self.dtype)

    def _rotated(self, x: Float[Tensor, "S T H D"], cos: Tensor, sin: Tensor) -> Float[Tensor, "S T H D"]:
        half = self._width // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def _attend(self, q: Tensor, layer: int, shape: Shape, mask: Float[Tensor, "S 1 GT C"]) -> Float[Tensor, "S T HD"]:
        """The query heads that share a key head become rows of one matrix: keys and values are never repeated."""
        S, T, G, D = shape.slots, shape.rows, self._groups, self._width
        keys, values = (x[layer][:S, : shape.columns].transpose(1, 2) for x in (self._keys, self._values))
        packed = q.view(S, T, G, -1, D).permute(0, 2, 3, 1, 4).reshape(S, G, -1, D)
        mixed = scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=D**-0.5)
        return mixed.view(S, G, -1, T, D).permute(0, 3, 1, 2, 4).reshape(S, T, -1)

    def _mask(self, sees: Tensor, offsets: Tensor, lengths: Tensor, shape: Shape) -> Float[Tensor, "S 1 GT C"]:
        """0 where a row sees a column: all committed ones, its path in the tree, column 0 for padding; else -inf."""
        columns = torch.arange(shape.columns, device=sees.device)
        beyond = (columns - lengths[:, None])[:, None]
        in_tree = sees.gather(2, beyond.clamp(0, shape.width - 1).expand(-1, shape.rows, -1))
        seen = (beyond < 0) | (in_tree & (beyond >= 0) & (beyond < shape.width))
        seen = seen | ((offsets < 0)[..., None] & (columns == 0))
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=sees.device).masked_fill(~seen, -torch.inf)
        return mask[:, None].repeat(1, 1, self._heads // self._groups, 1)

    def _forward(self, shape: Shape, table: Int[Tensor, "S _"], extra: Tensor | None, embedded: Tensor | None) -> list[Tensor]:
        """Logits [S, T or 1, V], then the hidden states asked for, [S, T, h].

        table: see `_table`.  extra: [S, T, W] what rows see beside their path.  embedded: [S, T, h] for rows with id -1.
        """
        S, T, W = shape.slots, shape.rows, shape.width
        ids, depths, offsets, parents, rest = table.split([T, T, T, W, 2], 1)
        lengths, last = rest[:, 0], rest[:, 1]
        place = offsets.clamp(min=0)
        sees = visible(parents).gather(1, place[..., None].expand(-1, -1, W))
        positions = lengths[:, None] + torch.where(depths >= 0, depths, sees.sum(-1) - 1)
        mask = self._mask(sees if extra is None else sees | extra, offsets, lengths, shape)
        columns = (lengths[:, None] + offsets).masked_fill(offsets < 0, self._columns - 1)
        places = (columns + self._columns * torch.arange(S, device=table.device)[:, None]).flatten()
        positions = positions.clamp(0, self._columns - 1)
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        x = self._embed[ids.clamp(min=0)]
        if embedded is not None:
            x = x.where(ids[..., None] >= 0, embedded)
        found: list[Tensor] = []
        widths = [self._heads * self._width, *[self._groups * self._width] * 2]
        for index, layer in enumerate(self._layers):
            if index in shape.hidden:
                found.append(x)
            q, k, v = linear(self._normed(x, layer.attention_norm), layer.qkv, layer.qkv_bias).split(widths, -1)
            q, k = q.unflatten(-1, (-1, self._width)), k.unflatten(-1, (-1, self._width))
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
            for store, new in ((self._keys, self._rotated(k, cos, sin)), (self._values, v)):
                store[index].flatten(0, 1).index_copy_(0, places, new.reshape(S * T, self._groups, self._width))
            mixed = self._attend(self._rotated(q, cos, sin), index, shape, mask)
            x = x + linear(mixed, layer.out, layer.out_bias)
            gate, up = linear(self._normed(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = x + linear(silu(gate) * up, layer.down, layer.down_bias)
        x = self._normed(x, self._norm)
        if len(self._layers) in shape.hidden:
            found.append(x)
        if shape.last:
            x = x.gather(1, last[:, None, None].expand(-1, 1, x.shape[-1]))
        return [linear(x, self._head).float(), *found]

    # A pass, from the host

    def _sent(self, values: np.ndarray | list[int]) -> Tensor:
        """To the device, without waiting for what it is doing."""
        return torch.from_numpy(np.asarray(values)).to(self.device, non_blocking=True)

    def _run(
        self, shape: Shape, table: np.ndarray | Tensor, extra: Tensor | None = None, embedded: Tensor | None = None
    ) -> list[Tensor]:
        """One pass; its results may be overwritten by the next one."""
        self.passes += 1
        given = self._sent(table) if isinstance(table, np.ndarray) else table
        if not self.graphed or embedded is not None:
            return self._forward(shape, given, extra, embedded)
        inputs = [given] if extra is None else [given, extra]
        key = (shape, extra is not None)
        if key not in self._graphs:
            self._graphs[key] = Replay(lambda t, e=None: self._forward(shape, t, e, None), inputs, self._pool)
        return self._graphs[key](inputs)

    def _table(self, slots: Sequence[int], tree: TokenTree, since: int, rows: int, width: int) -> np.ndarray:
        """All that a pass knows of its trees: [S, 3 T + W + 2] ids, given depths (-1: the node's own), offsets of the columns
        behind the committed ones (-1: padding), parents, then committed length and last row. Slots left out are padding."""
        S = min(bucket(max(slots) + 1), self.max_num_seqs)
        N, index = tree.num_nodes, np.asarray(slots)
        tokens, parents = (x.cpu().numpy() for x in (tree.tokens, tree.parents))
        real = parents >= 0
        real[:, 0] = True
        table = np.full((S, 3 * rows + width + 2), -1, np.int64)
        table[index, : N - since] = tokens[:, since:]
        table[index, 2 * rows : 2 * rows + N - since] = np.where(real, np.arange(N), -1)[:, since:]
        table[index, 3 * rows : 3 * rows + N] = parents
        table[:, -2:] = 0
        table[index, -2] = self.lengths[index]
        return table

    def _shape(self, slots: Sequence[int], rows: int, width: int, hidden: Sequence[int] = (), *, last: bool = False) -> Shape:
        reached = int(self.lengths[list(slots)].max()) + width
        S, columns = min(bucket(max(slots) + 1), self.max_num_seqs), min(bucket(reached, NARROWEST), self._columns)
        return Shape(S, bucket(rows), bucket(width), columns, tuple(sorted(set(hidden))), last)

    @property
    def offers(self) -> Needs:
        """Hidden states of all layers, embeddings, the head, and auxiliary rows."""
        return Needs(tuple(range(len(self._layers) + 1)), True, True, True, True, True)

    @torch.inference_mode()
    def embed(self, token_ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape D"]:
        """Embeddings of tokens, as layer 0 of `hidden`."""
        return self._embed[token_ids.to(self.device)]

    @torch.inference_mode()
    def head(self, hidden: Float[Tensor, "*shape D"]) -> Float[Tensor, "*shape V"]:
        """Logits of states as the last layer of `hidden` has them, after the final norm."""
        return linear(hidden.to(self.device, self.dtype), self._head).float()[..., : self.vocab_size]

    def append(self, texts: Mapping[int, Sequence[int]], hidden: Sequence[int]) -> list[tuple[Tensor, list[Tensor]]]:
        """See `slots.SlotModel.append`."""
        slots, counts = list(texts), np.array([len(ids) for ids in texts.values()])
        T = int(counts.max())
        tokens = torch.tensor([[*ids, *[0] * (T - len(ids))] for ids in texts.values()])
        parents = np.where(np.arange(T) < counts[:, None], np.arange(-1, T - 1), -1)
        shape = self._shape(slots, T, T, hidden, last=True)
        table = self._table(slots, TokenTree(tokens, torch.from_numpy(parents)), 0, shape.rows, shape.width)
        table[slots, -1] = counts - 1
        logits, *states = self._run(shape, table)
        by_layer = dict(zip(shape.hidden, states, strict=True))
        return [
            (logits[slot, 0, : self.vocab_size].clone(), [by_layer[layer][slot, :count].clone() for layer in hidden])
            for slot, count in zip(slots, counts.tolist(), strict=True)
        ]

    @torch.inference_mode()
    def score(
        self, slots: Sequence[int], tree: TokenTree, *, hidden: Sequence[int] = (), aux: AuxRows | None = None, since: int = 0
    ) -> Scores:
        """One pass over the nodes `since` .. N-1; see `core.Target.score`. Logits and states are on the device.

        hidden: 0 is the embedding, l what layer l puts out, the last one after the final norm.

        Raises:
            CapacityError: a slot, a tree or a context beyond what there is room for.
        """
        N, X = tree.num_nodes, 0 if aux is None else aux.nodes.shape[1]
        self.check_tree(N, X)
        self.check_slots(slots, [N + X] * len(slots), TREE_ROOM)
        M = N - since
        shape = self._shape(slots, M + X, N + X, hidden)
        table, extra, embedded = self._table(slots, tree, since, shape.rows, shape.width), None, None
        if aux is not None:
            extra, embedded = self._aux(slots, aux, table, shape, N, M)
        results = self._run(shape, table, extra, embedded)
        self.scored(slots, N)
        index = self._sent(list(slots))
        logits, *states = (x[index] for x in results)
        logits = logits[..., : self.vocab_size]
        return Scores(
            TokenTree(tree.tokens[:, since:], tree.parents[:, since:]),
            logits[:, :M],
            {layer: x[:, :M] for layer, x in zip(shape.hidden, states, strict=True)},
            None if aux is None else logits[:, M : M + X],
        )

    @torch.inference_mode()
    def feed(
        self, slots: Sequence[int], ids: Int[Tensor, "B M"], offsets: np.ndarray, parents: np.ndarray
    ) -> Float[Tensor, "B M V"]:
        """Logits of some nodes of trees whose tokens only the device knows; the nodes above them were fed before.

        ids: on the device.  offsets: [B, M] the nodes, -1 for padding.  parents: [B, N] of all nodes, on the host.

        Raises:
            CapacityError: a slot, a tree or a context beyond what there is room for.
        """
        (B, M), N = ids.shape, parents.shape[1]
        self.check_tree(N)
        self.check_slots(slots, [N] * B, TREE_ROOM)
        self.scored(slots, N)
        shape, T, index = self._shape(slots, M, N), bucket(M), np.asarray(slots)
        table = np.full((min(bucket(max(slots) + 1), self.max_num_seqs), 3 * T + bucket(N) + 2), -1, np.int64)
        table[index, 2 * T : 2 * T + M] = offsets
        table[index, 3 * T : 3 * T + N] = parents
        table[:, -2:] = 0
        table[index, -2] = self.lengths[index]
        given, where = self._sent(table), self._sent(list(slots))
        given[where, :M] = ids
        return self._run(shape, given)[0][where][:, :M, : self.vocab_size]

    def _aux(
        self, slots: Sequence[int], aux: AuxRows, table: np.ndarray, shape: Shape, N: int, M: int
    ) -> tuple[Tensor, Tensor | None]:
        """Enter auxiliary rows into the table behind the M nodes; what they see of each other, and their embeddings if given."""
        T, X, index = shape.rows, aux.nodes.shape[1], np.asarray(slots)
        where = self._sent(list(slots))
        for begin, values in (
            (M, -1 if aux.inputs.ndim == 3 else aux.inputs.cpu().numpy()),
            (T + M, aux.positions.cpu().numpy()),
            (2 * T + M, np.arange(N, N + X)),
            (3 * T + N, aux.nodes.cpu().numpy()),
        ):
            table[index, begin : begin + X] = values
        extra = torch.zeros(len(table), T, shape.width, dtype=torch.bool, device=self.device)
        extra[where, M : M + X, N : N + X] = aux.mask.to(self.device, non_blocking=True)
        if aux.inputs.ndim == 2:
            return extra, None
        embedded = torch.zeros(len(table), T, aux.inputs.shape[2], dtype=self.dtype, device=self.device)
        embedded[where, M : M + X] = aux.inputs.to(self.device, self.dtype, non_blocking=True)
        return extra, embedded

    @torch.inference_mode()
    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """See `slots.SlotModel.move`."""
        there, here = (self._sent(x[:, 0] * self._columns + x[:, 1]) for x in (source, target))
        for store in (*self._keys, *self._values):
            flat = store.flatten(0, 1)
            flat.index_copy_(0, here, flat[there])
