"""Falcon (arXiv 2311.16867): `LayerNorm`, attention and feed-forward read the same, whose sum is added, a feed-forward without a gate; queries, keys and
values lie in one matrix, by group of heads."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.networks.base import QKV, Network
from polydraft.models.networks.settings import LAYER_NORM, has, special_tokens
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.places import Stored

PARTS = {
    "self_attn.q_proj": slice(0, -2),
    "self_attn.k_proj": slice(-2, -1),
    "self_attn.v_proj": slice(-1, None),
}
"""Heads of a group, behind one another: its queries, its key, its value."""


def spec(config: Any) -> ModelSpec:
    parallel = config.new_decoder_architecture or config.parallel_attn
    return one_rotary(
        config,
        epsilon=config.layer_norm_epsilon,
        centred=True,
        parallel=parallel,
        activation=config.activation,
    )


def has_one_norm(config: Any) -> bool:
    if config.new_decoder_architecture:
        return config.num_ln_in_parallel_attn == 1
    return bool(config.parallel_attn)


def place(name: str, config: Any) -> Stored | None:
    module, _, kind = name.rpartition(".")
    if module not in PARTS:
        return None
    groups = config.num_key_value_heads
    of_group = config.num_attention_heads // groups + 2

    def part(rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(groups, of_group, -1, *rows.shape[1:])
        return heads[:, PARTS[module]].reshape(-1, *rows.shape[1:])

    return Stored(f"self_attention.query_key_value.{kind}", part=part)


def sizes(folder: Mapping[str, Any]) -> dict[str, Any]:
    """What other configurations call otherwise."""
    heads = folder["num_attention_heads"]
    grouped = folder.get("new_decoder_architecture", False) or not folder.get("multi_query", True)
    hidden = folder["hidden_size"]
    return {
        "num_key_value_heads": (folder.get("num_kv_heads") or heads) if grouped else 1,
        "intermediate_size": folder.get("ffn_hidden_size") or 4 * hidden,
        "head_dim": hidden // heads,
    }


def refusal(config: Any) -> str | None:
    return "its attention has linear biases" if config.alibi else None


def settings(file: GgufHeader) -> dict[str, Any]:
    heads = file.count("attention.head_count_kv", 1)
    two = has(file, "attn_norm_2.weight")
    return {
        "layer_norm_epsilon": file.number(LAYER_NORM),
        "num_kv_heads": heads,
        "new_decoder_architecture": two,
        "num_ln_in_parallel_attn": 2 if two else None,
        "multi_query": heads == 1,
        "parallel_attn": True,
        "alibi": False,
        "bias": has(file, "attn_qkv.bias"),
        "activation": "gelu",
        "ffn_hidden_size": file.count("feed_forward_length"),
    }


FALCON = Network(
    "falcon",
    "falcon",
    spec,
    shares_norm=has_one_norm,
    norm_bias=True,
    attention=AttentionWeights(bias="bias", out_bias="bias"),
    feed_forward=FeedForwardWeights.ungated("bias"),
    trunk="transformer.h",
    renamed={
        "model.embed_tokens": "transformer.word_embeddings",
        "model.norm": "transformer.ln_f",
        "input_layernorm": "ln_attn",
        "post_attention_layernorm": "ln_mlp",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    place=place,
    fused=(QKV,),
    names={"input_layernorm": "attn_norm_2 attn_norm", "post_attention_layernorm": "attn_norm"},
    settings=settings,
    refusal=refusal,
    defaults={
        **special_tokens(11, 11),
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5,
        "rms_norm_eps": 1e-5,
        "activation": "gelu",
        "alibi": False,
        "bias": False,
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": False,
        "num_ln_in_parallel_attn": None,
    },
    mended=sizes,
)
