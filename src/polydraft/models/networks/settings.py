"""Settings of transformers' configurations, as GGUF files and folders say them: those that all architectures have, and what several read alike."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from polydraft.models.mixers.experts.names import Experts
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.gguf_roles import TOKENS, end_ids, special_id
from polydraft.models.store.gguf_rope import rope_scaling

PART = "partial_rotary_factor"
LENGTH = "original_max_position_embeddings"
ANOTHER = "Give another file of the model"
LAYER_NORM = "attention.layer_norm_epsilon"
EPSILONS = ("attention.layer_norm_rms_epsilon", LAYER_NORM)


def has(file: GgufHeader, tensor: str) -> bool:
    """Whether any block has a tensor."""
    return any(name.startswith("blk.") and name.split(".", 2)[2] == tensor for name in file.tensors)


def linear_biases(file: GgufHeader) -> dict[str, bool]:
    """Whether attention and feed-forward have biases."""
    return {"attention_bias": has(file, "attn_q.bias"), "mlp_bias": has(file, "ffn_up.bias")}


def layer_sizes(file: GgufHeader, key: str, otherwise: int | None = None) -> list[int]:
    """A whole number for each layer of the trunk, which files write once where all are equal.

    Raises:
        ModelLoadError: something else.
    """
    layers = file.num_layers
    sizes = file.setting(key, otherwise)
    if not isinstance(sizes, list):
        return [file.count(key, otherwise)] * layers
    if len(sizes) < layers or not all(isinstance(size, int) and size >= 0 for size in sizes):
        name = f"{file.architecture}.{key}"
        problem = f"its {name} is {sizes!r}; expected a whole number for each of {layers} layers"
        raise file.refusal(problem, ANOTHER)
    return sizes[:layers]


def largest(file: GgufHeader, key: str, otherwise: int | None = None) -> int:
    """The largest of `layer_sizes`.

    Raises:
        ModelLoadError: all are 0.
    """
    size = max(layer_sizes(file, key, otherwise))
    if size == 0:
        raise file.refusal(f"its {file.architecture}.{key} is 0 in every layer", ANOTHER)
    return size


def vocab_size(file: GgufHeader) -> int:
    """Rows of its embeddings; a file with a model's further layers alone may share those of the model, and lists as many tokens.

    Raises:
        ModelLoadError: it has no embeddings.
    """
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is not None:
        return embeddings.shape[0]
    if file.setting("nextn_predict_layers"):
        return len(file.strings(TOKENS))
    raise file.refusal("it has no tensor 'token_embd.weight'", "Give a file with a whole model")


def rotary(
    file: GgufHeader, width: int, *, read: Collection[str] = (), partial: bool = False
) -> dict[str, Any]:
    """Rotary parameters as transformers names them. width: of what may rotate of a head.

    read: further keys of scaling that the architecture reads.  partial: whether a part of it may rotate.
    """
    theta = {"rope_theta": file.number("rope.freq_base", 10_000.0)}
    return theta | rope_scaling(file, width, read=read, partial=partial)


def settings_of_file(
    file: GgufHeader,
    rope: Callable[[GgufHeader, int], Mapping[str, Any]],
    settings: Callable[[GgufHeader], Mapping[str, Any]],
) -> dict[str, Any]:
    """All settings of a file. rope, settings: rotary parameters, and what the architecture has beside what all have.

    Raises:
        ModelLoadError: settings are missing, or ask for what the architecture is not read with.
    """
    heads = largest(file, "attention.head_count")
    hidden = file.count("embedding_length")
    width = file.count("attention.key_length", hidden // heads)
    experts = file.setting("expert_count") or 0
    if experts and not 0 < file.count("expert_used_count") <= experts:
        problem = f"it chooses {file.count('expert_used_count')} of {experts} experts"
        raise file.refusal(f"{problem}; expected 1 to {experts}", ANOTHER)
    common = {
        "name_or_path": str(file.path),
        "vocab_size": vocab_size(file),
        "max_position_embeddings": file.count("context_length"),
        "num_hidden_layers": file.num_layers,
        "hidden_size": hidden,
        "intermediate_size": max(layer_sizes(file, "feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": largest(file, "attention.head_count_kv", heads),
        "head_dim": width,
        "rope_parameters": rope(file, width),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": special_id(file, "bos"),
        "eos_token_id": end_ids(file) or None,
        "pad_token_id": special_id(file, "padding"),
    }
    epsilon = next((key for key in EPSILONS if file.setting(key) is not None), None)
    if epsilon is not None:
        common["rms_norm_eps"] = file.number(epsilon)
    return {**common, **settings(file)}


def experts(file: GgufHeader) -> dict[str, Any]:
    """Mixtures of experts as Qwen's configurations say them. Of a width that a file lacks, what llama.cpp takes."""
    chosen = file.count("expert_used_count")
    return {
        "num_experts": file.count("expert_count"),
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": file.count(
            "expert_feed_forward_length", file.count("feed_forward_length") // chosen
        ),
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    }


def local_experts(file: GgufHeader) -> dict[str, Any]:
    """How many experts there are and how many a row chooses, as Mixtral's configuration and those after it say it."""
    return {
        "num_local_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
    }


def everywhere(config: Any, **others: Any) -> Experts:
    """Experts of every layer, of a configuration that says them likewise. others: further fields."""
    layers = (True,) * config.num_hidden_layers
    num_experts = config.num_local_experts
    return Experts(num_experts, config.num_experts_per_tok, config.intermediate_size, layers, **others)


def shared_experts(file: GgufHeader) -> dict[str, Any]:
    """Likewise, and one expert that every token goes through."""
    width = file.count("expert_shared_feed_forward_length", file.count("feed_forward_length"))
    return experts(file) | {"shared_expert_intermediate_size": width}


def grouped_experts(file: GgufHeader) -> dict[str, Any]:
    """How rows choose experts among groups of them, as DeepSeek V3 and those after it say it (arXiv 2412.19437, section 2.1.2)."""
    return {
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "n_routed_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "n_group": file.count("expert_group_count", 1),
        "topk_group": file.count("expert_group_used_count", 1),
        "norm_topk_prob": bool(file.setting("expert_weights_norm", False)),
        "routed_scaling_factor": file.number_or_none("expert_weights_scale") or 1.0,
    }


def grouped_mixture(
    config: Any, num_experts: int, layers: tuple[bool, ...], shared: int, **others: Any
) -> Experts:
    """Experts that are chosen so, by a sigmoid of the router's products and a bias. layers, shared: as in `Experts`.  others: further fields."""
    return Experts(
        num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        layers,
        sigmoid=True,
        groups=config.n_group or 1,
        best_groups=config.topk_group or 1,
        shares=bool(config.norm_topk_prob),
        scale=config.routed_scaling_factor,
        shared=shared,
        choice_biased=True,
        **others,
    )


def state_spaces(file: GgufHeader) -> dict[str, Any]:
    """Mamba-2 as Granite's and Falcon's configurations say it."""
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


def special_tokens(bos: int | None, eos: int, padding: int | None = None) -> dict[str, Any]:
    """Ids that a class of transformers has where a config.json says none."""
    return {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": padding}


def rope_of_folder(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters of a config.json, whose older ones have them beside `rope_scaling`.

    Example:
        >>> rope_of_folder({"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 64})
        {'type': 'linear', 'factor': 2.0, 'rope_theta': 50000.0, 'rope_type': 'linear'}
    """
    rope = dict(settings.get("rope_scaling") or settings.get("rope_parameters") or {})
    rope.setdefault("rope_theta", settings.get("rope_theta"))
    rope.setdefault("rope_type", rope.get("type", "default"))
    if settings.get(PART) is not None:
        rope.setdefault(PART, settings[PART])
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        trained = settings.get(LENGTH)
        rope = (
            {LENGTH: settings["max_position_embeddings"], **rope}
            if trained is None
            else {**rope, LENGTH: trained}
        )
    return rope


def rope_of_kinds(folder: Mapping[str, Any], bases: Mapping[str, float | None]) -> dict[str, Any]:
    """Rotary parameters by kind of layer; older folders scale the positions of layers without a window alone. bases: where they are not said."""
    said = folder.get("rope_parameters") or {}
    older = folder.get("rope_scaling") or {}
    ropes = {
        kind: {
            "rope_type": "default",
            **(said.get(kind) or {}),
            **(older if kind == "full_attention" else {}),
        }
        for kind in bases
    }
    return {
        kind: rope_of_folder(
            {**folder, "rope_scaling": None, "rope_parameters": ropes[kind], "rope_theta": bases[kind]}
        )
        for kind in bases
    }


def by_kind_of_layer(file: GgufHeader, *, otherwise: int) -> list[str]:
    """Kinds of layers, by whether they have windows. otherwise: where the file does not say it, every so many attends to everything."""
    pattern = file.setting("attention.sliding_window_pattern", otherwise)
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern for layer in range(file.num_layers)]
    return ["sliding_attention" if local else "full_attention" for local in pattern[: file.num_layers]]


def windows_if_used(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of Qwen's configurations, which have a width of windows that none of their layers has."""
    return {} if settings.get("use_sliding_window") else {"sliding_window": None}


def windows_behind(settings: Mapping[str, Any]) -> list[str]:
    """Kinds of Qwen's layers, where they are not said: the last ones have windows, if any have."""
    first = (
        settings["num_hidden_layers"] if settings["sliding_window"] is None else settings["max_window_layers"]
    )
    return [
        "sliding_attention" if i >= first else "full_attention" for i in range(settings["num_hidden_layers"])
    ]


def renamed(ours: str, theirs: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """A setting that config.json files may have under another name, too."""
    return lambda settings: {ours: settings[theirs]} if settings.get(theirs) is not None else {}


def whole_every(interval: int, other: str) -> Callable[[Mapping[str, Any]], list[str]]:
    """Kinds of layers, where they are not said: every so many attends to everything."""
    return lambda settings: [
        other if (i + 1) % interval else "full_attention" for i in range(settings["num_hidden_layers"])
    ]


STATE_SPACE_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_d_ssm": None,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": lambda settings: [0.0, math.inf],
}
"""Of Granite's and Falcon's configurations."""


def heads_of_states(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The width of a state space's heads, where it is left to follow from the others."""
    if settings.get("mamba_d_head") != "auto":
        return {}
    given = {**STATE_SPACE_DEFAULTS, **settings}
    inner = given["mamba_d_ssm"] or given["mamba_expand"] * given["hidden_size"]
    return {"mamba_d_head": inner // given["mamba_n_heads"]}


EXPERT_DEFAULTS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": lambda settings: [],
    "norm_topk_prob": False,
}
"""Of Qwen's mixtures."""
