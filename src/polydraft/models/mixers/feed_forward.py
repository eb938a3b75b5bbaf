"""A feed-forward with a gate: down (activation(gate x) up x)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from polydraft.models.matrices.kernels import gate
from polydraft.models.matrices.rounding import quantize_rows
from polydraft.models.mixers.layer import Block, LayerWeights, Shapes, Weights, product
from polydraft.models.mixers.program import Part, Work, lasting_code
from polydraft.models.mixers.workspace import Sizes, Workspace
from polydraft.numerics.compile_time import unowned
from polydraft.numerics.compiled_code import njit


@dataclass(frozen=True)
class FeedForwardWeights(LayerWeights):
    """See `LayerWeights`; by default Llama's. width: of what lies between gate and down, from a configuration."""

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

    @classmethod
    def of(
        cls, gate: str, up: str, down: str, width: Callable[[Any], int] | None = None
    ) -> "FeedForwardWeights":
        """Of other names."""
        names = {gate: "ffn_gate", up: "ffn_up", down: "ffn_down"}
        matrices = {"gate_up": (gate, up), "down": (down,)}
        return cls(matrices=matrices, names=names, width=width or cls.width)

    def shapes_of(self, config: Any) -> Shapes:
        """Of the weights of one layer."""
        h = config.hidden_size
        inner = self.width(config)
        (down,) = self.matrices["down"]
        return {f"{name}.weight": (inner, h) for name in self.matrices["gate_up"]} | {
            f"{down}.weight": (h, inner)
        }


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
    quantize_rows(a.act, inner, a.rounding, a.rounded, begin, end)


@njit(cache=True)
def gate_code(arguments, address):
    return lasting_code(_gate, arguments, address)


def feed_forward_block(weights: Weights, sizes: Sizes, work: Workspace, step: np.ndarray) -> Block:
    """Down times (activation(gate) up)."""
    gate = Gate(
        step, work.gate_up, weights.inners, sizes.activation, work.act, weights.down.rounding, work.rounded
    )
    parts = (
        product(step, work.normed, weights.gate_up, work.gate_up, work),
        Part(gate_code, gate, Work(grain=1)),
        product(step, work.act, weights.down, work.update, work),
    )
    return Block(weights.gate_up.rounding, parts)
