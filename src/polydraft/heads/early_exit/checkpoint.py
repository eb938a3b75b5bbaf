"""An early exit on disk, see `heads`: what stands between a layer of a target and the target's own output rows.

    config.json          `exit_layers`: the layer behind which it exits
    model.safetensors    mlp_norm, mlp.*: a feed-forward beside the state; norm

A target that was trained to exit early (LayerSkip) needs none of it: its own norm and head serve behind any layer.
"""

from types import SimpleNamespace

import numpy as np

from polydraft.core import Target
from polydraft.errors import InvalidInputError
from polydraft.heads.checkpoint import HeadCheckpoint

__all__ = ["ExitCheckpoint"]


class ExitCheckpoint(HeadCheckpoint):
    """An early exit; without tensors it is the target's own norm and head."""

    kind = "early-exit"
    LAYERS = "exit_layers"

    @classmethod
    def untrained(cls, layer: int, target: Target) -> "ExitCheckpoint":
        """The target's own norm and head behind a layer."""
        return cls(SimpleNamespace(), (layer,), {}, np.arange(target.vocab_size))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that an exit of this configuration has."""
        h, inner = self.config.hidden_size, self.config.intermediate_size
        matrices = {"gate_proj": (inner, h), "up_proj": (inner, h), "down_proj": (h, inner)}
        return {"norm.weight": (h,), "mlp_norm.weight": (h,)} | {f"mlp.{name}.weight": s for name, s in matrices.items()}

    def check(self, target: Target) -> None:
        """Refuse another target than the exit was trained for, and layers that are not there or are all of them.

        Raises:
            IncompatibleError: another width, vocabulary or model.
            InvalidInputError: a layer out of range.
        """
        if self.tensors:
            super().check(target)
        last = max(target.offers.hidden, default=0)
        if len(self.layers) != 1 or not 1 <= self.layers[0] < last:
            raise InvalidInputError(
                f"an exit behind layer {', '.join(map(str, self.layers))} was given; expected one of 1 to {last - 1}: the target has {last} layers."
            )
