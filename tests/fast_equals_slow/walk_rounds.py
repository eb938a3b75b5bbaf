"""Drafts, target logits and keys for walks: near the target, and degenerate."""

import numpy as np
import torch

from polydraft.core import Draft, DraftSampling, NoiseKey, Outcome, SamplingParams, TokenTree, TreeShape
from polydraft.core import geometry as trees
from polydraft.sampling import processing as sampling
from polydraft.sampling.categorical import choose_systematic

V = 37
B = 400
DISTINCT = DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.GREEDY_PLUS_ONE
TREES = {
    TreeShape.CHAIN: [-1, 0, 1, 2],
    TreeShape.PATHS: [-1, 0, 0, 1, 2, 3, 4],
    TreeShape.PRODUCT: [-1, 0, 0, 1, 1, 2, 2],
    TreeShape.BY_POSITION: [-1, 0, 0, 0, 1, 1, 2, 4],
}


def rounds(
    shape: TreeShape,
    distribution: DraftSampling,
    seed: int,
    sharpness: float = 2.0,
    given: list[int] | None = None,
) -> tuple[Draft, torch.Tensor, NoiseKey]:
    """Drafts of a drafter near the target, distributions that depend on the last token alone, so that copies have equal rows."""
    g = torch.Generator().manual_seed(seed)
    parents = torch.tensor(given or TREES[shape]).expand(B, -1).contiguous()
    N = parents.shape[1]
    target = torch.randn(B, V, V, generator=g) * sharpness
    q = (target + torch.randn(B, V, V, generator=g)).softmax(-1)
    tokens = torch.zeros(B, N, dtype=torch.int64)
    rows = torch.full((B, N), -1)
    every = torch.arange(B)
    if distribution is DraftSampling.SYSTEMATIC:
        tokens = at_equal_steps(
            parents[0].tolist(),
            tokens,
            torch.rand(B, N, dtype=torch.float64, generator=g),
            lambda b, x: q[b, x],
        )
        rows = torch.where(parents >= 0, tokens.gather(1, parents.clamp(min=0)), -1)
    for n in range(1, N) if distribution is not DraftSampling.SYSTEMATIC else ():
        siblings = [m for m in range(1, n) if parents[0, m] == parents[0, n]]
        rows[:, n] = (
            tokens[every, parents[:, n]] + len(siblings) * (distribution is DraftSampling.INDEPENDENT)
        ) % V
        untried = q[every, rows[:, n]]
        if distribution in DISTINCT:
            untried = untried.scatter(1, tokens[:, siblings], 0.0)
        tokens[:, n] = torch.multinomial(untried, 1, generator=g)[:, 0]
    logits = target[every[:, None], tokens]
    key = NoiseKey.of(range(B), [seed] * B, [11] * B)
    if distribution is DraftSampling.POINT_MASS:
        return (
            Draft(TokenTree(tokens, parents), distribution, shape, None, torch.full_like(rows, -1), key),
            logits,
            key,
        )
    return Draft(TokenTree(tokens, parents), distribution, shape, q, rows, key), logits, key


def at_equal_steps(parents, tokens, u, row):
    """Systematic draws [B, N] from row(b, last token); `tokens` has the roots, u [B, N] a uniform for each context's first copy."""
    tokens = tokens.clone()
    for b in range(len(tokens)):
        paths = {0: ()}
        for n in range(len(parents)):
            drawn = [m for m in range(n + 1, len(parents)) if paths.get(parents[m]) == paths[n]]
            if not drawn or drawn[0] in paths:
                continue  # a leaf, or a copy
            ids = np.zeros(len(drawn), np.int64)
            choose_systematic(row(b, tokens[b, n]).numpy(), float(u[b, n]), ids)
            for m, x in zip(drawn, ids.tolist(), strict=True):
                paths[m] = (*paths[n], x)
                tokens[b, m] = x
    return tokens


def first_nodes(draft: Draft, sizes: list[int]) -> Draft:
    """The first nodes of every row's tree; the rest becomes padding."""
    real = torch.arange(draft.tree.num_nodes) < torch.tensor(sizes)[:, None]
    tree = type(draft.tree)(draft.tree.tokens.where(real, 0), draft.tree.parents.where(real, -1))
    return Draft(tree, draft.sampling, draft.shape, draft.probs, draft.rows.where(real, -1), draft.noise)


def trunk_counted_twice(draft: Draft, rows: torch.Tensor) -> tuple[Draft, torch.Tensor]:
    """One draw of a trunk of one, then two children, passed off as two draws; rows: of the target, at the nodes."""
    nodes = [0, 1, 1, 2, 3]
    B = len(rows)
    parents, drawn_from = (
        torch.tensor(x).expand(B, -1).contiguous() for x in ([-1, 0, 0, 1, 2], [-1, 0, 0, 1, 1])
    )
    tree = TokenTree(draft.tree.tokens[:, nodes], parents)
    return Draft(tree, draft.sampling, draft.shape, draft.probs, drawn_from, draft.noise), rows[
        :, nodes
    ].contiguous()


def same(one: Outcome, two: Outcome) -> bool:
    return all(torch.equal(getattr(one, x), getattr(two, x)) for x in ("path", "num_accepted", "token"))


def _zeros(x, g):
    return x.masked_fill(torch.rand(x.shape, generator=g) < 0.6, -torch.inf).index_fill(
        1, torch.tensor([0]), 0.0
    )


def _every_second(x, which):
    return x.masked_fill(torch.arange(x.shape[1]) % 2 == which, -torch.inf)


def _one_hot(x, g):
    return torch.full_like(x, -torch.inf).scatter(
        1, torch.randint(3, (len(x), 1), generator=g) % x.shape[1], 0.7
    )


def _tiny(x, g):
    """Half of the tokens 1e-14 times as probable."""
    return torch.where(torch.rand(x.shape, generator=g) < 0.5, x - 32.2, x).index_fill(
        1, torch.tensor([0]), 0.0
    )


def _truncated(x, **params):
    roots = TokenTree.roots(torch.zeros(len(x), dtype=torch.int64))
    one = [[0]] * len(x), [1] * len(x), [SamplingParams(**params)] * len(x)
    return sampling.process(x[:, None], roots, *one)[:, 0]


DEGENERATE = {
    "zeros": lambda p, q, g: (_zeros(p, g), _zeros(q, g)),
    "disjoint supports": lambda p, q, g: (_every_second(p, 0), _every_second(q, 1)),
    "one-hot": lambda p, q, g: (_one_hot(p, g), _one_hot(q, g)),
    "one-hot target": lambda p, q, g: (_one_hot(p, g), q),
    "one-hot draft": lambda p, q, g: (p, _one_hot(q, g)),
    "ties": lambda p, q, g: (p.round(), (q / 2).round()),
    "equal": lambda p, q, g: (p, p.clone()),
    "1e-14": lambda p, q, g: (_tiny(p, g), _tiny(q, g)),
    "truncated": lambda p, q, g: (_truncated(p, top_p=0.8), _truncated(q, top_k=2)),
    "truncated likewise": lambda p, q, g: (
        _truncated(p, top_k=3, top_p=0.9),
        _truncated(q, top_k=3, top_p=0.9),
    ),
}
"""Logits of target and draft, made of ordinary ones."""


def degenerate(
    kind: str, vocab_size: int, shape: TreeShape, distribution: DraftSampling, rows: int = 120
) -> tuple[Draft, torch.Tensor, NoiseKey]:
    """Drafts drawn from rows of a kind; distributions depend on the last token alone, logits are known up to a number for each row."""
    g = torch.Generator().manual_seed(vocab_size)
    p = 2 * torch.randn(vocab_size, vocab_size, generator=g)
    p, q = DEGENERATE[kind](p, p + torch.randn(vocab_size, vocab_size, generator=g), g)
    p = p + 5 * torch.randn(vocab_size, 1, generator=g)
    q = q.softmax(-1)
    parents = torch.tensor(TREES[shape]).expand(rows, -1).contiguous()
    tokens = torch.zeros_like(parents)
    tokens[:, 0] = torch.randint(vocab_size, (rows,), generator=g)
    if distribution is DraftSampling.SYSTEMATIC:
        u = torch.rand(parents.shape, dtype=torch.float64, generator=g)
        tokens = at_equal_steps(parents[0].tolist(), tokens, u, lambda b, x: q[x])
    for n in range(1, parents.shape[1]) if distribution is not DraftSampling.SYSTEMATIC else ():
        tokens[:, n] = torch.multinomial(q[tokens.gather(1, parents[:, n : n + 1])[:, 0]], 1, generator=g)[
            :, 0
        ]
    tree = TokenTree(tokens, parents)
    key = NoiseKey.of(range(rows), [1] * rows, [11] * rows)
    if distribution is DraftSampling.POINT_MASS:
        return Draft(tree, distribution, shape, None, torch.full_like(parents, -1), key), p[tokens], key
    drawn_from = torch.where(parents >= 0, trees.first_copies(tree).gather(1, parents.clamp(min=0)), -1)
    return Draft(tree, distribution, shape, q[tokens], drawn_from, key), p[tokens], key
