"""GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373): `LayerNorm`, attention and feed-forward side by side behind norms of their own, biases, rotation of a
quarter of each head; queries, keys and values lie in one matrix, head by head."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.networks.base import QKV, Network
from polydraft.models.networks.settings import LAYER_NORM, has, rope_of_folder, special_tokens
from polydraft.models.networks.spec import ModelSpec, partly_rotated
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.places import Stored

PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def spec(config: Any) -> ModelSpec:
    return partly_rotated(
        config, epsilon=config.layer_norm_eps, centred=True, parallel=config.use_parallel_residual
    )


def place(name: str, config: Any) -> Stored | None:
    module, _, kind = name.rpartition(".")
    if module not in PARTS:
        return None

    def part(rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(config.num_attention_heads, 3, -1, *rows.shape[1:])
        return heads[:, PARTS.index(module)].reshape(-1, *rows.shape[1:])

    return Stored(f"attention.query_key_value.{kind}", part=part)


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "layer_norm_eps": file.number(LAYER_NORM),
        "use_parallel_residual": bool(file.setting("use_parallel_residual", True)),
        "attention_bias": has(file, "attn_qkv.bias"),
        "hidden_act": "gelu",
    }


def sizes(folder: Mapping[str, Any]) -> dict[str, Any]:
    """What other configurations have, and an older name."""
    heads = folder["num_attention_heads"]
    part = {"partial_rotary_factor": folder["rotary_pct"]} if folder.get("rotary_pct") else {}
    return {
        "num_key_value_heads": heads,
        "head_dim": folder["hidden_size"] // heads,
        **part,
    }


def folder_rope(folder: Mapping[str, Any]) -> dict[str, Any]:
    return rope_of_folder({**folder, "rope_theta": folder.get("rotary_emb_base", 10_000.0)})


GPT_NEOX = Network(
    "gpt_neox",
    "gptneox",
    spec,
    norm_bias=True,
    attention=AttentionWeights(bias="attention_bias", out_bias="attention_bias"),
    feed_forward=FeedForwardWeights.ungated(True),
    trunk="gpt_neox.layers",
    renamed={
        "model.embed_tokens": "gpt_neox.embed_in",
        "model.norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
        "self_attn.o_proj": "attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    place=place,
    fused=(QKV,),
    partial_rotary=True,
    settings=settings,
    defaults={
        **special_tokens(0, 2),
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "attention_bias": True,
        "use_parallel_residual": True,
    },
    mended=sizes,
    folder_rope=folder_rope,
)
