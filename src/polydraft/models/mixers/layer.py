"""What layers are made of: which weights a kind of mixer has, all layers' weights stacked, and what stands between a norm and the sum behind it.

A kind of mixer is a file of this folder: its weights by name, their shapes, what it stores of a text, its block, and the compiled code of that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from polydraft.models.matrices.products import Packed
from polydraft.models.mixers.dense import Bias, Product, bias_code, product_code
from polydraft.models.mixers.program import Part, panel_work
from polydraft.models.mixers.workspace import Workspace
from polydraft.models.store.places import Stored

ATTENTION = "attention"
CONVOLUTION = "convolution"
STATE_SPACE = "state_space"
DELTA_NET = "delta_net"
NOTHING = "nothing"
"""Of layers that are a feed-forward alone."""
ATTENTION_AND_STATE_SPACE = "attention_and_state_space"
WIDE_ATTENTION = "wide_attention"
"""Attention of heads of another width than that of most layers."""
LATENT_ATTENTION = "latent_attention"
SIDE_BY_SIDE = {ATTENTION_AND_STATE_SPACE: (ATTENTION, STATE_SPACE)}
"""Kinds whose layers add what several others give for the same input."""
Shapes = dict[str, tuple[int, ...]]
"""Of weights by transformers' names, without the layer."""


def no_shapes(config: Any) -> Shapes:
    return {}


@dataclass(frozen=True)
class LayerWeights:
    """Weights of a mixer or a feed-forward in a layer.

    kind: of layers that have them.  shapes: from a configuration.
    matrices: name -> transformers' modules whose weights lie below one another in it.  vectors: name -> weight that is no matrix of a product.
    names: what GGUF files call modules, or weights.  in_stack: where they have a weight that lies in a stack, by its name.  values: what makes transformers' weights of those of files, by name.
    """

    kind: str = ""
    matrices: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    vectors: Mapping[str, str] = field(default_factory=dict[str, str])
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    in_stack: Callable[[str], Stored | None] = lambda name: None
    values: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(
        default_factory=dict[str, Callable[[np.ndarray], np.ndarray]]
    )
    shapes: Callable[[Any], Shapes] = no_shapes


def is_set(said: bool | str, config: Any) -> bool:
    """What a description says, or the setting of a configuration that it names."""
    return bool(getattr(config, said)) if isinstance(said, str) else said


NO_BIAS = np.zeros(0, np.float32)
NO_BIASES = np.zeros((1, 0), np.float32)


class HeadNorms(NamedTuple):
    """Norms of queries and keys. whole: of all heads together.  centred: whether they take the mean away.  behind: whether they stand behind the rotation.

    Gains of all heads, where each has its own, lie one behind another.
    """

    whole: bool = False
    centred: bool = False
    behind: bool = False


class Weights(NamedTuple):
    """All layers stacked: first axis = layer; absent parts are empty."""

    embed: Packed  # [V, h]
    head: Packed
    norm: np.ndarray  # [h]
    attention_norm: np.ndarray  # [L, h]
    attention_out_norm: np.ndarray  # [L, h] or [L, 0]
    mlp_norm: np.ndarray  # [L, h]
    mlp_out_norm: np.ndarray  # [L, h] or [L, 0]
    qkv: Packed
    bias: np.ndarray  # [L, (H + 2 G) D] or [L, 0]
    q_norm: np.ndarray  # [L, D or H D] or [L, 0]
    k_norm: np.ndarray  # [L, D or G D] or [L, 0]
    out: Packed
    out_bias: np.ndarray  # [L, h] or [L, 0]
    sinks: np.ndarray  # [L, H] or [L, 0]
    gate_up: Packed
    down: Packed
    cos: np.ndarray  # [rotaries, columns, half of the rotated numbers of a head]
    sin: np.ndarray
    rotaries: np.ndarray  # [L] which of them a layer has, or -1
    windows: np.ndarray  # [L] tokens that a row attends to, itself included, or 0 for all
    stores: np.ndarray  # [L] layer of the memory that keys and values go to, or -1 where those of another layer are attended to
    sources: np.ndarray  # [L] layer of the memory that is attended to
    layer_scale: np.ndarray  # [L, 1] what is multiplied with what a layer puts out, or [L, 0]
    inners: np.ndarray  # [L] width between gate and down
    is_sparse: tuple[bool, ...] = ()  # [L] whether the feed-forward of a layer is a mixture of experts
    experts: Any = None  # `ExpertWeights` of these layers; `gate_up` and `down` are of the others
    mixers: tuple[str, ...] = ()  # kind of each layer
    wide: Any = None  # `WideAttention`; what else is said of attention is of the other layers that have it
    latent: Any = None  # `LatentHeads`
    layer_inputs: Any = None  # `LayerInputs`
    others: Any = None  # stacked weights of other kinds of layers than attention, by their names there
    norm_bias: np.ndarray = NO_BIAS  # [h] or [0]
    head_bias: np.ndarray = NO_BIAS  # [V] or [0]
    attention_norm_bias: np.ndarray = NO_BIASES  # [L, h] or [L, 0]
    mlp_norm_bias: np.ndarray = NO_BIASES  # [L, h] or [L, 0]
    gate_up_bias: np.ndarray = NO_BIASES  # of the layers that have `gate_up`: [D, I or 2 I] or [D, 0]
    down_bias: np.ndarray = NO_BIASES  # [D, h] or [D, 0]
    alphas: np.ndarray = NO_BIASES  # [D, 3] of the activation, or [D, 0]
    parallel: bool = False  # whether mixer and feed-forward of a layer read the same
    has_feed_forward: tuple[bool, ...] = ()  # [L] whether a layer has one
    head_norms: HeadNorms = HeadNorms()
    query_scales: np.ndarray = NO_BIAS  # [columns] by position, or [0]

    @property
    def matrices(self) -> tuple[Packed, ...]:
        """Of all products of a forward pass."""
        further = [part.matrices for part in (self.experts, self.wide, self.layer_inputs) if part is not None]
        others = [w for w in self.others.values() if isinstance(w, Packed)]
        return self.head, self.qkv, self.out, self.gate_up, self.down, *chain(*further), *others


class WideAttention(NamedTuple):
    """weights: fields of `Weights`, of layers of `WIDE_ATTENTION`.  width, groups, keys_as_values: as in `Sizes`."""

    weights: Mapping[str, Any]
    width: int
    groups: int
    keys_as_values: bool

    @property
    def qkv(self) -> Packed:
        """Of queries, keys and values."""
        return self.weights["qkv"]

    @property
    def matrices(self) -> tuple[Packed, ...]:
        """Of its products."""
        return self.qkv, self.weights["out"]


class Block(NamedTuple):
    """What stands between a norm and the sum with what went into it. rounding: of the input.  Its parts leave what is added in `work.update`."""

    rounding: int
    parts: tuple[Part, ...]


def product(step: np.ndarray, x: np.ndarray, w: Packed, y: np.ndarray, work: Workspace) -> Part:
    """y = x W^T, where x was rounded into `work.rounded`."""
    items = panel_work(w.panels, w.panel_bytes, len(work.queries))
    return Part(product_code, Product(step, x, w, work.rounded, y), items)


def biased_product(
    step: np.ndarray, x: np.ndarray, w: Packed, y: np.ndarray, work: Workspace, bias: np.ndarray
) -> tuple[Part, ...]:
    """y = x W^T + bias. bias: [layers, outputs], or [layers, 0], or [1, 0]."""
    added = (Part(bias_code, Bias(step, y, bias)),) if bias.shape[1] else ()
    return product(step, x, w, y, work), *added
