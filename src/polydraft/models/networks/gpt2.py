"""GPT-2 and StarCoder (https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf, arXiv 2305.06161): embeddings of
positions. Folders of the first have matrices transposed."""

from typing import Any

from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import LAYER_NORM
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.places import Stored

MATRICES = {"attn.c_attn": (3, 1), "attn.c_proj": (1, 1), "mlp.c_fc": (4, 1), "mlp.c_proj": (1, 4)}
"""Outputs and inputs, in widths of the model."""
NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def settings(file: GgufHeader) -> dict[str, Any]:
    return {"layer_norm_epsilon": file.number(LAYER_NORM), "n_inner": file.count("feed_forward_length")}


def pieces(config: Any, layer: int) -> dict[str, tuple[int, ...]]:
    h = config.hidden_size
    inner = config.n_inner or 4 * h
    widths = {1: h, 3: 3 * h, 4: inner}
    return {
        f"{name}.weight": (widths[outputs], widths[inputs]) for name, (outputs, inputs) in MATRICES.items()
    }


def place(name: str, config: Any) -> Stored | None:
    is_matrix = name.removesuffix(".weight") in MATRICES
    return Stored(name, part=lambda matrix: matrix.T) if is_matrix else None


LACKS = "embeddings of positions"

GPT2 = Network(
    "gpt2",
    "gpt2",
    lacks=LACKS,
    trunk="transformer.h",
    names=NAMES,
    pieces=pieces,
    place=place,
    settings=settings,
)
STARCODER = Network(
    "gpt_bigcode",
    "starcoder",
    lacks=LACKS,
    trunk="transformer.h",
    names=NAMES,
    settings=lambda file: settings(file) | {"multi_query": file.count("attention.head_count_kv", 1) == 1},
)
