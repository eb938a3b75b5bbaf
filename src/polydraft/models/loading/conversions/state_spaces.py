"""Hybrids with Mamba-2 (arXiv 2405.21060): Granite 4 (https://www.ibm.com/granite), Nemotron-H (arXiv 2504.03624), Falcon-H1 (arXiv 2507.22448).

Decay rates of files are negative numbers, not logarithms. Granite's attention layers are those with heads of keys; in Nemotron-H a layer is one of
attention, a feed-forward, a mixture of experts (Nemotron 3) or a state space. Falcon's multipliers are folded into its weights.
"""

from typing import Any

from polydraft.models.loading.conversions.base import (
    Conversion,
    Source,
    has,
    joined,
    largest,
    layer_sizes,
    log_of_negative,
    routed_experts,
)
from polydraft.models.loading.gguf_header import GgufHeader

MAMBA_NAMES = {"conv1d": "ssm_conv1d", "in_proj": "ssm_in", "out_proj": "ssm_out"}


def mamba_weights(module: str) -> dict[str, Source]:
    return {
        f"{module}.A_log": log_of_negative("ssm_a"),
        f"{module}.D": Source(("ssm_d",)),
        f"{module}.dt_bias": Source(("ssm_dt.bias",)),
        f"{module}.norm.weight": Source(("ssm_norm.weight",), lambda config, by_group: by_group.flatten()),
    }


def mamba(file: GgufHeader) -> dict[str, Any]:
    heads = file.count("ssm.time_step_rank")
    inner = file.count("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": file.count("ssm.group_count"),
        "mamba_d_state": file.count("ssm.state_size"),
        "mamba_d_conv": file.count("ssm.conv_kernel"),
        "mamba_expand": inner // file.count("embedding_length"),
        "mamba_conv_bias": has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(file, "ssm_in.bias"),
    }


def granite(file: GgufHeader) -> dict[str, Any]:
    dense = largest(file, "feed_forward_length")
    return mamba(file) | {
        "layer_types": [
            "full_attention" if heads else "linear_attention"
            for heads in layer_sizes(file, "attention.head_count_kv")
        ],
        "position_embedding_type": "rope" if file.setting("rope.scaling.finetuned", True) else "nope",
        "attention_multiplier": file.number("attention.scale"),
        "embedding_multiplier": file.number("embedding_scale"),
        "residual_multiplier": file.number("residual_scale"),
        "logits_scaling": file.number("logit_scale"),
        "num_local_experts": file.setting("expert_count") or 0,
        "num_experts_per_tok": file.setting("expert_used_count") or 0,
        "shared_intermediate_size": file.count("expert_shared_feed_forward_length", dense),
    }


def granite_hybrid(shared: str) -> Conversion:
    """shared: end of the names of the feed-forward that every token goes through."""
    experts = {
        "block_sparse_moe.experts.gate_up_proj": joined("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        "block_sparse_moe.experts.down_proj": Source(("ffn_down_exps.weight",)),
        "shared_mlp.input_linear.weight": joined(f"ffn_gate{shared}.weight", f"ffn_up{shared}.weight"),
    }
    names = {"block_sparse_moe.router": "ffn_gate_inp", "shared_mlp.output_linear": f"ffn_down{shared}"}
    names |= {f"mamba.{name}": theirs for name, theirs in MAMBA_NAMES.items()}
    return Conversion("granitemoehybrid", granite, names, mamba_weights("mamba") | experts, interleaved=True)


GRANITE_HYBRID = granite_hybrid("_shexp")
GRANITE_HYBRID_DENSE = granite_hybrid("")


KINDS = {
    "attn_q.weight": "full_attention",
    "ffn_gate_inp.weight": "moe",
    "ffn_up.weight": "mlp",
    "ssm_in.weight": "linear_attention",
}
"""What a layer of Nemotron-H is, by a tensor that it alone has."""


def nemotron(file: GgufHeader) -> dict[str, Any]:
    mixed = mamba(file)
    blocks = [f"blk.{layer}." for layer in range(file.num_layers)]
    feed_forward = next(
        (
            file.tensors[f"{block}ffn_up.weight"]
            for block in blocks
            if f"{block}ffn_up.weight" in file.tensors
        ),
        None,
    )
    settings = {
        "layers_block_type": [
            next((KINDS[tensor] for tensor in KINDS if block + tensor in file.tensors), "mlp")
            for block in blocks
        ],
        "intermediate_size": 1 if feed_forward is None else feed_forward.shape[0],
        "layer_norm_epsilon": file.number(
            "attention.layer_norm_epsilon", file.setting("attention.layer_norm_rms_epsilon")
        ),
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": mixed["mamba_n_heads"],
        "mamba_head_dim": mixed["mamba_d_head"],
        "n_groups": mixed["mamba_n_groups"],
        "ssm_state_size": mixed["mamba_d_state"],
        "conv_kernel": mixed["mamba_d_conv"],
        "expand": mixed["mamba_expand"],
        "use_conv_bias": mixed["mamba_conv_bias"],
        "mamba_proj_bias": mixed["mamba_proj_bias"],
        "attention_bias": has(file, "attn_q.bias"),
        "mlp_bias": has(file, "ffn_up.bias"),
    }
    return settings | (nemotron_experts(file) if file.setting("expert_count") else {})


def nemotron_experts(file: GgufHeader) -> dict[str, Any]:
    """A sigmoid of scores, with a bias for the choice alone; experts may work on fewer numbers than a row has."""
    return routed_experts(file) | {
        "moe_shared_expert_intermediate_size": file.count("expert_shared_feed_forward_length"),
        "n_shared_experts": file.setting("expert_shared_count", 1),
        "moe_latent_size": file.number_or_none("moe_latent_size"),
    }


NEMOTRON_H = Conversion(
    "nemotron_h",
    nemotron,
    {
        "model.embeddings": "token_embd",
        "model.norm_f": "output_norm",
        "norm": "attn_norm",
        **{f"mixer.{name}": theirs for name, theirs in MAMBA_NAMES.items()},
        **{f"mixer.{name}_proj": f"attn_{name}" for name in "qkv"},
        "mixer.o_proj": "attn_output",
        **{f"mixer.{name}_proj": f"ffn_{name}" for name in ("up", "down")},
        **{f"mixer.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("up", "down")},
        "mixer.gate": "ffn_gate_inp",
        "mixer.fc1_latent_proj": "ffn_latent_down",
        "mixer.fc2_latent_proj": "ffn_latent_up",
    },
    mamba_weights("mixer")
    | {
        "mixer.gate.e_score_correction_bias": Source(("exp_probs_b.bias",)),
        "mixer.experts.up_proj": Source(("ffn_up_exps.weight",)),
        "mixer.experts.down_proj": Source(("ffn_down_exps.weight",)),
    },
)


def falcon(file: GgufHeader) -> dict[str, Any]:
    return mamba(file) | {
        "mamba_d_ssm": file.count("ssm.inner_size"),
        "mamba_rms_norm": has(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": has(file, "ssm_out.bias"),
        "attention_bias": has(file, "attn_q.bias"),
        "mlp_bias": has(file, "ffn_up.bias"),
    }


FALCON_H1 = Conversion(
    "falcon_h1",
    falcon,
    {
        "model.final_layernorm": "output_norm",
        **{f"mamba.{name}": theirs for name, theirs in MAMBA_NAMES.items()},
        **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    },
    mamba_weights("mamba") | {"pre_ff_layernorm.weight": Source(("ffn_norm",))},
)
