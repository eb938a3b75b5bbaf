"""Drafts of other shapes with as many parameters: what a pass of each takes."""

import math
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from polydraft.core import TokenTree
from polydraft.engine.stats import clock
from polydraft.models.compiled.llama import CompiledLlama

LARGEST = 200_000_000


def draft_shapes(config: Any, *, repetitions: int = 20) -> list[tuple[int, int, int, float]]:
    """Seconds of a one-row pass of random drafts with as many parameters beside the embedding: this shape, then deeper and wider ones.

    Empty for drafts that do not compile or are larger than LARGEST parameters. Yan et al. 2024 (arXiv 2402.01528): at an equal
    number of parameters latency follows layers, and acceptance hardly does.
    """
    layers, hidden, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    if 12 * layers * hidden**2 > LARGEST:
        return []
    made: list[tuple[int, int, int, Any]] = []
    step = math.lcm(8, 2 * heads)
    for count in dict.fromkeys((layers, max(1, layers // 2), 1, 2 * layers)):
        width = max(1, round(hidden * (layers / count) ** 0.5 / step)) * step
        shape = type(config).from_dict(config.to_dict())
        shape.num_hidden_layers, shape.hidden_size = count, width
        shape.intermediate_size = max(8, round(config.intermediate_size * width / hidden / 8) * 8)
        shape.head_dim, shape.layer_types = width // heads, None
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shape).float().eval()
        if CompiledLlama.why_unsupported(model) is not None:
            return []
        beside = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
        made.append((count, width, beside, CompiledLlama(model, max_num_seqs=1, max_model_len=256)))
    tree, watch = TokenTree.chain(torch.ones(1, 1, dtype=torch.int64)), clock(made[0][3])
    taken: list[list[float]] = [[] for _ in made]
    for *_, model in made:
        model.prefill([0], [[1] * 64])
    for _ in range(repetitions):
        for (*_, model), seconds in zip(made, taken, strict=True):
            start = watch()
            model.score([0], tree)
            seconds.append(watch() - start)
    return [(count, width, size, float(min(s[1:]))) for (count, width, size, _), s in zip(made, taken, strict=True)]
