"""Mixtures of experts as data: how a row chooses, how wide experts are, which layers have them, and what their weights are called.

One weight has one name here, whatever its file does, as folders of transformers 4 have it:
    mlp.gate.weight, .bias, .e_score_correction_bias    the router, and what is added to scores where experts are chosen
    mlp.experts.E.gate_proj.weight, .bias               up_proj and down_proj likewise
    mlp.shared_expert.gate_proj.weight                  likewise
    mlp.shared_expert_gate.weight                       what the shared expert's share follows from
transformers 5 stacks the experts of a layer; so do GGUF files.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polydraft.models.store.places import Stored, whole

ROUTER = "mlp.gate"
SHARED = "mlp.shared_expert"
SHARED_GATE = "mlp.shared_expert_gate"
BESIDE = {
    "router_gain": "router.scale",
    "dense_norm": "post_feedforward_layernorm_1.weight",
    "input_norm": "pre_feedforward_layernorm_2.weight",
    "output_norm": "post_feedforward_layernorm_2.weight",
}
"""Norms of a mixture beside a dense feed-forward, by the fields of `ExpertWeights`."""
FACTORS = "router.per_expert_scale"
CHOICE = f"{ROUTER}.e_score_correction_bias"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
OWN_PROJECTIONS = {"gate": "w1", "up": "w3", "down": "w2"}
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
GGUF_NAMES = {
    ROUTER: "ffn_gate_inp",
    CHOICE: "exp_probs_b.bias",
    SHARED_GATE: "ffn_gate_inp_shexp",
    **{f"{SHARED}.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
"""Files' names, without the layer."""


@dataclass(frozen=True)
class Experts:
    """experts, chosen: in all, and of each row.  inner: width between an expert's gate and its down product.  layers: whether each layer is a mixture.
    sigmoid: whether scores are a sigmoid of the router's products, and not their softmax.  groups, best_groups: see `experts.Routing`.
    pairs: whether groups are chosen by their two best experts.  shares, scale: whether weights of the chosen are divided by their sum, and what they are multiplied by.
    shared: width of an expert of all rows, or 0.  shared_gate: whether its share is a sigmoid of a product of its own.
    biased: whether router and experts have biases.  choice_biased: whether scores have one where experts are chosen.
    beside: whether its layers have a dense feed-forward, too, and norms of their own for both; weights of experts then have factors.
    limit: of gpt-oss' clamped gate, or None for a plain one.  alpha: of its sigmoid.  noise: of SparseMixer's choice, or None for another one.
    gated: whether experts have gates.  latent: numbers of a row that they work on, or 0 for all.
    """

    experts: int
    chosen: int
    inner: int
    layers: tuple[bool, ...]
    sigmoid: bool = False
    groups: int = 1
    best_groups: int = 1
    pairs: bool = True
    shares: bool = True
    scale: float = 1.0
    shared: int = 0
    shared_gate: bool = False
    biased: bool = False
    choice_biased: bool = False
    beside: bool = False
    limit: float | None = None
    alpha: float = 1.0
    noise: float | None = None
    gated: bool = True
    latent: int = 0

    @property
    def fault(self) -> str | None:
        """What cannot be, or None."""
        size = self.experts // self.groups if self.groups else 0
        if self.noise is not None and self.chosen != 2:
            return f"it chooses {self.chosen} experts; SparseMixer chooses 2"
        if not 1 <= self.chosen <= self.experts:
            return f"it chooses {self.chosen} of {self.experts} experts; expected 1 to {self.experts}"
        if (
            not 1 <= self.best_groups <= self.groups
            or size * self.groups != self.experts
            or size * self.best_groups < self.chosen
        ):
            return f"it chooses {self.chosen} of {self.experts} experts from {self.best_groups} of {self.groups} groups, which do not hold them"
        return None

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Of a layer's weights, by name."""
        shapes: dict[str, tuple[int, ...]] = {f"{ROUTER}.weight": (self.experts, hidden)}
        shapes |= {f"{ROUTER}.bias": (self.experts,)} if self.biased else {}
        shapes |= {CHOICE: (self.experts,)} if self.choice_biased else {}
        shapes |= self.expert_shapes(hidden)
        if self.beside:
            shapes |= {FACTORS: (self.experts,), **dict.fromkeys(BESIDE.values(), (hidden,))}
        if self.shared:
            shapes |= {
                f"{SHARED}.{part}.weight": shape
                for part, shape in self._shapes_of(self.shared, hidden).items()
            }
        return shapes | ({f"{SHARED_GATE}.weight": (1, hidden)} if self.shared_gate else {})

    def expert_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Of the experts alone."""
        shapes = dict[str, tuple[int, ...]]()
        of_one = self._shapes_of(self.inner, self.latent or hidden)
        for e in range(self.experts):
            shapes |= {expert_name(e, part): shape for part, shape in of_one.items()}
            biases = of_one if self.biased else {}
            shapes |= {expert_name(e, part, "bias"): shape[:1] for part, shape in biases.items()}
        return shapes

    @property
    def gate_up(self) -> tuple[str, ...]:
        """What the first product of an expert is made of."""
        return PROJECTIONS[:2] if self.gated else PROJECTIONS[1:2]

    def _shapes_of(self, inner: int, hidden: int) -> dict[str, tuple[int, ...]]:
        return {**dict.fromkeys(self.gate_up, (inner, hidden)), PROJECTIONS[2]: (hidden, inner)}


def expert_name(expert: int, part: str, kind: str = "weight") -> str:
    """Of a weight of one expert, without the layer.

    Example:
        >>> expert_name(3, "up_proj")
        'mlp.experts.3.up_proj.weight'
    """
    return f"mlp.experts.{expert}.{part}.{kind}"


def renamed_expert(name: str, module: str) -> Stored | None:
    """Where folders have a weight of an expert that call its projections w1, w3 and w2, as Mixtral's own do. module: of the mixture in a layer.

    Example:
        >>> renamed_expert("mlp.experts.11.up_proj.weight", "block_sparse_moe")[:2]
        ('block_sparse_moe.experts.11.w3.weight', None)
    """
    match = EXPERT.fullmatch(name)
    return match and Stored(f"{module}.experts.{match[1]}.{OWN_PROJECTIONS[match[2]]}.{match[3]}")


def in_gguf(name: str, *, halves: bool = False) -> Stored | None:
    """Where a GGUF file has a weight of an expert, without the block; None for any other weight. halves: see `MixtureWeights`.

    Example:
        >>> in_gguf("mlp.experts.3.up_proj.weight")[:2], in_gguf("mlp.gate.weight")
        (('ffn_up_exps.weight', 3), None)
    """
    match = EXPERT.fullmatch(name)
    if match and halves and match[2] != "down":
        return Stored(f"ffn_gate_up_exps.{match[3]}", int(match[1]), half=int(match[2] == "up"))
    return match and Stored(f"ffn_{match[2]}_exps.{match[3]}", int(match[1]))


def stacked(name: str, inner: int) -> Stored | None:
    """Where transformers 5 has a weight of an expert: gate and up below one another. inner: rows of each.

    Example:
        >>> stacked("mlp.experts.3.up_proj.weight", 16)[:2]
        ('mlp.experts.gate_up_proj', 3)
    """
    match = EXPERT.fullmatch(name)
    if match is None:
        return None
    if match[2] == "down":
        return Stored("mlp.experts.down_proj", int(match[1]))
    rows = slice(0, inner) if match[2] == "gate" else slice(inner, None)
    return Stored("mlp.experts.gate_up_proj", int(match[1]), lambda matrix: matrix[rows])


def stacked_by_columns(name: str, inner: int) -> Stored | None:
    """Likewise for gpt-oss: [inputs, outputs], where gate and up lie side by side in turn.

    Example:
        >>> stacked_by_columns("mlp.experts.3.down_proj.bias", 16)[:2]
        ('mlp.experts.down_proj_bias', 3)
    """
    match = EXPERT.fullmatch(name)
    if match is None:
        return None
    kind = "_bias" if match[3] == "bias" else ""
    if match[2] == "down":
        return Stored(f"mlp.experts.down_proj{kind}", int(match[1]), _transposed)
    columns = slice(0 if match[2] == "gate" else 1, None, 2)
    return Stored(
        f"mlp.experts.gate_up_proj{kind}", int(match[1]), lambda matrix: _transposed(matrix[..., columns])
    )


def flat(tensor: np.ndarray) -> np.ndarray:
    return tensor.reshape(-1)


def _transposed(matrix: np.ndarray) -> np.ndarray:
    return matrix.T if matrix.ndim > 1 else matrix


@dataclass(frozen=True)
class MixtureWeights:
    """Experts in the place of a feed-forward: which layers have them, and where folders and modules of transformers have their weights.

    of: from a configuration, or None where a model has none.  optional: whether there are models without.
    names: of modules, what folders may call them otherwise, without the layer.  halves: whether files have gate and up in one stack.
    stack: where they have a weight of an expert, by its name and `Experts.inner`.  stacks: what folders may call these stacks otherwise.
    module: where experts lie one by one that are called as Mixtral's own are, or "".
    """

    of: Callable[[Any], Experts | None] = lambda config: None
    optional: bool = False
    halves: bool = False
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    stack: Callable[[str, int], Stored | None] = stacked
    stacks: Mapping[str, str] = field(default_factory=dict[str, str])
    module: str = ""

    def takes(self, count: int) -> bool:
        """Whether models may have so many experts a layer."""
        return self.optional or (self != NO_EXPERTS) == (count > 0)

    def places(self, name: str, config: Any) -> list[Stored]:
        """Where a folder or a module may have a weight, but for its own name."""
        of_names = [
            Stored(name.replace(ours, theirs), part=flat if name == CHOICE else whole)
            for ours, theirs in self.names.items()
            if name.startswith(ours)
        ]
        experts = self.of(config)
        one = renamed_expert(name, self.module) if self.module else None
        in_stack = self.stack(name, 0 if experts is None else experts.inner)
        if in_stack is not None and in_stack.name in self.stacks:
            of_names.append(in_stack._replace(name=self.stacks[in_stack.name]))
        return [*of_names, *(place for place in (one, in_stack) if place is not None)]


NO_EXPERTS = MixtureWeights()
