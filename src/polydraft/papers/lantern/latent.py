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

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polydraft.core import Draft, DraftSampling, Method
from polydraft.core.arrays import like
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
    p: Float[Tensor, "M V"],
    x: Int[Tensor, "M C"],
    neighbours: Int[Tensor, "V m"],
    *,
    delta: float = 0.0,
    factor: float = 0.0,
) -> tuple[Float[Tensor, "M C"], Int[Tensor, "M C m"], Bool[Tensor, "M C m"]]:
    """S(x), the neighbours of x, and which of them are in A(x).

    Example:
        >>> p, near = torch.tensor([[0.25, 0.45, 0.3]]), torch.tensor([[2, 1], [0, 2], [0, 1]])
        >>> mass, _, within = borrowed(p, torch.tensor([[0]]), near, delta=0.5)
        >>> round(mass.item(), 6), within.tolist()
        (0.3, [[[True, False]]])
    """
    own_mass = p.gather(1, x)
    near = neighbours[x]
    there = near >= 0
    masses = p.gather(1, near.clamp(min=0).flatten(1)).view(near.shape) * there
    mass = masses.cumsum(-1)
    within = mass <= torch.maximum(torch.full_like(own_mass, delta), factor * own_mass)[..., None]
    return torch.where(within, mass, 0.0).amax(-1), near, within & there


def accept_probability(
    p: Float[Tensor, "M V"],
    q: Float[Tensor, "M V"],
    x: Int[Tensor, "M C"],
    neighbours: Int[Tensor, "V m"],
    *,
    delta: float = 0.0,
    factor: float = 0.0,
) -> Float[Tensor, "M C"]:
    """a(x) of sampled tokens x.

    Example:
        >>> p, q = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5]])
        >>> near, every = torch.tensor([[1], [0]]), torch.tensor([[0, 1]])
        >>> accept_probability(p, q, every, near).tolist()
        [[0.5, 1.0]]
        >>> accept_probability(p, q, every, near, delta=0.8).tolist()
        [[1.0, 1.0]]
    """
    mass, _, _ = borrowed(p, x, neighbours, delta=delta, factor=factor)
    qx = q.gather(1, x)
    return torch.where(qx > 0, (p.gather(1, x) + mass) / qx, 0.0).clamp(max=1)


def output_probs(
    p: Float[Tensor, "M V"],
    q: Float[Tensor, "M V"],
    neighbours: Int[Tensor, "V m"],
    *,
    delta: float = 0.0,
    factor: float = 0.0,
) -> Float[Tensor, "M V"]:
    """Distribution of the next token for one draft from q.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])
        >>> output_probs(p, q, torch.tensor([[1], [0]])).tolist()  # no budget: the target's distribution
        [[0.5, 0.5]]
    """
    every = torch.arange(p.shape[-1], device=p.device).expand(len(p), -1)
    accepted = q * accept_probability(p, q, every, neighbours, delta=delta, factor=factor)
    return accepted + (1 - accepted.sum(-1, keepdim=True)) * residual(p, q)


@dataclass(frozen=True)
class Latent:
    """The verifier for one codebook; see `latent`."""

    neighbours: Int[Tensor, "V m"]
    delta: float
    factor: float
    info: Method
    greedy: bool = False

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> TreeVerdict:
        if target_probs.shape[-1] != len(self.neighbours):
            raise InvalidInputError(
                f"distributions over {target_probs.shape[-1]} tokens were given to neighbours of {len(self.neighbours)}; expected one row of "
                "neighbours for each token. Build the table from the codebook of this model."
            )
        if self.greedy:
            return match(draft, self._chosen(draft, normalise(target_probs.double())))
        return PerNode(self.info, self.emitted_probs)(draft, target_probs)

    def _borrowed(self, p: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return borrowed(p, x, self.neighbours, delta=self.delta, factor=self.factor)

    def emitted_probs(
        self,
        p: Float[Tensor, "M V"],
        q: Float[Tensor, "M V"] | Float[Tensor, "M n V"] | None,
        draws: Int[Tensor, "M n"],
    ) -> Float[Tensor, "M V"]:
        """Distribution of the emitted token given the draws, in their order; see `lift.per_node.TokenRule`."""
        return self._after_points(p, draws) if q is None else self._after_draws(p, q, draws)

    def _after_points(self, p: Tensor, draws: Tensor) -> Tensor:
        """Deterministic siblings take their own mass and that of A; what is left has its own, bit for bit."""
        distribution = torch.zeros_like(p)
        remaining = p.clone()
        for draw in draws.unbind(1):
            there = (draw >= 0)[:, None]
            x = draw.clamp(min=0)[:, None]
            _, near, within = self._borrowed(normalise_or(remaining, otherwise=remaining), x)
            is_taken = (
                torch.zeros_like(remaining).scatter_add(
                    1, near[:, 0].clamp(min=0), within[:, 0].to(remaining.dtype)
                )
                > 0
            )
            is_taken = is_taken.scatter(1, x, True) & there
            distribution = distribution.scatter_add(1, x, (remaining * is_taken).sum(1, keepdim=True))
            remaining = torch.where(is_taken, 0.0, remaining)
        return distribution + remaining

    def _after_draws(self, p: Tensor, q: Tensor, draws: Tensor) -> Tensor:
        """Sampled siblings, each tried against what the earlier ones left over; as `recursive`, whose distribution it is at budget 0."""

        def accept(r: Tensor, c: Tensor, x: Tensor) -> Tensor:
            return accept_probability(
                r, c, x[:, None], self.neighbours, delta=self.delta, factor=self.factor
            )[:, 0]

        replacement = self.info.draft_sampling != {DraftSampling.WITHOUT_REPLACEMENT}
        return recursive.emitted_probs(p, q, draws, replacement=replacement, accept_probability=accept)

    def _chosen(self, draft: Draft, p: Tensor) -> Tensor:
        """One-hot rows: at each context the first child that meets the greedy test, else the most probable token."""
        nodes = like(draws_at(draft.tree), p)
        best = p.argmax(-1)
        if nodes.shape[-1]:
            b = torch.arange(len(p))[:, None, None]
            x = draft.tree.tokens[b, nodes.clamp(min=0)].flatten(0, 1)
            rows = p.flatten(0, 1)
            mass, _, _ = self._borrowed(rows, x)
            passes = (rows.gather(1, x) + mass >= rows.amax(-1, keepdim=True)) & (nodes >= 0).flatten(0, 1)
            first = passes.int().argmax(-1, keepdim=True)
            best = torch.where(passes.any(-1), x.gather(1, first)[:, 0], best.flatten()).view_as(best)
        return torch.zeros_like(p).scatter_(-1, best[..., None], 1.0)

    def deviation(
        self, draft: Draft, target_probs: Float[Tensor, "B N V"]
    ) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
        """Expected total variation that a step adds up over its tokens, and expected number of its tokens; exact, no sampling.

        At each context the total variation between p and the distribution that the verifier emits there, averaged over the sampled draft; weighted
        with the probability that the step emits a token there. Contexts without drafts count as tokens, and follow p.

        Raises:
            InvalidInputError: several sampled siblings, whose average has no short form, or a greedy verifier.
        """
        p = normalise(target_probs.double())
        nodes = like(draws_at(draft.tree), target_probs)
        if self.greedy or (draft.probs is not None and nodes.shape[-1] > 1):
            raise InvalidInputError(
                "several sampled siblings or a greedy rule were given; expected chains, or deterministic drafts."
            )
        reach = self(draft, target_probs).stop.clone()
        for n in range(draft.tree.num_nodes - 1, 0, -1):
            above = draft.tree.parents[:, n]
            reach.scatter_add_(1, above.clamp(min=0)[:, None], (reach[:, n] * (above >= 0))[:, None])
        inner = (nodes[..., 0] >= 0) if nodes.shape[-1] else torch.zeros_like(reach, dtype=torch.bool)
        if not inner.any():
            return torch.zeros_like(reach[:, 0]), reach.sum(1)
        if draft.probs is None:
            b = inner.nonzero()[:, :1]
            draws = torch.where(nodes[inner] >= 0, draft.tree.tokens[b, nodes[inner].clamp(min=0)], -1)
            distribution = self._after_points(p[inner], draws)
        else:
            b = inner.nonzero()[:, 0]
            child = nodes[inner][:, 0]
            q = normalise(draft.probs.double()[b, draft.rows[b, child]])
            distribution = output_probs(p[inner], q, self.neighbours, delta=self.delta, factor=self.factor)
        tv = torch.zeros_like(reach)
        tv[inner] = (distribution - p[inner]).abs().sum(-1) / 2
        return (reach * tv).sum(1), reach.sum(1)


def latent(
    neighbours: Int[Tensor, "V m"],
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
        >>> latent(torch.tensor([[1], [0]]), delta=0.1).info.lossless
        False
    """
    if not (0 <= delta < 1 and 0 <= factor < math.inf):
        raise InvalidInputError(
            f"delta={delta} and factor={factor} were given; expected 0 <= delta < 1, a mass, and a finite factor >= 0 of the token's own mass "
            "(lambda - 1 of LANTERN++). Use 0 for the exact verifier."
        )
    is_table = neighbours.ndim == 2 and neighbours.numel() > 0 and not neighbours.is_floating_point()
    if not (is_table and -1 <= int(neighbours.min()) <= int(neighbours.max()) < len(neighbours)):
        raise InvalidInputError(
            f"neighbours of shape {tuple(neighbours.shape)} were given; expected a [V, m] table of token ids, nearest first, or -1 for none. "
            "Build it from the distances between codebook rows."
        )
    lists_itself = (neighbours == torch.arange(len(neighbours))[:, None]).any(1)
    if lists_itself.any():
        raise InvalidInputError(
            f"token {int(lists_itself.int().argmax())} is among its own neighbours, which would count its mass twice. Leave it out of its row."
        )
    draft_sampling = REPLACED if replacement else frozenset({DraftSampling.WITHOUT_REPLACEMENT})
    return Latent(neighbours, delta, factor, replace(INFO, draft_sampling=draft_sampling), greedy)
