"""ERNIE 4.5 (https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf): Llama whose rotations lie side by side.

Its mixtures choose experts by their scores and a bias, and have one of all rows, behind dense layers.
"""

from collections.abc import Mapping
from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.experts.names import CHOICE, SHARED, Experts, MixtureWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import has, special_tokens
from polydraft.models.store.gguf_header import GgufHeader


def settings(file: GgufHeader) -> dict[str, Any]:
    return {"use_bias": has(file, "attn_q.bias")}


DEFAULTS = {
    **special_tokens(1, 2, 0),
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "use_bias": False,
}

ERNIE4_5 = Network(
    "ernie4_5",
    "ernie4_5",
    attention=AttentionWeights(bias="use_bias", out_bias="use_bias"),
    feed_forward=FeedForwardWeights(bias="use_bias"),
    pairs=True,
    settings=settings,
    defaults={**DEFAULTS, "head_dim": 128, "num_key_value_heads": 2},
)


STATICS = "moe_statics.e_score_correction_bias"


def mixture(config: Any) -> Experts:
    first = config.moe_layer_start_index
    last = config.moe_layer_end_index
    interval = config.moe_layer_interval
    layers = range(config.num_hidden_layers)
    return Experts(
        config.moe_num_experts,
        config.moe_k,
        config.moe_intermediate_size,
        tuple(first <= layer <= last and (layer + 1) % interval == 0 for layer in layers),
        shared=config.moe_intermediate_size * config.moe_num_shared_experts,
        choice_biased=True,
    )


def moe_settings(file: GgufHeader) -> dict[str, Any]:
    first = file.setting("leading_dense_block_count", 0)
    step = file.count("interleave_moe_layer_step", 1)
    width = file.count("expert_feed_forward_length")
    shared = file.setting("expert_shared_count", 0)
    return {
        "use_bias": has(file, "attn_q.bias"),
        "moe_num_experts": file.count("expert_count"),
        "moe_k": file.count("expert_used_count"),
        "moe_intermediate_size": width,
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": first,
        "moe_layer_end_index": file.num_layers - 1,
        "moe_layer_interval": step,
    }


def last_layer(folder: Mapping[str, Any]) -> dict[str, Any]:
    """The last mixture, which is the last layer where it is not said, and other names of settings."""
    names = {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}
    others = {
        ours: folder[theirs] for ours, theirs in names.items() if theirs in folder and ours not in folder
    }
    if folder.get("moe_layer_end_index", -1) != -1:
        return others
    return {**others, "moe_layer_end_index": folder["num_hidden_layers"] - 1}


ERNIE4_5_MOE = Network(
    "ernie4_5_moe",
    "ernie4_5-moe",
    attention=AttentionWeights(bias="use_bias", out_bias="use_bias"),
    feed_forward=FeedForwardWeights(bias="use_bias"),
    pairs=True,
    experts=MixtureWeights(
        mixture,
        names={
            f"{SHARED}.": "mlp.shared_experts.",
            CHOICE: f"mlp.gate.{STATICS}",
            CHOICE.removesuffix("s"): f"mlp.{STATICS}".removesuffix("s"),
        },
    ),
    settings=moe_settings,
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    mended=last_layer,
)
