"""Training a block head with a mask of its own: all places masked, and time-sampled.

    loss       sum over k of 0.8^(k-1) times -sum_v p(v) ln q_k(v) with all places masked, p the target's distribution there; and, time-sampled:
               at t ~ U(0, 1) each place is masked with chance t, else it shows its token; the masked ones count 1/t

Blocks stand at every `EVERY`-th position, another set each time. Trap: trained with all places masked alone, it has never read a revealed token.
"""

from typing import Any, ClassVar

import torch
from torch import nn

from polydraft.errors import IncompatibleError
from polydraft.heads.block.checkpoint import BlockCheckpoint
from polydraft.heads.block.network import BlockNet
from polydraft.heads.losses import unrolled
from polydraft.heads.network import Material
from polydraft.heads.recipe import Batch, Figures, Loss, Recipe, fresh_config

EVERY = 5
"""Positions of a text for one from which a block goes out."""
MIN_TIME = 0.05
"""Of t: the weight 1/t is bounded."""


class BlockRecipe(Recipe):
    """See the module. sizes: layers, and places of a block."""

    checkpoint = BlockCheckpoint
    network = BlockNet
    reads_three = True
    sizes: ClassVar = {"layers": 2, "block": 4}
    settings = ("block_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                "rope_theta", "rms_norm_eps")  # fmt: skip

    def fresh(self, material: Material) -> BlockNet:
        """A drafter of its target's width, whose layers add nothing yet."""
        layers = material.sizes["layers"]
        block = material.sizes["block"]
        form = {"slots": block + 1, "in_place": True, "sees": ["apart"] * layers, "windows": [None] * layers}
        sizes = {"block_size": block, "num_hidden_layers": layers, "model_type": "llama", **form}
        config: Any = fresh_config(material.hidden_size, **sizes)
        if config.num_attention_heads % 3 == 0:
            config.num_key_value_heads = config.num_attention_heads // 3
        return BlockNet(config, material)

    def started(self, material: Material, first: Any) -> nn.Module:
        """A head as an older checkpoint has it.

        Raises:
            IncompatibleError: one of another form, whose places learn something else.
        """
        if not first.config.in_place or first.bias_kind != "none" or set(first.config.sees) != {"apart"}:
            raise IncompatibleError(
                f"the head to start with has in_place={first.config.in_place}, sees={first.config.sees[0]!r} and the Markov part "
                f"{first.bias_kind!r}; expected one that `polydraft train block` wrote. Start with such a head, or train another kind: dspark."
            )
        return super().started(material, first)

    def loss(self, network: BlockNet, batch: Batch, *, steps: int, loss: Loss) -> Figures:
        """Of all places: those of blocks of masks, whose figures these are, and time-sampled."""
        X = network.num_depths
        T = batch.tokens.shape[1]
        at = torch.arange(int(torch.randint(EVERY, ())), T - 1 - X, EVERY, device=batch.tokens.device)
        places = at[:, None] + 1 + torch.arange(X + 1, device=at.device)
        blocks = batch.tokens[:, places]
        distributions = batch.distributions[:, places[:, :-1]]
        counted = batch.counted[:, places[:, 1:]]
        masked = torch.ones_like(blocks, dtype=torch.bool)
        masked[..., 0] = False
        logits = network.logits(batch.states, blocks, masked, at)
        by_place = [(logits[:, :, k], distributions[:, :, k], counted[:, :, k]) for k in range(X)]
        whole = unrolled(((q[here], p[here]) for q, p, here in by_place), loss)
        if not torch.is_grad_enabled():
            return whole
        times = torch.rand(*blocks.shape[:2], 1, device=at.device).clamp(min=MIN_TIME)
        masked = masked & (torch.rand(blocks.shape, device=at.device) < times)
        log_q = network.logits(batch.states, blocks, masked, at).float().log_softmax(-1)
        entropy = -(distributions * log_q).sum(-1)
        counted_masks = masked[..., 1:] & counted
        sampled = (entropy * counted_masks / times).sum() / counted.sum().clamp(min=1)
        return whole._replace(loss=whole.loss + sampled)
