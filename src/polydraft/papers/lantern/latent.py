"""Latent neighbourhoods (not lossless): a drafted image token may borrow the target's mass of its codebook neighbours.

Jang et al. 2024 (LANTERN, arXiv 2410.03355); Park et al. 2025 (LANTERN++, arXiv 2502.06352). For models whose tokens are codes of a
quantised latent space.

    A(x)    the longest beginning of x's nearest neighbours whose mass S(x) under p stays within the budget:
            additive        S(x) <= delta              LANTERN, 0 < delta < 1
            multiplicative  S(x) <= factor p(x)        LANTERN++, factor = lambda - 1 > 0
    sampled        a(x) = min(1, (p(x) + S(x)) / q(x));  a rejection leaves N((p - q)+) to the next sibling
    deterministic  a(x) = p(x) + S(x);  a rejection leaves p without x and without A(x)
    greedily       x is accepted where p(x) + S(x) >= max p; else the most probable token follows

One sampled draft: total variation of the output  sum_x min(S(x), (q(x) - p(x))+)  (`deviation`), which can be 1 at any budget: with p on
even and q on odd tokens, each the other's neighbour, delta = 0.005 suffices. The budget limits the mass borrowed for one candidate.
Traps: q raised with p, or a mere membership test in place of the sum; a neighbour list that holds its own token counts p twice; a rejection
that takes away neighbours which nothing was borrowed from (the released code's first k + 1) is another distribution even at budget 0.
There is no default codebook: make the verifier with `latent(neighbours, ...)`, for pictures with `papers.lantern.engine.neighbourhoods`.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from polydraft.core import Draft, DraftSampling, Method
from polydraft.core.arrays import (
    Array,
    double,
    first,
    gather,
    host,
    like,
    namespace,
    put,
    scatter,
    scatter_add,
    take,
)
from polydraft.errors import InvalidInputError
from polydraft.methods.papers import method
from polydraft.verifiers import recursive
from polydraft.verifiers.lift.draws import draws_at
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.lift.verdict import TreeVerdict
from polydraft.verifiers.match import match
from polydraft.verifiers.residual import normalise, normalise_or
from polydraft.verifiers.speculative import residual

INFO = method(
    "latent", "Latent neighbourhoods (LANTERN)", "2410.03355 2502.06352", DraftSampling, lossless=False
)
REPLACED = frozenset({DraftSampling.IID, DraftSampling.INDEPENDENT, DraftSampling.POINT_MASS})
"""Draft samplings that the verifier takes as they come; `WITHOUT_REPLACEMENT` asks for q without the earlier draws."""


def borrowed(
    p: Float[Array, "M V"],
    x: Int[Array, "M C"],
    neighbours: Int[Array, "V m"],
    *,
    delta: float = 0.0,
    factor: float = 0.0,
) -> tuple[Float[Array, "M C"], Int[Array, "M C m"], Bool[Array, "M C m"]]:
    """S(x), the neighbours of x, and which of them are in A(x).

    Example:
        >>> p, near = np.array([[0.25, 0.45, 0.3]]), np.array([[2, 1], [0, 2], [0, 1]])
        >>> mass, _, within = borrowed(p, np.array([[0]]), near, delta=0.5)
        >>> round(float(mass[0, 0]), 6), within.tolist()
        (0.3, [[[True, False]]])
    """
    xp = namespace(p)
    own_mass = gather(p, x)
    near = like(host(neighbours), p)[x]
    there = near >= 0
    masses = gather(p, xp.reshape(xp.clip(near, min=0), (len(p), -1)))
    mass = xp.cumulative_sum(xp.reshape(masses, near.shape) * there, axis=-1)
    within = mass <= xp.clip(factor * own_mass, min=delta)[..., None]
    return xp.max(xp.where(within, mass, 0.0), axis=-1), near, within & there


def accept_probability(
    p: Float[Array, "M V"],
    q: Float[Array, "M V"],
    x: Int[Array, "M C"],
    neighbours: Int[Array, "V m"],
    *,
    delta: float = 0.0,
    factor: float = 0.0,
) -> Float[Array, "M C"]:
    """a(x) of sampled tokens x.

    Example:
        >>> p, q = np.array([[0.25, 0.75]]), np.array([[0.5, 0.5]])
        >>> near, every = np.array([[1], [0]]), np.array([[0, 1]])
        >>> accept_probability(p, q, every, near).tolist()
        [[0.5, 1.0]]
        >>> accept_probability(p, q, every, near, delta=0.8).tolist()
        [[1.0, 1.0]]
    """
    mass, _, _ = borrowed(p, x, neighbours, delta=delta, factor=factor)
    xp = namespace(p)
    qx = gather(q, x)
    ratio = (gather(p, x) + mass) / xp.where(qx > 0, qx, 1.0)
    return xp.clip(xp.where(qx > 0, ratio, 0.0), max=1.0)


def output_probs(
    p: Float[Array, "M V"],
    q: Float[Array, "M V"],
    neighbours: Int[Array, "V m"],
    *,
    delta: float = 0.0,
    factor: float = 0.0,
) -> Float[Array, "M V"]:
    """Distribution of the next token for one draft from q.

    Example:
        >>> p, q = np.array([[0.5, 0.5]]), np.array([[0.25, 0.75]])
        >>> output_probs(p, q, np.array([[1], [0]])).tolist()  # no budget: the target's distribution
        [[0.5, 0.5]]
    """
    every = like(np.tile(np.arange(p.shape[-1]), (len(p), 1)), p)
    accepted = q * accept_probability(p, q, every, neighbours, delta=delta, factor=factor)
    return accepted + (1 - namespace(p).sum(accepted, axis=-1, keepdims=True)) * residual(p, q)


@dataclass(frozen=True)
class Latent:
    """The verifier for one codebook; see `latent`."""

    neighbours: Int[np.ndarray, "V m"]
    delta: float
    factor: float
    info: Method
    greedy: bool = False

    def __call__(self, draft: Draft, target_probs: Float[Array, "B N V"]) -> TreeVerdict:
        if target_probs.shape[-1] != len(self.neighbours):
            raise InvalidInputError(
                f"distributions over {target_probs.shape[-1]} tokens were given to neighbours of {len(self.neighbours)}; expected one row of "
                "neighbours for each token. Build the table from the codebook of this model."
            )
        if self.greedy:
            return match(draft, self._chosen(draft, normalise(double(target_probs))))
        return PerNode(self.info, self.emitted_probs)(draft, target_probs)

    def _borrowed(self, p: Array, x: Array) -> tuple[Array, Array, Array]:
        return borrowed(p, x, self.neighbours, delta=self.delta, factor=self.factor)

    def emitted_probs(
        self,
        p: Float[Array, "M V"],
        q: Float[Array, "M V"] | Float[Array, "M n V"] | None,
        draws: Int[Array, "M n"],
    ) -> Float[Array, "M V"]:
        """Distribution of the emitted token given the draws, in their order; see `lift.per_node.TokenRule`."""
        return self._after_points(p, draws) if q is None else self._after_draws(p, q, draws)

    def _after_points(self, p: Array, draws: Array) -> Array:
        """Deterministic siblings take their own mass and that of A; what is left has its own, bit for bit."""
        xp = namespace(p)
        distribution = xp.zeros_like(p)
        remaining = p
        for i in range(draws.shape[1]):
            draw = draws[:, i : i + 1]
            x = xp.clip(draw, min=0)
            _, near, within = self._borrowed(normalise_or(remaining, otherwise=remaining), x)
            counts = xp.astype(within[:, 0], p.dtype)
            counts = scatter_add(xp.zeros_like(p), xp.clip(near[:, 0], min=0), counts)
            is_taken = (scatter(counts, x, 1.0) > 0) & (draw >= 0)
            taken = xp.sum(remaining * is_taken, axis=1, keepdims=True)
            distribution = scatter_add(distribution, x, taken)
            remaining = xp.where(is_taken, 0.0, remaining)
        return distribution + remaining

    def _after_draws(self, p: Array, q: Array, draws: Array) -> Array:
        """Sampled siblings, each tried against what the earlier ones left over; as `recursive`, whose distribution it is at budget 0."""

        def accept(r: Array, c: Array, x: Array) -> Array:
            return accept_probability(
                r, c, x[:, None], self.neighbours, delta=self.delta, factor=self.factor
            )[:, 0]

        replacement = self.info.draft_sampling != {DraftSampling.WITHOUT_REPLACEMENT}
        return recursive.emitted_probs(p, q, draws, replacement=replacement, accept_probability=accept)

    def _chosen(self, draft: Draft, p: Array) -> Array:
        """One-hot rows: at each context the first child that meets the greedy test, else the most probable token."""
        xp = namespace(p)
        nodes = draws_at(draft.tree)
        rows = xp.reshape(p, (-1, p.shape[-1]))
        best = xp.argmax(rows, axis=-1)
        if nodes.shape[-1]:
            nodes = nodes.reshape(len(rows), -1)
            batch = np.repeat(np.arange(len(p)), p.shape[1])[:, None]
            x = like(draft.tree.host.tokens[batch, np.maximum(nodes, 0)], p)
            mass, _, _ = self._borrowed(rows, x)
            most = xp.max(rows, axis=-1, keepdims=True)
            passes = (gather(rows, x) + mass >= most) & like(nodes >= 0, p)
            best = xp.where(xp.any(passes, axis=-1), gather(x, first(passes)[:, None])[:, 0], best)
        return scatter(xp.zeros_like(p), xp.reshape(best, (*p.shape[:2], 1)), 1.0)

    def deviation(
        self, draft: Draft, target_probs: Float[Array, "B N V"]
    ) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
        """Expected total variation that a step adds up over its tokens, and expected number of its tokens; exact, no sampling.

        At each context the total variation between p and the distribution that the verifier emits there, averaged over the sampled draft; weighted
        with the probability that the step emits a token there. Contexts without drafts count as tokens, and follow p.

        Raises:
            InvalidInputError: several sampled siblings, whose average has no short form, or a greedy verifier.
        """
        p = normalise(double(target_probs))
        xp = namespace(p)
        nodes = draws_at(draft.tree)
        if self.greedy or (draft.probs is not None and nodes.shape[-1] > 1):
            raise InvalidInputError(
                "several sampled siblings or a greedy rule were given; expected chains, or deterministic drafts."
            )
        reach = self(draft, target_probs).stop
        tokens, parents = draft.tree.host
        for n in range(draft.tree.num_nodes - 1, 0, -1):
            above = like(parents[:, n : n + 1], reach)
            reach = scatter_add(reach, xp.clip(above, min=0), reach[:, n : n + 1] * (above >= 0))
        b, node = np.nonzero(nodes[..., 0] >= 0) if nodes.shape[-1] else np.empty((2, 0), np.int64)
        if not len(b):
            return xp.zeros_like(reach[:, 0]), xp.sum(reach, axis=1)
        here = take(p, b, node)
        children = nodes[b, node]
        if draft.probs is None:
            draws = np.where(children >= 0, tokens[b[:, None], np.maximum(children, 0)], -1)
            distribution = self._after_points(here, like(draws, p))
        else:
            q = normalise(double(take(draft.probs, b, host(draft.rows)[b, children[:, 0]])))
            distribution = output_probs(here, q, self.neighbours, delta=self.delta, factor=self.factor)
        distance = xp.sum(xp.abs(distribution - here), axis=-1) / 2
        tv = put(xp.zeros_like(reach), (b, node), distance)
        return xp.sum(reach * tv, axis=1), xp.sum(reach, axis=1)


def latent(
    neighbours: Int[Array, "V m"],
    *,
    delta: float = 0.0,
    factor: float = 0.0,
    replacement: bool = True,
    greedy: bool = False,
) -> Latent:
    """The verifier for one codebook.

    neighbours: the m nearest other tokens of each token, nearest first; -1 where there is none, as for tokens that are no codes: these are
        tried exactly.  delta, factor: additive and multiplicative budget; the larger of the two counts.
    replacement: whether siblings are independent draws or deterministic; False is for draws without replacement.
    greedy: accept what is most probable, for targets at temperature 1: where the temperature is 0 neighbours have no mass to lend.

    Raises:
        InvalidInputError: a budget out of its range, neighbours that are no table of token ids, or a token among its own.

    Example:
        >>> latent(np.array([[1], [0]]), delta=0.1).info.lossless
        False
    """
    if not (0 <= delta < 1 and 0 <= factor < math.inf):
        raise InvalidInputError(
            f"delta={delta} and factor={factor} were given; expected 0 <= delta < 1, a mass, and a finite factor >= 0 of the token's own mass "
            "(lambda - 1 of LANTERN++). Use 0 for the exact verifier."
        )
    neighbours = host(neighbours)
    is_table = neighbours.ndim == 2 and neighbours.size > 0 and neighbours.dtype.kind == "i"
    if not (is_table and -1 <= int(neighbours.min()) <= int(neighbours.max()) < len(neighbours)):
        raise InvalidInputError(
            f"neighbours of shape {tuple(neighbours.shape)} were given; expected a [V, m] table of token ids, nearest first, or -1 for none. "
            "Build it from the distances between codebook rows."
        )
    lists_itself = (neighbours == np.arange(len(neighbours))[:, None]).any(1)
    if lists_itself.any():
        raise InvalidInputError(
            f"token {int(lists_itself.argmax())} is among its own neighbours, which would count its mass twice. Leave it out of its row."
        )
    draft_sampling = REPLACED if replacement else frozenset({DraftSampling.WITHOUT_REPLACEMENT})
    return Latent(neighbours, delta, factor, replace(INFO, draft_sampling=draft_sampling), greedy)
