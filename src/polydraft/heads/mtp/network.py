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
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn

from polydraft.errors import ModelLoadError
from polydraft.heads.checkpoint import head_config, own_predictor
from polydraft.heads.eagle.network import EagleCheckpoint, EagleHead, EagleModel, EagleRecipe
from polydraft.heads.folder import HeadFolder
from polydraft.heads.mtp.published import MtpModule, Published, published
from polydraft.models.loading.checkpoint import Checkpoint, PredictorCheckpoint
from polydraft.models.torch.llama_layer import LlamaLayer, RMSNorm

SHARED = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Settings that a target's own layer has of the target."""
ENDS = {
    "project": "project.weight",
    "embedding_norm": "midlayer.input_layernorm.weight",
    "state_norm": "midlayer.hidden_norm.weight",
    "norm": "norm.weight",
}
"""Fields of `predictor.PredictorNames` -> names here."""


class MtpHead(EagleHead):
    """The module as it is trained and drafts."""

    def open(self, num_states: int) -> LlamaLayer:
        """The projection, and a layer that reads what it puts out."""
        h = self.config.hidden_size
        self.project = nn.Linear(2 * h, h, bias=False)
        layer = LlamaLayer(self.config)
        layer.attention_norm = RMSNorm(h, self.config.rms_norm_eps)
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


@dataclass(frozen=True)
class MtpCheckpoint(EagleCheckpoint):
    """A module for multi-token prediction: one trained here, one of another's folder, which is `published`, or the `predictor` in a target's own files,
    whose embeddings and output rows are the target's.
    """

    kind = "mtp"
    network = MtpHead
    projects = True
    published: Published | None = None
    predictor: PredictorCheckpoint | None = None

    @classmethod
    def reads(cls, settings: Mapping[str, Any]) -> bool:
        """Those of others: speculators' by its name, a whole model's by the number of such layers."""
        if "speculators_model_type" in settings:
            return settings["speculators_model_type"] == "mtp"
        inner = {**settings, **(settings.get("text_config") or {})}
        return any(
            isinstance(inner.get(name), int) and inner[name] > 0
            for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers")
        )

    @classmethod
    def of_folder(cls, folder: HeadFolder) -> "MtpCheckpoint":
        """See `HeadCheckpoint.load`; of a whole model's folder the module's tensors alone."""
        if "polydraft_head" in folder.settings:
            return super().of_folder(folder)
        try:
            module = published(folder.store)
        except Exception as error:  # whatever these files hold: they are somebody else's
            raise ModelLoadError(
                f"{str(folder)!r} was given as a module for multi-token prediction, and cannot be read as one: {error!r}. Expected a folder "
                "with config.json and safetensors, in which the target's, or speculators', module is."
            ) from error
        sizes = {name: module.settings.get(name) for name in ("hidden_size", "vocab_size")}
        return cls._around(
            module.outer, published=module, num_target_layers=module.settings["num_hidden_layers"], **sizes
        )

    @classmethod
    def of_target(cls, target: Any) -> "MtpCheckpoint | None":
        """That in a target's own files, where there is one that is run."""
        predictor = own_predictor(target)
        if predictor is None:
            return None
        sizes = {name: getattr(predictor.config, name) for name in SHARED}
        return cls._around(predictor.outer(), predictor=predictor, **sizes)

    @classmethod
    def _around(
        cls,
        outer: Mapping[str, np.ndarray],
        published: Published | None = None,
        predictor: PredictorCheckpoint | None = None,
        **settings: Any,
    ) -> "MtpCheckpoint":
        """One whose layer is not of this package's names. outer: by the fields of `predictor.PredictorNames`.  settings: sizes of the target."""
        config = head_config({"num_hidden_layers": 1, "norm_output": True, **settings})
        tensors = {ENDS[field]: tensor for field, tensor in outer.items()}
        return cls(config, (), tensors, np.empty(0, np.int64), published, predictor)

    @property
    def shares_rows(self) -> bool:
        """Those of a target's own files do."""
        return self.predictor is not None

    @property
    def layer(self) -> Checkpoint:
        """One of the target's architecture, or of Llama's."""
        return super().layer if self.predictor is None else self.predictor

    @property
    def compiles(self) -> bool:
        """As the target does; layers of others run in transformers."""
        if self.published is not None:
            return False
        return self.predictor is not None or super().compiles

    def check(self, target: Any) -> None:
        """See `HeadCheckpoint.check`; what is in a target's own files is of no other."""
        if self.predictor is None:
            super().check(target)


def in_torch(head: MtpCheckpoint, target: Any) -> EagleModel | MtpModule:
    """The module as a draft model in torch: another's is run by transformers."""
    return EagleModel(head, target) if head.published is None else MtpModule(head, head.published, target)


class MtpRecipe(EagleRecipe):
    """See the module."""

    checkpoint = MtpCheckpoint
    network = MtpHead
    decay = 0.6
    reads_three = False
    published: ClassVar = {}
