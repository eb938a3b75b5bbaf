"""Rules that are wrong in a way that published code has been: a test of a distribution that cannot fail shows nothing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from polydraft.core import Draft, DraftSampling, Method, NoiseKey, Outcome, TokenTree, TreeShape, Verdict
from polydraft.core import geometry as trees
from polydraft.core.arrays import scatter, scatter_add
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

    def __call__(self, draft: Draft, target_probs: Float[np.ndarray, "B N V"]) -> Verdict:
        return self.verdict(draft, target_probs)


# Wrong rules for the children of one node


def duplicates_skipped(p: Tensor, q: Tensor, draws: Tensor) -> Tensor:
    kept = draws.copy()
    for j in range(1, draws.shape[1]):
        kept[(draws[:, :j] == draws[:, j : j + 1]).any(1), j] = -1
    return recursive.emitted_probs(p, q, kept, replacement=True)


def iid_as_distinct(p: Tensor, q: Tensor, draws: Tensor) -> Tensor:
    """Equal draws are tested against a q without them, and take their part of the residual again."""
    distribution = np.zeros_like(p)
    alive = np.ones_like(p[:, 0])
    r = p
    c = q
    for j, draw in enumerate(draws.T):
        there = draw >= 0
        x = draw.clip(min=0)
        repeated = (draws[:, :j] == draw[:, None]).any(1)
        accept = np.where(there & ~repeated, speculative.accept_probability(r, c, x), 0.0)
        distribution = scatter_add(distribution, x[:, None], (alive * accept)[:, None])
        alive = alive * (1 - accept)
        r = np.where(there[:, None], normalise_or(positive_part(r - c), otherwise=r), r)
        c = np.where(there[:, None], normalise_or(scatter(c, x[:, None], 0.0), otherwise=c), c)
    return distribution + alive[:, None] * r


def resorted(p: Tensor, q: Tensor, draws: Tensor) -> Tensor:
    there = np.where(draws >= 0, np.take_along_axis(q, draws.clip(min=0), 1), -1.0)
    return recursive.emitted_probs(p, q, np.take_along_axis(draws, (-there).argsort(1), 1), replacement=False)


def redraws(p: Tensor, q: Tensor | None, draws: Int[np.ndarray, "M n"]) -> Tensor:
    accept = np.take_along_axis(p, draws[:, :1], 1)
    return scatter_add(((1 - accept) * p), draws[:, :1], accept)


# Wrong rules for chains and paths


def block(
    draft: Draft, target_probs: Tensor, *, clamp_factors: bool = False, plain_residual: bool = False, uncapped: bool = False,
    first_failure: bool = False,
) -> Verdict:  # fmt: skip
    """Block verification in plain torch, right without options, for chains of any lengths."""
    p = normalise(target_probs.astype(np.float64))
    N = draft.tree.num_nodes
    L = N - 1
    if L == 0 or draft.probs is None:
        return TreeVerdict(draft.tree, np.ones_like(p[..., 0]), lambda node: p[np.arange(len(p)), node])
    there = draft.tree.parents[:, 1:] >= 0
    rows = draft.rows[:, 1:].clip(min=0)
    q = np.take_along_axis(normalise(draft.probs.astype(np.float64)), rows[..., None], 1)
    x = draft.tree.tokens[:, 1:, None]
    ratio = np.where(there, (np.take_along_axis(p[:, :L], x, 2) / np.take_along_axis(q, x, 2))[..., 0], 0.0)
    w = [np.ones_like(ratio[:, 0])]
    for i in range(L):
        factor = ratio[:, i].clip(max=1) if clamp_factors else ratio[:, i]
        grown = ratio[:, : i + 1].prod(1) if uncapped and i == L - 1 else w[-1] * factor
        w.append(grown.clip(max=1))
    rest = [positive_part((1 if plain_residual else w[i][:, None]) * p[:, i] - q[:, i]) for i in range(L)]
    ends = [~there[:, i] for i in range(L)]  # a chain that stops here keeps the whole weight, and p follows
    h: list[Tensor] = []
    for i in range(L):
        S = rest[i].sum(-1)
        inner = np.where(S + 1 - w[i] > 0, S / (S + 1 - w[i]), 1.0)
        h.append(np.where(ends[i], w[i], inner))
    h.append(w[L])
    stop = np.zeros_like(p[..., 0])
    alive = np.ones_like(h[0])
    if first_failure:
        for i in range(1, L + 1):
            keep = np.where(there[:, i - 1], h[i], 0.0)
            stop[:, i - 1] = alive * (1 - keep)
            alive = alive * keep
        stop[:, L] = alive
    else:
        for i in range(L, 0, -1):
            keep = np.where(there[:, i - 1], h[i], 0.0)
            stop[:, i] = alive * keep
            alive = alive * (1 - keep)
        stop[:, 0] = alive
    distributions = np.stack(
        [
            *(
                np.where(ends[i][:, None], p[:, i], normalise_or(r, otherwise=p[:, i]))
                for i, r in enumerate(rest)
            ),
            p[:, L],
        ],
        axis=1,
    )
    return TreeVerdict(draft.tree, stop, lambda node: distributions[np.arange(len(p)), node])


def tempered(probs: Tensor, temperature: float) -> Tensor:
    return normalise(probs.astype(np.float64) ** (1 / temperature))


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The most probable tokens that reach this mass."""
    falling = np.sort(probs, -1)[..., ::-1]
    kept = (falling.cumsum(-1) - falling < top_p).sum(-1, keepdims=True)
    least = np.take_along_axis(falling, kept - 1, -1)
    return normalise(np.where(probs >= least, probs, 0.0))


def not_normalised(p: Tensor, q: Tensor) -> Tensor:
    """What is missing of the residual's mass falls to the last token, as it does where an inverse transform runs over its end."""
    rest = positive_part(p - q)
    rest[..., -1] += 1 - rest.sum(-1)
    return rest


def clamped(ratio: Tensor) -> Tensor:
    return ratio.clip(max=1.0)


def whole_target(p: Tensor, q: Tensor) -> Tensor:
    return p


def chain(
    draft: Draft,
    target_probs: Tensor,
    *,
    residual: Callable[[Tensor, Tensor], Tensor] | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    accept: Callable[[Tensor], Tensor] = clamped,
) -> Verdict:
    """Speculative sampling of chains, right without options. residual: of p and q.  temperature: of the target alone.  top_p: of the extra token alone.

    accept: the chance of a token by its ratio.
    """
    p = tempered(target_probs, temperature)
    if draft.probs is None or draft.tree.num_nodes == 1:
        return TreeVerdict(
            draft.tree, np.eye(p.shape[1])[:1].repeat(len(p), 0), lambda node: p[np.arange(len(p)), node]
        )
    x = draft.tree.tokens[:, 1:, None]
    there = draft.tree.parents[:, 1:] >= 0
    q = np.take_along_axis(normalise(draft.probs.astype(np.float64)), draft.rows[:, 1:, None].clip(min=0), 1)
    ratio = np.take_along_axis(p[:, :-1], x, 2) / np.take_along_axis(q, x, 2)
    reached = np.where(there, accept(ratio[..., 0]), 0.0).cumprod(1)
    first = np.ones((len(p), 1))
    none = np.zeros((len(p), 1))
    stop = np.concatenate([first, reached], 1) - np.concatenate([reached, none], 1)
    rest = (
        normalise_or(positive_part(p[:, :-1] - q), otherwise=p[:, :-1])
        if residual is None
        else residual(p[:, :-1], q)
    )
    after = np.concatenate([np.where(there[..., None], rest, p[:, :-1]), p[:, -1:]], 1)
    after = nucleus(after, top_p) if top_p < 1 else after
    return TreeVerdict(draft.tree, stop, lambda node: after[np.arange(len(p)), node])


def permuted(draft: Draft, order: Int[np.ndarray, "B N"]) -> Draft:
    """The draft with its nodes in another order."""
    rank = order.argsort(1)
    moved = np.take_along_axis(draft.tree.parents, order, 1)
    parents = np.where(moved >= 0, np.take_along_axis(rank, moved.clip(min=0), 1), -1)
    return replace(
        draft,
        tree=TokenTree(np.take_along_axis(draft.tree.tokens, order, 1), parents),
        rows=np.take_along_axis(draft.rows, order, 1),
    )


def likeliest_first(draft: Draft) -> Int[np.ndarray, "B N"]:
    """An order of the nodes in which two paths follow the draft's probability of their first token."""
    B, N = draft.tree.tokens.shape
    order = np.broadcast_to(np.arange(N), (B, N)).copy()
    for b in range(B):
        heads = [n for n in range(1, N) if draft.tree.parents[b, n] == 0]
        if draft.probs is None or len(heads) != 2:
            continue
        a, c = heads
        q = draft.probs[b, draft.rows[b, a]]
        if q[draft.tree.tokens[b, a]] < q[draft.tree.tokens[b, c]]:
            paths = trees.ancestors(trees.subtree(draft.tree, b))[0]
            first, second = ([n for n in range(1, len(paths)) if paths[n, head]] for head in (a, c))
            order[b, 1 : 1 + len(first) + len(second)] = np.array([*second, *first])
    return order


def sorted_paths(draft: Draft, target_probs: Tensor) -> Verdict:
    """Recursive rejection over paths whose order follows the draft's probability of their first token."""
    order = likeliest_first(draft)
    verdict = verifier("recursive")(
        permuted(draft, order),
        np.take_along_axis(target_probs, order[..., None], 1),
    )
    stop = scatter(np.zeros_like(verdict.stop), order, verdict.stop)
    rank = order.argsort(1)
    return TreeVerdict(
        draft.tree, stop, lambda node: verdict.after(np.take_along_axis(rank, node[:, None], 1)[:, 0])
    )


def counted_twice(draft: Draft, target_probs: Tensor) -> Verdict:
    """Greedy traversal told of two equal paths where one was drawn."""
    N = draft.tree.num_nodes
    L = N - 1
    tokens = np.concatenate([draft.tree.tokens, draft.tree.tokens[:, 1:]], axis=1)
    below = draft.tree.parents[:, 1:]
    parents = np.concatenate([draft.tree.parents, np.where(below > 0, below + L, below)], axis=1)
    rows = np.concatenate([draft.rows, draft.rows[:, 1:]], axis=1)
    full = (draft.tree.parents[:, 1:] >= 0).all(1)
    if L == 0 or not full.all():
        return verifier("greedy_traversal")(draft, target_probs)
    doubled = replace(draft, tree=TokenTree(tokens, parents), rows=rows, shape=TreeShape.PATHS)
    verdict = verifier("greedy_traversal")(
        doubled, np.concatenate([target_probs, target_probs[:, 1:]], axis=1)
    )
    stop = verdict.stop[:, :N].copy()
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

    def after(self, node: Int[np.ndarray, " B"]) -> Tensor:
        return self.right.after(node)

    def sample(self, key: NoiseKey) -> Outcome:
        stop = self.right.stop
        node = np.zeros(len(stop), np.int64)
        behind = np.zeros(len(stop), np.float64)
        for i in range(stop.shape[1] - 1, 0, -1):
            h = np.where(behind < 1, stop[:, i] / (1 - behind), 1.0)
            u = noise.uniforms(replace(key, position=key.position + i - 1), noise.Stream.STOP, 1)[:, 0]
            node = np.where((node == 0) & (u < h), i, node)
            behind = behind + stop[:, i]
        token = categorical.draw(self.after(node), key, noise.Stream.EXTRA)
        path, length = trees.path_to(self.tree, node)
        return Outcome(path, length, token)


def own_position(draft: Draft, target_probs: Tensor) -> Verdict:
    return _OwnPositionVerdict(draft.tree, verifier("block")(draft, target_probs))


# Wrong walks


def keep_all(
    draft: Draft, logits: Float[np.ndarray, "B N V"], key: NoiseKey, samplings: Any = None
) -> Outcome:
    """A broken walk: the first path is accepted as it stands, and the likeliest token follows."""
    batch = np.arange(len(logits))
    node = np.zeros(len(logits), np.int64)
    for n in range(1, draft.tree.num_nodes):
        node = np.where(draft.tree.parents[:, n] == node, n, node)
    path, length = trees.path_to(draft.tree, node)
    return Outcome(path, length, logits[batch, node].argmax(-1))
