"""Gemma 4's assistant: some layers that attend to the target's keys and values draft from its last state, token by token.

Google 2026 (https://ai.google.dev/gemma, model type `gemma4_assistant`). x is the last token of a context, h the target's state that it was drawn
from, or behind a drafted token what the assistant put out for the one before it:

    z = layers(P_1 (e(x), h))     e: the target's embedding.  Each layer attends to the keys and values of the target's last layer of its kind
                                  that has its own, from the position of the root on, whatever the depth
    q = softmax(W norm(z))        h of the next token = P_2 norm(z)

It reads no text and keeps nothing of one: branches cost what chains do. So it drafts in the target's own slots, all kinds of `drafters.model.paths`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from polydraft.core import Budget, Draft, DraftSampling, Drawing, Request
from polydraft.core.drafts import FIXED
from polydraft.drafters.model.paths import ModelDrafter, ModelState, slots_of
from polydraft.heads.assistant.checkpoint import AssistantCheckpoint
from polydraft.heads.depth_drafter import DepthDrafter
from polydraft.methods.papers import method

__all__ = ["AssistantDrafter"]
COMPILED = "polydraft.heads.assistant.compiled:CompiledAssistant"
"""It has no other form: it shares the KV cache of a compiled target."""


class AssistantDrafter(DepthDrafter):
    """An assistant as a drafter; kinds as for `ModelDrafter`.

    Example:
        >>> AssistantDrafter.methods[0].name
        'assistant'
    """

    methods = (
        method(
            "assistant",
            "Gemma 4's assistant",
            "2412.19437",
            {DraftSampling.IID},
            FIXED,
            authors="Google",
            year=2026,
        ),
    )
    checkpoint = AssistantCheckpoint
    forms = COMPILED, COMPILED

    def start(self, requests: Sequence[Request]) -> list[Any]:
        """The target's slots; nothing is read but the last state.

        Raises:
            IncompatibleError: requests of which nobody says where the target holds them.
        """
        slots = slots_of(self.info.name, requests)
        return [self._started(r, slot) for r, slot in zip(requests, slots, strict=True)]

    def release(self, states: Sequence[ModelState]) -> None:
        """The slots are the target's."""
        for s in states:
            self._proposed.pop(s.slot, None)

    @property
    def draws(self) -> Drawing:
        """See `core.Offers`."""
        return super().draws._replace(foretells=False)

    def room(self, num_tokens: int) -> int:
        """None behind a text of one token, which has no state before it; see `core.Offers`."""
        return ModelDrafter.room(self, num_tokens) if num_tokens > 1 else 0

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget]) -> Draft:
        """See `ModelDrafter.propose`."""
        for s in states:
            if len(s.cursor.states):
                self.model.give(s.slot, np.asarray(s.cursor.states[-1], np.float32))
        return ModelDrafter.propose(self, states, budgets)
