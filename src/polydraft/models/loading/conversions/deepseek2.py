"""DeepSeek V3 and its kin (arXiv 2412.19437): latent attention, experts in groups behind dense first layers.

Files have the second product of keys and values in two parts, that of keys transposed, and sizes of the latent cache as widths of heads; those of
heads themselves end in `_mla`. Their multiplier of yarn is a tenth of `mscale_all_dim`.
"""

from typing import Any

import torch
from torch import Tensor

from polydraft.models.loading.conversions.base import Conversion, Source, rotary, routed_experts
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.gguf_rope import YARN_MULTIPLIER


def rope(file: GgufHeader, width: int) -> dict[str, Any]:
    parameters = rotary(file, file.count("rope.dimension_count"), read=[YARN_MULTIPLIER])
    if parameters["rope_type"] != "yarn":
        return parameters
    scale = 10 * (file.number_or_none(YARN_MULTIPLIER) or 0.0)
    return {**parameters, "attention_factor": 1.0, "mscale": scale, "mscale_all_dim": scale}


def settings(file: GgufHeader) -> dict[str, Any]:
    if (gate := file.setting("expert_gating_func")) != 2:
        problem = f"its deepseek2.expert_gating_func is {gate!r}; expected 2 (sigmoid), which DeepSeek V3 has"
        raise file.refusal(problem, "Give its safetensors folder, which runs through transformers")
    turned = file.count("rope.dimension_count")
    return routed_experts(file) | {
        "head_dim": turned,
        "num_key_value_heads": file.count("attention.head_count"),
        "q_lora_rank": file.number_or_none("attention.q_lora_rank"),
        "kv_lora_rank": file.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": file.count("attention.key_length_mla") - turned,
        "v_head_dim": file.count("attention.value_length_mla"),
        "first_k_dense_replace": file.setting("leading_dense_block_count", 0),
        "n_shared_experts": file.setting("expert_shared_count", 0),
    }


def keys_and_values(config: Any, keys: Tensor, values: Tensor) -> Tensor:
    """[H, rank, D] and [H, E, rank] -> [H (D + E), rank]."""
    return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)


DEEPSEEK2 = Conversion(
    "deepseek_v3",
    settings,
    {
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    },
    {"self_attn.kv_b_proj.weight": Source(("attn_k_b.weight", "attn_v_b.weight"), keys_and_values)},
    rotary=rope,
)
