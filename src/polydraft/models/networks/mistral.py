"""Mistral and its kin.

Mistral (arXiv 2310.06825): Llama with a window in every layer, where its configuration has one. Files call it `llama`.
Ministral (https://mistral.ai/news/ministraux): Mistral whose layers say whether they have windows.
Ministral 3 (https://mistral.ai/news/mistral-3): Llama whose queries grow with the logarithm of their position, by multiples of the trained length. The
multiplier of the file is transformers' `mscale_all_dim`; the numerator of the factor of cosines and sines has 1, as in llama.cpp.
Mixtral (arXiv 2401.04088): Mistral whose feed-forwards are mixtures of experts. Files call it `llama`, with a number of experts.
"""

from collections.abc import Mapping
from typing import Any

from polydraft.models.mixers.experts.names import ROUTER, MixtureWeights
from polydraft.models.networks.base import Network, UncompiledError
from polydraft.models.networks.settings import everywhere, local_experts, renamed, rotary, special_tokens
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.rotary import rope_parameters
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.gguf_rope import YARN_MULTIPLIER


def refused(folder: Mapping[str, Any]) -> dict[str, Any]:
    """Those with kinds of layers are Ministral's."""
    if "layer_types" in folder:
        raise UncompiledError("its config.json has layer_types: it is a Ministral")
    return {}


MISTRAL = Network("mistral", defaults={**special_tokens(1, 2), "sliding_window": 4096}, mended=refused)


def all_alike(folder: Mapping[str, Any]) -> list[str]:
    kind = "full_attention" if folder["sliding_window"] is None else "sliding_attention"
    return [kind] * folder["num_hidden_layers"]


MINISTRAL = Network(
    "ministral",
    defaults={
        **special_tokens(1, 2),
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "layer_types": all_alike,
    },
)


SCALING = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def scaling(folder: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters of folders that say none."""
    return {**SCALING, "max_position_embeddings": folder["max_position_embeddings"]}


def spec3(config: Any) -> ModelSpec:
    rope3 = rope_parameters(config)
    growth = rope3["llama_4_scaling_beta"], rope3["original_max_position_embeddings"]
    return one_rotary(config, query_growth=growth)


def rope3(file: GgufHeader, width: int) -> dict[str, Any]:
    parameters = rotary(file, width, read=[YARN_MULTIPLIER])
    multiplier = file.number_or_none(YARN_MULTIPLIER)
    scales = {}
    if multiplier and parameters["rope_type"] == "yarn":
        scales = {"mscale": 1.0, "mscale_all_dim": multiplier}
    growth = {"llama_4_scaling_beta": file.number_or_none("attention.temperature_scale") or 0.0}
    trained = {"original_max_position_embeddings": file.count("context_length")}
    return {**trained, **parameters, **scales, **growth}


MINISTRAL3 = Network(
    "ministral3",
    "mistral3",
    spec3,
    settings=lambda file: {"sliding_window": None},
    rope=rope3,
    interleaved=True,
    defaults={
        **special_tokens(1, 2, 11),
        "head_dim": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": scaling,
    },
)


def settings(file: GgufHeader) -> dict[str, Any]:
    return {**local_experts(file), "sliding_window": None}


MIXTRAL = Network(
    "mixtral",
    "llama",
    interleaved=True,
    settings=settings,
    defaults={
        **special_tokens(1, 2),
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    mended=renamed("num_local_experts", "num_experts"),
    experts=MixtureWeights(everywhere, names={ROUTER: "block_sparse_moe.gate"}, module="block_sparse_moe"),
)
