"""What one model computes beside the products with its weights, as numbers: kinds of layers, windows, rotations, scales, caps.

Settings are read by the names of transformers' configurations, whichever file they come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from polydraft.models.mixers.cache import CachedHeads
from polydraft.models.mixers.latent_attention import LatentHeads
from polydraft.models.mixers.layer import ATTENTION, LATENT_ATTENTION, SIDE_BY_SIDE, WIDE_ATTENTION
from polydraft.models.mixers.recurrent import StateShape
from polydraft.models.rotary import head_width, rope_parameters, whole_heads
from polydraft.models.windows import setting, windows


class WideHeads(NamedTuple):
    """Those of `WIDE_ATTENTION`. groups: of keys and values.  keys_as_values: whether values are keys before norm and rotation."""

    width: int
    groups: int
    keys_as_values: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """What one model computes beside the products with its weights.

    epsilon: of norms.  mixers: kind of each layer, of `mixers.layer`.  states: what those of recurrent kinds store.
    windows: of each layer, tokens that a row attends to, itself included; 0 for all.
    rotaries: rotary parameters as transformers names them.  rotary_of_layer: which of them a layer has, or -1 for none.
    wide: heads of layers of `WIDE_ATTENTION`.  sources: of each layer, the one whose keys and values it attends to; of none, each to its own.
    latent: heads of layers of `LATENT_ATTENTION`.
    activation: transformers' name.  attention_cap, logit_cap: soft caps, 0 for none.
    centred: whether norms take the mean away, as `LayerNorm` does.  parallel: whether mixer and feed-forward of a layer read the same state.
    query_growth: beta and length of `compiled.vectors.query_scales`.  has_feed_forward: of each layer; default all.
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
    centred: bool = False
    parallel: bool = False
    query_growth: tuple[float, int] = (0.0, 1)
    has_feed_forward: tuple[bool, ...] = ()
    wide: WideHeads | None = None
    sources: tuple[int, ...] = ()
    latent: LatentHeads | None = None

    def heads(self, config: Any) -> dict[str, CachedHeads]:
        """Of each kind of attention that its layers have, at least one of them."""
        heads = dict[str, CachedHeads]()
        if self.latent is not None:
            width = self.latent.rank + self.latent.turned
            heads[LATENT_ATTENTION] = CachedHeads(width, 1, self.latent.rank, in_keys=True)
        else:
            width = head_width(config)
            heads[ATTENTION] = CachedHeads(width, config.num_key_value_heads, width)
        if self.wide is not None:
            width = self.wide.width
            heads[WIDE_ATTENTION] = CachedHeads(width, self.wide.groups, width)
        return heads

    def layers_with_keys(self, kind: str = ATTENTION) -> list[int]:
        """Those of a kind of attention that have keys and values of their own."""
        return [layer for layer in self.layers(kind) if not self.sources or self.sources[layer] == layer]

    def layers(self, kind: str) -> list[int]:
        """Those that have a kind of mixer."""
        return [layer for layer, mixer in enumerate(self.mixers) if kind in SIDE_BY_SIDE.get(mixer, (mixer,))]


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
