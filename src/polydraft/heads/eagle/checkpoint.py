"""EAGLE-3's head on disk, see `heads.checkpoint`, with the authors' tensor names, of what is trained here and of what others published.

    config.json          a Llama configuration of one layer, with `draft_vocab_size` and `eagle_aux_hidden_state_layer_ids`
    model.safetensors    fc, midlayer.*, norm; lm_head of the draft vocabulary where it has its own

Read are the layout of the authors and SGLang (pytorch_model.bin too; layers 2, L/2 and L-3 where none are named), of vLLM's speculators, with
norms of its states, of what it chains, and further layers, and of DeepSpec, whose `target_layer_ids` L is the output of layer L, the state L + 1 here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from polydraft.core import Target
from polydraft.heads.checkpoint import HeadCheckpoint, has_whole_widths, layer_shapes, stored
from polydraft.heads.fields import words
from polydraft.heads.fit import flat
from polydraft.heads.layers import HeadLayers
from polydraft.models.loading.checkpoint import Checkpoint


class EagleCheckpoint(HeadCheckpoint):
    """An EAGLE-3 head."""

    kind = "eagle"
    FIELDS = words(
        "eagle_config target_layer_ids draft_num_hidden_layers norm_before_residual norm_before_fc norm_output fc_norm norm_final_state"
    )
    projects: ClassVar[bool] = False
    """Whether its layer reads a projection of the pair of an embedding and a state, else its attention reads the pair."""

    @classmethod
    def reads(cls, settings: Mapping[str, Any]) -> bool:
        """Speculators' by its name, others by the architecture or the fields of this method alone."""
        if "speculators_model_type" in settings:
            return settings["speculators_model_type"] == "eagle3"
        named = any("Eagle3" in str(name) for name in settings.get("architectures") or ())
        return named or any(field in settings for field in (cls.LAYERS, "eagle_config", "draft_vocab_size"))

    @classmethod
    def read(cls, settings: dict[str, Any], folder: Path) -> tuple[dict[str, Any], Mapping[str, np.ndarray]]:
        """The authors' and SGLang's layout, vLLM's speculators', which nests the layer's configuration, or DeepSpec's; both call the layer layers.0."""
        tensors = stored(folder, "model.safetensors", "pytorch_model.bin")
        settings = flat(settings)
        layers = settings.get(cls.LAYERS) or (settings.get("eagle_config") or {}).get(cls.LAYERS) or []
        layers = layers or [layer + 1 for layer in settings.get("target_layer_ids") or ()]
        return settings | {cls.LAYERS: layers}, {
            f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: tensor
            for name, tensor in tensors.items()
        }

    def parts(self) -> dict[str, tuple[int, ...]]:
        """See `HeadCheckpoint.parts`; three layers' states where none are named."""
        h = self.config.hidden_size
        further = range(1, self.config.num_hidden_layers)
        shapes = {"norm.weight": (h,), "midlayer.hidden_norm.weight": (h,), **self.first_layer()}
        return shapes | {
            name: shape for l in further for name, shape in layer_shapes(self.config, f"layers.{l}.").items()
        }

    @property
    def states_width(self) -> int:
        """Of the target's states, side by side."""
        return (len(self.layers) or 3) * self.state_size

    def first_layer(self) -> dict[str, tuple[int, ...]]:
        """Of the layer that reads pairs, and of what comes before it."""
        config = self.config
        h = config.hidden_size
        shapes = {"fc.weight": (h, self.states_width), **layer_shapes(config, "midlayer.", 2 * h)}
        if config.norm_before_fc:
            shapes["input_norm.weight"] = (self.states_width,)
        if config.fc_norm:
            parts = range(self.states_width // self.state_size)
            shapes |= {f"fc_norm.{i}.weight": (self.state_size,) for i in parts}
        return shapes

    @property
    def layer(self) -> Checkpoint:
        """Its first layer as a checkpoint of one layer, as the compiled form packs it."""
        norm = (
            {"midlayer.input_layernorm.weight": self.tensors["midlayer.attention_norm.weight"]}
            if self.projects
            else {}
        )
        return HeadLayers.of(self.config, {**self.tensors, **norm}, ["midlayer."])

    @property
    def further_layers(self) -> Checkpoint | None:
        """Those behind the first, where there are any."""
        prefixes = [f"layers.{l}." for l in range(1, self.config.num_hidden_layers)]
        return HeadLayers.of(self.config, self.tensors, prefixes) if prefixes else None

    @property
    def compiles(self) -> bool:
        """Whether the compiled form runs it."""
        return has_whole_widths(self.config)

    def layers_of(self, target: Target) -> tuple[int, ...]:
        """Where the folder does not say them: those of the authors' code."""
        last = max(target.offers.hidden, default=0)
        return self.layers or ((last,) if self.projects else (2, last // 2, last - 3))
