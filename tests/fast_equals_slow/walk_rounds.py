"""Drafts, target logits and keys for walks: near the target, and degenerate."""

import numpy as np

from polydraft.core import Draft, DraftSampling, NoiseKey, Outcome, SamplingParams, TokenTree, TreeShape
from polydraft.core import geometry as trees
from polydraft.core.arrays import scatter
from polydraft.sampling import processing as sampling
from polydraft.sampling.categorical import choose_systematic
from polydraft.sampling.softmax import softmax
from tests.support.draws import multinomial

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
) -> tuple[Draft, np.ndarray, NoiseKey]:
    """Drafts of a drafter near the target, distributions that depend on the last token alone, so that copies have equal rows."""
    g = np.random.default_rng(seed)
    parents = np.tile(np.array(given or TREES[shape]), (B, 1))
    N = parents.shape[1]
    target = g.standard_normal((B, V, V), np.float32) * np.float32(sharpness)
    q = softmax(target + g.standard_normal((B, V, V), np.float32))
    tokens = np.zeros((B, N), np.int64)
    rows = np.full((B, N), -1)
    every = np.arange(B)
    if distribution is DraftSampling.SYSTEMATIC:
        tokens = at_equal_steps(
            parents[0].tolist(),
            tokens,
            g.random((B, N)),
            lambda b, x: q[b, x],
        )
        rows = np.where(parents >= 0, np.take_along_axis(tokens, parents.clip(min=0), 1), -1)
    for n in range(1, N) if distribution is not DraftSampling.SYSTEMATIC else ():
        siblings = [m for m in range(1, n) if parents[0, m] == parents[0, n]]
        rows[:, n] = (
            tokens[every, parents[:, n]] + len(siblings) * (distribution is DraftSampling.INDEPENDENT)
        ) % V
        untried = q[every, rows[:, n]]
        if distribution in DISTINCT:
            untried = scatter(untried, tokens[:, siblings], 0.0)
        tokens[:, n] = multinomial(untried, g)
    logits = target[every[:, None], tokens]
    key = NoiseKey.of(range(B), [seed] * B, [11] * B)
    if distribution is DraftSampling.POINT_MASS:
        return (
            Draft(TokenTree(tokens, parents), distribution, shape, None, np.full_like(rows, -1), key),
            logits,
            key,
        )
    return Draft(TokenTree(tokens, parents), distribution, shape, q, rows, key), logits, key


def at_equal_steps(parents, tokens, u, row):
    """Systematic draws [B, N] from row(b, last token); `tokens` has the roots, u [B, N] a uniform for each context's first copy."""
    tokens = tokens.copy()
    for b in range(len(tokens)):
        paths = {0: ()}
        for n in range(len(parents)):
            drawn = [m for m in range(n + 1, len(parents)) if paths.get(parents[m]) == paths[n]]
            if not drawn or drawn[0] in paths:
                continue  # a leaf, or a copy
            ids = np.zeros(len(drawn), np.int64)
            choose_systematic(row(b, tokens[b, n]), float(u[b, n]), ids)
            for m, x in zip(drawn, ids.tolist(), strict=True):
                paths[m] = (*paths[n], x)
                tokens[b, m] = x
    return tokens


def first_nodes(draft: Draft, sizes: list[int]) -> Draft:
    """The first nodes of every row's tree; the rest becomes padding."""
    real = np.arange(draft.tree.num_nodes) < np.array(sizes)[:, None]
    tree = type(draft.tree)(np.where(real, draft.tree.tokens, 0), np.where(real, draft.tree.parents, -1))
    return Draft(tree, draft.sampling, draft.shape, draft.probs, np.where(real, draft.rows, -1), draft.noise)


def trunk_counted_twice(draft: Draft, rows: np.ndarray) -> tuple[Draft, np.ndarray]:
    """One draw of a trunk of one, then two children, passed off as two draws; rows: of the target, at the nodes."""
    nodes = [0, 1, 1, 2, 3]
    B = len(rows)
    parents, drawn_from = (np.tile(np.array(x), (B, 1)) for x in ([-1, 0, 0, 1, 2], [-1, 0, 0, 1, 1]))
    tree = TokenTree(draft.tree.tokens[:, nodes], parents)
    return Draft(tree, draft.sampling, draft.shape, draft.probs, drawn_from, draft.noise), rows[:, nodes]


def same(one: Outcome, two: Outcome) -> bool:
    return all(np.array_equal(getattr(one, x), getattr(two, x)) for x in ("path", "num_accepted", "token"))


def _zeros(x, g):
    some = np.where(g.random(x.shape) < 0.6, -np.inf, x)
    some[:, 0] = 0.0
    return some


def _every_second(x, which):
    return np.where(np.arange(x.shape[1]) % 2 == which, -np.inf, x)


def _one_hot(x, g):
    return scatter(np.full_like(x, -np.inf), g.integers(3, size=(len(x), 1)) % x.shape[1], 0.7)


def _tiny(x, g):
    """Half of the tokens 1e-14 times as probable."""
    some = np.where(g.random(x.shape) < 0.5, x - np.float32(32.2), x)
    some[:, 0] = 0.0
    return some


def _truncated(x, **params):
    roots = TokenTree.roots(np.zeros(len(x), np.int64))
    one = [[0]] * len(x), [1] * len(x), [SamplingParams(**params)] * len(x)
    return sampling.process(x[:, None], roots, *one)[:, 0]


DEGENERATE = {
    "zeros": lambda p, q, g: (_zeros(p, g), _zeros(q, g)),
    "disjoint supports": lambda p, q, g: (_every_second(p, 0), _every_second(q, 1)),
    "one-hot": lambda p, q, g: (_one_hot(p, g), _one_hot(q, g)),
    "one-hot target": lambda p, q, g: (_one_hot(p, g), q),
    "one-hot draft": lambda p, q, g: (p, _one_hot(q, g)),
    "ties": lambda p, q, g: (p.round(), (q / 2).round()),
    "equal": lambda p, q, g: (p, p.copy()),
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
) -> tuple[Draft, np.ndarray, NoiseKey]:
    """Drafts drawn from rows of a kind; distributions depend on the last token alone, logits are known up to a number for each row."""
    g = np.random.default_rng(vocab_size)
    p = 2 * g.standard_normal((vocab_size, vocab_size), np.float32)
    p, q = DEGENERATE[kind](p, p + g.standard_normal((vocab_size, vocab_size), np.float32), g)
    p = p + 5 * g.standard_normal((vocab_size, 1), np.float32)
    q = softmax(q)
    parents = np.tile(np.array(TREES[shape]), (rows, 1))
    tokens = np.zeros_like(parents)
    tokens[:, 0] = g.integers(vocab_size, size=rows)
    if distribution is DraftSampling.SYSTEMATIC:
        u = g.random(parents.shape)
        tokens = at_equal_steps(parents[0].tolist(), tokens, u, lambda b, x: q[x])
    for n in range(1, parents.shape[1]) if distribution is not DraftSampling.SYSTEMATIC else ():
        tokens[:, n] = multinomial(q[tokens[:, parents[0, n]]], g)
    tree = TokenTree(tokens, parents)
    key = NoiseKey.of(range(rows), [1] * rows, [11] * rows)
    if distribution is DraftSampling.POINT_MASS:
        return Draft(tree, distribution, shape, None, np.full_like(parents, -1), key), p[tokens], key
    drawn_from = np.where(
        parents >= 0, np.take_along_axis(trees.first_copies(tree), parents.clip(min=0), 1), -1
    )
    return Draft(tree, distribution, shape, q[tokens], drawn_from, key), p[tokens], key
