"""Layers that are mixtures of experts: their weights, packed, and the parts that they are made of."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from polydraft.models.matrices.products import EXACT, Packed
from polydraft.models.matrices.rounding import rounded_bytes
from polydraft.models.matrices.vectors import aligned
from polydraft.models.mixers.dense import (
    Add,
    Join,
    Norm,
    Product,
    Rounding,
    add_code,
    join_code,
    norm_code,
    product_code,
    rounding_code,
)
from polydraft.models.mixers.experts.names import (
    BESIDE,
    CHOICE,
    FACTORS,
    PROJECTIONS,
    ROUTER,
    SHARED,
    SHARED_GATE,
    Experts,
    expert_name,
)
from polydraft.models.mixers.experts.parts import (
    Activate,
    Choose,
    ClampedActivate,
    Combine,
    Gather,
    Group,
    MultiplyExperts,
    activate_code,
    choose_code,
    clamped_code,
    combine_code,
    gather_code,
    group_code,
    multiply_code,
)
from polydraft.models.mixers.experts.routing import (
    SIGMOID,
    SOFTMAX,
    SPARSE_MIXER,
    Choices,
    Routing,
    new_choices,
)
from polydraft.models.mixers.feed_forward import Activation, Gate, activation_code, gate_code
from polydraft.models.mixers.layer import NO_BIASES, Block
from polydraft.models.mixers.program import Items, Part, Work, panel_grain, panel_work
from polydraft.models.mixers.workspace import CHUNK, ONE, Sizes, Workspace
from polydraft.numerics.floats import as_float32


class ExpertWeights(NamedTuple):
    """Of the M layers that are mixtures of E experts; absent parts are empty.

    router: M matrices.  router_bias, choice: [M, E], see `experts.choose`.  gate_up, down: M E matrices, those of a layer one after the other.
    factors: [M, E] of the weights of experts.  router_gain: what rows are normalised with for the router, where there is a dense feed-forward, too;
    dense_norm, input_norm, output_norm: behind that, before the experts and behind them, all [M, h].
    gate_up_bias, down_bias: [M, E, outputs].  shared_gate_up, shared_down: M matrices of the expert of all rows.  shared_gate: [M, h] what its share follows from.
    """

    mixture: Experts
    router: Packed
    gate_up: Packed
    down: Packed
    shared_gate_up: Packed
    shared_down: Packed
    router_bias: np.ndarray
    choice: np.ndarray
    gate_up_bias: np.ndarray
    down_bias: np.ndarray
    shared_gate: np.ndarray
    factors: np.ndarray
    router_gain: np.ndarray
    dense_norm: np.ndarray
    input_norm: np.ndarray
    output_norm: np.ndarray

    @property
    def matrices(self) -> tuple[Packed, ...]:
        """Those that are packed."""
        return self.router, self.gate_up, self.down, self.shared_gate_up, self.shared_down


def expert_matrices(mixture: Experts, prefixes: Sequence[str]) -> dict[str, list[list[str]]]:
    """Field of `ExpertWeights` -> tensors of each matrix, one below another. prefixes: of the layers that are mixtures."""
    gate_up = mixture.gate_up
    (down,) = PROJECTIONS[2:]
    experts = [(prefix, e) for prefix in prefixes for e in range(mixture.experts)]
    names = {
        "gate_up": [[prefix + expert_name(e, part) for part in gate_up] for prefix, e in experts],
        "down": [[prefix + expert_name(e, down)] for prefix, e in experts],
    }
    if mixture.shared:
        names["shared_gate_up"] = [
            [f"{prefix}{SHARED}.{part}.weight" for part in gate_up] for prefix in prefixes
        ]
        names["shared_down"] = [[f"{prefix}{SHARED}.{down}.weight"] for prefix in prefixes]
    return names


def expert_vectors(
    read: Callable[[str], np.ndarray], hidden: int, mixture: Experts, prefixes: Sequence[str]
) -> dict[str, Any]:
    """Fields of `ExpertWeights` that are no matrices of a product. read: a weight by its name.  hidden: width of the model."""

    def stacked(names: Sequence[str], shape: tuple[int, ...], present: bool) -> np.ndarray:
        """Of each layer, all these one behind the other."""
        if not present:
            return np.zeros((*shape[:-1], 0), np.float32)
        layers = [
            np.concatenate([as_float32(read(prefix + name)).reshape(-1) for name in names])
            for prefix in prefixes
        ]
        return np.stack(layers).reshape(shape)

    M = len(prefixes)
    E = mixture.experts
    experts = range(mixture.experts)
    gate_up = [expert_name(e, part, "bias") for e in experts for part in PROJECTIONS[:2]]
    return {
        "router_bias": stacked([f"{ROUTER}.bias"], (M, E), mixture.biased),
        "choice": stacked([CHOICE], (M, E), mixture.choice_biased),
        "gate_up_bias": stacked(gate_up, (M, E, 2 * mixture.inner), mixture.biased),
        "down_bias": stacked(
            [expert_name(e, PROJECTIONS[2], "bias") for e in experts], (M, E, hidden), mixture.biased
        ),
        "shared_gate": stacked([f"{SHARED_GATE}.weight"], (M, hidden), mixture.shared_gate),
        "factors": stacked([FACTORS], (M, E), mixture.beside),
        **{role: stacked([name], (M, hidden), mixture.beside) for role, name in BESIDE.items()},
    }


def routing_of(mixture: Experts) -> Routing:
    """What compiled code knows of it."""
    score = SIGMOID if mixture.sigmoid else SOFTMAX
    return Routing(
        mixture.experts,
        mixture.chosen,
        score if mixture.noise is None else SPARSE_MIXER,
        mixture.groups,
        mixture.best_groups,
        mixture.shares,
        np.float32(mixture.scale),
        np.float32(mixture.noise or 0.0),
        mixture.pairs,
    )


def expert_parts(
    weights: ExpertWeights,
    sizes: Sizes,
    work: Workspace,
    step: np.ndarray,
    routed: np.ndarray | None = None,
    between: tuple[Part, ...] = (),
) -> tuple[Part, ...]:
    """From the normed rows, rounded for the experts' first product, to what is added to the residual stream, in `work.update`.

    routed: what the router reads, default the normed rows.  between: parts that make these where the router reads others.
    """
    choices = new_choices(CHUNK, routing_of(weights.mixture), weights.router.outputs)
    outputs, of_experts = _of_chosen(weights, sizes, work, step, choices)
    shared, of_shared = _shared(weights, sizes, work, step)
    combined = Combine(
        step,
        outputs,
        weights.down_bias,
        choices,
        work.normed,
        shared,
        weights.shared_gate,
        work.normed.shape[1],
        work.update,
    )
    return (
        *_choosing(weights, work, step, work.normed if routed is None else routed, choices),
        *between,
        *of_experts,
        *of_shared,
        Part(combine_code, combined, Work(grain=1)),
    )


def _choosing(
    weights: ExpertWeights, work: Workspace, step: np.ndarray, routed: np.ndarray, choices: Choices
) -> tuple[Part, ...]:
    """The router's product, and the choice."""
    w = weights.router
    router = Product(step, routed, w, work.rounded, choices.logits)
    choose = Choose(
        step, weights.router_bias, weights.choice, weights.factors, routing_of(weights.mixture), choices
    )
    return (
        Part(product_code, router, panel_work(w.panels, w.panel_bytes, len(work.queries))),
        Part(choose_code, choose),
    )


def _of_chosen(
    weights: ExpertWeights, sizes: Sizes, work: Workspace, step: np.ndarray, choices: Choices
) -> tuple[np.ndarray, tuple[Part, ...]]:
    """What the chosen experts give, [places, outputs], and its parts: rows are gathered by expert and go through its matrices."""
    mixture = weights.mixture
    places = CHUNK * mixture.chosen

    def rows_for(w: Packed, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Room for what a product reads of each place, as it is and rounded."""
        rounded = 0 if w.rounding == EXACT else rounded_bytes(width)
        return aligned(places, width if w.reads_numbers else 0), aligned(places, rounded, dtype=np.uint8)

    def multiply(x: np.ndarray, w: Packed, rounded: np.ndarray, y: np.ndarray) -> Part:
        grain = panel_grain.py_func(mixture.chosen * w.panels, w.panel_bytes, len(work.queries))
        product = MultiplyExperts(step, x, w, mixture.experts, rounded, y, choices)
        return Part(multiply_code, product, Work(Items.COUNTED, w.panels, grain=grain))

    gathered, gathered_rounded = rows_for(weights.gate_up, work.normed.shape[1])
    both = aligned(places, weights.gate_up.outputs)
    act = aligned(places, mixture.inner)
    _, act_rounded = rows_for(weights.down, mixture.inner)
    outputs = aligned(places, weights.down.outputs)
    parts = (
        Part(group_code, Group(step, choices), Work(Items.FIXED, 1)),
        Part(gather_code, Gather(work.normed, work.rounded, choices, gathered, gathered_rounded)),
        multiply(gathered, weights.gate_up, gathered_rounded, both),
        _activation(weights, sizes, step, choices, both, act, act_rounded),
        multiply(act, weights.down, act_rounded, outputs),
    )
    return outputs, parts


def _activation(
    weights: ExpertWeights,
    sizes: Sizes,
    step: np.ndarray,
    choices: Choices,
    both: np.ndarray,
    act: np.ndarray,
    rounded: np.ndarray,
) -> Part:
    mixture = weights.mixture
    rounding = weights.down.rounding
    if mixture.limit is None:
        plain = Activate(
            both, mixture.inner, sizes.activation, mixture.gated, choices, act, rounding, rounded
        )
        return Part(activate_code, plain, Work(grain=1))
    limits = np.float32(mixture.limit), np.float32(mixture.alpha)
    clamped = ClampedActivate(
        step, both, mixture.inner, weights.gate_up_bias, *limits, choices, act, rounding, rounded
    )
    return Part(clamped_code, clamped, Work(grain=1))


def _shared(
    weights: ExpertWeights, sizes: Sizes, work: Workspace, step: np.ndarray
) -> tuple[np.ndarray, tuple[Part, ...]]:
    """What the expert of all rows gives, and its parts; nothing where there is none."""
    inner = weights.mixture.shared
    gate_up = weights.shared_gate_up
    down = weights.shared_down
    if inner == 0:
        return aligned(CHUNK, 0), ()
    inners = np.full(len(weights.router.segments), inner)
    both = aligned(CHUNK, gate_up.outputs)
    act = aligned(CHUNK, inner)
    outputs = aligned(CHUNK, down.outputs)
    rounded = aligned(CHUNK, rounded_bytes(max(inner, work.normed.shape[1])), dtype=np.uint8)
    threads = len(work.queries)

    def product(x: np.ndarray, w: Packed, y: np.ndarray) -> Part:
        return Part(
            product_code, Product(step, x, w, rounded, y), panel_work(w.panels, w.panel_bytes, threads)
        )

    if weights.mixture.gated:
        gated = Gate(step, both, inners, sizes.activation, act, down.rounding, rounded)
        activation = Part(gate_code, gated, Work(grain=1))
    else:
        plain = Activation(step, both, sizes.activation, NO_BIASES, act, down.rounding, rounded)
        activation = Part(activation_code, plain, Work(grain=1))
    parts = (
        Part(rounding_code, Rounding(step, work.normed, work.normed.shape[1], gate_up.rounding, rounded)),
        product(work.normed, gate_up, both),
        activation,
        product(act, down, outputs),
    )
    return outputs, parts


def experts_block(weights: ExpertWeights, sizes: Sizes, work: Workspace, step: np.ndarray) -> Block:
    """A mixture of experts."""
    return Block(weights.gate_up.rounding, expert_parts(weights, sizes, work, step))


def experts_beside_block(
    weights: ExpertWeights, dense: Block, sizes: Sizes, work: Workspace, step: np.ndarray
) -> Block:
    """A mixture beside a dense feed-forward, each with a norm behind it, of the same rows with other gains (Gemma 4)."""
    hidden = work.x.shape[1]
    summed = aligned(CHUNK, hidden)
    routed = aligned(CHUNK, hidden)
    root = np.float32(hidden**-0.5)
    none = np.zeros((len(weights.output_norm), 0), np.float32)

    def norm(x: np.ndarray, gain: np.ndarray, out: np.ndarray, rounding: int = EXACT) -> Part:
        return Part(norm_code, Norm(step, x, gain, sizes.epsilon, out, rounding, work.rounded))

    inputs = norm(work.x, weights.input_norm, work.normed, weights.gate_up.rounding)
    added = Join(step, summed, work.update, none, weights.output_norm, sizes.epsilon, ONE)
    parts = (
        *dense.parts,
        norm(work.update, weights.dense_norm, summed),
        norm(work.x, weights.router_gain * root, routed),
        *expert_parts(weights, sizes, work, step, routed, (inputs,)),
        Part(join_code, added),
        Part(add_code, Add(summed, work.update, replaces=True)),
    )
    return Block(dense.rounding, parts)
