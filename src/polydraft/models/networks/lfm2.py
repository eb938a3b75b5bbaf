"""LFM2 (arXiv 2511.23404): short convolutions, and in some layers attention with norms of queries and keys; SiLU gate.

The feed-forwards of LFM2-MoE behind the first layers are mixtures of experts, chosen by the sigmoid of their scores.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.experts.names import (
    CHOICE,
    ROUTER,
    Experts,
    MixtureWeights,
    stacked,
)
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.mixers.layer import ATTENTION, CONVOLUTION
from polydraft.models.mixers.short_convolution import CONVOLUTION_WEIGHTS, convolution_shape
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import layer_sizes, special_tokens
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.places import Stored


def spec(config: Any) -> ModelSpec:
    # all other kinds of transformers' configuration are convolutions
    mixers = tuple(ATTENTION if kind == "full_attention" else CONVOLUTION for kind in config.layer_types)
    shape = convolution_shape(mixers.count(CONVOLUTION), config.hidden_size, config.conv_L_cache)
    return one_rotary(config, epsilon=config.norm_eps, mixers=mixers, states={CONVOLUTION: shape})


def inner_width(config: Any) -> int:
    """As transformers' `Lfm2MLP` has it."""
    width = config.intermediate_size
    if getattr(config, "block_auto_adjust_ff_dim", False):
        width = int((config.block_ffn_dim_multiplier or 1.0) * int(2 * width / 3))
        width = -(-width // config.block_multiple_of) * config.block_multiple_of
    return width


def settings(file: GgufHeader) -> dict[str, Any]:
    heads = layer_sizes(file, "attention.head_count_kv")
    return {
        "norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": file.count("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


def convolutions_between(folder: Mapping[str, Any]) -> list[str]:
    attends = folder["full_attn_idxs"]
    return ["full_attention" if layer in attends else "conv" for layer in range(folder["num_hidden_layers"])]


def old_names(folder: Mapping[str, Any]) -> dict[str, Any]:
    """What the first folders call otherwise."""
    names = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    return {ours: folder[theirs] for theirs, ours in names.items() if theirs in folder}


LFM2 = Network(
    "lfm2",
    "lfm2",
    spec,
    norms={"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"},
    final_norm="model.embedding_norm",
    attention=AttentionWeights(
        matrices={**AttentionWeights().matrices, "out": ("self_attn.out_proj",)},
        norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    ),
    recurrent=CONVOLUTION_WEIGHTS,
    feed_forward=FeedForwardWeights.of(
        "feed_forward.w1", "feed_forward.w3", "feed_forward.w2", width=inner_width
    ),
    names={
        "model.embedding_norm": "token_embd_norm",
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
    },
    settings=settings,
    defaults={
        **special_tokens(1, 2, 0),
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "norm_eps": 1e-5,
        "rms_norm_eps": lambda folder: folder["norm_eps"],
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": lambda folder: list(range(folder["num_hidden_layers"])),
        "layer_types": convolutions_between,
    },
    mended=old_names,
)


def mixture(config: Any) -> Experts:
    return Experts(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        tuple(layer >= config.num_dense_layers for layer in range(config.num_hidden_layers)),
        sigmoid=True,
        shares=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        choice_biased=config.use_expert_bias,
    )


def stack(name: str, inner: int) -> Stored | None:
    stored = stacked(name, inner)
    return stored and stored._replace(name=stored.name.replace("mlp.", "feed_forward."))


def moe_settings(file: GgufHeader) -> dict[str, Any]:
    return {
        **LFM2.settings(file),
        "num_dense_layers": file.setting("leading_dense_block_count", 0),
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "num_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": file.number_or_none("expert_weights_scale") or 1.0,
    }


LFM2_MOE = replace(
    LFM2,
    model_type="lfm2_moe",
    gguf="lfm2moe",
    settings=moe_settings,
    defaults={
        **{name: LFM2.defaults[name] for name in LFM2.defaults if not name.startswith(("block_", "full_"))},
        "layer_types": None,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    },
    experts=MixtureWeights(
        mixture,
        names={ROUTER: "feed_forward.gate", CHOICE: "feed_forward.expert_bias"},
        stack=stack,
        module="feed_forward",
    ),
)
