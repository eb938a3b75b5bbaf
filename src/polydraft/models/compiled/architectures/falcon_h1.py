"""Falcon-H1 (arXiv 2507.22448): attention and a state space of Mamba-2 side by side in every layer.

Multipliers are folded into the weights of GGUF files; folders, whose weights have none of them, run through transformers.
"""

from typing import Any

from polydraft.models.compiled.architectures.base import (
    ATTENTION_AND_STATE_SPACE,
    MATRICES,
    STATE_SPACE,
    Architecture,
    ModelSpec,
    one_rotary,
)
from polydraft.models.compiled.architectures.granite_hybrid import (
    LOGARITHMS,
    MAMBA_NAMES,
    STATE_MATRICES,
    STATE_VECTORS,
    limited_steps,
    sizes,
    state_space_shapes,
)
from polydraft.models.compiled.parts.state_space import state_space_shape
from polydraft.models.loading.conversions.state_spaces import FALCON_H1 as FILES
from polydraft.models.loading.conversions.state_spaces import falcon

MULTIPLIERS = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}


def spec(config: Any) -> ModelSpec:
    layers = config.num_hidden_layers
    states = {STATE_SPACE: state_space_shape(layers, sizes(config))}
    return one_rotary(config, mixers=(ATTENTION_AND_STATE_SPACE,) * layers, states=states, windows=(0,) * layers)


def refusal(config: Any) -> str | None:
    factors = [getattr(config, f"{name}_multiplier", 1.0) for name in MULTIPLIERS]
    factors += [*getattr(config, "ssm_multipliers", ()), *getattr(config, "mlp_multipliers", ())]
    if any(factor not in (None, 1.0) for factor in factors):
        return "it has multipliers, which GGUF files have in their weights"
    if config.projectors_bias or config.mamba_proj_bias or (config.mamba_rms_norm and config.mamba_norm_before_gate):
        return "its state spaces have biases, or norms before their gates"
    return limited_steps(config)


def mixer_shapes(config: Any, kind: str) -> dict[str, tuple[int, ...]]:
    return state_space_shapes(config, norm=config.mamba_rms_norm)


FALCON_H1 = Architecture(
    "falcon_h1",
    "falcon-h1",
    spec,
    NORMS,
    gguf_names=MAMBA_NAMES | dict(FILES.names) | {"pre_ff_layernorm.weight": "ffn_norm"},
    gguf_settings=falcon,
    matrices=MATRICES
    | STATE_MATRICES
    | {"gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"), "down": ("feed_forward.down_proj",)},
    vectors=STATE_VECTORS,
    final_norm="model.final_layernorm",
    mixer_shapes=mixer_shapes,
    gguf_values=LOGARITHMS,
    refusal=refusal,
)
