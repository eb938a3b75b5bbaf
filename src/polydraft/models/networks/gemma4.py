"""Gemma 4 (https://ai.google.dev/gemma): wider heads in layers without a window, keys and values shared by the last layers, embeddings for each layer;
the mixture has a dense feed-forward beside its experts. Its 12B, `gemma4_unified`, has neither of the last two.

A layer without a window may take its keys, before norm and rotation, for values, too. Those that share keys and values have neither products nor
norms for them, and may have a feed-forward that is twice as wide. Files say by divisors of frequencies which pairs of a head rotate: the others are
divided by 1e30.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polydraft.models.mixers import layer_inputs
from polydraft.models.mixers.attention import HEAD_NORMS, AttentionWeights
from polydraft.models.mixers.experts.names import ROUTER, Experts, MixtureWeights, stacked
from polydraft.models.mixers.layer import ATTENTION, WIDE_ATTENTION, Shapes
from polydraft.models.networks.base import Network
from polydraft.models.networks.gemma import GGUF_NAMES as GEMMA_NAMES
from polydraft.models.networks.gemma import GLOBAL, LOCAL, NORMS, TANH_GELU
from polydraft.models.networks.settings import layer_sizes, special_tokens, whole_every
from polydraft.models.networks.spec import ModelSpec, WideHeads, one_rotary
from polydraft.models.rotary import WIDTH, rope_parameters, whole_heads
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.places import Stored
from polydraft.models.windows import setting

ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
    GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
"""Of a config.json that says none."""
KEYS = ("self_attn.k_proj.weight", "self_attn.k_norm.weight", "self_attn.v_proj.weight")


def heads(config: Any, layer: int) -> tuple[int, int]:
    """Width of a layer's heads, and how many groups of keys and values it has."""
    of_layers = config.per_layer_config
    if not isinstance(of_layers, Mapping):  # a view of transformers
        return of_layers[layer].head_dim, of_layers[layer].num_key_value_heads
    said = of_layers.get(str(layer)) or of_layers.get(layer) or {}
    return (
        said.get("head_dim", config.head_dim),
        said.get("num_key_value_heads", config.num_key_value_heads),
    )


def sources(config: Any) -> tuple[int, ...]:
    """Of each layer, the one whose keys and values it attends to: behind the first ones, the last of those that is of its kind, or -1 where
    there is none: those of another model."""
    kinds = list(config.layer_types)
    own = len(kinds) - config.num_kv_shared_layers
    last = {kind: layer for layer, kind in enumerate(kinds[:own])}
    return tuple(layer if layer < own else last.get(kind, -1) for layer, kind in enumerate(kinds))


def spec(config: Any) -> ModelSpec:
    ropes = rope_parameters(config)
    kinds = list(config.layer_types)
    wide = WideHeads(*heads(config, kinds.index(GLOBAL)), keys_as_values=config.attention_k_eq_v)
    return one_rotary(
        config,
        mixers=tuple(WIDE_ATTENTION if kind == GLOBAL else ATTENTION for kind in kinds),
        rotaries=(dict(whole_heads(ropes[LOCAL])), {**ropes[GLOBAL], WIDTH: wide.width}),
        rotary_of_layer=tuple(map((LOCAL, GLOBAL).index, kinds)),
        attention_scale=1.0,
        activation=config.hidden_activation,
        embedding_scale=config.hidden_size**0.5,
        logit_cap=config.final_logit_softcapping or 0.0,
        wide=wide,
        sources=sources(config),
    )


def refusal(config: Any) -> str | None:
    if setting(config, "use_bidirectional_attention") == "all":
        return "its attention is not causal"
    kinds = list(config.layer_types)
    by_kind = {kind: {heads(config, l) for l, own in enumerate(kinds) if own == kind} for kind in {*kinds}}
    if any(len(several) > 1 for several in by_kind.values()):
        return f"its heads have several widths in layers of one kind ({by_kind})"
    if rope_parameters(config)[GLOBAL].get("rope_type") != "proportional":
        return "the rotation of its layers without a window is not proportional"
    width, groups = heads(config, kinds.index(GLOBAL))
    if width % 8 or config.num_attention_heads % groups:
        return f"its heads of layers without a window are {groups} of width {width}"
    return None


def mixture(config: Any) -> Experts | None:
    if not setting(config, "enable_moe_block"):
        return None
    everywhere = (True,) * config.num_hidden_layers
    return Experts(
        config.num_experts, config.top_k_experts, config.moe_intermediate_size, everywhere, beside=True
    )


def outer(config: Any) -> Shapes:
    width = setting(config, "hidden_size_per_layer_input")
    if not width:
        return {}
    vocabulary = config.vocab_size_per_layer_input
    return layer_inputs.shapes(config.num_hidden_layers, config.hidden_size, width, vocabulary)


def of_layer(config: Any, layer: int, shapes: Shapes) -> Shapes:
    width, groups = heads(config, layer)
    hidden = config.hidden_size
    inputs = setting(config, "hidden_size_per_layer_input")
    shares = sources(config)[layer] != layer
    inner = config.intermediate_size * (2 if shares and config.use_double_wide_mlp else 1)
    shapes = {
        **shapes,
        "self_attn.q_proj.weight": (config.num_attention_heads * width, hidden),
        "self_attn.k_proj.weight": (groups * width, hidden),
        "self_attn.v_proj.weight": (groups * width, hidden),
        "self_attn.o_proj.weight": (hidden, config.num_attention_heads * width),
        "self_attn.q_norm.weight": (width,),
        "self_attn.k_norm.weight": (width,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "layer_scalar": (1,),
        **(layer_inputs.layer_shapes(hidden, inputs) if inputs else {}),
    }
    is_global = config.layer_types[layer] == GLOBAL
    absent = KEYS if shares else KEYS[2:] if config.attention_k_eq_v and is_global else ()
    return {name: shape for name, shape in shapes.items() if name not in absent}


def unread(config: Any) -> set[str]:
    """Products and norms of keys and values, in layers that attend to those of others."""
    shared = (layer for layer, source in enumerate(sources(config)) if source != layer)
    return {f"model.layers.{layer}.{name}" for layer in shared for name in KEYS}


def stack(name: str, inner: int) -> Stored | None:
    place = stacked(name, inner)
    return place and place._replace(name=place.name.removeprefix("mlp."))


def kinds_of_layers(folder: Mapping[str, Any]) -> list[str]:
    return [*whole_every(6, LOCAL)(folder)[:-1], GLOBAL]


def of_global_layers(folder: Mapping[str, Any]) -> dict[str, Any]:
    """What layers without a window have otherwise."""
    groups = folder.get("num_global_key_value_heads") if folder["attention_k_eq_v"] else None
    own = {"head_dim": folder.get("global_head_dim") or 512}
    own |= {} if groups is None else {"num_key_value_heads": groups}
    return {str(layer): own for layer, kind in enumerate(folder["layer_types"]) if kind == GLOBAL}


def mended(folder: Mapping[str, Any]) -> dict[str, Any]:
    """The last layer has no window."""
    kinds = folder.get("layer_types")
    return {"layer_types": [*kinds[:-1], GLOBAL]} if kinds else {}


def folder_rope(folder: Mapping[str, Any]) -> dict[str, Any]:
    if scaling := folder.get("rope_scaling"):
        raise ValueError(f"its rope_scaling is {scaling!r}")
    return dict(folder.get("rope_parameters") or ROPES)


def settings(file: GgufHeader) -> dict[str, Any]:
    layers = file.num_layers
    narrow = file.count("attention.key_length_swa")
    is_local = layer_sizes(file, "attention.sliding_window_pattern")
    kv_heads = layer_sizes(file, "attention.head_count_kv")
    widths = layer_sizes(file, "feed_forward_length")
    of_global = [layer for layer in range(layers) if not is_local[layer]]
    wide = {
        str(layer): {"head_dim": file.count("attention.key_length"), "num_key_value_heads": kv_heads[layer]}
        for layer in of_global
    }
    per_layer = file.tensors.get("per_layer_token_embd.weight")
    experts = file.setting("expert_count") or 0
    return {
        "hidden_activation": TANH_GELU,
        "sliding_window": file.count("attention.sliding_window"),
        "layer_types": [LOCAL if local else GLOBAL for local in is_local],
        "head_dim": narrow,
        "num_key_value_heads": next(
            (heads for heads, local in zip(kv_heads, is_local, strict=True) if local), kv_heads[0]
        ),
        "per_layer_config": wide,
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) == 2 * min(widths),
        "num_kv_shared_layers": file.setting("attention.shared_kv_layers", 0),
        "attention_k_eq_v": any(
            _has(file, layer, "attn_k") and not _has(file, layer, "attn_v") for layer in of_global
        ),
        "hidden_size_per_layer_input": file.setting("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": file.tensors["token_embd.weight"].shape[0]
        if per_layer is None
        else per_layer.shape[0],
        "final_logit_softcapping": file.number_or_none("final_logit_softcapping"),
        "enable_moe_block": bool(experts),
        "num_experts": experts or None,
        "top_k_experts": file.setting("expert_used_count"),
        "moe_intermediate_size": file.setting("expert_feed_forward_length"),
    }


def _has(file: GgufHeader, layer: int, tensor: str) -> bool:
    return f"blk.{layer}.{tensor}.weight" in file.tensors


def rope(file: GgufHeader, width: int) -> dict[str, Any]:
    factors = file.floats("rope_freqs.weight")
    # pairs whose frequencies are divided by 1e20 or more do not rotate
    return {
        GLOBAL: {
            "rope_type": "proportional",
            "rope_theta": file.number("rope.freq_base"),
            "partial_rotary_factor": sum(factor < 1e20 for factor in factors) / len(factors),
        },
        LOCAL: {
            "rope_type": "default",
            "rope_theta": file.number("rope.freq_base_swa", 10_000.0),
        },
    }


DEFAULTS = {
    **special_tokens(2, 1, 0),
    "tie_word_embeddings": True,
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": TANH_GELU,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "sliding_window": 512,
    "layer_types": kinds_of_layers,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "per_layer_config": of_global_layers,
}
GEMMA4 = Network(
    "gemma4_text",
    "gemma4",
    spec,
    refusal=refusal,
    norms=NORMS,
    attention=AttentionWeights(norms=HEAD_NORMS, value_norm=True),
    beside=layer_inputs.WEIGHTS,
    outer=outer,
    of_layer=of_layer,
    experts=MixtureWeights(
        mixture, optional=True, halves=True, names={f"{ROUTER}.": "router.proj."}, stack=stack
    ),
    partial_rotary=True,
    defaults=DEFAULTS,
    mended=mended,
    unread=unread,
    folder_rope=folder_rope,
    names={
        **GEMMA_NAMES,
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
    },
    settings=settings,
    rope=rope,
    reads_rope_factors=True,
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    gguf="",
    defaults={
        **{
            name: value
            for name, value in DEFAULTS.items()
            if "experts" not in name and "per_layer_input" not in name
        },
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    },
)
