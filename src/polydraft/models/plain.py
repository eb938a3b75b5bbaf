"""Plain decoding for models whose caches cannot be rolled back: one token a pass, in the model's own cache.

Recurrent states, sliding windows and hybrids of them cannot forget a rejected draft. Without drafts nothing is rejected, so
such a model still runs in the engine, with its sampling parameters, stops, streams and statistics. A slot that must forget
after all (an interrupted step) reads its tokens again from the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polydraft.core import AuxRows, Needs, Scores, TokenTree
from polydraft.errors import IncompatibleError
from polydraft.models.slots import SlotModel, special_ids
from polydraft.models.supported import check_plain, context_length

__all__ = ["PlainTarget"]

CACHES = ("past_key_values", "cache_params", "state")
"""What outputs call the cache; the next pass takes it under the same name."""
UNLIMITED = 1 << 20
"""Context in tokens where the configuration names none: a recurrent state has the same size for any text."""


@dataclass
class _State:
    """Tokens that a cache has read, the logits after the last of them, and the cache under the model's own name for it."""

    token_ids: list[int] = field(default_factory=list[int])
    cache: dict[str, Any] = field(default_factory=dict[str, Any])
    logits: Tensor | None = None


class PlainTarget(SlotModel):
    """A causal language model of transformers that decodes without drafts; see `core.Target`, of which it takes bare roots.

    model: a module, in evaluation mode from now on.  max_model_len: default the model's context.

    Raises:
        ModelLoadError: an encoder-decoder.
        CapacityError: a context longer than the model's.

    Example:
        >>> from transformers import MambaConfig, MambaForCausalLM
        >>> config = MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=4)
        >>> target = PlainTarget(MambaForCausalLM(config), max_num_seqs=1)
        >>> _ = target.prefill([0], [[3, 1, 4]])
        >>> target.score([0], TokenTree.roots(torch.tensor([1]))).logits.shape
        torch.Size([1, 1, 16])
    """

    def __init__(self, model: Any, *, max_model_len: int | None = None, max_num_seqs: int = 8) -> None:
        check_plain(model.config, max_model_len)
        self.model = model.eval()
        self.name = getattr(model.config, "name_or_path", "") or type(model).__name__
        weights = next(model.parameters())
        self.dtype, self.device = weights.dtype, weights.device
        longest = max_model_len or context_length(model.config) or UNLIMITED
        self.open_slots(longest, max_num_seqs, context=longest, bytes_per_token=0, device=self.device)
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.eos_token_ids, self.bos_token_id = special_ids(model)
        self._states = [_State() for _ in range(max_num_seqs)]

    def _read(self, state: _State, token_ids: Sequence[int], hidden: Sequence[int] = ()) -> dict[int, Tensor]:
        """A whole text in one pass, later tokens one by one: what every kind of cache supports. Returns the states asked for, [T, D]."""
        states: dict[int, list[Tensor]] = {layer: [] for layer in hidden}
        step = 1 if state.token_ids else len(token_ids)
        for begin in range(0, len(token_ids), step):
            piece = list(token_ids[begin : begin + step])
            options = {"output_hidden_states": True} if hidden else {}
            out = self.model(torch.tensor([piece], device=self.device), use_cache=True, **options, **state.cache)
            for layer in hidden:
                states[layer].append(out.hidden_states[layer][0])
            state.cache = {name: out[name] for name in CACHES if out.get(name) is not None}
            if not state.cache:
                raise IncompatibleError(
                    f"{type(self.model).__name__} returns no cache; it cannot be decoded here. Use another model."
                )
            state.token_ids += piece
            state.logits = out.logits[0, -1, : self.vocab_size].float()
            self.passes += 1
        return {layer: torch.cat(rows) for layer, rows in states.items()}

    def _rewind(self, slot: int) -> _State:
        """The slot's state after its committed tokens; one that must forget reads them again."""
        state, length = self._states[slot], int(self.lengths[slot])
        if len(state.token_ids) > length:
            committed = state.token_ids[:length]
            state = self._states[slot] = _State()
            if committed:
                self._read(state, committed)
        return state

    @property
    def offers(self) -> Needs:
        """Hidden states, as many as a pass over one token returns."""
        return Needs(tuple(range(self._num_states)), logits=True, every_round=True)

    @cached_property
    @torch.inference_mode()
    def _num_states(self) -> int:
        out = self.model(torch.tensor([[0]], device=self.device), output_hidden_states=True)
        return len(out.get("hidden_states") or ())

    chunk = UNLIMITED
    rolls_back = False

    def append(self, token_ids: Mapping[int, Sequence[int]], hidden: Sequence[int]) -> list[tuple[Tensor, list[Tensor]]]:
        """See `slots.SlotModel.append`; one slot after the other."""
        outputs: list[tuple[Tensor, list[Tensor]]] = []
        for slot, ids in token_ids.items():
            state = self._rewind(slot)
            states = self._read(state, ids, hidden)
            assert state.logits is not None
            outputs.append((state.logits, [states[layer] for layer in hidden]))
        return outputs

    @torch.inference_mode()
    def score(
        self, slots: Sequence[int], tree: TokenTree, *, hidden: Sequence[int] = (), aux: AuxRows | None = None, since: int = 0
    ) -> Scores:
        """Logits and hidden states after each root, [B, 1, V] and [B, 1, D].

        Raises:
            IncompatibleError: a tree with drafted nodes, or auxiliary rows.
        """
        if tree.num_nodes != 1 or aux is not None or since:
            raise IncompatibleError(
                f"a tree of {tree.num_nodes} nodes was given to {type(self.model).__name__}, whose cache cannot be rolled back: "
                "it decodes without drafts. Use drafter=None, or another model."
            )
        self.check_slots(slots, [1] * len(slots))
        self.scored(slots, 1)
        rows, states = list[Tensor](), list[dict[int, Tensor]]()
        for slot, root in zip(slots, tree.tokens[:, 0].tolist(), strict=True):
            state, length = self._states[slot], int(self.lengths[slot])
            if hidden or state.token_ids[length:] != [root]:  # otherwise it was scored before and not committed
                state = self._rewind(slot)
                states.append(self._read(state, [root], hidden))
            assert state.logits is not None
            rows.append(state.logits)
        hidden_states = {layer: torch.stack([row_states[layer] for row_states in states]) for layer in hidden}
        return Scores(tree, torch.stack(rows)[:, None], hidden_states)

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """There is nothing to move: only roots are committed, and a copy is read."""
        assert not len(source), "a tree was committed to a cache that cannot be rolled back"

    def copy(self, source: int, slot: int, length: int) -> None:
        """The first `length` committed tokens of a slot into an empty one, which reads them."""
        self.prefill([slot], [self._states[source].token_ids[:length]])

    def release(self, slots: Sequence[int]) -> None:
        """Empty the slots."""
        for slot in slots:
            self._states[slot] = _State()
        super().release(slots)
