"""BLOOM and MPT (arXiv 2211.05100, https://www.databricks.com/blog/mpt-7b): attention with linear biases (arXiv 2108.12409). Folders of the first have queries,
keys and values head by head."""

from typing import Any

import numpy as np

from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import LAYER_NORM
from polydraft.models.store.gguf_header import GgufHeader

LACKS = "attention with linear biases"
QKV = "self_attention.query_key_value"


def head_by_head(config: Any, rows: np.ndarray) -> np.ndarray:
    """Queries, keys and values of each head side by side, of those that lie one behind another."""
    parts = rows.reshape(3, config.num_attention_heads, -1, *rows.shape[1:])
    return parts.swapaxes(0, 1).reshape(rows.shape)


def mpt_settings(file: GgufHeader) -> dict[str, Any]:
    bias = file.number_or_none("attention.max_alibi_bias")
    clip = file.number_or_none("attention.clamp_kqv")
    return {
        "layer_norm_epsilon": file.number(LAYER_NORM),
        "expansion_ratio": file.count("feed_forward_length") // file.count("embedding_length"),
        "max_seq_len": file.count("context_length"),
        "attn_config": {"alibi": bool(bias), "alibi_bias_max": int(bias or 8), "clip_qkv": clip},
    }


BLOOM = Network(
    "bloom",
    "bloom",
    lacks=LACKS,
    trunk="transformer.h",
    names={
        "transformer.word_embeddings": "token_embd",
        "transformer.word_embeddings_layernorm": "token_embd_norm",
        "transformer.ln_f": "output_norm",
        QKV: "attn_qkv",
        "self_attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    settings=lambda file: {"layer_norm_epsilon": file.number(LAYER_NORM)},
    order={f"{QKV}.{kind}": head_by_head for kind in ("weight", "bias")},
)
MPT = Network(
    "mpt",
    "mpt",
    lacks=LACKS,
    trunk="transformer.blocks",
    names={
        "transformer.wte": "token_embd",
        "transformer.norm_f": "output_norm",
        "norm_1": "attn_norm",
        "attn.Wqkv": "attn_qkv",
        "attn.out_proj": "attn_output",
        "norm_2": "ffn_norm",
        "ffn.up_proj": "ffn_up",
        "ffn.down_proj": "ffn_down",
    },
    settings=mpt_settings,
)
