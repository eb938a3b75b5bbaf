"""DeepSeek V2 and V3 and their kin (arXiv 2405.04434, 2412.19437): latent attention, experts in groups behind dense first layers, and experts of
all rows. GLM-4.7 Flash and Moonlight are V3 of other sizes. V2 chooses groups by their best expert, and experts by a softmax.

Files have the second product of keys and values in two parts, that of keys transposed, and sizes of the latent cache as widths of heads; those of
heads themselves end in `_mla`. Their multiplier of yarn is a tenth of `mscale_all_dim`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polydraft.models.mixers.experts.names import SHARED, Experts, MixtureWeights
from polydraft.models.mixers.latent_attention import LATENT_WEIGHTS, LatentHeads, in_folder
from polydraft.models.mixers.layer import LATENT_ATTENTION
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import (
    grouped_experts,
    grouped_mixture,
    renamed,
    rotary,
    special_tokens,
)
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.rotary import rope_parameters
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.gguf_rope import YARN_MULTIPLIER
from polydraft.models.windows import setting

SOFTMAX, SIGMOID = 1, 2
"""`expert_gating_func` of files."""


def rope(file: GgufHeader, width: int) -> dict[str, Any]:
    parameters = rotary(file, file.count("rope.dimension_count"), read=[YARN_MULTIPLIER])
    if parameters["rope_type"] != "yarn":
        return parameters
    scale = 10 * (file.number_or_none(YARN_MULTIPLIER) or 0.0)
    return {**parameters, "attention_factor": 1.0, "mscale": scale, "mscale_all_dim": scale}


def attention_scale(config: Any) -> float:
    """Of scores: yarn's growth of both, of queries and keys, stands here and not in their rotation."""
    heads = LatentHeads.of(config)
    scale = (heads.plain + heads.turned) ** -0.5
    said = rope_parameters(config)
    multiplier = said.get("mscale_all_dim") or 0.0
    if said.get("rope_type", "default") == "default" or not multiplier or said["factor"] <= 1:
        return scale
    return scale * (0.1 * multiplier * math.log(said["factor"]) + 1.0) ** 2


def spec(config: Any) -> ModelSpec:
    return one_rotary(
        config,
        mixers=(LATENT_ATTENTION,) * config.num_hidden_layers,
        attention_scale=attention_scale(config),
        latent=LatentHeads.of(config),
    )


def gating(file: GgufHeader) -> int:
    """Files that are older than V3 do not say it."""
    return file.setting("expert_gating_func") or SOFTMAX


def settings(file: GgufHeader) -> dict[str, Any]:
    if gating(file) not in (SOFTMAX, SIGMOID):
        problem = f"its deepseek2.expert_gating_func is {gating(file)!r}; expected 1 (softmax) or 2 (sigmoid)"
        raise file.refusal(problem, "Give its safetensors folder, which runs through transformers")
    turned = file.count("rope.dimension_count")
    return grouped_experts(file) | {
        "head_dim": turned,
        "num_key_value_heads": file.count("attention.head_count"),
        "q_lora_rank": file.setting("attention.q_lora_rank"),
        "kv_lora_rank": file.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": file.count("attention.key_length_mla") - turned,
        "v_head_dim": file.count("attention.value_length_mla"),
        "first_k_dense_replace": file.setting("leading_dense_block_count", 0),
        "n_shared_experts": file.setting("expert_shared_count", 0),
    }


def settings2(file: GgufHeader) -> dict[str, Any]:
    groups = file.setting("expert_group_count") or 1
    return settings(file) | {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}


def mixture(config: Any) -> Experts:
    layers = config.num_hidden_layers
    kinds = setting(config, "mlp_layer_types")
    dense = setting(config, "first_k_dense_replace", 0)
    sparse = tuple(kinds[layer] == "sparse" if kinds else layer >= dense for layer in range(layers))
    shared = config.moe_intermediate_size * (config.n_shared_experts or 0)
    return grouped_mixture(config, config.n_routed_experts, sparse, shared)


def mixture2(config: Any) -> Experts:
    grouped = config.topk_method == "group_limited_greedy"
    groups = (
        {"groups": config.n_group, "best_groups": config.topk_group}
        if grouped
        else {"groups": 1, "best_groups": 1}
    )
    return replace(mixture(config), sigmoid=False, pairs=False, shares=False, choice_biased=False, **groups)


def refusal2(config: Any) -> str | None:
    known = config.topk_method in ("greedy", "group_limited_greedy")
    return None if known else f"it chooses experts by {config.topk_method!r}"


def mended(folder: Mapping[str, Any]) -> dict[str, Any]:
    """What rotates of a head is what transformers calls its width."""
    known = renamed("n_routed_experts", "num_local_experts")(folder)
    return known | {"head_dim": folder.get("qk_rope_head_dim") or 64}


DEFAULTS: dict[str, Any] = {
    **special_tokens(0, 1),
    "attention_bias": False,
    "rope_interleave": True,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
}
"""Of V3, as its class in transformers has them."""
DEEPSEEK_V3 = Network(
    "deepseek_v3",
    "deepseek2",
    spec,
    recurrent=LATENT_WEIGHTS,
    experts=MixtureWeights(mixture, names={f"{SHARED}.": "mlp.shared_experts."}),
    place=in_folder,
    settings=settings,
    rope=rope,
    reads_file=lambda file: gating(file) != SOFTMAX,
    defaults=DEFAULTS,
    mended=mended,
)
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    refusal=refusal2,
    experts=MixtureWeights(mixture2, names={f"{SHARED}.": "mlp.shared_experts."}),
    settings=settings2,
    reads_file=lambda file: gating(file) == SOFTMAX,
    defaults={
        **{name: value for name, value in DEFAULTS.items() if name != "rope_interleave"},
        **special_tokens(1, 2),
        "mlp_bias": False,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.0,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "num_experts_per_tok": None,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    },
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    gguf="",
    defaults={
        **{name: value for name, value in DEFAULTS.items() if name != "first_k_dense_replace"},
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "mlp_layer_types": lambda folder: ["dense"] + ["sparse"] * (folder["num_hidden_layers"] - 1),
    },
)
"""GLM-4.7 Flash; its files are V3's."""
