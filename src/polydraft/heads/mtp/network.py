"""A module for multi-token prediction in torch, applied to its own output: an EAGLE-3 head but for what its layer reads.

DeepSeek-AI 2024, DeepSeek-V3, section 2.2 (arXiv 2412.19437); Cai et al. 2025, FastMTP (arXiv 2509.18362): one module for all depths.

    a_1[t] = block(P [norm(embedding of x[t+1]); norm(h[t])])           h[t]: the target's last state; distribution of x[t+2]
    a_k[t] = block(P [norm(embedding of x[t+k]); norm(a_(k-1)[t])])     of x[t+k+1]

Trap: x[t+1] belongs to h[t], the state that it was drawn from: off by one, the module learns to repeat a token.

Training is EAGLE-3's, with weights 0.6^(k-1) of the steps (FastMTP, arXiv 2509.18362).

On disk it is an EAGLE-3 head, but for what its layer reads.
"""

from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from polydraft.heads.eagle.network import EagleHead, EagleModel, EagleRecipe
from polydraft.heads.mtp.checkpoint import MtpCheckpoint
from polydraft.heads.mtp.module import MtpModule
from polydraft.models.torch.llama_layer import LlamaLayer, RMSNorm


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


class MtpModel(EagleModel):
    """The module as a draft model with a KV cache of its own; see `EagleModel`."""

    network_class = MtpHead


def in_torch(head: MtpCheckpoint, target: Any) -> MtpModel | MtpModule:
    """The module as a draft model in torch: another's is run by transformers."""
    return MtpModel(head, target) if head.published is None else MtpModule(head, head.published, target)


class MtpRecipe(EagleRecipe):
    """See the module."""

    checkpoint = MtpCheckpoint
    network = MtpHead
    decay = 0.6
    reads_three = False
    published: ClassVar = {}
