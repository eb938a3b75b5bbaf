"""MiniMax-M2 (https://github.com/MiniMax-AI/MiniMax-M2): experts with sigmoid scores in every layer, norms of all queries and of all keys together; a part
of each head rotates."""

from typing import Any

from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.mixers.experts.names import CHOICE, ROUTER, Experts, MixtureWeights
from polydraft.models.mixers.layer import HeadNorms
from polydraft.models.networks.base import Network
from polydraft.models.networks.settings import everywhere, local_experts, renamed, special_tokens
from polydraft.models.networks.spec import partly_rotated
from polydraft.models.store.gguf_header import GgufHeader

MODULE = "block_sparse_moe"


def mixture(config: Any) -> Experts:
    return everywhere(config, sigmoid=True, choice_biased=True)


def settings(file: GgufHeader) -> dict[str, Any]:
    return {**local_experts(file), "intermediate_size": file.count("expert_feed_forward_length")}


MINIMAX_M2 = Network(
    "minimax_m2",
    "minimax-m2",
    partly_rotated,
    attention=AttentionWeights(norms=HEAD_NORMS, norm_form=HeadNorms(whole=True)),
    partial_rotary=True,
    experts=MixtureWeights(
        mixture,
        names={
            CHOICE: "mlp.e_score_correction_bias",
            f"{ROUTER}.e_": f"{MODULE}.e_",
            f"{ROUTER}.w": f"{MODULE}.gate.w",
        },
        module=MODULE,
    ),
    settings=settings,
    defaults={
        **special_tokens(200_034, 200_020),
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rope_theta": 5e6,
        "partial_rotary_factor": None,
    },
    mended=renamed("num_local_experts", "num_experts"),
)
