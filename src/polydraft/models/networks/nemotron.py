"""Nemotron.

Nemotron-4 and Minitron (arXiv 2402.16819, 2407.14679): `LayerNorm` whose weights folders have less 1, squared ReLU without a gate, rotation of a half of
each head.
Nemotron-H (arXiv 2504.03624) and Nemotron 3: a layer is one of attention, a feed-forward, a mixture of experts or a state space. Decay rates of files
are negative numbers, not logarithms."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.experts.names import EXPERT, ROUTER, SHARED, Experts, MixtureWeights
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.mixers.layer import ATTENTION, NOTHING, STATE_SPACE
from polydraft.models.mixers.state_space import (
    STATE_SPACE_WEIGHTS,
    state_space_shapes,
    state_space_sizes,
)
from polydraft.models.mixers.state_space.code import state_space_shape
from polydraft.models.networks.base import Network
from polydraft.models.networks.granite import limited_steps
from polydraft.models.networks.settings import (
    LAYER_NORM,
    grouped_experts,
    grouped_mixture,
    linear_biases,
    special_tokens,
    state_spaces,
)
from polydraft.models.networks.spec import ModelSpec, one_rotary, partly_rotated
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.places import Stored


def spec(config: Any) -> ModelSpec:
    return partly_rotated(config, epsilon=config.norm_eps, centred=True)


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "norm_eps": file.number(LAYER_NORM),
        "hidden_act": "relu2",
        **linear_biases(file),
    }


NEMOTRON = Network(
    "nemotron",
    "nemotron",
    spec,
    norm_bias=True,
    norm_offset=1.0,
    attention=AttentionWeights(bias="attention_bias", out_bias="attention_bias"),
    feed_forward=FeedForwardWeights.ungated("mlp_bias"),
    partial_rotary=True,
    settings=settings,
    defaults={
        **special_tokens(2, 3),
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
)


KINDS = {
    "attn_q.weight": "full_attention",
    "ffn_gate_inp.weight": "moe",
    "ffn_up.weight": "mlp",
    "ssm_in.weight": "linear_attention",
}
"""What a layer is, by a tensor that it alone has."""
NORMS = {"attention_norm": "norm", "mlp_norm": "norm"}
NAMES = {
    "norm": "attn_norm",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
RENAMED = {
    "model.embed_tokens": "model.embeddings",
    "model.norm": "model.norm_f",
    "mamba": "mixer",
    **{f"mamba.{part}": f"mixer.{part}" for part in ("in_proj", "out_proj", "conv1d", "norm")},
    **{f"self_attn.{part}_proj": f"mixer.{part}_proj" for part in "qkvo"},
    **{f"mlp.{part}_proj": f"mixer.{part}_proj" for part in ("up", "down")},
}
OF_LAYER = {
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "linear_attention": STATE_SPACE,
    "mamba": STATE_SPACE,
}
PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Kinds of layers, as older folders write them."""


def mamba(config: Any) -> SimpleNamespace:
    """Its settings of state spaces, as Granite's configurations name them."""
    return SimpleNamespace(
        hidden_size=config.hidden_size,
        mamba_n_heads=config.mamba_num_heads,
        mamba_d_head=config.mamba_head_dim,
        mamba_n_groups=config.n_groups,
        mamba_d_state=config.ssm_state_size,
        mamba_d_conv=config.conv_kernel,
        mamba_conv_bias=config.use_conv_bias,
        mamba_proj_bias=config.mamba_proj_bias,
    )


def hybrid_spec(config: Any) -> ModelSpec:
    kinds = config.layers_block_type
    mixers = tuple(OF_LAYER.get(kind, NOTHING) for kind in kinds)
    count = mixers.count(STATE_SPACE)
    states = {STATE_SPACE: state_space_shape(count, state_space_sizes(mamba(config)))} if count else {}
    return one_rotary(
        config,
        epsilon=config.layer_norm_epsilon,
        mixers=mixers,
        states=states,
        windows=(0,) * len(mixers),
        rotaries=({"rope_type": "default", "rope_theta": 10_000.0},),
        rotary_of_layer=(-1,) * len(mixers),
        activation=config.mlp_hidden_act,
        has_feed_forward=tuple(mixer == NOTHING for mixer in mixers),
    )


def refusal(config: Any) -> str | None:
    if config.attention_bias or config.mlp_bias:
        return "its products have biases"
    if config.moe_latent_size and "moe" in config.layers_block_type:
        return f"its experts work on {config.moe_latent_size} numbers of a row"
    return limited_steps(config)


def mixture(config: Any) -> Experts | None:
    sparse = tuple(kind == "moe" for kind in config.layers_block_type)
    if not any(sparse):
        return None
    return grouped_mixture(
        config,
        config.n_routed_experts,
        sparse,
        config.moe_shared_expert_intermediate_size,
        gated=False,
        latent=config.moe_latent_size or 0,
    )


def stack(name: str, inner: int) -> Stored | None:
    match = EXPERT.fullmatch(name)
    return match and Stored(f"mixer.experts.{match[2]}_proj", int(match[1]))


def kinds_of_folder(folder: Mapping[str, Any]) -> dict[str, Any]:
    """Kinds of layers, under any of their names, and how many they are."""
    pattern = folder.get("hybrid_override_pattern")
    older = [PATTERN[letter] for letter in pattern] if pattern else KINDS_UNSAID
    kinds = folder.get("layers_block_type") or folder.get("layer_types") or older
    return {"layers_block_type": kinds, "num_hidden_layers": len(kinds), "layer_types": None}


KINDS_UNSAID = ["linear_attention", "moe", "full_attention", "mlp"]


def hybrid_settings(file: GgufHeader) -> dict[str, Any]:
    mamba = state_spaces(file)
    blocks = [f"blk.{layer}." for layer in range(file.num_layers)]
    widths = [
        file.tensors[f"{block}ffn_up.weight"].shape[0]
        for block in blocks
        if f"{block}ffn_up.weight" in file.tensors
    ]
    epsilon = file.setting("attention.layer_norm_rms_epsilon")
    hybrid_settings = {
        "layers_block_type": [
            next((KINDS[tensor] for tensor in KINDS if block + tensor in file.tensors), "mlp")
            for block in blocks
        ],
        "intermediate_size": widths[0] if widths else 1,
        "layer_norm_epsilon": file.number("attention.layer_norm_epsilon", epsilon),
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "moe_latent_size": None,
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "expand": mamba["mamba_expand"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "mamba_proj_bias": mamba["mamba_proj_bias"],
        **linear_biases(file),
    }
    return hybrid_settings | (expert_settings(file) if file.setting("expert_count") else {})


def expert_settings(file: GgufHeader) -> dict[str, Any]:
    """A sigmoid of scores, with a bias for the choice alone; experts may work on fewer numbers than a row has."""
    return grouped_experts(file) | {
        "moe_shared_expert_intermediate_size": file.count("expert_shared_feed_forward_length"),
        "n_shared_experts": file.setting("expert_shared_count", 1),
        "moe_latent_size": file.number_or_none("moe_latent_size"),
    }


NEMOTRON_H = Network(
    "nemotron_h",
    "nemotron_h nemotron_h_moe",
    hybrid_spec,
    norms=NORMS,
    recurrent=replace(STATE_SPACE_WEIGHTS, shapes=lambda config: state_space_shapes(mamba(config))),
    feed_forward=FeedForwardWeights.ungated(),
    experts=MixtureWeights(
        mixture,
        optional=True,
        names={
            ROUTER: "mixer.gate",
            f"{SHARED}.": "mixer.shared_experts.",
            "mlp.experts": "mixer.experts",
        },
        stack=stack,
    ),
    renamed=RENAMED,
    names=NAMES,
    settings=hybrid_settings,
    refusal=refusal,
    defaults={
        **special_tokens(1, 2, 0),
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "layer_norm_epsilon": 1e-5,
        "layers_block_type": KINDS_UNSAID,
        "attention_bias": False,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "use_conv_bias": True,
        "mamba_proj_bias": False,
        "time_step_limit": lambda hybrid_settings: [0.0, math.inf],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    mended=kinds_of_folder,
)
