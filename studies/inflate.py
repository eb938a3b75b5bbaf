"""`python -m studies.inflate LAYERS`: a small trained model made as expensive as a big one without changing what it computes.

Appended layers whose output projections are zero add nothing to the residual stream: the distribution stays bit-equal, the cost is
that of the bigger model. Acceptance is then a trained pair's and cost ratios are realistic on a small machine.
"""

from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from polydraft.errors import InvalidInputError
from polydraft.models import pair
from polydraft.models.load import load_tokenizer
from polydraft.models.torch.module import load_module
from studies.options import Out


@torch.no_grad()
def inflate(model: Any, num_layers: int) -> Any:
    """A copy of a Llama-family module with `num_layers` more decoder layers that change nothing.

    Raises:
        InvalidInputError: a negative number.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        >>> small, ids = LlamaForCausalLM(config).eval(), torch.tensor([[1, 2]])
        >>> torch.equal(small(ids).logits, inflate(small, 3)(ids).logits)
        True
    """
    if num_layers < 0:
        raise InvalidInputError(f"{num_layers} layers were given; expected 0 or more.")
    grown = deepcopy(model)
    layers = grown.model.layers
    for _ in range(num_layers):
        layer = deepcopy(layers[-1])
        layer.self_attn.layer_idx = len(layers)
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        layers.append(layer)
    grown.config.num_hidden_layers = len(layers)
    if getattr(grown.config, "layer_types", None):
        grown.config.layer_types = [*grown.config.layer_types, *[grown.config.layer_types[-1]] * num_layers]
    return grown


def main(
    layers: Annotated[int, typer.Argument(min=0, help="Number of layers that are added.")],
    model: Annotated[
        str | None, typer.Option(help="Model of the Llama family; without it the embedded target.")
    ] = None,
    out: Out = Path("build/inflated"),
) -> None:
    """Write the inflated model as a folder, for `polydraft bench --model`."""
    source = model or str(pair.target_folder())
    inflate(load_module(source, device="cpu"), layers).save_pretrained(out)
    load_tokenizer(source).save_pretrained(out)
    typer.echo(f"wrote {out}", err=True)


if __name__ == "__main__":
    typer.run(main)
