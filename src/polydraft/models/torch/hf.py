"""Any causal language model of transformers as a target: trees scored in one forward pass, in slots, over a cache of its own.

    B  sequences of a call    N  nodes of the tree    T = N - since  rows of the forward pass

The module is used as it is: it gets an explicit mask for each kind of its layers, explicit positions and a `SlotCache`. When a target is
built, a branching tree behind a prefix is scored and compared with a plain forward pass, so that a model that ignores any of the three is refused, see `proof`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from polydraft.core import Needs, Scores, TokenTree
from polydraft.errors import CapacityError, IncompatibleError, ModelLoadError, PolydraftError
from polydraft.models.slots import TREE_ROOM, RowAndStates, special_ids
from polydraft.models.supported import check_rolls_back, context_length
from polydraft.models.torch.cache import LayerShape, PassRecorder, SlotCache
from polydraft.models.torch.door import inward, outward, states_outward
from polydraft.models.torch.fixed_rotary import FixedRotary, fixed, fixed_rotary
from polydraft.models.torch.module_weights import of_module
from polydraft.models.torch.proof import (
    NARROW,
    fitting_context,
    position_behind_padding,
    proof_text,
    prove_trees,
)
from polydraft.models.torch.slots import TorchModel
from polydraft.models.torch.tree_attention import GROUPED, column_positions, node_mask
from polydraft.models.windows import narrowed, text_config, windows, within


class HFTarget(TorchModel):
    """A causal language model of transformers that scores token trees in slots; see `core.Target`.

    model: a module, in evaluation mode from now on; its weights and configuration stay as they are.
    max_model_len: most tokens of a sequence. Default: the model's context, or as much of it as fits half the free memory.
    max_num_seqs: most sequences at once.

    Attributes: max_model_len, max_num_seqs, eos_token_ids, bos_token_id, name, cache_bytes, dtype, device.
    vocab_size: rows of logits; lower it to cut off ids that the tokenizer does not have.

    Raises:
        ModelLoadError: a model whose cache cannot be rolled back (recurrent, hybrid, encoder-decoder), or that does not follow masks.
        CapacityError: a cache larger than the free memory, or a context longer than the model's.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> target = HFTarget(LlamaForCausalLM(config), max_model_len=64, max_num_seqs=2)
        >>> _ = target.prefill([0], [[3, 1, 4]])
        >>> target.score([0], TokenTree(np.array([[1, 5, 9]]), np.array([[-1, 0, 0]]))).logits.shape
        (1, 3, 32)
        >>> from polydraft.core import Outcome
        >>> target.commit([0], Outcome.of_paths([[2]]))
        >>> target.lengths.tolist()
        [5, 0]
    """

    _first_position = 0
    _said_length = 1 << 20
    """Far from any: a model that takes positions from it shows in the proof (Llama 4 scales queries by them)."""

    def __init__(self, model: Any, *, max_model_len: int | None = None, max_num_seqs: int = 8) -> None:
        self._check(model, max_model_len)
        self.model = model.eval()
        self.checkpoint = of_module(model)
        self.name = getattr(model.config, "name_or_path", "") or type(model).__name__
        self.take_module(model)
        self.eos_token_ids, self.bos_token_id = special_ids(model)
        self._attention = self._choose_attention()
        self._keeps_logits = "logits_to_keep" in signature(model.forward).parameters
        self._num_groups = 1
        self._windows = dict[str, Any]()
        self._rotaries: list[FixedRotary] = []
        try:
            self._build(max_model_len, max_num_seqs)
        except PolydraftError:
            raise
        except Exception as error:
            raise ModelLoadError(
                f"{type(model).__name__} does not run with a mask, positions and a cache of our own ({error}). Use another model."
            ) from error

    # Building

    def _check(self, model: Any, max_model_len: int | None) -> None:
        check_rolls_back(model.config, max_model_len, model)
        if getattr(model.config, "is_encoder_decoder", False):
            raise ModelLoadError(
                f"{type(model).__name__} was given, which has an encoder. Use models.seq2seq.Seq2SeqTarget."
            )

    def _choose_attention(self) -> str:
        configured = self.model.config._attn_implementation
        if configured not in ("sdpa", "eager"):
            raise IncompatibleError(
                f"attention {configured!r} was given; expected 'sdpa' or 'eager'. Load the model with attn_implementation='sdpa'."
            )
        return (
            GROUPED
            if configured == "sdpa" and getattr(self.model, "_supports_attention_backend", False)
            else configured
        )

    @torch.inference_mode()
    def _build(self, max_model_len: int | None, max_num_seqs: int) -> None:
        """Find the cache's shape with a plain forward pass, allocate it, and prove that a tree gives the logits of its paths."""
        recorder = PassRecorder()
        path = torch.tensor([[0, 2]], device=self.device)
        ones = torch.ones_like(path)
        out = self.model(
            path, past_key_values=recorder, use_cache=True, attention_mask=ones, output_hidden_states=True
        )
        self.vocab_size: int = out.logits.shape[-1]
        self._num_states = len(out.hidden_states)
        head = self.model.get_output_embeddings()
        self._plain_head = head is not None and torch.allclose(
            head(out.hidden_states[-1]), out.logits, rtol=1e-2, atol=1e-3
        )
        layers = self._allocate(recorder, max_model_len, max_num_seqs)
        if self._attention == GROUPED:
            num_ranks = getattr(self.model, "tp_size", None) or 1  # each has its part of the heads
            self._num_groups = max(
                1, text_config(self.model.config).num_attention_heads // (layers[0].num_heads * num_ranks)
            )
        self._rotaries = fixed_rotary(self.model, self.max_model_len)
        self._windows = self._shorter_windows()
        text = proof_text(self.vocab_size, self.max_model_len)
        wide = self._windows
        with narrowed(self.model, NARROW) if wide else nullcontext():
            self._windows = self._shorter_windows() if wide else {}
            with fixed(self._rotaries):
                plain = self.model(torch.tensor([text], device=self.device), use_cache=False).logits[0]
            self._prove_positions(text, outward(plain))
        self._windows = wide
        self.max_model_len = fitting_context(self, self.model.config, self._first_position, max_model_len)

    def _prove_positions(self, text: list[int], plain: Float[np.ndarray, "L V"]) -> None:
        """As `_prove`; a model whose own positions begin elsewhere is given those."""
        try:
            self._prove(text, plain)
        except ModelLoadError:
            first = position_behind_padding(self.model.config)
            if first is None:
                raise
            self._first_position = first
            self._prove(text, plain)

    def _shorter_windows(self) -> dict[str, Any]:
        """By kind of layer, see `windows`; empty where none is shorter than a sequence: one mask then serves all."""
        kinds = windows(self.model.config)
        return kinds if any(w is not None and w.width < self.max_model_len for w in kinds.values()) else {}

    def _allocate(
        self, recorder: PassRecorder, max_model_len: int | None, max_num_seqs: int
    ) -> list[LayerShape]:
        layers = recorder.layer_shapes
        columns = self.open_slots(
            max_model_len,
            max_num_seqs,
            context=context_length(self.model.config)
            or 0,  # 0 only where max_model_len is given, see check_rolls_back
            bytes_per_token=sum(shape.bytes_per_token for shape in layers),
            device=self.device,
        )
        self.cache_dtype = str(layers[0].dtype).removeprefix("torch.") if layers else self.cache_dtype
        self._cache = SlotCache(layers, self.max_num_seqs, columns, recorder.devices)
        self._cache.said_length = self._said_length
        return layers

    def _prove(self, text: list[int], plain: Float[np.ndarray, "L V"]) -> None:
        prove_trees(self, text, plain)
        self.passes = 0

    # Forward passes

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        """The grouped attention and fixed rotary positions, for the length of a forward pass: the module is the caller's."""
        config = self.model.config
        before = config._attn_implementation
        config._attn_implementation = self._attention
        try:
            with fixed(self._rotaries):
                yield
        finally:
            config._attn_implementation = before

    def _bias(self, mask: Float32[np.ndarray, "B T C"]) -> Float[Tensor, "B 1 GT C"]:
        bias = torch.from_numpy(mask)[:, None]
        if self._num_groups > 1:
            bias = bias.repeat(1, 1, self._num_groups, 1)
        return bias.to(self.device, self.dtype)

    def _masks(
        self, mask: np.ndarray, positions: np.ndarray, columns: np.ndarray
    ) -> Tensor | dict[str, Tensor]:
        """What the module gets: one mask, or one for each kind of its layers."""
        if not self._windows:
            return self._bias(mask)
        full = self._bias(mask)
        masks = {
            kind: full if window is None else self._bias(within(mask, positions, columns, window))
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _forward(
        self, inputs: Tensor, mask: np.ndarray, positions: np.ndarray, columns: np.ndarray, **options: Any
    ) -> Any:
        """One forward pass of the module; its tokens go where `SlotCache.begin` said.

        inputs: [B, T] ids or [B, T, D] embeddings.  mask, positions, columns: as of `tree_attention`.
        """
        self.passes += 1
        embedded = {"inputs_embeds": inputs} if inputs.ndim == 3 else {"input_ids": inputs}
        with self._own_attention():
            return self.model(
                **embedded,
                attention_mask=self._masks(mask, positions, columns),
                position_ids=torch.from_numpy(positions + self._first_position).to(self.device),
                past_key_values=self._cache,
                use_cache=True,
                **options,
            )

    def logits_of(self, output: Any, *rows: Sequence[int]) -> Float[np.ndarray, "*shape V"]:
        """What a forward pass says of all its rows, or of some."""
        logits = output.logits[rows] if rows else output.logits
        return self.without_absent(outward(logits[..., : self.vocab_size]))

    def _row_order(self, slots: Sequence[int]) -> list[int]:
        """The entries of `slots` in the order of their rows: a full batch is then a slice of the cache."""
        rows = [self._cache.row(slot) for slot in slots]
        return sorted(range(len(rows)), key=rows.__getitem__)

    def cached(
        self, layer: int, slots: Sequence[int]
    ) -> tuple[Float[Tensor, "B C G D"], Float[Tensor, "B C G E"]]:
        """Keys and values of these slots in a layer, as many as the longest has committed tokens."""
        return self._cache.committed(layer, slots, int(self.lengths[slots].max()))

    @property
    def offers(self) -> Needs:
        """Hidden states of all layers, embeddings, and the head where it is a matrix and nothing more."""
        return Needs(tuple(range(self._num_states)), True, self._plain_head, True, True)

    @torch.inference_mode()
    def embed(self, token_ids: Int64[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape D"]:
        """What the model's embedding makes of tokens."""
        return outward(self.model.get_input_embeddings()(inward(token_ids, self)))

    @torch.inference_mode()
    def head(self, hidden: Float[np.ndarray, "*shape D"]) -> Float[np.ndarray, "*shape V"]:
        """Logits of states as the last layer of `hidden` has them, after the final norm."""
        logits = self.model.get_output_embeddings()(inward(hidden, self, self.dtype))
        return outward(logits[..., : self.vocab_size])

    @torch.inference_mode()
    def append(self, token_ids: Mapping[int, Sequence[int]], hidden: Sequence[int]) -> list[RowAndStates]:
        """See `slots.SlotModel.append`."""
        slots = sorted(token_ids, key=self._cache.row)
        last_rows = {slot: len(ids) - 1 for slot, ids in token_ids.items()}
        T = max(map(len, token_ids.values()))
        tokens = torch.tensor(
            [[*token_ids[slot], *[0] * (T - len(token_ids[slot]))] for slot in slots], device=self.device
        )
        chains = np.broadcast_to(np.arange(-1, T - 1), (len(slots), T)).copy()
        mask, positions = node_mask(self.lengths[slots], chains)
        columns = column_positions(self.lengths[slots], chains)
        logit_rows = sorted(set(last_rows.values())) if self._keeps_logits else list(range(T))
        options = (
            {"logits_to_keep": torch.tensor(logit_rows, device=self.device)} if self._keeps_logits else {}
        )
        self._cache.begin(slots, self.lengths[slots], T)
        positions = np.minimum(positions, self.max_model_len - 1)
        out = self._forward(tokens, mask, positions, columns, output_hidden_states=bool(hidden), **options)
        batch_rows = list(range(len(slots)))
        logits = self.logits_of(out, batch_rows, [logit_rows.index(last_rows[slot]) for slot in slots])
        states = states_outward(out.hidden_states, hidden) if hidden else {}
        row = {slot: b for b, slot in enumerate(slots)}
        return [
            (logits[row[slot]], [states[layer][row[slot], : end + 1] for layer in hidden])
            for slot, end in last_rows.items()
        ]

    @torch.inference_mode()
    def score(
        self, slots: Sequence[int], tree: TokenTree, *, hidden: Sequence[int] = (), since: int = 0
    ) -> Scores:
        """Logits of the nodes `since`.. of a tree, in one forward pass; what is committed stays as it is.

        tree: [B, N]; copies are not merged here (`tree.dedup` does that).
        hidden: layers whose outputs are wanted, as in transformers' `hidden_states`: 0 is the embedding, the last one
            comes after the final norm.
        since: the nodes before are those of the last call on these slots: a tree that grows is scored depth by depth.
            All that is returned then begins at node `since`.

        Raises:
            CapacityError: a node beyond the context, or a tree too large for the scratch behind it.
        """
        self.check_slots(slots, [1] * len(slots), TREE_ROOM)
        order = self._row_order(slots)
        N = tree.num_nodes
        if order != list(range(len(order))):
            return self._reordered(slots, order, tree, hidden, since)
        self.check_tree(N)
        parents = tree.host.parents
        mask, positions = node_mask(self.lengths[slots], parents, since)
        columns = column_positions(self.lengths[slots], parents)
        self._check_positions(positions)
        inputs = inward(tree.host.tokens[:, since:], self)
        self._cache.begin(slots, self.lengths[slots] + since, mask.shape[1])
        out = self._forward(
            inputs, mask, positions, columns, **({"output_hidden_states": True} if hidden else {})
        )
        self.scored(slots, N)
        states = states_outward(out.hidden_states, hidden) if hidden else {}
        return Scores(tree.nodes_from(since), self.logits_of(out), states)

    def _reordered(
        self, slots: Sequence[int], order: list[int], tree: TokenTree, hidden: Sequence[int], since: int
    ) -> Scores:
        """`score` with the sequences in the order of their rows, and its results back in the order of the call."""
        back = np.argsort(order)
        inner = TokenTree(tree.tokens[order], tree.parents[order])
        scores = self.score([slots[b] for b in order], inner, hidden=hidden, since=since)
        return Scores(
            tree.nodes_from(since),
            scores.logits[back],
            {layer: states[back] for layer, states in scores.hidden.items()},
        )

    def _check_positions(self, positions: Int64[np.ndarray, "B T"]) -> None:
        if positions.max() >= self.max_model_len:
            raise CapacityError(
                f"a node at position {positions.max()} was given; the context holds {self.max_model_len} tokens. "
                "Lower the draft's depth near the end, or raise max_model_len."
            )

    @torch.inference_mode()
    def fresh(self, token_ids: Sequence[int]) -> Float[np.ndarray, " V"]:
        """Logits after a text by a forward pass over all of it, alone and without a cache: a function of the token ids only.

        In low precision the rows of a tree, a batch and a cache differ in their last bits; these do not.
        """
        options: dict[str, Any] = {"logits_to_keep": 1} if self._keeps_logits else {}
        if self._first_position:
            options["position_ids"] = (
                torch.arange(len(token_ids), device=self.device)[None] + self._first_position
            )
        self.passes += 1
        with fixed(self._rotaries):
            out = self.model(torch.tensor([list(token_ids)], device=self.device), use_cache=False, **options)
        return self.without_absent(outward(out.logits[0, -1, : self.vocab_size]))

    @torch.inference_mode()
    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """See `slots.SlotModel.move`."""
        self._cache.move(source, target)

    block_tokens = 16

    @torch.inference_mode()
    def read_block(self, slot: int, start: int) -> list[np.ndarray]:
        """See `core.BlockCopying`."""
        return self._cache.read(slot, start, self.block_tokens)

    @torch.inference_mode()
    def write_block(self, slot: int, entries: list[np.ndarray]) -> None:
        """See `core.BlockCopying`."""
        self._cache.write(slot, int(self.lengths[slot]), entries)
        self.appended([slot], self.block_tokens)

    @torch.inference_mode()
    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots; those that are empty already are ignored."""
        for slot in slots:
            self._cache.free(slot, self._lengths + self._scored)
        super().release(slots)
