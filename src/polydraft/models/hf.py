"""Any causal language model of transformers as a target that scores token trees in slots.

The model's own code runs unchanged: it is given an explicit mask (ancestors only), explicit positions (committed length
plus depth) and a cache of ours (`models.cache`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from polydraft import tree as trees
from polydraft.core import AuxRows, Outcome, Scores, TokenTree
from polydraft.errors import CapacityError, IncompatibleError
from polydraft.models.cache import SlotCache
from polydraft.models.memory import check_memory

__all__ = ["HFTarget", "why_unsupported"]

TREE_ROOM = 256
CHUNK = 256


def why_unsupported(config: Any, max_model_len: int) -> str | None:
    """Why a model's cache cannot be rolled back, or None if it can.

    Example:
        >>> from transformers import MistralConfig
        >>> why_unsupported(MistralConfig(sliding_window=128), 1024)
        'its sliding window of 128 tokens is shorter than the context of 1024 (lower max_model_len to 128)'
    """
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    kinds = set(getattr(config, "layer_types", None) or ())
    odd = kinds - {"full_attention", "sliding_attention", "attention"}
    if odd or getattr(config, "ssm_cfg", None) or config.model_type in {"mamba", "mamba2", "rwkv", "xlstm", "recurrent_gemma"}:
        return f"it has recurrent or compressed layers ({', '.join(sorted(odd)) or config.model_type}), whose state cannot roll back"
    window = getattr(config, "sliding_window", None)
    windowed = "sliding_attention" in kinds or (not kinds and getattr(config, "use_sliding_window", True))
    if window and windowed and window < max_model_len:
        return f"its sliding window of {window} tokens is shorter than the context of {max_model_len} (lower max_model_len to {window})"
    return None


class HFTarget:
    """A transformers model with slots; see `core.Target`.

    model: a causal language model in eval mode.  max_model_len: default its own limit.  max_num_seqs: slots.

    Raises:
        IncompatibleError: an architecture whose cache cannot roll back.
        CapacityError: the cache does not fit in memory; says the figures.
    """

    def __init__(self, model: Any, *, max_model_len: int | None = None, max_num_seqs: int = 8) -> None:
        config = model.config.get_text_config()
        limit = int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", 0) or 2048)
        if max_model_len is not None and max_model_len > limit:
            raise CapacityError(f"max_model_len={max_model_len} was given; the model's context holds {limit}. Use at most {limit}.")
        self.model, self.max_model_len, self.max_num_seqs = model, max_model_len or limit, max_num_seqs
        reason = why_unsupported(config, self.max_model_len)
        if reason:
            raise IncompatibleError(
                f"{type(model).__name__} cannot be a target: {reason}. Use transformers' own generate for plain decoding, or another model."
            )
        self.name = str(config.name_or_path or type(model).__name__)
        self.vocab_size = int(config.vocab_size)
        self.device, self.dtype = model.device, model.dtype
        self.eos_token_ids, self.bos_token_id = special_ids(model)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        columns = self.max_model_len + TREE_ROOM
        self.cache_bytes = 2 * config.num_hidden_layers * max_num_seqs * heads * columns * size * self.dtype.itemsize
        check_memory(self.cache_bytes, self.device, max_model_len=self.max_model_len, max_num_seqs=max_num_seqs)
        self._cache = SlotCache(config.num_hidden_layers, max_num_seqs, columns)
        self.lengths = [0] * max_num_seqs
        self.passes = 0

    @torch.inference_mode()
    def prefill(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> Scores:
        """Append committed tokens; see `core.Target.prefill`."""
        self._check_room(slots, [len(ids) for ids in token_ids], self.max_model_len)
        last = torch.zeros(len(slots), 1, self.vocab_size)
        for begin in range(0, max(map(len, token_ids)), CHUNK):
            part = [(b, ids[begin : begin + CHUNK]) for b, ids in enumerate(token_ids) if len(ids) > begin]
            chunk = trees.pad([(list(ids), range(-1, len(ids) - 1)) for _, ids in part])
            rows = [b for b, _ in part]
            ends = torch.tensor([len(ids) - 1 for _, ids in part])
            logits, _ = self._pass([slots[b] for b in rows], chunk, keep=ends.unique())
            picked = logits[torch.arange(len(rows)), torch.searchsorted(ends.unique(), ends)]
            last[rows, 0] = picked.float().cpu()
            for b, ids in part:
                self.lengths[slots[b]] += len(ids)
        roots = TokenTree.roots(torch.tensor([ids[-1] for ids in token_ids]))
        return Scores(roots, last.to(self.device))

    @torch.inference_mode()
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
        """
        extra = 0 if aux is None else aux.positions.shape[1]
        if tree.num_nodes + extra > TREE_ROOM:
            raise CapacityError(f"a tree of {tree.num_nodes} nodes and {extra} auxiliary rows was given; a pass takes at most {TREE_ROOM}.")
        self._check_room(slots, [tree.num_nodes] * len(slots), self.max_model_len + TREE_ROOM)
        logits, states = self._pass(slots, tree, since=since, aux=aux, hidden=bool(hidden))
        nodes = tree.num_nodes - since
        seen = {layer: states[layer][:, :nodes] for layer in hidden}
        scored = TokenTree(tree.tokens[:, since:], tree.parents[:, since:])
        return Scores(scored, logits[:, :nodes].float(), seen, logits[:, nodes:].float() if extra else None)

    def _check_room(self, slots: Sequence[int], counts: Sequence[int], columns: int) -> None:
        for slot, count in zip(slots, counts, strict=True):
            if not 0 <= slot < self.max_num_seqs:
                raise CapacityError(f"slot {slot} was given; there are max_num_seqs={self.max_num_seqs}. Release a slot or raise it.")
            if self.lengths[slot] + count > columns:
                raise CapacityError(
                    f"{count} tokens after {self.lengths[slot]} committed ones were given; the context holds {self.max_model_len}. Shorten the text."
                )

    def _pass(
        self,
        slots: Sequence[int],
        tree: TokenTree,
        *,
        since: int = 0,
        aux: AuxRows | None = None,
        hidden: bool = False,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        self.passes += 1
        device, lengths = self.device, torch.tensor([self.lengths[s] for s in slots])
        positions = lengths[:, None] + trees.depths(tree).clamp(min=0)[:, since:].cpu()
        columns = lengths[:, None] + torch.arange(since, tree.num_nodes)
        visible = trees.ancestors(tree)[:, since:].cpu()
        if aux is not None:
            positions = torch.cat([positions, lengths[:, None] + aux.positions.cpu()], 1)
            behind = lengths[:, None] + tree.num_nodes + torch.arange(aux.positions.shape[1])
            columns, visible = torch.cat([columns, behind], 1), _with_aux(trees.ancestors(tree).cpu(), visible, aux)
        columns = columns.clamp(max=self._cache.num_columns - 1)
        width = int(columns.max()) + 1
        mask = _mask(lengths, visible, width)
        self._cache.begin(slots, columns.to(device), width)
        limit = self.max_model_len - 1
        out = self.model(
            **self._inputs(tree.tokens[:, since:].to(device), aux),
            attention_mask=mask.to(device),
            position_ids=positions.clamp(max=limit).to(device),
            past_key_values=self._cache,
            use_cache=True,
            output_hidden_states=hidden,
            **({} if keep is None else {"logits_to_keep": keep.to(device)}),
        )
        return out.logits, out.hidden_states

    def _inputs(self, tokens: Int[Tensor, "B T"], aux: AuxRows | None) -> dict[str, Tensor]:
        if aux is None:
            return {"input_ids": tokens}
        if aux.inputs.dtype.is_floating_point:
            embedded = self.model.get_input_embeddings()(tokens)
            return {"inputs_embeds": torch.cat([embedded, aux.inputs.to(embedded)], 1)}
        return {"input_ids": torch.cat([tokens, aux.inputs.to(tokens)], 1)}

    @torch.inference_mode()
    def commit(self, slots: Sequence[int], outcome: Outcome) -> None:
        """Keep the rows of the root and the path of the last `score`."""
        moved: list[tuple[int, int, int]] = []
        for slot, path, kept in zip(slots, outcome.path.tolist(), outcome.num_accepted.tolist(), strict=True):
            start = self.lengths[slot]
            moved += [(slot, start + node, start + 1 + i) for i, node in enumerate(path[:kept]) if node != 1 + i]
            self.lengths[slot] = start + 1 + kept
        if moved:
            self._cache.keep(*torch.tensor(moved, device=self.device).unbind(1))

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots."""
        for slot in slots:
            self.lengths[slot] = 0


def _with_aux(above: Bool[Tensor, "B N N"], visible: Bool[Tensor, "B T N"], aux: AuxRows) -> Bool[Tensor, "B R C"]:
    """Columns are tree nodes, then auxiliary rows; tree rows see no auxiliary column."""
    B, X = aux.positions.shape
    rows = above.gather(1, aux.nodes.cpu()[..., None].expand(B, X, above.shape[-1]))
    hidden = torch.zeros(B, visible.shape[1], X, dtype=torch.bool)
    return torch.cat([torch.cat([visible, hidden], 2), torch.cat([rows, aux.mask.cpu() | torch.eye(X, dtype=torch.bool)], 2)], 1)


def _mask(lengths: Int[Tensor, "B"], visible: Bool[Tensor, "B R C"], width: int) -> Bool[Tensor, "B 1 R W"]:
    """Committed columns of the row's own slot, then the visible columns of this pass."""
    B, R, C = visible.shape
    mask = (torch.arange(width) < lengths[:, None])[:, None].expand(B, R, width).clone()
    behind = (lengths[:, None] + torch.arange(C)).clamp(max=width - 1)
    return mask.scatter_(2, behind[:, None].expand(B, R, C), visible)[:, None]


def special_ids(model: Any) -> tuple[list[int], int | None]:
    """End-of-sequence ids (generation config first, one or many) and the BOS id of a model."""
    generation, config = getattr(model, "generation_config", None), model.config
    eos = getattr(generation, "eos_token_id", None)
    eos = config.eos_token_id if eos is None else eos
    return ([] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]), getattr(config, "bos_token_id", None)
