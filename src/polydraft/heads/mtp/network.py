"""A module for multi-token prediction in torch, applied to its own output: an EAGLE-3 head but for what its layer reads.

DeepSeek-AI 2024, DeepSeek-V3, section 2.2 (arXiv 2412.19437); Cai et al. 2025, FastMTP (arXiv 2509.18362): one module for all depths.

    a_1[t] = block(P [norm(embedding of x[t+1]); norm(h[t])])           h[t]: the target's last state; distribution of x[t+2]
    a_k[t] = block(P [norm(embedding of x[t+k]); norm(a_(k-1)[t])])     of x[t+k+1]

Trap: x[t+1] belongs to h[t], the state that it was drawn from: off by one, the module learns to repeat a token.

Training is EAGLE-3's, with weights 0.6^(k-1) of the steps (FastMTP, arXiv 2509.18362).

On disk it is an EAGLE-3 head, but for what its layer reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn

from polydraft.heads.eagle.network import EagleCheckpoint, EagleHead, EagleModel, EagleRecipe
from polydraft.heads.mtp.published import PublishedMtp, reads
from polydraft.methods.head_folders import settings_of
from polydraft.models.loading.checkpoint import Checkpoint, PredictorCheckpoint
from polydraft.models.torch.llama_layer import LlamaLayer, Norm

SHARED = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Settings that a target's own layer has of the target."""
ENDS = {
    "project": "project.weight",
    "embedding_norm": "midlayer.input_layernorm.weight",
    "state_norm": "midlayer.hidden_norm.weight",
    "norm": "norm.weight",
}
"""Fields of `predictor.Layout` -> names here."""


class MtpCheckpoint(EagleCheckpoint):
    """A module for multi-token prediction."""

    kind = "mtp"
    projects = True

    @classmethod
    def reads(cls, settings: Mapping[str, Any]) -> bool:
        """Those of others."""
        return reads(settings)

    @classmethod
    def load(cls, folder: str | Path) -> Any:
        """A module trained here, or the one of another's folder, see `published`."""
        return super().load(folder) if "polydraft_head" in settings_of(folder) else PublishedMtp.load(folder)


@dataclass(frozen=True)
class OwnPredictor(MtpCheckpoint):
    """The layer in a target's own files that predicts a further token; embeddings and output rows are the target's."""

    shares_rows = True
    predictor: PredictorCheckpoint | None = None

    @classmethod
    def of_target(cls, target: Any) -> "OwnPredictor | None":
        """That of a target, where it has one that is run."""
        predictor = getattr(getattr(target, "checkpoint", None), "predictor", None)
        if predictor is None:
            return None
        parts = predictor.outer()
        tensors = {ours: parts[field] for field, ours in ENDS.items()}
        settings = {name: getattr(predictor.config, name) for name in SHARED}
        return cls(
            SimpleNamespace(**settings, norm_output=True), (), tensors, np.empty(0, np.int64), predictor
        )

    @property
    def layer(self) -> Checkpoint:
        """One of the target's architecture."""
        assert self.predictor is not None
        return self.predictor

    @property
    def compiles(self) -> bool:
        """As the target does."""
        return True

    def check(self, target: Any) -> None:
        """It is of no other target."""


class MtpHead(EagleHead):
    """The module as it is trained and drafts."""

    def open(self, num_states: int) -> LlamaLayer:
        """The projection, and a layer that reads what it puts out."""
        h = self.config.hidden_size
        self.project = nn.Linear(2 * h, h, bias=False)
        layer = LlamaLayer(self.config)
        layer.attention_norm = Norm(h, self.config.rms_norm_eps)
        return layer

    @property
    def first(self) -> nn.Linear:
        """The projection."""
        return self.project

    def read(self, features: Float[Tensor, "B T h"]) -> Float[Tensor, "B T h"]:
        """The target's last states, as they are."""
        return features.float()

    def join(self, pairs: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The projection of the pairs, and its norm."""
        x = self.project(pairs.to(self.project.weight.dtype))
        return x, self.midlayer.attention_norm(x)  # pyright: ignore[reportCallIssue]


class MtpModel(EagleModel):
    """The module as a draft model; see `EagleModel`."""

    network_class = MtpHead


class MtpRecipe(EagleRecipe):
    """See the module."""

    checkpoint = MtpCheckpoint
    network = MtpHead
    decay = 0.6
    reads_three = False
    published: ClassVar = {}
