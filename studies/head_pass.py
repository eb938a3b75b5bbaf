"""What a pass of a DSpark-shaped head costs, in torch and compiled, beside a forward pass of its target: processor time of one thread.

    python -m studies.head_pass --model smollm2-135m-instruct --layers 2 --passes 20

The head has random weights, which cost what trained ones do: DeepSpec's form with seven drafts and a Markov part of rank 256, layers as wide as the target's,
embeddings and output rows of its own. Passes of all forms take turns; figures are medians.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import torch
import typer
from safetensors.torch import save_file

from polydraft.core import TokenTree
from polydraft.heads.block.checkpoint import BlockCheckpoint
from polydraft.heads.block.compiled import CompiledBlock
from polydraft.heads.block.network import BlockModel
from polydraft.heads.checkpoint import embeddings, head_config
from polydraft.models.load import load_model
from studies.options import Quick
from studies.timing import by_turns

TEXT = 200
BLOCK = 7
RANK = 256
"""Committed tokens, drafts of a pass, and width of the Markov part."""


def written_head(target: Any, layers: int, folder: Path) -> Path:
    """A folder with a head of random weights for a target."""
    c = target.checkpoint.config
    rows = embeddings(target)
    settings = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": BLOCK, "mask_token_id": 0, "markov_rank": RANK,
        "num_hidden_layers": layers, "num_target_layers": c.num_hidden_layers, "target_layer_ids": [0, c.num_hidden_layers // 2, c.num_hidden_layers - 2],
        "vocab_size": target.vocab_size, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "rms_norm_eps": 1e-6,
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads, "head_dim": c.head_dim,
        "max_position_embeddings": 4096, "rope_theta": 10_000.0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    own = {"embed_tokens.weight": rows, "lm_head.weight": rows.clone()}
    save_file(own, folder / "model.safetensors")
    form, _ = BlockCheckpoint.read(settings, folder)
    shapes = BlockCheckpoint(
        head_config(form), tuple(form[BlockCheckpoint.LAYERS]), own, np.arange(len(rows))
    ).shapes()
    made = {name: own.get(name, (0.02 * torch.randn(shape)).bfloat16()) for name, shape in shapes.items()}
    save_file(made, folder / "model.safetensors")
    return folder


def measured(target: Any, head: BlockCheckpoint, passes: int) -> dict[str, float]:
    """Milliseconds of each kind of pass."""
    states = torch.randn(TEXT, 3 * head.config.hidden_size)
    models = {"head in torch": BlockModel(head, target)}
    models |= {
        f"head compiled, {bits}": CompiledBlock(head, target, quantization=bits) for bits in ("int8", "int4")
    }
    kinds = dict[str, Callable[[], object]]()
    for name, model in models.items():
        model.inject(0, 0, states)
        kinds[name] = lambda model=model: model.know([0], states[-1:])
        kinds[f"{name}: 3 accepted tokens"] = lambda model=model: model.inject(0, TEXT - 3, states[-3:])
    target.prefill([0], [list(range(5, 5 + TEXT))])
    for rows in (1, 1 + BLOCK):
        nodes = TokenTree(torch.full((1, rows), 7), torch.tensor([[-1, *range(rows - 1)]]))
        kinds[f"target, {rows} rows"] = lambda nodes=nodes: target.score([0], nodes)
    times = by_turns(kinds, passes, warm=2, clock=process_time)
    return {name: 1e3 * median(each) for name, each in times.items()}


def main(
    model: str = "smollm2-135m-instruct",
    layers: int = 2,
    passes: int = 20,
    quantization: str | None = None,
    quick: Quick = False,
) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    target = load_model(
        model,
        backend="compiled",
        quantization=quantization,
        threads=1,
        max_model_len=512,
        max_num_seqs=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        head = BlockCheckpoint.load(written_head(target, layers, Path(folder)))
    found = measured(target, head, 1 if quick else passes)
    for name, milliseconds in found.items():
        print(
            f"{name:45} {milliseconds:8.2f} ms {milliseconds / found['target, 1 rows']:6.2f} forward passes"
        )


if __name__ == "__main__":
    typer.run(main)
