"""Training of a block diffusion drafter: with all places masked, and time-sampled.

Chen, Liang & Liu 2026, DFlash (arXiv 2602.06036); Christopher et al. 2024, SpecDiff (arXiv 2408.05636).

    loss       sum over k of 0.8^(k-1) times -sum_v p(v) ln q_k(v) with all places masked, p the target's distribution there; and, time-sampled:
               at t ~ U(0, 1) each place is masked with chance t, else it shows its token; the masked ones count 1/t

Blocks stand at every `EVERY`-th position, another set each time. Trap: trained with all places masked alone, it has never read a revealed token.
"""

from typing import Any, ClassVar

import torch

from polydraft.heads.diffusion.checkpoint import DiffusionCheckpoint
from polydraft.heads.diffusion.network import DiffusionNet
from polydraft.heads.recipe import Batch, Figures, Material, Recipe, fresh_config, unrolled

__all__ = ["DiffusionRecipe"]

EVERY = 5
"""Positions of a text for one from which a block goes out."""
LEAST = 0.05
"""Of t: the weight 1/t is bounded."""


class DiffusionRecipe(Recipe):
    """See the module. sizes: layers, and places of a block."""

    checkpoint, network = DiffusionCheckpoint, DiffusionNet
    sizes: ClassVar = {"layers": 2, "block": 4}
    settings = ("block_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                "rope_theta", "rms_norm_eps")  # fmt: skip

    def layers(self, last: int) -> tuple[int, ...]:
        """A low, a middle and the last."""
        return max(1, last // 4), last // 2 + 1, last

    def fresh(self, material: Material) -> DiffusionNet:
        """A drafter of its target's width, whose layers add nothing yet."""
        sizes = {"block_size": material.sizes["block"], "num_hidden_layers": material.sizes["layers"]}
        config: Any = fresh_config(material.hidden_size, **sizes)
        if config.num_attention_heads % 3 == 0:
            config.num_key_value_heads = config.num_attention_heads // 3
        return DiffusionNet(config, material)

    def loss(self, network: DiffusionNet, batch: Batch, *, steps: int, tv_weight: float) -> Figures:
        """Of all places: those of blocks of masks, whose figures these are, and time-sampled."""
        X, T = network.num_depths, batch.tokens.shape[1]
        at = torch.arange(int(torch.randint(EVERY, ())), T - 1 - X, EVERY, device=batch.tokens.device)
        places = at[:, None] + 1 + torch.arange(X + 1, device=at.device)
        blocks, laws, counted = batch.tokens[:, places], batch.laws[:, places[:, :-1]], batch.counted[:, places[:, 1:]]
        masked = torch.ones_like(blocks, dtype=torch.bool)
        masked[..., 0] = False
        logits = network.logits(batch.states, blocks, masked, at)
        whole = unrolled(
            ((logits[:, :, k][counted[:, :, k]], laws[:, :, k][counted[:, :, k]]) for k in range(X)), tv_weight=tv_weight
        )
        if not torch.is_grad_enabled():
            return whole
        times = torch.rand(*blocks.shape[:2], 1, device=at.device).clamp(min=LEAST)
        masked = masked & (torch.rand(blocks.shape, device=at.device) < times)
        log_q = network.logits(batch.states, blocks, masked, at).float().log_softmax(-1)
        counted_masks = masked[..., 1:] & counted
        sampled = (-(laws * log_q).sum(-1) * counted_masks / times).sum() / counted.sum().clamp(min=1)
        return whole._replace(loss=whole.loss + sampled)
