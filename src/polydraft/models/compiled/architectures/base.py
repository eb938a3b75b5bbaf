"""What an architecture is, as data: what its tensors are called in both kinds of files, and what its layers compute beside their products.

Every layer of the compiled path has the same parts, and an architecture says which of them it has and with what numbers:

    x = x + residual_scale norm?(mixer(norm(x)))          of one kind a layer:
        attention                                         norms of queries and keys, biases, rotation, window, soft cap, output gate
        convolution                                       short and gated, see `parts.short_convolution`
        state_space                                       Mamba-2, see `parts.state_space`
        delta_net                                         see `parts.delta_net`
    x = x + residual_scale norm?(feed_forward(norm(x)))   activation(gate) up, or a mixture of experts, see `mixture`
    logits = cap(logit_scale head(norm(x)))               x begins as embedding_scale times the token's embedding

Settings are read by the names of transformers' configurations, whichever file they come from.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from polydraft.models.compiled.architectures.mixture import GGUF_NAMES as MIXTURE_NAMES
from polydraft.models.compiled.architectures.mixture import Mixture, Stored, in_gguf, stacked
from polydraft.models.compiled.recurrent import StateShape
from polydraft.models.loading.conversions.names import LLAMA_NAMES
from polydraft.models.loading.gguf_header import GgufHeader
from polydraft.models.rotary import PART, head_width, rope_parameters, whole_heads
from polydraft.models.windows import setting, windows

ATTENTION = "attention"
CONVOLUTION = "convolution"
STATE_SPACE = "state_space"
DELTA_NET = "delta_net"
ATTENTION_AND_STATE_SPACE = "attention_and_state_space"
SIDE_BY_SIDE = {ATTENTION_AND_STATE_SPACE: (ATTENTION, STATE_SPACE)}
"""Kinds whose layers add what several others give for the same input."""


class Mixer(NamedTuple):
    """What layers of a kind have, by the keys of `Architecture.matrices` and `Architecture.vectors`."""

    matrices: tuple[str, ...]
    vectors: tuple[str, ...] = ()


MIXERS = {
    ATTENTION: Mixer(("qkv", "out")),
    CONVOLUTION: Mixer(
        ("conv_in", "conv_out"), ("conv_taps", "conv_taps_bias", "conv_in_bias", "conv_out_bias")
    ),
    STATE_SPACE: Mixer(
        ("ssm_in", "ssm_out"),
        (
            "ssm_taps",
            "ssm_taps_bias",
            "ssm_rates",
            "ssm_rate_bias",
            "ssm_skips",
            "ssm_norm",
            "ssm_in_bias",
            "ssm_out_bias",
        ),
    ),
    DELTA_NET: Mixer(
        ("delta_in", "delta_out"), ("delta_taps", "delta_rate", "delta_rate_bias", "delta_norm")
    ),
}
"""Kinds of layers, by what mixes their tokens."""
FEED_FORWARD = ("gate_up", "down")
MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Llama's, see `Architecture`."""
HEAD_NORMS = "self_attn.q_norm", "self_attn.k_norm"

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Llama's norms of a layer: field of `layers.Weights` -> transformers' name."""
GGUF_NAMES = LLAMA_NAMES | MIXTURE_NAMES
"""Files' names of what transformers' modules are called, without the layer."""


@dataclass(frozen=True)
class ModelSpec:
    """What one model computes beside the products with its weights.

    epsilon: of norms.  mixers: kind of each layer, of `MIXERS`.  states: what those of recurrent kinds store.
    windows: of each layer, tokens that a row attends to, itself included; 0 for all.
    rotaries: rotary parameters as transformers names them.  rotary_of_layer: which of them a layer has, or -1 for none.
    activation: transformers' name.  attention_cap, logit_cap: soft caps, 0 for none.
    """

    epsilon: float
    mixers: tuple[str, ...]
    states: Mapping[str, StateShape]
    windows: tuple[int, ...]
    rotaries: tuple[Mapping[str, Any], ...]
    rotary_of_layer: tuple[int, ...]
    attention_scale: float
    activation: str = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0

    def layers(self, kind: str) -> list[int]:
        """Those that have a kind of mixer."""
        return [layer for layer, mixer in enumerate(self.mixers) if kind in SIDE_BY_SIDE.get(mixer, (mixer,))]


def as_named(name: str, config: Any) -> Stored | None:
    """Of no weight: each is a tensor of its name."""
    return None


def layer_windows(config: Any) -> tuple[int, ...]:
    """The window of each layer of a configuration, 0 where it sees everything.

    Example:
        >>> from transformers import MistralConfig
        >>> layer_windows(MistralConfig(num_hidden_layers=2, sliding_window=64))
        (64, 64)
    """
    by_kind = windows(config)
    widths = {kind: 0 if window is None else window.width for kind, window in by_kind.items()}
    kinds = setting(config, "layer_types") or [next(iter(by_kind))] * config.num_hidden_layers
    return tuple(widths[kind] for kind in kinds)


def one_rotary(config: Any, **numbers: Any) -> ModelSpec:
    """A model whose layers all rotate alike, as Llama's do. numbers: fields of `ModelSpec` that differ from Llama's."""
    layers = config.num_hidden_layers
    fields: dict[str, Any] = {
        "epsilon": numbers.get("epsilon") or config.rms_norm_eps,
        "mixers": (ATTENTION,) * layers,
        "states": {},
        "windows": layer_windows(config),
        "rotaries": (whole_heads(rope_parameters(config)),),
        "rotary_of_layer": (0,) * layers,
        "attention_scale": head_width(config) ** -0.5,
        "activation": setting(config, "hidden_act", "silu"),
    }
    return ModelSpec(**{**fields, **numbers})


def partly_rotated(config: Any, **numbers: Any) -> ModelSpec:
    """Likewise, of those whose classes read that only the first part of each head rotates."""
    return one_rotary(config, rotaries=(rope_parameters(config),), **numbers)


@dataclass(frozen=True)
class Architecture:
    """One architecture; see this module's first lines.

    model_type: of config.json.  gguf: `general.architecture` of GGUF files.
    norms: field of `layers.Weights` -> transformers' name of a norm in a layer.  norm_offset: added to norm weights of folders; GGUF files hold the sum.
    matrices: name -> transformers' modules whose weights lie below one another in it.  vectors: name -> weight of a layer that is no matrix of a product.
    final_norm: transformers' name of the norm before the head.
    head_norms: names of the norms of queries and keys, where attention has them.  qkv_bias, out_bias: whether its first and its last product have biases, or the setting that says so.
    output_gate: whether each head of queries has another one behind it, whose sigmoid its output is multiplied by.
    sinks: whether each head has a score more in its softmax, without a value.
    spec: from a configuration.  inner_width: of what lies between gate and down, likewise.  mixer_shapes: of the weights of a layer's mixer by name, of kinds other than attention.
    fused: whether q, k, v and gate, up are one matrix each.
    gguf_names: where GGUF files name tensors otherwise than Llama's.  interleaved: whether they have the two halves of a rotation side by side
    in the rows of queries and keys.  gguf_settings: of transformers' configuration, what such a file implies or names otherwise.
    place: where transformers has a weight that is a part of another, or a multiple of it, by its name and the configuration.
    gguf_values: what makes transformers' weights of those of a file, by name.  refusal: why models of some configurations are not compiled, or None.
    partial_rotary: whether files and folders may say that only the first part of each head rotates.
    mixture: from a configuration, where layers are mixtures of experts.  some_without_experts: whether it is None for some.  stack: where transformers has a weight of an expert, by its name and
    `Mixture.inner`.  module_names: of modules, what folders may call them otherwise, without the layer.  expert_place: where folders may have a weight
    of an expert otherwise, one by one.
    """

    model_type: str
    gguf: str | None
    spec: Callable[[Any], ModelSpec] = one_rotary
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    norm_offset: float = 0.0
    head_norms: tuple[str, ...] = ()
    qkv_bias: bool | str = False
    fused: bool = False
    gguf_names: Mapping[str, str] = field(default_factory=dict[str, str])
    interleaved: bool = False
    gguf_settings: Callable[[GgufHeader], Mapping[str, Any]] = lambda file: {}
    mixture: Callable[[Any], Mixture | None] | None = None
    some_without_experts: bool = False
    stack: Callable[[str, int], Stored | None] = stacked
    module_names: Mapping[str, str] = field(default_factory=dict[str, str])
    expert_place: Callable[[str], Stored | None] = lambda name: None
    out_bias: bool = False
    sinks: bool = False
    place: Callable[[str, Any], Stored | None] = as_named
    gguf_values: Mapping[str, Callable[[Tensor], Tensor]] = field(
        default_factory=dict[str, Callable[[Tensor], Tensor]]
    )
    refusal: Callable[[Any], str | None] = lambda config: None
    output_gate: bool = False
    matrices: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MATRICES)
    vectors: Mapping[str, str] = field(default_factory=dict[str, str])
    final_norm: str = "model.norm"
    partial_rotary: bool = False
    inner_width: Callable[[Any], int] = lambda config: config.intermediate_size
    mixer_shapes: Callable[[Any, str], dict[str, tuple[int, ...]]] = lambda config, kind: {}

    def mixture_of(self, config: Any) -> Mixture | None:
        """Of the layers that are mixtures of experts, where there are any."""
        return None if self.mixture is None else self.mixture(config)

    def why_refused(self, config: Any) -> str | None:
        """Why models of a configuration are not compiled, or None."""
        spec = self.spec(config)
        parts = [rope[PART] for rope in spec.rotaries if rope.get(PART, 1.0) != 1.0]
        if parts and not self.partial_rotary:
            return f"its scaled rotation is of a part of each head ({PART} {parts[0]})"
        if not spec.layers(ATTENTION):
            return "none of its layers is of attention"
        if windows(config).get("sliding_attention", ()) is None:
            return "its layers of sliding attention have no sliding_window"
        if spec.states and spec.activation != "silu":
            return f"the activation of its recurrent layers is {spec.activation!r}"
        return self.refusal(config)

    def in_gguf(self, name: str) -> Stored:
        """Where a GGUF file has a weight, both without the layer."""
        if exact := self.gguf_names.get(name) or GGUF_NAMES.get(name):
            return Stored(exact)
        module, _, kind = name.rpartition(".")
        return in_gguf(name) or Stored(f"{self.gguf_name(module)}.{kind}")

    def places(self, name: str, config: Any) -> list[Stored]:
        """Where a folder or a module of transformers may have a weight, both without the layer."""
        renamed = [
            Stored(name.replace(ours, theirs))
            for ours, theirs in self.module_names.items()
            if name.startswith(ours)
        ]
        mixture = self.mixture_of(config)
        in_stack = self.stack(name, 0 if mixture is None else mixture.inner)
        module, _, kind = name.rpartition(".")
        matrix, rows = self.fused_rows(config).get(module, (None, slice(None)))
        in_matrix = None if matrix is None else Stored(f"{matrix}.{kind}", part=lambda tensor: tensor[rows])
        return [
            *(place for place in (self.place(name, config),) if place is not None),
            Stored(name),
            *renamed,
            *(place for place in (self.expert_place(name), in_stack, in_matrix) if place is not None),
        ]

    def gguf_name(self, module: str) -> str:
        """A GGUF file's name of a module of transformers, both without the layer."""
        return self.gguf_names.get(module) or GGUF_NAMES.get(module, module)

    def fused_rows(self, config: Any) -> dict[str, tuple[str, slice]]:
        """Of modules that lie below one another in a matrix: its module, and their rows in it."""
        if not self.fused:
            return {}
        width = head_width(config)
        inner = self.inner_width(config)
        q = config.num_attention_heads * width
        kv = config.num_key_value_heads * width
        return {
            "self_attn.q_proj": ("self_attn.qkv_proj", slice(0, q)),
            "self_attn.k_proj": ("self_attn.qkv_proj", slice(q, q + kv)),
            "self_attn.v_proj": ("self_attn.qkv_proj", slice(q + kv, None)),
            "mlp.gate_proj": ("mlp.gate_up_proj", slice(0, inner)),
            "mlp.up_proj": ("mlp.gate_up_proj", slice(inner, None)),
        }

    def layer_shapes(
        self, config: Any, inputs: int | None = None, layer: int = 0, mixer: str = ATTENTION
    ) -> dict[str, tuple[int, ...]]:
        """Of the weights of one layer, by name. inputs: width of what its attention reads, default the model's.  mixer: its kind."""
        h = config.hidden_size
        inner = self.inner_width(config)
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (h,) for name in self.norms.values()}
        for kind in SIDE_BY_SIDE.get(mixer, (mixer,)):
            shapes |= (
                self._attention_shapes(config, inputs or h)
                if kind == ATTENTION
                else self.mixer_shapes(config, kind)
            )
        mixture = self.mixture_of(config)
        if mixture is not None and mixture.layers[layer]:
            return shapes | mixture.shapes(h)
        shapes |= {f"{name}.weight": (inner, h) for name in self.matrices["gate_up"]}
        return shapes | {f"{name}.weight": (h, inner) for name in self.matrices["down"]}

    def has_qkv_bias(self, config: Any) -> bool:
        """Whether queries, keys and values have biases."""
        return bool(getattr(config, self.qkv_bias)) if isinstance(self.qkv_bias, str) else self.qkv_bias

    def _attention_shapes(self, config: Any, inputs: int) -> dict[str, tuple[int, ...]]:
        width = head_width(config)
        outputs = [heads * width for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        qkv = self.matrices["qkv"]
        (out,) = self.matrices["out"]
        shapes: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (rows, inputs) for name, rows in zip(qkv, outputs, strict=True)
        }
        if self.output_gate:
            shapes[f"{qkv[0]}.weight"] = (2 * outputs[0], inputs)
        shapes[f"{out}.weight"] = (config.hidden_size, outputs[0])
        if self.has_qkv_bias(config):
            shapes |= {f"{name}.bias": (rows,) for name, rows in zip(qkv, outputs, strict=True)}
        if self.out_bias:
            shapes[f"{out}.bias"] = (config.hidden_size,)
        if self.sinks:
            shapes["self_attn.sinks"] = (config.num_attention_heads,)
        has_norms = setting(config, "use_qk_norm", True)
        return shapes | {f"{name}.weight": (width,) for name in (self.head_norms if has_norms else ())}
