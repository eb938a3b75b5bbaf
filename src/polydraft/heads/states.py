"""What draft models read that read tokens with the target's states before them: given by the drafter, taken by the next forward pass."""

from functools import cached_property

import numpy as np
from jaxtyping import Float


class GivenStates:
    """States of each slot that wait to be read."""

    @cached_property
    def _given(self) -> dict[int, Float[np.ndarray, "T F"]]:
        return {}

    def give(self, slot: int, states: Float[np.ndarray, "T F"]) -> None:
        """The target's states before each of the tokens that the slot is to read next, the root's last."""
        self._given[slot] = states

    def take(self, slot: int, count: int) -> Float[np.ndarray, "T F"]:
        """Those before the next tokens, once."""
        states = self._given[slot][:count]
        self._given[slot] = self._given[slot][count:]
        return states
