"""Rules that are wrong in a way that published code has been: a test of a distribution that cannot fail shows nothing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import Draft, DraftSampling, Method, NoiseKey, Outcome, TokenTree, TreeShape, Verdict
from polydraft.core import geometry as trees
from polydraft.methods.registry import verifier
from polydraft.sampling import categorical, noise
from polydraft.verifiers import recursive, speculative
from polydraft.verifiers.lift.verdict import TreeVerdict
from polydraft.verifiers.residual import normalise, normalise_or, positive_part

ANYTHING = Method(
    "wrong", "A known mistake", "", 2026, "", frozenset(DraftSampling), frozenset(TreeShape), lossless=False
)


@dataclass(frozen=True)
class Wrong:
    """A function as a verifier that claims to fit everything."""

    verdict: Callable[[Draft, Tensor], Verdict]
    info: Method = ANYTHING

    def __call__(self, draft: Draft, target_probs: Float[Tensor, "B N V"]) -> Verdict:
        return self.verdict(draft, target_probs)


# Wrong rules for the children of one node


def duplicates_skipped(p: Tensor, q: Tensor, draws: Tensor) -> Tensor:
    kept = draws.clone()
    for j in range(1, draws.shape[1]):
        kept[(draws[:, :j] == draws[:, j : j + 1]).any(1), j] = -1
    return recursive.emitted_probs(p, q, kept, replacement=True)


def iid_as_distinct(p: Tensor, q: Tensor, draws: Tensor) -> Tensor:
    """Equal draws are tested against a q without them, and take their part of the residual again."""
    distribution = torch.zeros_like(p)
    alive = torch.ones_like(p[:, 0])
    r = p
    c = q
    for j, draw in enumerate(draws.unbind(1)):
        there = draw >= 0
        x = draw.clamp(min=0)
        repeated = (draws[:, :j] == draw[:, None]).any(1)
        accept = torch.where(there & ~repeated, speculative.accept_probability(r, c, x), 0.0)
        distribution = distribution.scatter_add(1, x[:, None], (alive * accept)[:, None])
        alive = alive * (1 - accept)
        r = torch.where(there[:, None], normalise_or(positive_part(r - c), otherwise=r), r)
        c = torch.where(there[:, None], normalise_or(c.scatter(1, x[:, None], 0.0), otherwise=c), c)
    return distribution + alive[:, None] * r


def resorted(p: Tensor, q: Tensor, draws: Tensor) -> Tensor:
    there = torch.where(draws >= 0, q.gather(1, draws.clamp(min=0)), -1.0)
    return recursive.emitted_probs(
        p, q, draws.gather(1, there.argsort(1, descending=True)), replacement=False
    )


def redraws(p: Tensor, q: Tensor | None, draws: Int[Tensor, "M n"]) -> Tensor:
    accept = p.gather(1, draws[:, :1])
    return ((1 - accept) * p).scatter_add(1, draws[:, :1], accept)


# Wrong rules for chains and paths


def block(
    draft: Draft, target_probs: Tensor, *, clamp_factors: bool = False, plain_residual: bool = False, uncapped: bool = False,
    first_failure: bool = False,
) -> Verdict:  # fmt: skip
    """Block verification in plain torch, right without options, for chains of any lengths."""
    p = normalise(target_probs.double())
    N = draft.tree.num_nodes
    L = N - 1
    if L == 0 or draft.probs is None:
        return TreeVerdict(draft.tree, torch.ones_like(p[..., 0]), lambda node: p[torch.arange(len(p)), node])
    there = draft.tree.parents[:, 1:] >= 0
    rows = draft.rows[:, 1:].clamp(min=0)
    q = normalise(draft.probs.double()).gather(1, rows[..., None].expand(-1, -1, p.shape[-1]))
    x = draft.tree.tokens[:, 1:, None]
    ratio = torch.where(there, (p[:, :L].gather(2, x) / q.gather(2, x))[..., 0], 0.0)
    w = [torch.ones_like(ratio[:, 0])]
    for i in range(L):
        factor = ratio[:, i].clamp(max=1) if clamp_factors else ratio[:, i]
        grown = ratio[:, : i + 1].prod(1) if uncapped and i == L - 1 else w[-1] * factor
        w.append(grown.clamp(max=1))
    rest = [positive_part((1 if plain_residual else w[i][:, None]) * p[:, i] - q[:, i]) for i in range(L)]
    ends = [~there[:, i] for i in range(L)]  # a chain that stops here keeps the whole weight, and p follows
    h: list[Tensor] = []
    for i in range(L):
        S = rest[i].sum(-1)
        inner = torch.where(S + 1 - w[i] > 0, S / (S + 1 - w[i]), 1.0)
        h.append(torch.where(ends[i], w[i], inner))
    h.append(w[L])
    stop = torch.zeros_like(p[..., 0])
    alive = torch.ones_like(h[0])
    if first_failure:
        for i in range(1, L + 1):
            keep = torch.where(there[:, i - 1], h[i], 0.0)
            stop[:, i - 1] = alive * (1 - keep)
            alive = alive * keep
        stop[:, L] = alive
    else:
        for i in range(L, 0, -1):
            keep = torch.where(there[:, i - 1], h[i], 0.0)
            stop[:, i] = alive * keep
            alive = alive * (1 - keep)
        stop[:, 0] = alive
    distributions = torch.stack(
        [
            *(
                torch.where(ends[i][:, None], p[:, i], normalise_or(r, otherwise=p[:, i]))
                for i, r in enumerate(rest)
            ),
            p[:, L],
        ],
        1,
    )
    return TreeVerdict(draft.tree, stop, lambda node: distributions[torch.arange(len(p)), node])


def permuted(draft: Draft, order: Int[Tensor, "B N"]) -> Draft:
    """The draft with its nodes in another order."""
    rank = order.argsort(1)
    moved = draft.tree.parents.gather(1, order)
    parents = torch.where(moved >= 0, rank.gather(1, moved.clamp(min=0)), -1)
    return replace(
        draft, tree=TokenTree(draft.tree.tokens.gather(1, order), parents), rows=draft.rows.gather(1, order)
    )


def likeliest_first(draft: Draft) -> Int[Tensor, "B N"]:
    """An order of the nodes in which two paths follow the draft's probability of their first token."""
    B, N = draft.tree.tokens.shape
    order = torch.arange(N).expand(B, N).clone()
    for b in range(B):
        heads = [n for n in range(1, N) if draft.tree.parents[b, n] == 0]
        if draft.probs is None or len(heads) != 2:
            continue
        a, c = heads
        q = draft.probs[b, draft.rows[b, a]]
        if q[draft.tree.tokens[b, a]] < q[draft.tree.tokens[b, c]]:
            paths = trees.ancestors(trees.subtree(draft.tree, b))[0]
            first, second = ([n for n in range(1, len(paths)) if paths[n, head]] for head in (a, c))
            order[b, 1 : 1 + len(first) + len(second)] = torch.tensor([*second, *first])
    return order


def sorted_paths(draft: Draft, target_probs: Tensor) -> Verdict:
    """Recursive rejection over paths whose order follows the draft's probability of their first token."""
    order = likeliest_first(draft)
    verdict = verifier("recursive")(
        permuted(draft, order),
        target_probs.gather(1, order[..., None].expand(-1, -1, target_probs.shape[-1])),
    )
    stop = torch.zeros_like(verdict.stop).scatter(1, order, verdict.stop)
    rank = order.argsort(1)
    return TreeVerdict(draft.tree, stop, lambda node: verdict.after(rank.gather(1, node[:, None])[:, 0]))


def counted_twice(draft: Draft, target_probs: Tensor) -> Verdict:
    """Greedy traversal told of two equal paths where one was drawn."""
    N = draft.tree.num_nodes
    L = N - 1
    tokens = torch.cat([draft.tree.tokens, draft.tree.tokens[:, 1:]], 1)
    below = draft.tree.parents[:, 1:]
    parents = torch.cat([draft.tree.parents, torch.where(below > 0, below + L, below)], 1)
    rows = torch.cat([draft.rows, draft.rows[:, 1:]], 1)
    full = (draft.tree.parents[:, 1:] >= 0).all(1)
    if L == 0 or not full.all():
        return verifier("greedy_traversal")(draft, target_probs)
    doubled = replace(draft, tree=TokenTree(tokens, parents), rows=rows, shape=TreeShape.PATHS)
    verdict = verifier("greedy_traversal")(doubled, torch.cat([target_probs, target_probs[:, 1:]], 1))
    stop = verdict.stop[:, :N].clone()
    stop[:, 1:] += verdict.stop[:, N:]
    return TreeVerdict(draft.tree, stop, verdict.after)


@dataclass(frozen=True)
class _OwnPositionVerdict:
    """A right verdict whose stop node meets the noise of each token's own position."""

    tree: TokenTree
    right: Verdict

    @property
    def stop(self) -> Tensor:
        return self.right.stop

    def after(self, node: Int[Tensor, " B"]) -> Tensor:
        return self.right.after(node)

    def sample(self, key: NoiseKey) -> Outcome:
        stop = self.right.stop
        node = torch.zeros(len(stop), dtype=torch.int64)
        behind = torch.zeros(len(stop), dtype=torch.float64)
        for i in range(stop.shape[1] - 1, 0, -1):
            h = torch.where(behind < 1, stop[:, i] / (1 - behind), 1.0)
            u = noise.uniforms(replace(key, position=key.position + i - 1), noise.Stream.STOP, 1)[:, 0]
            node = torch.where((node == 0) & (u < h), i, node)
            behind = behind + stop[:, i]
        token = categorical.draw(self.after(node), key, noise.Stream.EXTRA)
        path, length = trees.path_to(self.tree, node)
        return Outcome(path, length, token)


def own_position(draft: Draft, target_probs: Tensor) -> Verdict:
    return _OwnPositionVerdict(draft.tree, verifier("block")(draft, target_probs))


# Wrong walks


def keep_all(draft: Draft, logits: Float[Tensor, "B N V"], key: NoiseKey, samplings: Any = None) -> Outcome:
    """A broken walk: the first path is accepted as it stands, and the likeliest token follows."""
    batch = torch.arange(len(logits))
    node = torch.zeros(len(logits), dtype=torch.int64)
    for n in range(1, draft.tree.num_nodes):
        node = torch.where(draft.tree.parents[:, n] == node, n, node)
    path, length = trees.path_to(draft.tree, node)
    return Outcome(path, length, logits.cpu()[batch, node].argmax(-1))
