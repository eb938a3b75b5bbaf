"""Falcon-H1 (arXiv 2507.22448): attention and a state space of Mamba-2 side by side in every layer.

Multipliers are folded into the weights of GGUF files; of folders they are multiplied with the weights that are read, in float32.
"""

from typing import Any

import numpy as np

from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.mixers.layer import ATTENTION_AND_STATE_SPACE, STATE_SPACE
from polydraft.models.mixers.state_space import STATE_SPACE_WEIGHTS, state_space_sizes
from polydraft.models.mixers.state_space.code import state_space_shape
from polydraft.models.networks.base import Network
from polydraft.models.networks.granite import limited_steps
from polydraft.models.networks.settings import (
    STATE_SPACE_DEFAULTS,
    has,
    heads_of_states,
    linear_biases,
    special_tokens,
    state_spaces,
)
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.places import Stored

MULTIPLIERS = ("attention_in", "attention_out", "embedding", "key", "lm_head", "ssm_in", "ssm_out")


def spec(config: Any) -> ModelSpec:
    layers = config.num_hidden_layers
    states = {STATE_SPACE: state_space_shape(layers, state_space_sizes(config))}
    return one_rotary(
        config,
        mixers=(ATTENTION_AND_STATE_SPACE,) * layers,
        states=states,
        windows=(0,) * layers,
        embedding_scale=_multiplier(config, "embedding"),
        logit_scale=_multiplier(config, "lm_head"),
    )


def _multiplier(config: Any, name: str) -> float:
    return getattr(config, f"{name}_multiplier", None) or 1.0


def multipliers(config: Any) -> dict[str, float]:
    """What weights of a layer are multiplied by, but for the state space's first product."""
    entering = _multiplier(config, "attention_in")
    gate, down = getattr(config, "mlp_multipliers", None) or (1.0, 1.0)
    return {
        "self_attn.q_proj.weight": entering,
        "self_attn.k_proj.weight": entering * _multiplier(config, "key"),
        "self_attn.v_proj.weight": entering,
        "self_attn.o_proj.weight": _multiplier(config, "attention_out"),
        "mamba.out_proj.weight": _multiplier(config, "ssm_out"),
        "mamba.out_proj.bias": _multiplier(config, "ssm_out"),
        "feed_forward.gate_proj.weight": gate,
        "feed_forward.down_proj.weight": down,
    }


def place(name: str, config: Any) -> Stored | None:
    """A weight times its multiplier; of the state space's first product z, x, B, C and dt have one each."""
    factor = multipliers(config).get(name, 1.0)
    if name in ("mamba.in_proj.weight", "mamba.in_proj.bias"):
        s = state_space_sizes(config)
        entering = _multiplier(config, "ssm_in") if name.endswith("weight") else 1.0
        rows = s.inner, s.inner, s.groups * s.states, s.groups * s.states, s.heads
        row_multipliers = getattr(config, "ssm_multipliers", None) or (1.0,) * len(rows)
        if entering != 1.0 or any(multiplier != 1.0 for multiplier in row_multipliers):
            factors = np.array(row_multipliers, np.float32).repeat(rows) * np.float32(entering)
            return Stored(name, factors=factors)
    return None if factor == 1.0 else Stored(name, factors=np.array([factor], np.float32))


def refusal(config: Any) -> str | None:
    if config.mamba_rms_norm and config.mamba_norm_before_gate:
        return "its state spaces have norms before their gates"
    return limited_steps(config)


def settings(file: GgufHeader) -> dict[str, Any]:
    return state_spaces(file) | {
        "mamba_d_ssm": file.count("ssm.inner_size"),
        "mamba_rms_norm": has(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": has(file, "ssm_out.bias"),
        **linear_biases(file),
    }


FALCON_H1 = Network(
    "falcon_h1",
    "falcon-h1",
    spec,
    refusal=refusal,
    norms={"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
    final_norm="model.final_layernorm",
    recurrent=STATE_SPACE_WEIGHTS,
    feed_forward=FeedForwardWeights.of(
        "feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"
    ),
    place=place,
    names={"model.final_layernorm": "output_norm", "pre_ff_layernorm.weight": "ffn_norm"},
    settings=settings,
    defaults={
        **special_tokens(1, 2, 0),
        **STATE_SPACE_DEFAULTS,
        **dict.fromkeys([f"{name}_multiplier" for name in MULTIPLIERS], 1.0),
        "mamba_d_head": 8,
        "mamba_d_ssm": 1024,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": True,
        "projectors_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "mlp_multipliers": lambda folder: [1.0] * 2,
        "ssm_multipliers": lambda folder: [1.0] * 5,
    },
    mended=heads_of_states,
)
