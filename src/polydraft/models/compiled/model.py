"""Causal language models as one compiled call per forward pass, on a CPU: what `networks` describes, Llama and its kin.

Grouped queries, windows, and any rotary scaling, as for the longest text. Projections are fused (q, k, v; gate and up) and packed
for `matrices.kernels`; the cache is allocated once. A forward pass takes the nodes of many trees, in slots with lengths of their own, as rows of one matrix.
The forward pass is in `compiled.forward`, how weights are taken in `compiled.weights`, whole proposals in `growing.proposals`.

A row's bits depend on its own tokens alone, and on whether these stand in a prompt or were generated, not on the batch, the tree around it, the pieces of a prompt, kept prefixes or threads: the same context
has the same logits in plain and in speculative decoding, for every kind of layer, format and cache (tests/models/test_row_bits.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from polydraft.core import Needs, Scores, TokenTree
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.models.compiled.forward import compiled_forward, embed_rows, head_rows
from polydraft.models.compiled.layers import model_arrays, with_head
from polydraft.models.compiled.slots import CompiledSlots
from polydraft.models.compiled.support import check_options, sizes_of, why_unsupported
from polydraft.models.compiled.weights import packed_weights
from polydraft.models.growing.draft_vocabulary import FIRST_TOKENS, DraftVocabulary
from polydraft.models.growing.guesses import Texts
from polydraft.models.loading.checkpoint import Checkpoint
from polydraft.models.matrices.matrix_unit import has_matrix_unit
from polydraft.models.matrices.products import BYTES, Packed
from polydraft.models.matrices.vectors import PANEL
from polydraft.models.mixers.layer import Weights
from polydraft.models.mixers.workspace import CHUNK, workspace
from polydraft.models.slots import TREE_ROOM, RowAndStates, special_ids
from polydraft.models.supported import check_plain
from polydraft.numerics.threads import Pool, default_threads


class CompiledModel(CompiledSlots):
    """A Llama-family model in compiled code, with slots; see `core.Target`.

    model: the weights to take: a `Checkpoint`, read one at a time, or a module of transformers, which is not needed afterwards.
    max_model_len: longest sequence, default the model's own context.  max_num_seqs: slots.
    quantization: how matrices are stored. None changes no weight: those of a checkpoint in bfloat16 are stored as such, which
        halves what a forward pass reads and gives the same bits. "bfloat16" rounds others, too; arithmetic is float32.
        "int8", "int4": blocks of 32 inputs with one float16 scale, 8.5 or 4.5 bits a weight, Q8_0 and Q4_0 of GGUF files. Blocks of a
        file are used as they are, and rounded a second time only where they have more bits than that.
    activations: of products with blocks: "int8", rounded to eight bits with a scale for each 32, as llama.cpp does; "float32", as they
        are. None: "int8".
    cache_dtype: of keys and values. "float32": as they are; "bfloat16": half the memory, each number rounded once; "q8_0": a quarter, bytes with
        a scale for 32 numbers of a key and one for each value, whose products are of integers. Those two are another model, too.
        None: "bfloat16", or "float32" beside activations in float32.
    threads: that a forward pass runs on; bits do not depend on it, and small models gain nothing. None: see `default_threads`.
    `weight_format` says how they are stored, `quantization_error` what that lost, relative to all matrices' norm; `rounded_again`
    which formats of a file were rounded to which other one; `draft_vocabulary` how many first tokens are drafted, where logits are of a part.

    Raises:
        IncompatibleError: an architecture or option that is not covered; says which.
        ModelLoadError, CapacityError, InvalidInputError: the context asked for does not suit the model or the memory.
    """

    cache_grows = True  # see `vectors.aligned`

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        quantization: str | None = None,
        activations: str | None = None,
        cache_dtype: str | None = None,
        threads: int | None = 1,
    ) -> None:
        check_options(quantization, activations, threads)
        source = self._supported(model)
        self.checkpoint: Checkpoint | None = source
        config = source.config
        check_plain(config, max_model_len)
        self.name = str(config.name_or_path or type(model).__name__)
        self.vocab_size = int(config.vocab_size)
        self.eos_token_ids, self.bos_token_id = special_ids(source)
        spec = source.architecture.spec(config)
        memories = self.open_memories(spec, max_model_len, max_num_seqs, cache_dtype, activations)
        memory = self.memories[0]
        weights = self._pack(source, memory.tokens.shape[1], quantization, activations)
        threads = default_threads(self.weight_bytes) if threads is None else threads
        widest = max(outline.shape[1] for outline in source.outlines.values() if outline.ndim == 2)
        sizes = sizes_of(source, weights)
        work = workspace(weights, sizes, threads, widest)
        states = self.new_states(spec) | memories
        self.reads_prompts_apart = self.activations == "int8" and has_matrix_unit()
        prompt_lengths = self._prompt_lengths if self.reads_prompts_apart else None
        self.arrays = model_arrays(weights, sizes, memory, work, states, prompt_lengths)
        self.read_texts = Texts(memory.tokens, memory.lengths)
        self._state_indexes = dict[tuple[int, ...], np.ndarray]()
        self.pool = Pool(threads)
        self._vocabulary: DraftVocabulary | None = None

    def _supported(self, model: Any) -> Checkpoint:
        """See the class on errors."""
        if reason := self.why_unsupported(model):
            raise IncompatibleError(
                f"{type(model).__name__} cannot be compiled: {reason}. Use backend='transformers'."
            )
        return _checkpoint_of(model)

    def _pack(
        self, source: Checkpoint, columns: int, quantization: str | None, activations: str | None
    ) -> Weights:
        """The weights as they are multiplied with, and what is said of them. columns: positions that a slot has."""
        packed = packed_weights(
            source, columns, quantization, integers=activations != "float32", length=self.max_model_len
        )
        self.weights, self.weight_format, self.quantization_error, self.rounded_again = packed
        self.activations = "int8" if any(w.rounding == BYTES for w in self.weights.matrices) else "float32"
        self.weight_bytes = sum(w.nbytes for w in self.weights.matrices)
        return self.weights

    def draft_over(self, num_first: int | None = None, special_ids: Sequence[int] = ()) -> bool:
        """Compute logits of a part of the vocabulary only, as a draft model: of the first tokens, of special ones and, for each slot, of those that its
        text holds, see `draft_vocabulary`. All others have no probability.

        num_first: rounded up to whole panels, default FIRST_TOKENS; with more than half of the vocabulary nothing changes.

        Raises:
            InvalidInputError: fewer than one token, or slots with texts.
        """
        num_first = FIRST_TOKENS if num_first is None else num_first
        if num_first < 1 or self.lengths.any():
            raise InvalidInputError(
                f"num_first={num_first} was given to a model with texts in {int((self.lengths > 0).sum())} slots; "
                "expected at least 1, and none. Do it before the first request."
            )
        num_first = -(-num_first // PANEL) * PANEL
        if 2 * num_first <= self.vocab_size and not len(self.arrays.head_bias):
            special = (*special_ids, *self.eos_token_ids)
            head = self.arrays.head
            self._vocabulary = DraftVocabulary(head, self.vocab_size, num_first, special, self.max_num_seqs)
            self.draft_vocabulary = num_first
            self._take_outputs()
        return True

    def _take_outputs(self) -> None:
        """Compute the outputs that the draft vocabulary has now."""
        if self._vocabulary is not None:
            self.output_tokens = self._vocabulary.tokens
            self.draft_ids = self.output_tokens.ids
            head = self.arrays.head
            layer = self._vocabulary.layer
            if layer is not head:
                self.weight_bytes += (layer.panels - head.panels) * layer.panel_bytes
                self.arrays = with_head(self.arrays, layer)

    def reads(self, slot: int, token_ids: Sequence[int]) -> None:
        """The text of a slot goes on so: its tokens are drafted."""
        if self._vocabulary is not None:
            self._vocabulary.read(slot, token_ids, int(self.lengths[slot]))
            self._take_outputs()

    def cut(self, slot: int, length: int) -> None:
        """See `slots.SlotModel.cut`."""
        super().cut(slot, length)
        if self._vocabulary is not None:
            self._vocabulary.cut(slot, length)
            self._take_outputs()

    def copy(self, source: int, slot: int, length: int) -> None:
        """See `slots.SlotModel.copy`."""
        super().copy(source, slot, length)
        if self._vocabulary is not None:
            self._vocabulary.copy(source, slot, length)
            self._take_outputs()

    def release(self, slots: Sequence[int]) -> None:
        """See `slots.SlotModel.release`."""
        super().release(slots)
        if self._vocabulary is not None:
            for slot in slots:
                self._vocabulary.cut(slot, 0)
            self._take_outputs()

    def _of_all_tokens(self, slots: Sequence[int], rows: np.ndarray) -> Float[np.ndarray, "B T V"]:
        """Rows [B, T, outputs] of these slots as rows of all tokens."""
        if self._vocabulary is None:
            return self.without_absent(rows[..., : self.vocab_size])
        logits = np.empty((*rows.shape[:2], self.vocab_size), np.float32)
        tokens = self._vocabulary.tokens
        for b, slot in enumerate(slots):
            tokens.spread(rows[b], slot, logits[b])
        return self.without_absent(logits)

    @property
    def num_threads(self) -> int:
        """That a forward pass runs on."""
        return self.pool.num_threads

    @staticmethod
    def why_unsupported(model: Any) -> str | None:
        """Why a model is not covered, or None if it is. model: as for the constructor."""
        return why_unsupported(_checkpoint_of(model))

    def _run(
        self,
        slots: Sequence[int],
        tree: TokenTree,
        since: int,
        logits_from: np.ndarray,
        logits: np.ndarray,
        layers: Sequence[int] = (),
    ) -> np.ndarray:
        """One compiled forward pass over the nodes from `since` on; returns the states asked for, [layers, rows, h]."""
        if since == 0:
            self.settle(slots)
        tokens, parents = tree.host
        B, N = tokens.shape
        state_index = self._state_index(tuple(layers))
        hidden = np.empty((len(layers), B * (N - since), len(self.arrays.norm)), np.float32)
        nodes = tokens, parents, np.full(B, since), np.full(B, N)
        with self.pool:
            compiled_forward(self.arrays, np.array(slots), *nodes, logits_from, logits, hidden, state_index)
        self.passes += 1
        return hidden

    def _state_index(self, layers: tuple[int, ...]) -> np.ndarray:
        """Of each layer, its place among these whose states are asked for, or -1."""
        if layers not in self._state_indexes:
            state_index = np.full(len(self.weights.attention_norm) + 1, -1, np.int64)
            state_index[list(layers)] = range(len(layers))
            self._state_indexes[layers] = state_index
        return self._state_indexes[layers]

    def read_on(self, slot: int, token_ids: Sequence[int]) -> None:
        """See `CompiledSlots`."""
        self._run(
            [slot],
            TokenTree.chain(np.array([token_ids], np.int64)),
            0,
            np.array([len(token_ids)]),
            self.new_logits(0),
        )

    def new_logits(self, rows: int) -> np.ndarray:
        """Room for the logits of some rows, as `compiled_forward` writes them: the vocabulary is filled up to whole panels."""
        return np.empty((rows, self.arrays.sizes.outputs), np.float32)

    @property
    def offers(self) -> Needs:
        """Hidden states of all layers, embeddings and the head; of a draft vocabulary no head."""
        layers = tuple(range(len(self.weights.attention_norm) + 1))
        return Needs(layers, True, self._vocabulary is None, True, True)

    def embed(self, token_ids: Int[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape D"]:
        """Embeddings of tokens, as layer 0 of `hidden`."""
        return self._weights_of(token_ids, self.arrays.embed, self.arrays.sizes.embedding_scale)

    def output_rows(self, token_ids: Int[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape D"]:
        """Rows of the output matrix: what `head` multiplies last states with for the logits of these tokens."""
        return self._weights_of(token_ids, self.arrays.head, self.arrays.sizes.logit_scale)

    def _weights_of(self, token_ids: np.ndarray, matrix: Packed, scale: np.float32) -> np.ndarray:
        out = np.empty((token_ids.size, len(self.arrays.norm)), np.float32)
        embed_rows(matrix, scale, token_ids.reshape(-1), out)
        return out.reshape(*token_ids.shape, -1)

    def head(self, hidden: Float[np.ndarray, "*shape D"]) -> Float[np.ndarray, "*shape V"]:
        """Logits of states as the last layer of `hidden` has them, after the final norm."""
        rows = np.ascontiguousarray(hidden, np.float32).reshape(-1, hidden.shape[-1])
        logits = self.new_logits(len(rows))
        model = self.arrays
        for begin in range(0, len(rows), CHUNK):
            some = rows[begin : begin + CHUNK], logits[begin : begin + CHUNK]
            head_rows(model.head, model.sizes, model.head_bias, model.work.rounded, *some)
        return logits[:, : self.vocab_size].reshape(*hidden.shape[:-1], -1)

    def append(self, token_ids: Mapping[int, Sequence[int]], hidden: Sequence[int]) -> list[RowAndStates]:
        """See `slots.SlotModel.append`; one slot after the other."""
        rows = list[RowAndStates]()
        for slot, ids in token_ids.items():
            self.reads(slot, ids)
            self.appending([slot])
            logits = self.new_logits(1)
            chain = TokenTree.chain(np.array([ids], np.int64))
            states = self._run([slot], chain, 0, np.array([len(ids) - 1]), logits, hidden)
            rows.append((self._of_all_tokens([slot], logits[None])[0, 0], list(states)))
        return rows

    def score(
        self, slots: Sequence[int], tree: TokenTree, *, hidden: Sequence[int] = (), since: int = 0
    ) -> Scores:
        """One forward pass over the nodes `since` .. N-1; see `core.Target.score`.

        since: the earlier nodes of this tree were scored by the calls before (a draft that grows depth by depth).
        hidden: 0 is the embedding, l what layer l puts out, the last one after the final norm.

        Raises:
            CapacityError: a slot, a tree or a context beyond what there is room for.
        """
        self.check_tree(tree.num_nodes)
        self.check_slots(slots, [tree.num_nodes] * len(slots), TREE_ROOM)
        scored = tree.nodes_from(since)
        B, N = scored.tokens.shape
        for slot, root in zip(slots, scored.host.tokens[:, :1].tolist() if since == 0 else (), strict=False):
            self.reads(slot, root)
        if since == 0:
            self.goes_on(slots)
        buffer = self.new_logits(B * N)
        states = self._run(slots, tree, since, np.array([since] * B), buffer, hidden)
        self.scored(slots, tree.num_nodes)
        parents = tree.host.parents[:, since:]
        roots = since == 0
        rows = self._of_all_tokens(slots, padded(buffer, parents, roots))
        by_layer = {layer: padded(x, parents, roots) for layer, x in zip(hidden, states, strict=True)}
        return Scores(scored, rows, by_layer)

    def score_mixed(
        self,
        slots: Sequence[int],
        tree: TokenTree,
        pieces: Mapping[int, Sequence[int]],
        *,
        hidden: Sequence[int] = (),
    ) -> tuple[Scores, Scores]:
        """See `core.Mixing`. A piece has at most TREE_ROOM tokens.

        Raises:
            CapacityError: a slot, a tree, a piece or a context beyond what there is room for.
        """
        B, N = tree.tokens.shape
        counts = [len(ids) for ids in pieces.values()]
        self.check_tree(max(N, *counts))
        self.check_slots([*slots, *pieces], [N] * B + counts, TREE_ROOM)
        self.check_slots(list(pieces), counts)
        together = with_chains(tree, list(pieces.values()))
        self.goes_on(slots)
        self.appending(pieces)
        logits_from = np.array([0] * B + counts)
        buffer = self.new_logits(B * N)
        states = self._run([*slots, *pieces], together, 0, logits_from, buffer, hidden)
        self.scored(slots, N)
        self.appended(list(pieces), counts)
        of_trees = together.host.parents[:B, :N]
        of_pieces = together.host.parents[B:, : max(counts)]
        num_tree_rows = B + int((of_trees[:, 1:] >= 0).sum())
        tree_states = dict[int, np.ndarray]()
        piece_states = dict[int, np.ndarray]()
        for layer, x in zip(hidden, states, strict=True):
            tree_states[layer] = padded(x[:num_tree_rows], of_trees, True)
            piece_states[layer] = padded(x[num_tree_rows:], of_pieces, True)
        logits = self._of_all_tokens(slots, padded(buffer, of_trees, True))
        roots = TokenTree.roots(np.array([ids[-1] for ids in pieces.values()], np.int64))
        no_logits = np.empty((len(counts), 1, 0), np.float32)
        return Scores(tree, logits, tree_states), Scores(roots, no_logits, piece_states)


def _checkpoint_of(model: Any) -> Checkpoint:
    if isinstance(model, Checkpoint):
        return model
    from polydraft.models.torch.module_weights import of_module

    return of_module(model)


def with_chains(tree: TokenTree, chains: Sequence[Sequence[int]]) -> TokenTree:
    """A batch of trees, and below it chains of tokens.

    Example:
        >>> with_chains(TokenTree.roots(np.array([7])), [[1, 2]]).host.parents.tolist()
        [[-1, -1], [-1, 0]]
    """
    B, N = tree.tokens.shape
    shape = B + len(chains), max(N, *map(len, chains))
    tokens = np.zeros(shape, np.int64)
    parents = np.full(shape, -1)
    tokens[:B, :N] = tree.host.tokens
    parents[:B, :N] = tree.host.parents
    for b, ids in enumerate(chains, B):
        tokens[b, : len(ids)] = ids
        parents[b, : len(ids)] = np.arange(-1, len(ids) - 1)
    return TokenTree.of(tokens, parents)


def padded(rows: np.ndarray, parents: np.ndarray, roots: bool) -> np.ndarray:
    """Rows [R, W] of what is real -> rows [B, T, W] of all places, zero where there is padding.

    parents: [B, T], with the roots first or without them.

    Example:
        >>> padded(np.array([[1], [2], [3]]), np.array([[-1, 0], [-1, -1]]), roots=True).tolist()
        [[[1.0], [2.0]], [[3.0], [0.0]]]
    """
    if parents.shape[1] == roots or all(n >= 0 for row in parents.tolist() for n in row[int(roots) :]):
        return rows[: parents.size].reshape(*parents.shape, -1)
    real = parents >= 0
    real[:, 0] |= roots
    placed = np.zeros((*real.shape, rows.shape[-1]), np.float32)
    placed[real] = rows[: int(real.sum())]
    return placed
