"""Flow verification by enumeration: wide trees, degenerate rows, one path; and the mistakes that would bias it."""

import itertools
from functools import partial

import numpy as np
import pytest

from polydraft.core import DraftSampling, TreeShape
from polydraft.methods.registry import verifier
from polydraft.testing import Grown, Tables, as_batch, by_position, enumerate_drafts, measure, sibling_draws
from polydraft.verifiers import flow as module
from polydraft.verifiers.lift.draws import without_repeats
from tests.exactness.harness import by_depth, ragged

SYS = DraftSampling.SYSTEMATIC
IID = DraftSampling.IID
PATHS = TreeShape.PATHS
PRODUCT = TreeShape.PRODUCT
flow = verifier("flow")
WIDE = {
    "3 paths of 3": (PATHS, by_depth(3, 1, 1), 3),
    "4 paths of 2": (PATHS, by_depth(4, 1), 2),
    "6 paths of 1": (PATHS, by_depth(6), 1),
    "a trunk, then 3": (PRODUCT, by_depth(1, 3, 1), 3),
    "3, each 2": (PRODUCT, by_depth(3, 2), 2),
    "3, 2 and 1": (TreeShape.RAGGED, ragged(3, 2, 1), 3),
    "by position": (TreeShape.BY_POSITION, by_position(-1, 0, 0, 0, 0, 1, 1, 2), 2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "3 paths of 3" else name for name in WIDE]
)
def test_wide_trees_keep_the_distribution(name):
    shape, counts, depth = WIDE[name]
    for seed in range(6):
        assert measure(flow, Tables(3, seed), SYS, shape, counts, depth).error < 1e-12, seed


def cut(x, count):
    """The largest `count` of a row."""
    y = np.where(x >= np.sort(x)[-count], x, 0.0)
    return y / y.sum()


ROWS = {
    "equal rows": lambda p, q: (p, p),
    "nearly equal rows": lambda p, q: (p, p + 1e-13 * (q - p)),
    "a one-hot target": lambda p, q: (cut(p, 1), q),
    "a one-hot draft": lambda p, q: (p, cut(q, 1)),
    "one-hot, both": lambda p, q: (cut(p, 1), cut(q, 1)),
    "ties in q": lambda p, q: (p, np.full_like(q, 1 / q.size)),
    "ties in both": lambda p, q: (np.full_like(p, 1 / p.size), np.full_like(q, 1 / q.size)),
    "truncated distributions": lambda p, q: (cut(p, 2), cut(q, 3)),
    "a truncated draft": lambda p, q: (p, cut(q, 2)),
    "disjoint supports": lambda p, q: (p * [1, 1, 0, 0] / p[:2].sum(), q * [0, 0, 1, 1] / q[2:].sum()),
    "tiny masses": lambda p, q: (p * [1, 1e-14, 1, 1e-14] / (p * [1, 1e-14, 1, 1e-14]).sum(), q),
}


class Changed:
    """Random tables, both rows of each path changed."""

    def __init__(self, seed, change):
        self.V = 4
        self.tables = Tables(4, seed)
        self.change = change

    def row(self, which, path):
        return self.change(self.tables.row("p", path), self.tables.row("q", path))["pq".index(which)]


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("K", [2, 3, 4])
def test_degenerate_rows_keep_the_distribution(kind, K):
    for seed in (0, 6):
        assert measure(flow, Changed(seed, ROWS[kind]), SYS, PATHS, by_depth(K, 1), 2).error < 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_one_path_is_block_verification_to_the_last_bit(seed):
    tables = Tables(4, seed)
    draft, p = as_batch(tables, SYS, TreeShape.CHAIN, enumerate_drafts(tables, SYS, by_depth(1, 1), 2))
    for kind in (np.float64, np.float32):
        ours, theirs = (verifier(n)(draft, p.astype(kind)) for n in ("flow", "block"))
        assert np.array_equal(ours.stop, theirs.stop)


def test_more_is_kept_than_by_greedy_traversal_of_iid_paths():
    """On average over tables; the tables of docs/papers/flow.md are of real text."""
    setting = PATHS, by_depth(3, 1), 2
    ours, theirs = ([measure(verifier(n), Tables(4, s), distribution, *setting).block_efficiency for s in range(0, 30, 6)]
                    for n, distribution in (("flow", SYS), ("greedy_traversal", IID)))  # fmt: skip
    assert np.mean(ours) > 1.02 * np.mean(theirs)


# Mistakes


def worst(distribution=SYS, drafts=None, K=3, seeds=(0, 6, 12)):
    found = []
    for seed in seeds:
        tables = Tables(4, seed)
        given = None if drafts is None else drafts(tables, K, 2)
        found.append(measure(flow, tables, distribution, PATHS, by_depth(K, 1), 2, given).tv)
    return max(found)


def test_the_mistakes_below_are_looked_for_where_the_rule_is_exact():
    assert worst() < 1e-12


@pytest.mark.parametrize("K", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_iid_draws_are_caught(K):
    assert worst(IID, K=K, seeds=(0,)) > 3e-3


def one_uniform(tables, K, depth):
    """Wrong: all contexts of a tree meet one u, so that a draft is a function of it."""

    def grown(u):
        tokens = [0]
        parents = [-1]
        paths = [()]
        level = [0] * K  # the node that each path has reached
        for _ in range(depth):
            reached = [paths[n] for n in level]
            for j, path in enumerate(reached):
                turn = reached[:j].count(path)
                k = reached.count(path)
                q = tables.row("q", path)
                x = min(int((q.cumsum() / q.sum() <= (u + turn) / k).sum()), int(np.flatnonzero(q)[-1]))
                parents.append(level[j])
                tokens.append(x)
                paths.append((*path, x))
                level[j] = len(tokens) - 1
        return Grown(0.0, tokens, parents, paths, [])

    distributions = [tables.row("q", path) for d in range(depth) for path in np.ndindex(*[tables.V] * d)]
    at = np.unique(
        [
            0,
            1,
            *(
                k * F - j
                for q in distributions
                for F in q.cumsum()
                for k in range(1, K + 1)
                for j in range(k)
            ),
        ]
    )
    at = at[(at >= 0) & (at <= 1)]
    found = [grown((low + high) / 2) for low, high in itertools.pairwise(at)]
    for d, low, high in zip(found, at, at[1:], strict=False):
        d.probability = high - low
    return found


def test_one_uniform_for_a_whole_tree_is_caught():
    assert worst(drafts=one_uniform) > 1e-2


def test_mass_in_the_place_of_weights_is_caught(monkeypatch):
    monkeypatch.setattr(module, "weights", lambda mass: mass)
    assert worst() > 1e-3


def careless(g, r, P, D, *, start=1.0, capped=True, from_marginals=False):
    """`flow.scaled` from another start, which may overshoot; wrong: without the last cap, or with E as if each token met the average of the others."""
    new = without_repeats(D) >= 0
    a = start * (g / (r - np.minimum(g, 0.9 * r))).clip(module.SMALLEST, module.LARGEST)
    for turn in range(2):
        held = module.look_up(a, D) * new
        T = held / (1 + held.sum(-1, keepdims=True))
        E = module.sum_by_token(g, D, P[..., None] * T)
        if from_marginals:
            E = r * a / (1 + a + np.nansum(r * a, 1, keepdims=True) - r * a)
        if turn == 0:
            a = np.where(E > 0, (a * g / E).clip(module.SMALLEST, module.LARGEST), a)
    phi = np.where(g < E, g / E, 1.0) if capped else np.ones_like(g)
    return T * module.look_up(phi, D), (g - phi * E).clip(min=0)


@pytest.mark.parametrize("start", [0.01, 1.0, 10.0])
def test_any_start_keeps_the_distribution(start, monkeypatch):
    monkeypatch.setattr(module, "scaled", partial(careless, start=start))
    assert worst() < 1e-12


@pytest.mark.parametrize("mistake", [{"start": 10.0, "capped": False}, {"from_marginals": True}], ids=str)
def test_a_transport_that_gives_more_than_there_is_is_caught(mistake, monkeypatch):
    monkeypatch.setattr(module, "scaled", partial(careless, **mistake))
    assert worst() > 5e-3


def test_the_steps_from_the_rules_own_start_never_overshoot(monkeypatch):
    """a = g/(r - g) would serve a token alone, and a step that serves one better leaves the others less: the cap is for rounding."""
    monkeypatch.setattr(module, "scaled", partial(careless, capped=False))
    assert worst() < 1e-12


def test_a_context_that_pools_less_than_it_drew_is_caught():
    """Wrong: each copy of a context draws alone, as if it were another one."""

    def apart(tables, K, depth):
        found = []
        for probability, heads in sibling_draws(SYS, [tables.row("q", ())], K):
            tails = [(probability, ())]
            for x in heads:
                tails = [
                    (v * w, (*tail, y))
                    for v, tail in tails
                    for w, (y,) in sibling_draws(SYS, [tables.row("q", (x,))], 1)
                ]
            for v, tail in tails:
                paths = [(), *((x,) for x in heads), *zip(heads, tail, strict=True)]
                found.append(Grown(v, [0, *heads, *tail], [-1, *[0] * K, *range(1, K + 1)], paths, []))
        return found

    assert worst(drafts=apart) > 1e-3
