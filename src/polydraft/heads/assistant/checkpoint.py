"""Gemma 4's assistants on disk, as their authors publish them: a model of the target's family whose layers have no keys and values."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polydraft.core import Target
from polydraft.errors import IncompatibleError, ModelLoadError, first_line
from polydraft.heads.checkpoint import HeadCheckpoint, stored
from polydraft.heads.folder import HeadFolder
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.loading.checkpoint import Checkpoint, shapes_of
from polydraft.models.loading.config import CheckpointConfig
from polydraft.models.networks import ModelSpec
from polydraft.models.networks.gemma4 import GEMMA4, GEMMA4_UNIFIED
from polydraft.models.store.weights import InMemory
from polydraft.numerics.floats import as_float32

FAMILIES = {"gemma4_assistant": GEMMA4, "gemma4_unified_assistant": GEMMA4_UNIFIED}
"""`model_type` -> what its layers are of."""
EMBEDDING = "model.embed_tokens.weight"
CENTROIDS = "masked_embedding.centroids.weight"
ORDER = "masked_embedding.token_ordering"


class AssistantLayers(Checkpoint):
    """Its layers as a checkpoint of layers alone, as the compiled form packs it."""

    @property
    def spec(self) -> ModelSpec:
        """With products of queries alone; whose keys and values layers attend to is the target's."""
        return replace(super().spec, sources=())


@dataclass(frozen=True)
class AssistantCheckpoint(HeadCheckpoint):
    """config: of its layers, and `state_size` of the target's states, `centroids` that are chosen, 0 without any."""

    kind = "assistant"

    @classmethod
    def reads(cls, settings: Mapping[str, Any]) -> bool:
        """By its type."""
        return settings.get("model_type") in FAMILIES

    @classmethod
    def of_folder(cls, folder: HeadFolder) -> "AssistantCheckpoint":
        """See `HeadCheckpoint.load`."""
        settings = folder.settings
        try:
            network = FAMILIES[settings["model_type"]]
            inner = {**settings["text_config"]}
            inner["num_kv_shared_layers"] = inner["num_hidden_layers"]
            config = CheckpointConfig.of_json(inner, network, str(folder))
            tensors = stored(folder.path, "model.safetensors")
            extra = {
                "state_size": int(settings.get("backbone_hidden_size", 1536)),
                "chosen_centroids": int(settings.get("centroid_intermediate_top_k", 32))
                if settings.get("use_ordered_embeddings")
                else 0,
                "num_centroids": int(settings.get("num_centroids", 2048)),
            }
            own = replace(config, of_architecture={**config.of_architecture, **extra})
        except (
            ModelLoadError,
            ArithmeticError,
            AttributeError,
            LookupError,
            OSError,
            TypeError,
            ValueError,
        ) as error:
            raise ModelLoadError(
                f"{str(folder)!r} was given as an assistant of Gemma 4, and cannot be read as one: {first_line(error)}. Expected a folder with "
                "config.json, whose text_config says its layers, and model.safetensors."
            ) from error
        head = cls(own, (), tensors, np.arange(own.vocab_size))
        head.check_tensors(str(folder))
        return head

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `HeadCheckpoint.shapes`."""
        config = self.config
        h = config.hidden_size
        shapes = {
            **shapes_of(config),
            "pre_projection.weight": (h, 2 * config.state_size),
            "post_projection.weight": (config.state_size, h),
        }
        if config.chosen_centroids:
            shapes |= {CENTROIDS: (config.num_centroids, h), ORDER: (config.vocab_size,)}
        return shapes

    @property
    def layer(self) -> AssistantLayers:
        """See `AssistantLayers`."""
        weights = {
            name: as_float32(x) for name, x in self.tensors.items() if name.startswith("model.layers.")
        }
        return AssistantLayers(self.config, weights, InMemory(weights))

    def check(self, target: Target) -> None:
        """Refuse another target than one whose keys and values it attends to.

        Raises:
            IncompatibleError: another width, vocabulary, or heads; or a target whose cache it cannot share.
        """
        if reason := self._misfit(target):
            raise IncompatibleError(
                f"the assistant is not for {target.name or type(target).__name__}: {reason}. Use that of this target."
            )

    def _misfit(self, target: Target) -> str | None:
        checkpoint = target.checkpoint if isinstance(target, CompiledModel) else None
        if checkpoint is None or checkpoint.spec.wide is None:
            return "it shares the KV cache of a compiled Gemma 4"
        theirs = checkpoint.config
        ours = self.config
        for said, own, other in (
            ("states of width", ours.state_size, theirs.hidden_size),
            ("tokens", ours.vocab_size, theirs.vocab_size),
            ("heads", self.layer.spec.heads(ours), checkpoint.spec.heads(theirs)),
        ):
            if own != other:
                return f"its {said} are {own}, the target's {other}"
        return None
