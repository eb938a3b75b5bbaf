"""dots.llm1 (arXiv 2506.05767): experts with sigmoid scores, and an expert of all rows, behind some dense layers; norms of queries and keys."""

from typing import Any

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.mixers.experts.names import SHARED, MixtureWeights
from polydraft.models.networks.base import Network
from polydraft.models.networks.glm4 import mixture
from polydraft.models.networks.settings import grouped_experts, has, renamed, windows_behind
from polydraft.models.store.gguf_header import GgufHeader


def settings(file: GgufHeader) -> dict[str, Any]:
    return grouped_experts(file) | {
        "attention_bias": has(file, "attn_q.bias"),
        "first_k_dense_replace": file.setting("leading_dense_block_count", 0),
        "n_shared_experts": file.count("expert_shared_count"),
        "sliding_window": None,
    }


DOTS1 = Network(
    "dots1",
    "dots1",
    attention=AttentionWeights(norms=HEAD_NORMS, bias="attention_bias", out_bias="attention_bias"),
    experts=MixtureWeights(mixture, names={f"{SHARED}.": "mlp.shared_experts."}),
    settings=settings,
    defaults={
        "attention_bias": False,
        "n_routed_experts": None,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1408,
        "n_shared_experts": None,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "layer_types": windows_behind,
    },
    mended=renamed("n_routed_experts", "num_local_experts"),
)
