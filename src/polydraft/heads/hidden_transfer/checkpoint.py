"""Maps of hidden transfer on disk, see `heads`.

config.json          `transfer_layers`: t_1 .. t_k, rising: map i takes the target's state behind layer t_i
model.safetensors    maps.{i}.weight: [h, h]
"""

from polydraft.core import Target
from polydraft.errors import InvalidInputError
from polydraft.heads.checkpoint import HeadCheckpoint

__all__ = ["TransferCheckpoint"]


class TransferCheckpoint(HeadCheckpoint):
    """Maps of a target's states to those of the next positions."""

    kind = "hidden-transfer"
    LAYERS = "transfer_layers"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the maps."""
        h = self.config.hidden_size
        return {f"maps.{i}.weight": (h, h) for i in range(len(self.layers))}

    def check(self, target: Target) -> None:
        """Refuse another target than the maps were trained for, and layers that are not there or fall.

        Raises:
            IncompatibleError: another width, vocabulary or model.
            InvalidInputError: layers out of range or order.
        """
        super().check(target)
        last = max(target.offers.hidden, default=0)
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or not 1 <= self.layers[0] <= self.layers[-1] <= last:
            raise InvalidInputError(
                f"hidden transfer behind layers {self.layers} was given; expected rising ones of 1 to {last}, which the target has."
            )
