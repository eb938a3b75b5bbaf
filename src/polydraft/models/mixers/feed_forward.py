"""A feed-forward: down (activation(gate x) up x), or without a gate down activation(up x)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from polydraft.models.matrices.kernels import activate, gate
from polydraft.models.matrices.products import rounding_of
from polydraft.models.matrices.rounding import quantize_rows
from polydraft.models.mixers.layer import (
    Block,
    LayerWeights,
    Shapes,
    Weights,
    biased_product,
    is_set,
)
from polydraft.models.mixers.program import Part, Work, lasting_code
from polydraft.models.mixers.workspace import Sizes, Workspace
from polydraft.numerics.compile_time import unowned
from polydraft.numerics.compiled_code import njit


@dataclass(frozen=True)
class FeedForwardWeights(LayerWeights):
    """See `LayerWeights`; by default Llama's.

    width: of what lies between gate and down, from a configuration.  bias: whether its products have biases, or the setting that says so.
    alphas: shapes of weights that its activation has.
    """

    matrices: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",)}
    )
    names: Mapping[str, str] = field(
        default_factory=lambda: {
            "mlp.gate_up_proj": "ffn_up",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }
    )
    width: Callable[[Any], int] = lambda config: config.intermediate_size
    bias: bool | str = False
    alphas: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    @classmethod
    def of(
        cls, gate: str, up: str, down: str, width: Callable[[Any], int] | None = None
    ) -> "FeedForwardWeights":
        """Of other names."""
        names = {gate: "ffn_gate", up: "ffn_up", down: "ffn_down"}
        matrices = {"gate_up": (gate, up), "down": (down,)}
        return cls(matrices=matrices, names=names, width=width or cls.width)

    @classmethod
    def ungated(
        cls, bias: bool | str = False, up: str = "mlp.up_proj", down: str = "mlp.down_proj"
    ) -> "FeedForwardWeights":
        """Of two products alone."""
        return cls(
            matrices={"gate_up": (up,), "down": (down,)}, names={up: "ffn_up", down: "ffn_down"}, bias=bias
        )

    @property
    def has_gate(self) -> bool:
        return len(self.matrices["gate_up"]) > 1

    def has_bias(self, config: Any) -> bool:
        """Whether its products have biases."""
        return is_set(self.bias, config)

    def shapes_of(self, config: Any) -> Shapes:
        """Of the weights of one layer."""
        h = config.hidden_size
        inner = self.width(config)
        (down,) = self.matrices["down"]
        rows = dict.fromkeys(self.matrices["gate_up"], inner) | {down: h}
        shapes: Shapes = {f"{name}.weight": (size, h + inner - size) for name, size in rows.items()}
        if self.has_bias(config):
            shapes |= {f"{name}.bias": (size,) for name, size in rows.items()}
        return shapes | dict(self.alphas)


class Gate(NamedTuple):
    """x: [rows, 2 I].  inners: [layers] I of each.  activation: of `kernels`."""

    step: np.ndarray
    x: np.ndarray
    inners: np.ndarray
    activation: int
    act: np.ndarray
    rounding: int
    rounded: np.ndarray


@unowned
def _gate(a, begin, end, thread):
    inner = a.inners[a.step[0].index]
    gate(a.x, inner, a.activation, a.act, begin, end)
    quantize_rows(a.act, inner, rounding_of(a.rounding, a.step[0].of_prompt), a.rounded, begin, end)


@njit(cache=True)
def gate_code(arguments, address):
    return lasting_code(_gate, arguments, address)


class Activation(NamedTuple):
    """x: [rows, I].  alphas: [layers, 3] of xIELU, or [layers, 0]."""

    step: np.ndarray
    x: np.ndarray
    activation: int
    alphas: np.ndarray
    act: np.ndarray
    rounding: int
    rounded: np.ndarray


@unowned
def _activation(a, begin, end, thread):
    inner = a.act.shape[1]
    activate(a.x, inner, a.activation, a.alphas[a.step[0].index], a.act, begin, end)
    quantize_rows(a.act, inner, rounding_of(a.rounding, a.step[0].of_prompt), a.rounded, begin, end)


@njit(cache=True)
def activation_code(arguments, address):
    return lasting_code(_activation, arguments, address)


def feed_forward_block(weights: Weights, sizes: Sizes, work: Workspace, step: np.ndarray) -> Block:
    """Down times (activation(gate) up), or times activation(up)."""
    rounding = weights.down.rounding
    if sizes.ungated:
        alphas = weights.alphas
        plain = Activation(step, work.gate_up, sizes.activation, alphas, work.act, rounding, work.rounded)
        activation = Part(activation_code, plain, Work(grain=1))
    else:
        inners = weights.inners
        gated = Gate(step, work.gate_up, inners, sizes.activation, work.act, rounding, work.rounded)
        activation = Part(gate_code, gated, Work(grain=1))
    parts = (
        *biased_product(step, work.normed, weights.gate_up, work.gate_up, work, weights.gate_up_bias),
        activation,
        *biased_product(step, work.act, weights.down, work.update, work, weights.down_bias),
    )
    return Block(weights.gate_up.rounding, parts)
