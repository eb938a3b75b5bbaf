"""Models of transformers in the cache that they make themselves, one sequence per forward pass: states of recurrent layers, and kinds not known here.

Such a cache cannot forget a token. A forward pass over drafts therefore runs on a copy of it; where all of a path is accepted, that copy is what the
slot holds from now on. Else the slot stays as it was, and its next forward pass reads the accepted tokens again, before the
drafts. The paths of a tree are rows of one forward pass.

When a target is built, both are compared with a forward pass over the whole text: tokens one by one in the cache, and a tree behind a prefix. A
model whose tree differs is decoded plainly; one whose tokens differ reads its text again for each.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import numpy as np
import torch

from polydraft.core import Needs, Outcome, Scores, TokenTree
from polydraft.errors import CapacityError, IncompatibleError, ModelLoadError, first_line
from polydraft.models.slots import TREE_ROOM, RowAndStates, special_ids
from polydraft.models.supported import check_plain, context_length
from polydraft.models.torch.door import outward
from polydraft.models.torch.fixed_rotary import fixed, fixed_rotary
from polydraft.models.torch.proof import (
    NARROW,
    PREFIX,
    check_close,
    fitting_context,
    is_close,
    position_behind_padding,
    proof_text,
    prove_trees,
)
from polydraft.models.torch.slots import TorchModel
from polydraft.models.windows import narrowed, text_config

PENDING = 16
"""Accepted tokens that a forward pass over drafts reads again; more are read for good before it."""
UNLIMITED = 1 << 20
"""Context in tokens where the configuration names none: a recurrent state has the same size for any text."""


@dataclass
class _State:
    """Tokens that a cache has read, the logits after the last of them, and the cache under the model's own name for it."""

    token_ids: list[int] = field(default_factory=list[int])
    cache: dict[str, Any] = field(default_factory=dict[str, Any])
    logits: np.ndarray | None = None


@dataclass(frozen=True)
class _Scored:
    """The tree that was scored last: tokens of its nodes, and the states behind its paths; a path is that of all tokens that its state has read."""

    tokens: list[int]
    states: list[_State] = field(default_factory=list[_State])


class OwnCacheTarget(TorchModel):
    """A causal language model of transformers in its own cache; see `core.Target`.

    model: a module, in evaluation mode from now on.  max_model_len: default the model's context.
    plain_reason: why no drafts can be scored, or None.  reads_again: whether each forward pass reads the whole text.

    Raises:
        ModelLoadError: an encoder-decoder.
        CapacityError: a context longer than the model's.

    Example:
        >>> from transformers import Mamba2Config, Mamba2ForCausalLM
        >>> config = Mamba2Config(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=4, num_heads=4, head_dim=4, n_groups=1)
        >>> target = OwnCacheTarget(Mamba2ForCausalLM(config), max_num_seqs=1)
        >>> _ = target.prefill([0], [[3, 1, 4]])
        >>> target.score([0], TokenTree(np.array([[1, 5, 9]]), np.array([[-1, 0, 0]]))).logits.shape
        (1, 3, 16)
    """

    rolls_back = False

    def __init__(self, model: Any, *, max_model_len: int | None = None, max_num_seqs: int = 8) -> None:
        check_plain(model.config, max_model_len)
        self.model = model.eval()
        self.name = getattr(model.config, "name_or_path", "") or type(model).__name__
        self.take_module(model)
        longest = max_model_len or context_length(model.config) or UNLIMITED
        self.open_slots(longest, max_num_seqs, context=longest, bytes_per_token=0, device=self.device)
        self.vocab_size = int(text_config(model.config).vocab_size)
        self.eos_token_ids, self.bos_token_id = special_ids(model)
        self._takes = signature(model.forward).parameters
        self._rotaries = fixed_rotary(model, self.max_model_len)
        self._states = [_State() for _ in range(max_num_seqs)]
        self._texts = [list[int]() for _ in range(max_num_seqs)]
        self._trees: dict[int, _Scored] = {}
        self.reads_again = False
        self.plain_reason = None
        self._first_position: int | None = None
        with narrowed(model, NARROW):
            self._prove()
        self.max_model_len = fitting_context(self, model.config, self._first_position or 0, max_model_len)
        self.chunk = UNLIMITED if self.plain_reason or self.reads_again else TREE_ROOM

    @torch.inference_mode()
    def _prove(self) -> None:
        """Find out what the model's cache is good for."""
        text = proof_text(self.vocab_size, self.max_model_len)
        try:
            out = self._forward([text], 0, {"use_cache": False}, output_hidden_states=True)
            plain = outward(out.logits[0, :, : self.vocab_size])
            self._num_states = len(out.get("hidden_states") or ())
        except (
            Exception
        ) as error:  # whatever transformers, or a model of it, has for settings that it does not run with
            problem = f"{type(self.model).__name__} does not run in transformers ({type(error).__name__}: {first_line(error)})"
            raise ModelLoadError(f"{problem}. Correct its config.json, or use another model.") from error
        self._first_position = self._known_first_position(text, plain)
        try:
            state = _State()
            rows = list[np.ndarray]()
            for piece in [text[:PREFIX], *([token] for token in text[PREFIX:])]:
                rows.append(self._read(state, piece)[0])
            check_close(
                np.stack(rows), plain[min(PREFIX, len(text)) - 1 :], self, "a text read token by token"
            )
        except Exception:  # whatever the cache lacks, a model needs none
            self.reads_again = True
        try:
            prove_trees(self, text, plain)
        except Exception:  # also what forward passes over several tokens fail with, such as shapes
            name = type(self.model).__name__
            self.plain_reason = f"in transformers, {name} gives other logits for several tokens behind others than for one at a time"
            self._states[0] = _State()
            self._texts[0] = []
            self.release([0])
        self.passes = 0

    def _known_first_position(self, text: list[int], plain: np.ndarray) -> int | None:
        """That which gives the logits of a forward pass without positions; None where the model has to count them itself."""
        if "position_ids" not in self._takes:
            return None
        for first in (0, position_behind_padding(self.model.config)):
            if first is not None:
                self._first_position = first
                out = self._forward([text], 0, {"use_cache": False})
                if is_close(outward(out.logits[0, :, : self.vocab_size]), plain, self.dtype):
                    return first
        return None

    # Forward passes

    def _forward(self, rows: list[list[int]], begin: int, cache: Mapping[str, Any], **options: Any) -> Any:
        """One forward pass over rows of one length, whose first tokens are behind `begin` others."""
        tokens = torch.tensor(rows, device=self.device)
        if self._first_position is not None:
            positions = (
                torch.arange(begin, begin + tokens.shape[1], device=self.device) + self._first_position
            )
            options["position_ids"] = positions.expand_as(tokens)
        self.passes += 1
        with fixed(self._rotaries):
            return self.model(tokens, **({"use_cache": True} | dict(cache)), **options)

    def _read(
        self, state: _State, token_ids: Sequence[int], hidden: Sequence[int] = ()
    ) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Read a text for good, in one forward pass where the model can. Returns the logits after it and the states asked for, [T, D]."""
        states: dict[int, list[np.ndarray]] = {layer: [] for layer in hidden}
        whole = self.reads_again or not state.token_ids or self.plain_reason is None
        step = len(token_ids) if whole else 1
        options: dict[str, Any] = {"output_hidden_states": True} if hidden else {}
        options |= {"logits_to_keep": 1} if "logits_to_keep" in self._takes else {}
        for begin in range(0, len(token_ids), step):
            piece = list(token_ids[begin : begin + step])
            num_read = len(state.token_ids)
            if self.reads_again:
                out = self._forward([state.token_ids + piece], 0, {"use_cache": False}, **options)
            else:
                out = self._forward([piece], num_read, state.cache, **options)
                state.cache = self._cache_of(out)
            for layer in hidden:
                states[layer].append(outward(out.hidden_states[layer][0, -len(piece) :]))
            state.token_ids = state.token_ids + piece
            state.logits = self.without_absent(outward(out.logits[0, -1, : self.vocab_size]))
        assert state.logits is not None
        return state.logits, {layer: np.concatenate(rows) for layer, rows in states.items()}

    def _cache_of(self, out: Any) -> dict[str, Any]:
        # the next forward pass takes the cache under the same name
        cache = {
            name: out[name]
            for name in ("past_key_values", "cache_params", "state")
            if out.get(name) is not None
        }
        if not cache:
            raise IncompatibleError(f"{type(self.model).__name__} returns no cache.")
        return cache

    def _committed(self, slot: int) -> _State:
        """The slot's state after some of its committed tokens; one that must forget begins anew."""
        state = self._states[slot]
        length = int(self.lengths[slot])
        if len(state.token_ids) > length or self.reads_again:
            state = self._states[slot] = _State()
        return state

    def _caught_up(self, slot: int) -> _State:
        """The state after all of them."""
        state = self._committed(slot)
        pending = self._texts[slot][len(state.token_ids) : int(self.lengths[slot])]
        if pending and not self.reads_again:
            self._read(state, pending)
        elif pending:
            state.token_ids = list(pending)
        return state

    # Slots

    @property
    def offers(self) -> Needs:
        """Hidden states, as many as a forward pass returns."""
        return Needs(tuple(range(self._num_states)), logits=True, every_step=True)

    @torch.inference_mode()
    def append(self, token_ids: Mapping[int, Sequence[int]], hidden: Sequence[int]) -> list[RowAndStates]:
        """See `slots.SlotModel.append`; one slot after the other."""
        outputs = list[RowAndStates]()
        for slot, ids in token_ids.items():
            logits, states = self._read(self._caught_up(slot), ids, hidden)
            self._texts[slot] = [*self._texts[slot][: int(self.lengths[slot])], *ids]
            outputs.append((logits, [states[layer] for layer in hidden]))
        return outputs

    @torch.inference_mode()
    def score(
        self, slots: Sequence[int], tree: TokenTree, *, hidden: Sequence[int] = (), since: int = 0
    ) -> Scores:
        """See `core.Target`; a tree that grows is scored from its root each time.

        Raises:
            IncompatibleError: drafted nodes where `plain_reason` says that there can be none.
            CapacityError: a node beyond the context.
        """
        if self.plain_reason and tree.num_nodes != 1:
            raise IncompatibleError(
                f"a tree of {tree.num_nodes} nodes was given to {type(self.model).__name__}, "
                f"which takes none ({self.plain_reason}). Use drafter=None, or another model."
            )
        self.check_slots(slots, [1] * len(slots))
        self.check_tree(tree.num_nodes)
        logits = list[np.ndarray]()
        states = list[list[np.ndarray]]()
        for slot, tokens, parents in zip(slots, *tree.lists, strict=True):
            rows, row_states = self._score(slot, tokens, parents, hidden)
            logits.append(rows[since:])
            states.append([x[since:] for x in row_states])
        self.scored(slots, tree.num_nodes)
        hidden_states = {layer: np.stack([x[i] for x in states]) for i, layer in enumerate(hidden)}
        return Scores(tree.nodes_from(since), np.stack(logits), hidden_states)

    def _score(
        self, slot: int, tokens: list[int], parents: list[int], hidden: Sequence[int]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Logits and states of all nodes of one tree; those of padding are zero."""
        paths = _paths(parents)
        length = int(self.lengths[slot])
        root = tokens[:1]
        if length + max(map(len, paths)) > self.max_model_len:
            raise CapacityError(
                f"a path of {max(map(len, paths))} nodes was given behind {length} tokens; the context holds {self.max_model_len} tokens. "
                "Lower the draft's depth near the end, or raise max_model_len."
            )
        if len(tokens) == 1 and not hidden and self._states[slot].token_ids[length:] == root:
            read = self._states[slot].logits
            states = list[np.ndarray]()  # it was scored before and not committed
            assert read is not None
            rows = read[None]
        elif len(tokens) == 1:
            read, by_layer = self._read(self._caught_up(slot), root, hidden)
            rows = read[None]
            states = [by_layer[layer] for layer in hidden]
        else:
            return self._score_paths(slot, tokens, paths, hidden)
        self._trees[slot] = _Scored(tokens)
        return rows, states

    def _score_paths(
        self, slot: int, tokens: list[int], paths: list[list[int]], hidden: Sequence[int]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        state = self._committed(slot)
        pending = self._texts[slot][len(state.token_ids) : int(self.lengths[slot])]
        if len(pending) > PENDING and not self.reads_again:
            state = self._caught_up(slot)
            pending = []
        texts = [pending + [tokens[n] for n in path] for path in paths]
        out = self._forward_paths(state, texts, bool(hidden))
        outputs = [
            self.without_absent(outward(out.logits[..., : self.vocab_size])),
            *(outward(out.hidden_states[layer]) for layer in hidden),
        ]
        results = [np.zeros((len(tokens), x.shape[-1]), x.dtype) for x in outputs]
        for row, path in enumerate(paths):
            for x, result in zip(outputs, results, strict=True):
                result[path] = x[row, len(pending) : len(pending) + len(path)]
        last_logits = [results[0][path[-1]] for path in paths]
        after = (
            [] if self.reads_again else self._states_behind(state, texts, self._cache_of(out), last_logits)
        )
        self._trees[slot] = _Scored(tokens, after)
        return results[0], results[1:]

    def _forward_paths(self, state: _State, texts: list[list[int]], with_states: bool) -> Any:
        """One forward pass over texts behind a state, as rows of a batch that are padded at their ends."""
        width = max(map(len, texts))
        cache: Any = {"use_cache": False}
        if not self.reads_again:
            cache = {k: _rows_of(_copied(v), [0] * len(texts)) for k, v in state.cache.items()}
        options = {"output_hidden_states": True} if with_states else {}
        rows = [text + [0] * (width - len(text)) for text in texts]
        return self._forward(rows, len(state.token_ids), cache, **options)

    def _states_behind(
        self, state: _State, texts: list[list[int]], cache: Any, logits: list[np.ndarray]
    ) -> list[_State]:
        """States behind the longest of some texts: behind shorter ones there is padding. cache, logits: of the forward pass over them, the latter at their ends."""
        width = max(map(len, texts))
        after = list[_State]()
        for row, text in enumerate(texts):
            if len(text) < width:
                continue
            own = cache if len(texts) == 1 else {k: _rows_of(_copied(v), [row]) for k, v in cache.items()}
            after.append(_State(state.token_ids + text, own, logits[row]))
        return after

    def commit(self, slots: Sequence[int], outcome: Outcome) -> None:
        """See `core.Target`; a state that has read the whole path is the slot's from now on."""
        lengths = self.lengths[list(slots)].tolist()
        super().commit(slots, outcome)
        for slot, length, path, count in zip(
            slots, lengths, *(x.tolist() for x in outcome.host[:2]), strict=True
        ):
            scored = self._trees.pop(slot)
            text = self._texts[slot][:length] + [scored.tokens[n] for n in (0, *path[:count])]
            self._texts[slot] = text
            self._states[slot] = next(
                (state for state in scored.states if state.token_ids == text), self._states[slot]
            )

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """There are no columns: what is committed is read again."""

    def copy(self, source: int, slot: int, length: int) -> None:
        """The first `length` committed tokens of a slot into an empty one, which reads them."""
        self.prefill([slot], [self._texts[source][:length]])

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots."""
        for slot in slots:
            self._states[slot] = _State()
            self._texts[slot] = []
            self._trees.pop(slot, None)
        super().release(slots)


def _paths(parents: list[int]) -> list[list[int]]:
    """From the root to each leaf; padding is left out.

    Example:
        >>> _paths([-1, 0, 0, 1, -1])
        [[0, 2], [0, 1, 3]]
    """
    inner = set(parents)
    paths = list[list[int]]()
    for leaf in range(len(parents)):
        if leaf in inner or (leaf and parents[leaf] < 0):
            continue
        path = [leaf]
        while path[-1]:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    return paths


def _copied(cache: Any) -> Any:
    """A copy that a forward pass may write to. Keys and values of attention are only ever replaced, states are written in place."""
    layers = getattr(cache, "layers", ())
    replaced = [
        x
        for layer in layers
        for x in (getattr(layer, "keys", None), getattr(layer, "values", None))
        if x is not None
    ]
    return deepcopy(cache, {id(x): x for x in replaced})


def _rows_of(cache: Any, rows: list[int]) -> Any:
    """A cache with these rows of its batch."""
    if rows != [0]:
        cache.reorder_cache(torch.tensor(rows))
    return cache
