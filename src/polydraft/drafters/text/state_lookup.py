"""Prompt lookup by the target's own states: copy what followed the places where the target was in the most similar state.

State-keyed lookup (arXiv 2608.03839), training-free. With h_i the target's hidden state at token i, which says what follows, and t the last token,

    place i follows the text where token i + 1 is the last token;  score = cosine of h_i and h_{t-1},  draft = what stands behind i + 1

The state of the last token itself is not there yet: it is computed by the forward pass that scores the draft. So the key is that of the token before, which
predicted the last one. Where suffixes of tokens are ambiguous, as brackets and indents are, the states of the places say which of them is meant. A middle layer finds more than
the last ones do (`studies.repeats`).
Deterministic: there is no q, so drafts are POINT_MASS. Keys are float16, 2 D bytes a token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from polydraft.core import Budget, Needs, Offers, Outcome, Request, Scores, Target
from polydraft.drafters.base import Parts
from polydraft.drafters.grown_tree import GrownTree, limits, new_tree, plant
from polydraft.drafters.text.base import TextDrafter, text_method
from polydraft.errors import IncompatibleError, InvalidInputError

MOST_PLACES = 8
"""Places whose continuations are joined to a tree."""


class StateText:
    """The text of a request with the target's states. num_ahead: tokens before the prompt, which the target does not read.

    keys: [T, D] unit vectors, zero where the state is not known.  places: token -> where it stands.
    """

    def __init__(self, tokens: Sequence[int] | np.ndarray, num_ahead: int) -> None:
        self.tokens = list[int]()
        self.num_ahead = num_ahead
        self.keys = np.zeros((0, 0), np.float16)
        self.places = dict[int, list[int]]()
        self.extend([int(token) for token in tokens])

    def extend(self, tokens: Sequence[int]) -> None:
        """Go on with what was emitted."""
        for token in tokens:
            self.places.setdefault(token, []).append(len(self.tokens))
            self.tokens.append(token)

    def tell(self, start: int, states: Float[np.ndarray, "T D"]) -> None:
        """The states of the tokens from `start` on."""
        end = start + len(states)
        if end > len(self.keys) or states.shape[1] != self.keys.shape[1]:
            keys = np.zeros((2 * end, states.shape[1]), np.float16)
            keys[: len(self.keys), : self.keys.shape[1]] = self.keys
            self.keys = keys
        norms = np.linalg.norm(states, axis=1, keepdims=True)
        self.keys[start:end] = states / np.maximum(norms, 1e-12)

    def nearest(self, count: int) -> tuple[list[int], list[float]]:
        """Places of the last token, those of the most similar states first, the latest of equal ones; and their cosines."""
        last = len(self.tokens) - 1
        at = np.array([i for i in self.places[self.tokens[-1]] if 0 < i < last], np.int64)
        if not len(at) or last > len(self.keys):
            return [], []
        cosines = self.keys[at - 1].astype(np.float32) @ self.keys[last - 1].astype(np.float32)
        order = np.lexsort((-at, -cosines))[:count]
        return at[order].tolist(), cosines[order].tolist()


class StateLookupDrafter(TextDrafter[StateText]):
    """See the module. layer: whose states are the keys; default the one at two thirds of the depth.  threshold: least cosine of a place.

    Raises:
        InvalidInputError: a threshold beyond -1 to 1.
        IncompatibleError: a target that does not give this layer's states.
    """

    info = text_method("state-lookup", "State-keyed lookup", "2608.03839")
    reads_text_alone = False

    def __init__(
        self,
        target: Target,
        *,
        layer: int | None = None,
        threshold: float = 0.0,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        if not -1 <= threshold <= 1:
            raise InvalidInputError(f"threshold={threshold} was given; expected a cosine, -1 to 1.")
        offered = target.offers.hidden
        if not offered or layer not in (None, *offered):
            raise IncompatibleError(
                f"layer={layer} was given to the drafter 'state-lookup', and the target gives the states of {list(offered)}. "
                "Give one of these, or load the target with another backend ('compiled' or 'transformers')."
            )
        super().__init__(eos_token_ids)
        self.target = target
        self.layer = sorted(offered)[len(offered) * 2 // 3] if layer is None else layer
        self.threshold = threshold
        self.needs = Needs(hidden=(self.layer,))

    @classmethod
    def build(cls, parts: Parts, **options: Any) -> "StateLookupDrafter":
        """For the engine, with its target; options as the constructor."""
        return cls(parts.target, eos_token_ids=parts.eos_token_ids, **options)

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        return Offers(read=self.read)

    def begin(self, request: Request, tokens: Sequence[int] | np.ndarray) -> StateText:
        """The text, whose states `read` tells."""
        return StateText(tokens, len(tokens) - len(request.prompt_token_ids))

    def read(self, states: Sequence[StateText], scores: Scores) -> list[StateText]:
        """The states of the prompt but for its last token."""
        for state, hidden in zip(states, scores.hidden[self.layer], strict=True):
            known = len(state.tokens) - 1 - state.num_ahead
            state.tell(state.num_ahead, hidden[:known])
        return list(states)

    def observe(self, states: Sequence[StateText], outcome: Outcome, scores: Scores) -> list[StateText]:
        """The states of the root and of what was accepted, then the text goes on."""
        paths = outcome.lists.paths
        emitted = outcome.emitted(scores.tree)
        for b, state in enumerate(states):
            hidden = scores.hidden[self.layer][b]
            state.tell(len(state.tokens) - 1, hidden[[0, *paths[b]]])
            state.extend(emitted[b])
        return list(states)

    def continuations(self, state: StateText, budget: Budget) -> GrownTree:
        """What stands behind the nearest places, merged by prefix."""
        arrays = new_tree(budget, self._eos)
        plant(arrays, state.tokens[-1], limits(budget))
        tree = GrownTree(arrays)
        for place, cosine in zip(*state.nearest(MOST_PLACES), strict=True):
            if cosine >= self.threshold:
                tree.add_path(state.tokens[place + 1 : place + 1 + budget.max_depth], score=(1 + cosine) / 2)
        return tree
