"""DeepSeek V3 and its kin (arXiv 2412.19437): latent attention, experts in groups behind dense first layers.

Files have the second product of keys and values in two parts, that of keys transposed, and sizes of the latent cache as widths of heads; those of
heads themselves end in `_mla`. Their multiplier of yarn is a tenth of `mscale_all_dim`.
"""

from typing import Any

from polydraft.models.mixers.experts.names import Experts, MixtureWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import grouped_experts, rotary
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.gguf_rope import YARN_MULTIPLIER
from polydraft.models.store.places import Stored

KEYS = "self_attn.k_b_proj.weight"
VALUES = "self_attn.v_b_proj.weight"
"""Of the second product of keys and values, [heads, rank, width] and [heads, width, rank]."""


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
    return grouped_experts(file) | {
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


def mixture(config: Any) -> Experts:
    dense = config.first_k_dense_replace
    layers = tuple(layer >= dense for layer in range(config.num_hidden_layers))
    return Experts(config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size, layers)


def pieces(config: Any, layer: int) -> dict[str, tuple[int, ...]]:
    heads = config.num_attention_heads
    rank = config.kv_lora_rank
    shapes: dict[str, tuple[int, ...]] = {
        KEYS: (heads, rank, config.qk_nope_head_dim),
        VALUES: (heads, config.v_head_dim, rank),
    }
    experts = mixture(config)
    return shapes | (experts.expert_shapes(config.hidden_size) if experts.layers[layer] else {})


def place(name: str, config: Any) -> Stored | None:
    if name not in (KEYS, VALUES):
        return None
    heads = config.num_attention_heads
    width = config.qk_nope_head_dim

    def part(matrix: Any) -> Any:
        by_head = matrix.reshape(heads, -1, *matrix.shape[1:])
        return by_head[:, :width].swapaxes(1, 2) if name == KEYS else by_head[:, width:]

    return Stored("self_attn.kv_b_proj.weight", part=part)


DEEPSEEK_V3 = Network(
    "deepseek_v3",
    "deepseek2",
    lacks="latent attention, whose keys and values are made of one compressed row",
    experts=MixtureWeights(mixture),
    pieces=pieces,
    place=place,
    names={
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.k_b_proj": "attn_k_b",
        "self_attn.v_b_proj": "attn_v_b",
        **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    },
    settings=settings,
    rope=rope,
)
