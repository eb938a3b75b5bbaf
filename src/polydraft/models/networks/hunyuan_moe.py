"""Hunyuan's mixtures (arXiv 2411.02265): Hunyuan with experts in every layer, and one of all rows beside them."""

from typing import Any

from polydraft.models.mixers.experts.names import ROUTER, SHARED, Experts, MixtureWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.hunyuan import ATTENTION, DEFAULTS, GGUF_NAMES, spec
from polydraft.models.networks.settings import has, renamed
from polydraft.models.store.gguf_header import GgufHeader


def number_of(value: Any) -> Any:
    """Of a setting that may be said for each layer, where all say the same."""
    return value if isinstance(value, int) or len({*value}) != 1 else value[0]


def mixture(config: Any) -> Experts:
    return Experts(
        number_of(config.num_experts),
        number_of(config.moe_topk),
        config.intermediate_size,
        (True,) * config.num_hidden_layers,
        shared=config.intermediate_size,
    )


def settings(file: GgufHeader) -> dict[str, Any]:
    return {
        "num_experts": file.count("expert_count"),
        "moe_topk": file.count("expert_used_count"),
        "attention_bias": has(file, "attn_q.bias"),
    }


HUNYUAN_MOE = Network(
    "hunyuan_v1_moe",
    "hunyuan-moe",
    spec,
    attention=ATTENTION,
    names=GGUF_NAMES,
    experts=MixtureWeights(mixture, names={f"{ROUTER}.": "mlp.gate.wg.", f"{SHARED}.": "mlp.shared_mlp."}),
    settings=settings,
    defaults={**DEFAULTS, "num_experts": 1, "moe_topk": 1},
    mended=renamed("num_experts", "num_local_experts"),
)
