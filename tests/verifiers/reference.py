"""Leaf-to-root rules for one tree, written once more in plain NumPy after the specification's pseudo-code.

A rule is `steps(p, q, tokens, w) -> (tries, w, p)`: the tokens tried with their weights, and what all rejections leave.
"""

from collections.abc import Iterator

import numpy as np
from harness import Grown, Path, sibling_draws


def sampled(tables, law, counts, depth, seed) -> Grown:
    """One random draft; see `harness.enumerate_drafts`."""
    rng = np.random.default_rng(seed)
    tokens, parents, paths, frontier = [0], [-1], [()], [0]
    for _ in range(depth):
        grown = []
        for n in frontier:
            options = list(sibling_draws(law, tables.row("q", paths[n]), counts(paths[n]))) if counts(paths[n]) else [(1.0, ())]
            chances = np.array([probability for probability, _ in options])
            for x in options[rng.choice(len(options), p=chances / chances.sum())][1]:
                grown.append(len(tokens))
                tokens.append(x)
                parents.append(n)
                paths.append((*paths[n], x))
        frontier = grown
    return Grown(1.0, tokens, parents, paths, frontier)


def visits(draft: Grown, tables, steps) -> Iterator[tuple[Path, float, np.ndarray]]:
    """(context, stop probability, law after it) in the order of the walk."""
    drawn: dict[Path, list[int]] = {}
    for path in draft.paths[1:]:
        drawn.setdefault(path[:-1], []).append(path[-1])
    alive = 1.0

    def visit(path, w):
        nonlocal alive
        p, q = tables.row("p", path), tables.row("q", path)
        tries, w, p = steps(p, q, drawn[path], w) if path in drawn else ([], w, p)
        for x, into in tries:
            yield from visit((*path, x), into)
        yield path, alive * w, p
        alive *= 1 - w

    return visit((), 1.0)


def rejected(w, p, law):
    rest = np.maximum(w * p - law, 0)
    S = rest.sum()
    return (1.0 if S + 1 - w <= 0 else S / (S + 1 - w)), (rest / S if S > 0 else p)


def without(law, x):
    law = law.copy()
    law[x] = 0
    return law / law.sum() if law.sum() > 0 else law


def pooled(p, q, tokens, w):
    """Traversal, iid: every draw is tested against q; a repeated token has no subtree of its own."""
    tries = []
    for j, x in enumerate(tokens):
        if x not in tokens[:j]:
            tries.append((x, min(1, w * p[x] / q[x])))
        w, p = rejected(w, p, q)
    return tries, w, p


def merged(p, q, tokens, w):
    """Traversal with equal siblings merged, q losing each token after its test; also traversal without replacement."""
    tries = []
    for x in dict.fromkeys(tokens):
        tries.append((x, min(1, w * p[x] / q[x])))
        w, p = rejected(w, p, q)
        q = without(q, x)
    return tries, w, p


def merged_wrongly(p, q, tokens, w):
    """The trap: equal siblings merged although the law of each test stays q."""
    return pooled(p, q, list(dict.fromkeys(tokens)), w)


def one_hot(p, q, tokens, w):
    tries = []
    for x in tokens:
        tries.append((x, w * p[x]))
        w, p = rejected(w, p, np.eye(len(p))[x])
    return tries, w, p


def sampled_first(p, q, tokens, w):
    """Greedy plus one: the last stored child first, against q without the others; then the others in stored order."""
    *top, x = tokens
    for t in top:
        q = without(q, t)
    if q[x] == 0:
        return one_hot(p, q, [x, *top], w)
    into = min(1, w * p[x] / q[x])
    w, p = rejected(w, p, q)
    tries, w, p = one_hot(p, q, top, w)
    return [(x, into), *tries], w, p


def greedy(p, q, tokens, w):
    """Greedy traversal verification, section 9.1."""
    tries, rem = [], list(tokens)
    while rem:
        n = len(rem)
        b = np.zeros(len(p), int)
        if n > 1 and np.minimum(p, q).sum() <= 1 - 0.2 / n:
            with np.errstate(divide="ignore", invalid="ignore"):
                b = np.clip(np.round(16 * np.log2(np.where(q > 0, p / q, 1))), -128, 128).astype(int)
        lo = np.array([q[b < j].sum() for j in b])
        hi = np.array([q[b <= j].sum() for j in b])
        law = q * sum(hi**i * lo ** (n - 1 - i) for i in range(n))
        law = law / law.sum()
        B = max(b[rem])
        inside, below = [x for x in rem if b[x] == B], [x for x in rem if b[x] < B]
        left = np.where(b == B, q, 0)
        while inside:
            x = inside[0]
            tries.append((x, min(1, w * p[x] / law[x])))
            w, p = rejected(w, p, law)
            inside = [y for y in inside if y != x]
            left = left.copy()
            left[x] = 0
            if inside:
                law = left / left.sum()
        rem, q = below, np.where(b < B, q, 0)
        q = q / q.sum() if rem else q
    return tries, w, p
