"""An EAGLE-3 head on disk, see `heads`: the authors' tensor names, of what is trained here and of what others published.

config.json          a Llama configuration of one layer, with `draft_vocab_size` and `eagle_aux_hidden_state_layer_ids`
model.safetensors    fc, midlayer.*, norm; lm_head of the draft vocabulary where it has its own

Read are the layout of the authors and SGLang (pytorch_model.bin too; layers 2, L/2 and L-3 where none are named) and of vLLM's speculators.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from polydraft.core import Target
from polydraft.heads.checkpoint import HeadCheckpoint, stored
from polydraft.models.checkpoint import layer_shapes

__all__ = ["EagleCheckpoint"]


class EagleCheckpoint(HeadCheckpoint):
    """An EAGLE-3 head."""

    kind = "eagle"
    projects: ClassVar[bool] = False
    """Whether its layer reads a projection of the pair of an embedding and a state, else its attention reads the pair."""

    @classmethod
    def read(cls, settings: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """The authors' and SGLang's layout, or vLLM's speculators', which nests the layer's configuration and calls the layer layers.0."""
        tensors = stored(folder, "model.safetensors", "pytorch_model.bin")
        settings = {**settings.get("transformer_layer_config", {}), **settings}
        return settings | {cls.LAYERS: settings.get(cls.LAYERS) or []}, {
            f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: tensor
            for name, tensor in tensors.items()
        }

    @property
    def norm_before_residual(self) -> bool:
        """Whether the layer adds to the normed state, as speculators may."""
        return bool(getattr(self.config, "norm_before_residual", False))

    def layers_of(self, target: Target) -> tuple[int, ...]:
        """Where the folder does not say them: those of the authors' code."""
        last = max(target.offers.hidden, default=0)
        return self.layers or ((last,) if self.projects else (2, last // 2, last - 3))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors that a head of this configuration has."""
        h = self.config.hidden_size
        own_head = {"lm_head.weight": (len(self.ids), h)} if "lm_head.weight" in self.tensors else {}
        first = {"project.weight": (h, 2 * h)} if self.projects else {"fc.weight": (h, (len(self.layers) or 3) * h)}
        layer = layer_shapes(self.config, h if self.projects else 2 * h) | {"hidden_norm.weight": (h,)}
        layer |= {"attention_norm.weight": (h,)} if self.projects else {}
        return {**first, "norm.weight": (h,), **own_head} | {f"midlayer.{name}": shape for name, shape in layer.items()}
