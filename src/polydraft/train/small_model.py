"""A small Llama distilled on its target's distributions, along text that the target wrote: a draft model in a folder of its own.

Zhou et al. 2023, DistillSpec (arXiv 2310.08461). Depth against width at one number of weights: Yan et al. 2024 (arXiv 2402.01528), who find
that latency goes by depth and acceptance does not.

    embeddings   of all tokens, input and output; at first the target's, in the directions in which they differ most
    loss         -sum_v p(v) ln q(v) over the whole vocabulary: a draft model has no reduced one
"""

from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from polydraft.core import Target
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.heads.checkpoint import HeadCheckpoint
from polydraft.heads.losses import unrolled
from polydraft.heads.recipe import Batch, Figures, Loss, Material, Recipe
from polydraft.models.torch.module import load_config
from polydraft.models.torch.silence import silent_loading


class DraftFolder(HeadCheckpoint):
    """A draft model on disk: it reads nothing of the target but tokens."""

    kind = "model"

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> "DraftFolder":
        """Read its configuration.

        Raises:
            ModelLoadError: no folder of a model.
        """
        config = load_config(Path(folder))
        return cls(config, (), {}, np.arange(config.vocab_size))

    def check(self, target: Target) -> None:
        """Refuse a target of another vocabulary.

        Raises:
            IncompatibleError: another one.
        """
        if self.config.vocab_size != target.vocab_size:
            raise IncompatibleError(
                f"the draft model has {self.config.vocab_size} tokens and the target {target.vocab_size}; expected the same. "
                "Begin with a draft model of this target, or with none."
            )


class ModelRecipe(Recipe):
    """See the module. sizes: layers, and width."""

    checkpoint = DraftFolder
    defaults: ClassVar = {"draft_vocab": 1 << 30, "batch": 2, "window": 256, "unroll": 1}
    sizes: ClassVar = {"layers": 2, "width": 256}
    option = "--draft-model"

    def layers(self, last: int) -> tuple[int, ...]:
        """None."""
        return ()

    def fresh(self, material: Material) -> nn.Module:
        """A Llama of these sizes with the target's embeddings, rotated and cut to its width.

        Raises:
            InvalidInputError: a reduced draft vocabulary.
        """
        from transformers import LlamaConfig, LlamaForCausalLM

        width = material.sizes["width"]
        target = material.target
        if len(material.ids) < target.vocab_size:
            raise InvalidInputError(
                f"a draft vocabulary of {len(material.ids)} tokens was given; expected all {target.vocab_size}, which a draft model has. "
                "Leave --draft-vocab out."
            )
        heads = max(1, width // 64)
        config = LlamaConfig(
            vocab_size=target.vocab_size,
            hidden_size=width,
            intermediate_size=-(-8 * width // 24) * 8,
            num_hidden_layers=material.sizes["layers"],
            num_attention_heads=heads,
            head_dim=width // heads,
            max_position_embeddings=max(2048, target.max_model_len),
            tie_word_embeddings=True,
            bos_token_id=target.bos_token_id,
            eos_token_id=list(target.eos_token_ids) or None,
        )
        network = LlamaForCausalLM(config)
        with torch.no_grad():
            network.model.embed_tokens.weight.copy_(_reduced(material.embeddings.float(), width))
        return network

    def started(self, material: Material, first: Any) -> nn.Module:
        """A draft model that was trained before."""
        from transformers import AutoModelForCausalLM

        with silent_loading():
            return AutoModelForCausalLM.from_pretrained(first.config.name_or_path, dtype=torch.float32)

    def loss(self, network: Any, batch: Batch, *, steps: int, loss: Loss) -> Figures:
        """Of all depths, which are one: it reads what it drafted as it reads what the target wrote."""
        counted = batch.counted[:, 1:]
        states = network.model(batch.tokens[:, :-1], use_cache=False).last_hidden_state[counted]
        figures = unrolled([(network.lm_head(states), batch.distributions[:, :-1][counted])], loss)
        return Figures(figures.loss, figures.acceptance * steps, figures.agreement * steps)

    def export(self, network: Any, material: Material, folder: Path) -> None:
        """Write a folder as of transformers, in bfloat16, with the target's tokenizer."""
        weights = {name: tensor.detach().cpu().bfloat16() for name, tensor in network.state_dict().items()}
        network.save_pretrained(folder, state_dict=weights)
        if material.tokenizer is not None:
            material.tokenizer.save_pretrained(folder)


def _reduced(rows: Float[Tensor, "V h"], width: int) -> Float[Tensor, "V w"]:
    """Rows in the directions in which they differ most, as large as fresh ones."""
    reduced = rows @ torch.linalg.eigh(rows.T @ rows).eigenvectors.flip(1)[:, :width]
    reduced = torch.nn.functional.pad(reduced, (0, width - reduced.shape[1]))
    return 0.02 * reduced / reduced.square().mean().sqrt()
