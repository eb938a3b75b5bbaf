"""Granite.

Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): Llama with scales of embeddings, residuals, scores and logits; so is MiniCPM
(arXiv 2404.06395), which transformers does not have under a name of its own. Its mixtures: experts, some with one of all rows beside them.
Granite 4 (https://www.ibm.com/granite): state spaces of Mamba-2, in some layers attention that mostly does not rotate; every token goes through a
feed-forward, beside a mixture of experts in the larger models.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from polydraft.models.mixers.experts.names import (
    PROJECTIONS,
    ROUTER,
    SHARED,
    Experts,
    MixtureWeights,
    stacked,
)
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.mixers.layer import ATTENTION, STATE_SPACE
from polydraft.models.mixers.state_space import STATE_SPACE_WEIGHTS, state_space_sizes
from polydraft.models.mixers.state_space.code import state_space_shape
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import (
    STATE_SPACE_DEFAULTS,
    everywhere,
    heads_of_states,
    largest,
    layer_sizes,
    local_experts,
    special_tokens,
    state_spaces,
)
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.places import Stored

SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
"""transformers' names -> those of files."""


def scaled_spec(config: Any, **numbers: Any) -> ModelSpec:
    """numbers: fields that differ, beside its scales."""
    return one_rotary(
        config,
        attention_scale=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1 / config.logits_scaling,
        **numbers,
    )


def settings(file: GgufHeader) -> dict[str, Any]:
    width = file.count("embedding_length") // file.count("attention.head_count")
    # files of MiniCPM do not say what scores are multiplied by
    usual = file.count("attention.key_length", width) ** -0.5 if file.architecture == "minicpm" else None
    return {
        name: file.number(key, usual if key == "attention.scale" else None) for name, key in SCALES.items()
    }


DEFAULTS = {**special_tokens(1, 2), **dict.fromkeys(SCALES, 1.0), "attention_bias": False}

GRANITE = Network(
    "granite",
    "granite minicpm",
    scaled_spec,
    interleaved=True,
    settings=settings,
    defaults={**DEFAULTS, "mlp_bias": False},
)


def hybrid_spec(config: Any) -> ModelSpec:
    kinds = getattr(config, "layers_block_type", None) or config.layer_types
    # all other kinds of transformers' configuration are state spaces
    mixers = tuple(ATTENTION if kind in ("attention", "full_attention") else STATE_SPACE for kind in kinds)
    rotates = 0 if config.position_embedding_type == "rope" else -1
    states = {STATE_SPACE: state_space_shape(mixers.count(STATE_SPACE), state_space_sizes(config))}
    return scaled_spec(
        config,
        mixers=mixers,
        states=states,
        windows=(0,) * len(mixers),
        rotary_of_layer=(rotates,) * len(mixers),
    )


def limited_steps(config: Any) -> str | None:
    """Why a model's time steps are not computed, or None."""
    limits = getattr(config, "time_step_limit", None) or (0.0, math.inf)
    if tuple(map(float, limits)) != (0.0, math.inf):
        return f"its time steps are limited to {tuple(limits)}"
    return None


def mixture(config: Any) -> Experts | None:
    if not config.num_local_experts:
        return None
    layers = (True,) * config.num_hidden_layers
    shared = config.shared_intermediate_size
    return Experts(
        config.num_local_experts, config.num_experts_per_tok, config.intermediate_size, layers, shared=shared
    )


def stack(name: str, inner: int) -> Stored | None:
    """Where folders have a weight of a feed-forward: gate and up below one another."""
    stored = stacked(name, inner)
    if stored is not None:
        return stored._replace(name=stored.name.replace("mlp.", "block_sparse_moe."))
    module, _, part = name.removesuffix(".weight").rpartition(".")
    if module not in (SHARED, "mlp") or part not in PROJECTIONS:
        return None
    if part == "down_proj":
        return Stored("shared_mlp.output_linear.weight")
    return Stored(
        "shared_mlp.input_linear.weight", part=lambda matrix: np.split(matrix, 2)[PROJECTIONS.index(part)]
    )


ROUTERS = {ROUTER: "block_sparse_moe.router", f"{ROUTER}.": "block_sparse_moe.router.layer."}
STACKS = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
}


def hybrid_settings(file: GgufHeader) -> dict[str, Any]:
    dense = largest(file, "feed_forward_length")
    return (
        state_spaces(file)
        | {name: file.number(key) for name, key in SCALES.items()}
        | {
            "layer_types": [
                "full_attention" if heads else "linear_attention"
                for heads in layer_sizes(file, "attention.head_count_kv")
            ],
            "position_embedding_type": "rope" if file.setting("rope.scaling.finetuned", True) else "nope",
            "num_local_experts": file.setting("expert_count") or 0,
            "num_experts_per_tok": file.setting("expert_used_count") or 0,
            "shared_intermediate_size": file.count("expert_shared_feed_forward_length", dense),
        }
    )


GRANITE_HYBRID = Network(
    "granitemoehybrid",
    "granitehybrid",
    hybrid_spec,
    recurrent=STATE_SPACE_WEIGHTS,
    feed_forward=FeedForwardWeights(width=lambda config: config.shared_intermediate_size),
    interleaved=True,
    settings=hybrid_settings,
    experts=MixtureWeights(
        mixture,
        optional=True,
        names=ROUTERS,
        stack=stack,
        stacks=STACKS,
    ),
    refusal=limited_steps,
    defaults={
        **DEFAULTS,
        **STATE_SPACE_DEFAULTS,
        "mamba_d_head": 64,
        "layers_block_type": None,
        "layer_types": lambda folder: ["linear_attention"] * folder["num_hidden_layers"],
        "position_embedding_type": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
    },
    mended=heads_of_states,
)


SHARED_WIDTH = "expert_shared_feed_forward_length"


def moe_settings(file: GgufHeader) -> dict[str, Any]:
    return {**{name: file.number(key) for name, key in SCALES.items()}, **local_experts(file)}


def shared_settings(file: GgufHeader) -> dict[str, Any]:
    return moe_settings(file) | {"shared_intermediate_size": file.count(SHARED_WIDTH)}


MOE_DEFAULTS = {**DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2}

GRANITE_MOE = Network(
    "granitemoe",
    "granitemoe",
    scaled_spec,
    interleaved=True,
    experts=MixtureWeights(everywhere, names=ROUTERS, stack=stack, stacks=STACKS),
    settings=moe_settings,
    reads_file=lambda file: not file.setting(SHARED_WIDTH),
    defaults=MOE_DEFAULTS,
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    model_type="granitemoeshared",
    experts=MixtureWeights(mixture, names=ROUTERS, stack=stack, stacks=STACKS),
    settings=shared_settings,
    reads_file=lambda file: bool(file.setting(SHARED_WIDTH)),
    defaults={**MOE_DEFAULTS, "shared_intermediate_size": 0},
)
