"""Nemotron-H (arXiv 2504.03624) and Nemotron 3: a layer is one of attention, a feed-forward, a mixture of experts or a state space.

Decay rates of files are negative numbers, not logarithms.
"""

from typing import Any

import numpy as np

from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import grouped_experts, has, state_spaces
from polydraft.models.store.gguf_header import GgufHeader

KINDS = {
    "attn_q.weight": "full_attention",
    "ffn_gate_inp.weight": "moe",
    "ffn_up.weight": "mlp",
    "ssm_in.weight": "linear_attention",
}
"""What a layer is, by a tensor that it alone has."""
NAMES = {
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "norm": "attn_norm",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.in_proj": "ssm_in",
    "mixer.out_proj": "ssm_out",
    "mixer.norm": "ssm_norm",
    "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d",
    "mixer.dt_bias": "ssm_dt.bias",
    **{f"mixer.{name}_proj": f"attn_{name}" for name in "qkv"},
    "mixer.o_proj": "attn_output",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps.weight",
    "mixer.experts.down_proj": "ffn_down_exps.weight",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
NAMES |= {f"mixer.{name}_proj": f"ffn_{name}" for name in ("up", "down")}
NAMES |= {f"mixer.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("up", "down")}


def settings(file: GgufHeader) -> dict[str, Any]:
    mamba = state_spaces(file)
    blocks = [f"blk.{layer}." for layer in range(file.num_layers)]
    widths = [
        file.tensors[f"{block}ffn_up.weight"].shape[0]
        for block in blocks
        if f"{block}ffn_up.weight" in file.tensors
    ]
    epsilon = file.setting("attention.layer_norm_rms_epsilon")
    settings = {
        "layers_block_type": [
            next((KINDS[tensor] for tensor in KINDS if block + tensor in file.tensors), "mlp")
            for block in blocks
        ],
        "intermediate_size": widths[0] if widths else 1,
        "layer_norm_epsilon": file.number("attention.layer_norm_epsilon", epsilon),
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "expand": mamba["mamba_expand"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "mamba_proj_bias": mamba["mamba_proj_bias"],
        "attention_bias": has(file, "attn_q.bias"),
        "mlp_bias": has(file, "ffn_up.bias"),
    }
    return settings | (expert_settings(file) if file.setting("expert_count") else {})


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
    lacks="layers of a mixer or of a feed-forward alone, and squared ReLU without a gate, of mixtures, too",
    names=NAMES,
    settings=settings,
    values={"mixer.A_log": lambda rates: np.log(-rates.astype(np.float64)).astype(np.float32)},
)
