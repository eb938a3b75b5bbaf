"""What an architecture is, as data: what its tensors are called in both kinds of files, and what its layers compute beside their products.

Every layer of the compiled path has the same parts, and an architecture says which of them it has and with what numbers:

    x = x + residual_scale norm?(mixer(norm(x)))          of one kind a layer:
        attention, wide_attention                         norms of queries and keys, biases, rotation, window, soft cap, output gate
        convolution                                       short and gated, see `mixers.short_convolution`
        state_space                                       Mamba-2, see `mixers.state_space`
        delta_net                                         see `mixers.delta_net`
    x = x + residual_scale norm?(feed_forward(norm(x)))   activation(gate) up, or a mixture of experts, see `mixers.experts`
    x = factor (x + norm(up (activation(gate x) input)))  where layers have inputs of their own, see `mixers.layer_inputs`
    logits = cap(logit_scale head(norm(x)))               x begins as embedding_scale times the token's embedding

Settings are read by the names of transformers' configurations, whichever file they come from.
"""

import re
from collections import ChainMap
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from polydraft.errors import ModelLoadError
from polydraft.models.mixers.attention import AttentionWeights
from polydraft.models.mixers.experts.names import GGUF_NAMES as EXPERT_NAMES
from polydraft.models.mixers.experts.names import NO_EXPERTS, MixtureWeights, in_gguf
from polydraft.models.mixers.feed_forward import FeedForwardWeights
from polydraft.models.mixers.layer import (
    ATTENTION,
    NOTHING,
    SIDE_BY_SIDE,
    WIDE_ATTENTION,
    LayerWeights,
    Shapes,
    is_set,
)
from polydraft.models.networks.settings import rope_of_folder, rotary, settings_of_file
from polydraft.models.networks.spec import ModelSpec, one_rotary
from polydraft.models.rotary import PART, head_width, rope_parameters
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.places import Stored
from polydraft.models.windows import setting, windows

NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Llama's norms of a layer: field of `mixers.layer.Weights` -> transformers' name."""
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Files' names of what is around mixers and feed-forwards, by transformers' names, without the layer."""
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
QKV = "self_attn.qkv_proj"
GATE_UP = "mlp.gate_up_proj"
TRUNK = "model.layers"
ROTATED = ("num_attention_heads", "num_key_value_heads")
"""Settings of how many heads queries and keys have."""
Rows = Callable[[np.ndarray], np.ndarray]
"""What takes or orders rows of a weight."""
LAYER = re.compile(r"(model\.layers\.(\d+)\.|)(.+)")
"""Prefix of a layer's weights, its number, and their names in it."""


class UncompiledError(ModelLoadError):
    """Weights or settings that the compiled path does not read, and transformers may; says why."""


def as_named(name: str, config: Any) -> Stored | None:
    """Of no weight: each is a tensor of its name."""
    return None


def halves_apart(rows: np.ndarray, heads: int, width: int, turned: int) -> np.ndarray:
    """Rows of some heads, the two halves of whose first `turned` lie side by side, with one half behind the other. width: of a head.

    Example:
        >>> halves_apart(np.arange(6), 1, 6, 4).tolist()
        [0, 2, 1, 3, 4, 5]
    """
    order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, width)]
    return rows.reshape(heads, width, -1)[:, order].reshape(rows.shape)


def joined(place: Stored, further: Rows | None) -> Stored:
    """Where a weight lies, whose rows there are to be ordered once more."""
    if further is None:
        return place
    return place._replace(part=lambda tensor: further(place.part(tensor)))


@dataclass(frozen=True)
class Network:
    """One architecture; see this module's first lines.

    model_type: of config.json.  gguf: `general.architecture` of GGUF files; several names have spaces between them.
    lacks: what is not compiled of it: it runs through transformers, and needs `names` and `settings` alone.
    spec: from a configuration.  refusal: why models of some configurations are not compiled, or None.

    Parts of a layer:
    norms: field of `mixers.layer.Weights` -> transformers' name of a norm.  final_norm: transformers' name of the norm before the head.
    shares_norm: whether the feed-forward of a layer reads what the mixer's norm gives.  plain_norms: whether these have no weights.  norm_bias: whether they have biases.  head_bias: whether the head has one, or the setting that says so.
    attention, recurrent: weights of the mixers that layers have; the second of others than attention, and of latent attention.  feed_forward: of layers without experts.
    experts: of layers that have them in its place, or beside it.
    beside: of all layers, beside those.  outer: shapes of what lies outside of the layers beside embedding, last norm and head.
    of_layer: what is made of a layer's shapes where they differ from layer to layer.
    pieces: shapes of weights of a layer that transformers has in one tensor with others, of what is not compiled.

    Folders, and modules of transformers:
    defaults: settings that a config.json may leave out, as transformers' classes have them; of its own settings no others are read. A function
    makes one of those that are there, and of one that is null, too.  mended: what the classes make of settings that are there.
    unread: weights that folders and files may have more, in layers that do not read them.
    folder_rope: rotary parameters, of a config.json with these defaults.
    norm_offset: what they have norm weights less by.  fused: matrices of QKV and GATE_UP that are one; files have the same ones, if they have any.
    renamed: what they call modules otherwise than Llama's.  trunk: of what layers are in.
    place: where they have a weight that is a part of a tensor, or a multiple of it, by its name and the configuration.
    pairs: whether they have the two halves of a rotation side by side in the rows of queries and keys; files have the same ones.
    partial_rotary: whether files and folders may say that only the first part of each head rotates.

    GGUF files:
    names: where they name tensors otherwise than Llama's; of several names, with spaces between them, the first one that a file has.  settings: of transformers' configuration, what they imply or name otherwise.
    rope: rotary parameters, of a file and the width of its heads.  reads_rope_factors: whether it reads divisors of frequencies, which are otherwise taken as they are.
    interleaved: whether they have the two halves of a rotation side by side in the rows of queries and keys.
    in_settings: weights that are no tensors there, but lists of numbers of the layers, by key.
    reads_file: whether files of its names are of it, where others have the names, too.
    values: what makes transformers' weights of theirs, by name, beside what their mixers say.
    order: likewise, what brings them into transformers' order, where compiled layers take that of files.
    """

    model_type: str
    gguf: str = ""
    spec: Callable[[Any], ModelSpec] = one_rotary
    lacks: str = ""
    refusal: Callable[[Any], str | None] = lambda config: None
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    final_norm: str = "model.norm"
    shares_norm: Callable[[Any], bool] = lambda config: False
    plain_norms: bool = False
    norm_bias: bool = False
    head_bias: bool | str = False
    attention: AttentionWeights = field(default_factory=AttentionWeights)
    recurrent: LayerWeights = field(default_factory=LayerWeights)
    feed_forward: FeedForwardWeights = field(default_factory=FeedForwardWeights)
    experts: MixtureWeights = NO_EXPERTS
    beside: LayerWeights = field(default_factory=LayerWeights)
    outer: Callable[[Any], Shapes] = lambda config: {}
    of_layer: Callable[[Any, int, Shapes], Shapes] = lambda config, layer, shapes: shapes
    pieces: Callable[[Any, int], Shapes] = lambda config, layer: {}
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    mended: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda settings: {}
    unread: Callable[[Any], Iterable[str]] = lambda config: ()
    folder_rope: Callable[[Mapping[str, Any]], Mapping[str, Any]] = rope_of_folder
    norm_offset: float = 0.0
    fused: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    trunk: str = "model.layers"
    pairs: bool = False
    place: Callable[[str, Any], Stored | None] = as_named
    partial_rotary: bool = False
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    settings: Callable[[GgufHeader], Mapping[str, Any]] = lambda file: {}
    rope: Callable[[GgufHeader, int], Mapping[str, Any]] | None = None
    reads_rope_factors: bool = False
    interleaved: bool = False
    reads_file: Callable[[GgufHeader], bool] = lambda file: True
    in_settings: Mapping[str, str] = field(default_factory=dict[str, str])
    values: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(
        default_factory=dict[str, Callable[[np.ndarray], np.ndarray]]
    )
    order: Mapping[str, Callable[[Any, np.ndarray], np.ndarray]] = field(
        default_factory=dict[str, Callable[[Any, np.ndarray], np.ndarray]]
    )

    @property
    def gguf_names(self) -> list[str]:
        """What files call it."""
        return self.gguf.split()

    def reads(self, file: GgufHeader) -> bool:
        """Whether it is that of a file of one of its names."""
        return (
            bool(self.lacks) or self.experts.takes(file.setting("expert_count") or 0)
        ) and self.reads_file(file)

    def settings_of(self, file: GgufHeader) -> dict[str, Any]:
        """Settings of transformers' configuration; see `settings_of_file`."""
        return settings_of_file(file, self.rope or self._rope, self.settings)

    def _rope(self, file: GgufHeader, width: int) -> dict[str, Any]:
        whole = {PART: 1.0} if self.partial_rotary else {}
        return whole | rotary(file, width, partial=self.partial_rotary)

    def norms_of(self, config: Any) -> Mapping[str, str]:
        """Norms of the layers of a configuration."""
        return (
            {**self.norms, "mlp_norm": self.norms["attention_norm"]}
            if self.shares_norm(config)
            else self.norms
        )

    def why_refused(self, config: Any) -> str | None:
        """Why models of a configuration are not compiled, or None."""
        spec = self.spec(config)
        parts = [rope[PART] for rope in spec.rotaries if rope.get(PART, 1.0) != 1.0]
        if parts and not self.partial_rotary:
            return f"its scaled rotation is of a part of each head ({PART} {parts[0]})"
        if not spec.layers(ATTENTION) and spec.latent is None:
            return "none of its layers is of attention"
        if windows(config).get("sliding_attention", ()) is None:
            return "its layers of sliding attention have no sliding_window"
        of_states = setting(config, "mamba_hidden_act", spec.activation)
        if spec.states and of_states != "silu":
            return f"the activation of its recurrent layers is {of_states!r}"
        return self.refusal(config)

    @property
    def has_plain_places(self) -> bool:
        """Whether modules of transformers have each weight as a tensor of its name."""
        others = self.fused or self.renamed or self.pairs or self.trunk != TRUNK or self.feed_forward.alphas
        return self.experts == NO_EXPERTS and not others and self.place is as_named

    @cached_property
    def parts(self) -> tuple[LayerWeights, ...]:
        """Mixers and feed-forward of its layers."""
        return self.attention, self.recurrent, self.feed_forward, self.beside

    @cached_property
    def file_names(self) -> dict[str, str]:
        """What GGUF files call modules and weights, without the layer."""
        of_parts = (part.names for part in self.parts)
        return dict(ChainMap(dict(self.names), *map(dict, of_parts), EXPERT_NAMES, GGUF_NAMES))

    def file_value(self, name: str) -> Callable[[np.ndarray], np.ndarray] | None:
        """What makes a weight of what GGUF files have, or None where it is the same. name: with its layer."""
        part = LAYER.fullmatch(name)[3]  # pyright: ignore[reportOptionalSubscript]
        return self.recurrent.values.get(part) or self.values.get(part)

    def in_gguf(self, name: str) -> list[Stored]:
        """Where a GGUF file may have a weight, both without the layer."""
        if exact := self.file_names.get(name):
            return [Stored(exact)]
        if stacked := in_gguf(name, halves=self.experts.halves) or self.recurrent.in_stack(name):
            return [stacked]
        module, _, kind = name.rpartition(".")
        return [Stored(f"{own}.{kind}") for own in self.file_names.get(module, module).split()]

    def own_name(self, name: str) -> str:
        """What folders call a weight, without the layer."""
        module, _, kind = name.rpartition(".")
        return f"{self.renamed.get(module, module)}.{kind}"

    def canonical(self, name: str) -> str:
        """A weight of transformers, as names of layers are here."""
        return re.sub(rf"^{re.escape(self.trunk)}\.(?=\d)", f"{TRUNK}.", name)

    def places(self, name: str, config: Any) -> list[Stored]:
        """Where a folder or a module of transformers may have a weight, both without the layer."""
        module, _, kind = name.rpartition(".")
        matrix, rows = self.fused_rows(config).get(module, (None, slice(None)))
        in_matrix = None if matrix is None else Stored(f"{matrix}.{kind}", part=lambda tensor: tensor[rows])
        own = self.place(name, config)
        of_experts = self.experts.places(name, config)
        new_name = Stored(f"{self.renamed[module]}.{kind}") if module in self.renamed else None
        places = own, new_name, Stored(name), *of_experts, in_matrix
        halves = self.halves(name, config) if self.pairs else None
        return [joined(place, halves) for place in places if place is not None]

    def halves(self, name: str, config: Any) -> Rows | None:
        """What puts one half of each rotation in a weight behind the other, where they lie side by side; None of weights that do not rotate.

        name: without the layer.
        """
        rotates = dict(zip(self.attention.matrices["qkv"], ROTATED, strict=False))
        if self.attention.each_has_norms:
            rotates |= dict(zip(self.attention.norms, ROTATED, strict=False))
        heads = rotates.get(name.rpartition(".")[0])
        if heads is None:
            return None
        width = head_width(config)
        part = rope_parameters(config).get(PART, 1.0) if self.partial_rotary else 1.0
        return partial(halves_apart, heads=getattr(config, heads), width=width, turned=int(width * part))

    def offset_of(self, name: str) -> float:
        """What folders and modules have a weight less by than files."""
        module = LAYER.fullmatch(name)[3].removesuffix(".weight")  # pyright: ignore[reportOptionalSubscript]
        has_offset = module in (*self.norms.values(), *self.attention.norms, self.final_norm)
        return self.norm_offset if has_offset else 0.0

    def shapes(self, config: Any) -> Shapes:
        """Of the weights of a model, by name; of those that are not compiled, of what transformers has in one tensor with others."""
        layers = range(config.num_hidden_layers)
        if self.lacks:
            return {
                f"model.layers.{layer}.{name}": shape
                for layer in layers
                for name, shape in self.pieces(config, layer).items()
            }
        spec = self.spec(config)
        mixers = spec.mixers
        has_feed_forward = spec.has_feed_forward or (True,) * len(mixers)
        outer: Shapes = {
            EMBEDDING: (config.vocab_size, config.hidden_size),
            **self.norm_shapes(config, [self.final_norm]),
            **self.outer(config),
        }
        head = {} if config.tie_word_embeddings else {HEAD: outer[EMBEDDING]}
        if is_set(self.head_bias, config):
            head[HEAD_BIAS] = (config.vocab_size,)
        return {
            **outer,
            **{
                f"model.layers.{layer}.{name}": shape
                for layer in layers
                for name, shape in self.layer_shapes(
                    config, layer=layer, mixer=mixers[layer], has_feed_forward=has_feed_forward[layer]
                ).items()
            },
            **head,
        }

    def located(self, config: Any, names: Iterable[str], tensors: Container[str]) -> dict[str, Stored]:
        """Where weights lie among the tensors of a folder or a module.

        Raises:
            UncompiledError: nowhere.
        """
        located = dict[str, Stored]()
        for name in names:
            prefix, _, part = LAYER.fullmatch(name).groups()  # pyright: ignore[reportOptionalMemberAccess]
            own_prefix = prefix.replace(TRUNK, self.trunk, 1)
            places = [place._replace(name=own_prefix + place.name) for place in self.places(part, config)]
            place = next((place for place in places if place.name in tensors), None)
            if place is None:
                raise UncompiledError(f"it has no weight {name!r}")
            located[name] = place
        return located

    def fused_rows(self, config: Any) -> dict[str, tuple[str, slice]]:
        """Of modules that lie below one another in a matrix: its module, and their rows in it."""
        if not self.fused:
            return {}
        width = head_width(config)
        inner = self.feed_forward.width(config)
        q = config.num_attention_heads * width
        kv = config.num_key_value_heads * width
        places = {
            "self_attn.q_proj": (QKV, slice(0, q)),
            "self_attn.k_proj": (QKV, slice(q, q + kv)),
            "self_attn.v_proj": (QKV, slice(q + kv, None)),
            "mlp.gate_proj": (GATE_UP, slice(0, inner)),
            "mlp.up_proj": (GATE_UP, slice(inner, None)),
        }
        return {module: place for module, place in places.items() if place[0] in self.fused}

    def norm_shapes(self, config: Any, names: Iterable[str]) -> Shapes:
        """Of weights and biases of norms."""
        kinds = ["weight"] * (not self.plain_norms) + ["bias"] * self.norm_bias
        return {f"{name}.{kind}": (config.hidden_size,) for name in names for kind in kinds}

    def layer_shapes(
        self,
        config: Any,
        inputs: int | None = None,
        layer: int = 0,
        mixer: str = ATTENTION,
        has_feed_forward: bool = True,
    ) -> Shapes:
        """Of the weights of one layer, by name. inputs: width of what its attention reads, default the model's.  mixer: its kind."""
        hidden = config.hidden_size
        shapes = self.norm_shapes(config, self.norms_of(config).values())
        for kind in SIDE_BY_SIDE.get(mixer, () if mixer == NOTHING else (mixer,)):
            is_attention = kind in (ATTENTION, WIDE_ATTENTION)
            shapes |= (
                self.attention.shapes_of(config, inputs) if is_attention else self.recurrent.shapes(config)
            )
        if not has_feed_forward:
            return self.of_layer(config, layer, shapes)
        mixture = self.experts.of(config)
        experts = mixture if mixture is not None and mixture.layers[layer] else None
        if experts is not None:
            shapes |= experts.shapes(hidden)
        if experts is None or experts.beside:
            shapes |= self.feed_forward.shapes_of(config)
        return self.of_layer(config, layer, shapes)
