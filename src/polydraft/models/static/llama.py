"""The Llama family in torch with static shapes: for GPUs, where a pass over trees is one replayed CUDA graph; eager elsewhere.

Llama, Mistral, Qwen2 and Qwen3, in the number format of their weights. Projections are fused (q, k, v; gate and up) and the
cache is allocated once. A pass over trees has the shape (S, T), each a power of two; all else that it needs to know is in a table of
integers (`table.py`). Graphs of a fixed set of shapes are captured by `capture`, which the engine calls when it is built, and none later:
other passes run one kernel after another, as prompts do, whose rows are packed without padding.

    S  sequences of a pass      T  rows of each, nodes and auxiliary rows      R  rows of all
    column   place of one token in a slot: committed tokens first, then the nodes of the tree being scored

Rows that are padding write to the last column, which no row sees.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear, silu

from polydraft.core import AuxRows, Needs, Scores, TokenTree
from polydraft.errors import IncompatibleError
from polydraft.models.checkpoint import why_not_family
from polydraft.models.memory import weight_bytes
from polydraft.models.slots import TREE_ROOM, special_ids
from polydraft.models.static import attention
from polydraft.models.static.cuda_graph import Replay
from polydraft.models.static.paths import StaticProposals
from polydraft.models.static.table import Fields, Rows, fields, filled, with_aux
from polydraft.models.static.weights import fused_layer
from polydraft.models.supported import check_supported, context_length
from polydraft.staging import sent

__all__ = ["Captured", "StaticLlama", "bucket"]


def bucket(size: int) -> int:
    """The next power of two.

    Example:
        >>> [bucket(n) for n in (1, 3, 8, 9)]
        [1, 4, 8, 16]
    """
    return 1 << (size - 1).bit_length()


class Captured(NamedTuple):
    """What capturing took. graphs: how many.  seconds: in all.  bytes: that their memory holds, beside weights and cache."""

    graphs: int
    seconds: float
    bytes: int


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [R, H, D], k and v [R, G, D]) -> [R, H D]."""


class StaticLlama(StaticProposals):
    """A Llama-family target of torch with static shapes; see `core.Target`.

    model: a module of transformers; from now on its q, k, v and gate, up weights are views of the fused matrices here, equal
        to what they were, so that nothing is held twice.
    max_model_len: default the model's context, or as much of it as fits half the free memory.

    Attributes: max_model_len, max_num_seqs, vocab_size, eos_token_ids, bos_token_id, name, cache_bytes, dtype, device.
    weight_format: the weights' number format.  graphed: whether passes may be CUDA graphs.  captured: those that are.  passes: forward passes so far.
    chunk: prompt tokens of one sequence that are read at a time.

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
        layers, rows = len(model.model.layers), max_num_seqs * self._columns
        with torch.no_grad():
            self._layers = [fused_layer(layer) for layer in model.model.layers]
            self._embed, self._head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
            self._norm = model.model.norm.weight.detach()
            self._cache = torch.zeros(2, layers, rows, self._groups, self._width, dtype=self.dtype, device=self.device)
            positions = torch.arange(self._columns, device=self.device)[None]
            turns = model.model.rotary_emb(torch.zeros(1, device=self.device), positions)
            self._cos, self._sin = (x[0].to(self.dtype) for x in turns)
        self._graphs: dict[tuple[int, int], Replay] = {}
        self.captured = Captured(0, 0.0, 0)
        self._captured: tuple[int, ...] = ()
        """Layers whose states the graphs give."""
        self._results: list[Tensor] = []
        """Where graphs leave logits and states, all of them in the same memory."""

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

    def _rotated(self, x: Float[Tensor, "R H D"], cos: Tensor, sin: Tensor) -> Float[Tensor, "R H D"]:
        half = self._width // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def _through(
        self, x: Float[Tensor, "R h"], positions: Int[Tensor, " R"], hidden: Sequence[int], attend: Attend
    ) -> list[Float[Tensor, "R h"]]:
        """The states after the final norm, then those of the layers asked for."""
        cos, sin = (turn[positions.clamp(0, self._columns - 1)][:, None] for turn in (self._cos, self._sin))
        found: list[Tensor] = []
        widths = [self._heads * self._width, *[self._groups * self._width] * 2]
        for index, layer in enumerate(self._layers):
            if index in hidden:
                found.append(x)
            q, k, v = linear(self._normed(x, layer.attention_norm), layer.qkv, layer.qkv_bias).split(widths, -1)
            q, k, v = (part.unflatten(-1, (-1, self._width)) for part in (q, k, v))
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
            mixed = attend(index, self._rotated(q, cos, sin), self._rotated(k, cos, sin), v)
            x = x + linear(mixed, layer.out, layer.out_bias)
            gate, up = linear(self._normed(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = x + linear(silu(gate) * up, layer.down, layer.down_bias)
        x = self._normed(x, self._norm)
        return [x, *found, *([x] if len(self._layers) in hidden else [])]

    def _kept(self, layer: int) -> tuple[Float[Tensor, "slots C G D"], Float[Tensor, "slots C G D"]]:
        """Keys and values of a layer."""
        keys, values = self._cache[:, layer].unflatten(1, (-1, self._columns)).unbind()
        return keys, values

    def _store(self, layer: int, places: Int[Tensor, " R"], k: Tensor, v: Tensor) -> None:
        for side, new in enumerate((k, v)):
            self._cache[side, layer].index_copy_(0, places, new)

    def _over_trees(
        self, table: Int[Tensor, "S L"], hidden: Sequence[int], embedded: Tensor | None, reach: int, width: int
    ) -> list[Tensor]:
        """Logits [S, T, V], then the hidden states asked for, [S, T, h], in the model's number format.

        embedded: [S, T, h] for rows with id -1.  reach, width: see `attention.tree`.
        """
        parts: Fields = fields(table)
        S, T = parts.ids.shape
        column = torch.where(parts.offset < 0, self._columns - 1, parts.length[:, None] + parts.offset)
        places = (parts.slot[:, None] * self._columns + column).flatten()
        x = self._embed[parts.ids.clamp(min=0)]
        if embedded is not None:
            x = x.where(parts.ids[..., None] >= 0, embedded)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._store(layer, places, k, v)
            return attention.tree(q.unflatten(0, (S, T)), *self._kept(layer), table, parts, reach, width).flatten(0, 1)

        positions = (parts.length[:, None] + parts.position).flatten()
        x, *states = self._through(x.flatten(0, 1), positions, hidden, attend)
        return [y.unflatten(0, (S, T)) for y in (linear(x, self._head), *states)]

    # A pass, from the host

    def _sent(self, values: np.ndarray | list[int]) -> Tensor:
        return sent(torch.from_numpy(np.asarray(values)), self.device)

    def _pass(
        self,
        slots: Sequence[int],
        rows: Rows,
        hidden: Sequence[int] = (),
        *,
        ids: Int[Tensor, "B M"] | None = None,
        embedded: Float[Tensor, "B M h"] | None = None,
    ) -> list[Tensor]:
        """Logits [B, M, V] in float32 and the states asked for, [B, M, h], of a pass over trees. ids: where only the device knows them."""
        self.passes += 1
        B, M = rows.offset.shape
        shape, index = (min(bucket(B), self.max_num_seqs), bucket(M)), np.asarray(slots)
        table = self._sent(filled(shape, index, self.lengths, rows))
        if ids is not None:
            table[:B, :M] = ids
        if shape in self._graphs and embedded is None and {*hidden} <= {*self._captured}:
            logits, *every = (x[: shape[0] * shape[1]].unflatten(0, shape) for x in self._graphs[shape](table))
            states = [every[self._captured.index(layer)] for layer in hidden]
            return [x[:B, :M].clone() for x in (logits[..., : self.vocab_size], *states)]
        given = None
        if embedded is not None:
            given = torch.zeros(*shape, embedded.shape[2], dtype=self.dtype, device=self.device)
            given[:B, :M] = embedded
        reach, width = int(self.lengths[index].max()), int(rows.offset.max()) + 1
        logits, *states = self._over_trees(table, hidden, given, reach, width)
        return [logits[:B, :M, : self.vocab_size].float(), *(x[:B, :M] for x in states)]

    @torch.inference_mode()
    def capture(self, most_rows: int, hidden: Sequence[int] = (), progress: Callable[[int], None] = lambda _: None) -> Captured:
        """Capture the graphs of passes over trees, on a GPU: batches of 1, 2, 4, ... sequences by 1, 2, 4, ... rows. Elsewhere nothing,
        nor where they are there already.

        most_rows: of a sequence's tree.  hidden: layers whose states are wanted.  progress: is told how many are left, before each.
        """
        if not self.graphed:
            return self.captured
        start, before = perf_counter(), self._memory()
        batches = sorted({min(1 << i, self.max_num_seqs) for i in range((self.max_num_seqs - 1).bit_length() + 1)}, reverse=True)
        widths = [1 << i for i in range(bucket(min(most_rows, TREE_ROOM)).bit_length())][::-1]
        shapes = [(S, T) for T in widths for S in batches]  # the largest first: the others find their memory there
        if {*shapes} <= {*self._graphs} and {*hidden} <= {*self._captured}:
            return self.captured
        most, self._captured = max(S * T for S, T in shapes), tuple(sorted({*hidden, *self._captured}))
        sizes = [(len(self._head), torch.float32), *[(self._embed.shape[1], self.dtype)] * len(self._captured)]
        self._graphs.clear()
        self._results = [torch.zeros(most, size, dtype=dtype, device=self.device) for size, dtype in sizes]
        pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        for number, shape in enumerate(shapes):
            progress(len(shapes) - number)
            self._graphs[shape] = Replay(self._into_results, self._idle(shape), pool)
        self.captured = Captured(len(shapes), perf_counter() - start, self._memory() - before)
        return self.captured

    def _memory(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def _idle(self, shape: tuple[int, int]) -> Tensor:
        """A table of padding alone, with which a pass changes nothing."""
        none = np.zeros((0, 0), np.int64)
        return self._sent(filled(shape, np.zeros(0, np.int64), self.lengths, Rows(none, none, none, none)))

    def _into_results(self, table: Int[Tensor, "S L"]) -> list[Tensor]:
        """A pass whose results lie in memory of all graphs."""
        found = self._over_trees(table, self._captured, None, self._columns, TREE_ROOM)
        for kept, new in zip(self._results, found, strict=True):
            kept[: new.shape[0] * new.shape[1]].copy_(new.flatten(0, 1))
        return self._results

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
        """See `slots.SlotModel.append`; the rows of all texts are one matrix, without padding."""
        self.passes += 1
        slots, counts = list(texts), [len(ids) for ids in texts.values()]
        begins, ends = [int(self.lengths[slot]) for slot in slots], np.cumsum(counts)
        position = np.concatenate([np.arange(begin, begin + count) for begin, count in zip(begins, counts, strict=True)])
        column = position + np.repeat(slots, counts) * self._columns
        ids, positions, places = self._sent(np.stack([[t for text in texts.values() for t in text], position, column]))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._store(layer, places, k, v)
            kept, seen = self._kept(layer), zip(slots, begins, counts, q.split(counts), strict=True)
            each = [attention.causal(rows, *(x[slot, : begin + count] for x in kept)) for slot, begin, count, rows in seen]
            return torch.cat(each)

        wanted = sorted({*hidden})
        x, *states = self._through(self._embed[ids], positions, wanted, attend)
        logits = linear(x[self._sent(ends - 1)], self._head).float()[:, : self.vocab_size]
        by_layer = {layer: found.split(counts) for layer, found in zip(wanted, states, strict=True)}
        return [(logits[b], [by_layer[layer][b] for layer in hidden]) for b in range(len(slots))]

    @torch.inference_mode()
    def fresh(self, token_ids: Sequence[int]) -> Float[Tensor, " V"]:
        """Logits after a text by a pass over all of it, alone and without the cache: a function of the token ids only.

        In low precision the rows of passes of different shapes differ in their last bits; these do not.
        """
        self.passes += 1
        ids = self._sent(list(token_ids))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention.causal(q, k, v)

        (x,) = self._through(self._embed[ids], torch.arange(len(ids), device=self.device), (), attend)
        return linear(x[-1:], self._head)[0, : self.vocab_size].float()

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
        tokens, parents = tree.host
        node = np.where((parents >= 0) | (np.arange(N) == 0), np.arange(N), -1)[:, since:]
        rows, embedded, M = Rows(tokens[:, since:], node, node, parents), None, N - since
        if aux is not None:
            rows = with_aux(rows, aux, N)
            if aux.inputs.ndim == 3:
                embedded = torch.zeros(len(slots), M + X, aux.inputs.shape[2], dtype=self.dtype, device=self.device)
                embedded[:, M:] = sent(aux.inputs, self.device)
        wanted = tuple(sorted({*hidden}))
        logits, *states = self._pass(slots, rows, wanted, embedded=embedded)
        self.scored(slots, N)
        return Scores(
            TokenTree(tree.tokens[:, since:], tree.parents[:, since:]),
            logits[:, :M],
            {layer: x[:, :M] for layer, x in zip(wanted, states, strict=True)},
            None if aux is None else logits[:, M:],
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
        N = parents.shape[1]
        self.check_tree(N)
        self.check_slots(slots, [N] * len(ids), TREE_ROOM)
        self.scored(slots, N)
        return self._pass(slots, Rows(None, offsets, offsets, parents), ids=ids)[0]

    @torch.inference_mode()
    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """See `slots.SlotModel.move`."""
        there, here = self._sent(np.stack([x[:, 0] * self._columns + x[:, 1] for x in (source, target)]))
        self._cache.index_copy_(2, here, self._cache[:, :, there])
