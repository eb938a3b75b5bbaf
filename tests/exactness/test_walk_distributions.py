"""Walks keep the target's distribution: texts from what they emit in float32 with the real noise, against the product of target rows.

Readable rules are enumerated (`test_lossless`). Walks draw, so theirs is a chi-square: ROWS drafts, drawn by their probabilities, are
walked in one batch of as many seeds, and every block is completed by target rows to three tokens of three, 27 texts.

Power: a bias adds ROWS times sum (difference^2 / distribution) to a statistic of mean 26 and standard deviation 7, so a total variation of 0.05 adds
at least 120 on any tables. The weakest of the wrong variants below adds about 100 on its own. Each is asked for p < 1e-6.
"""

from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import pytest
from scipy.stats import chi2

from polydraft.core import Draft, DraftSampling, NoiseKey, Outcome, TokenTree, TreeShape
from polydraft.core import geometry as trees
from polydraft.methods import registry
from polydraft.sampling import noise
from polydraft.sampling.softmax import softmax
from polydraft.testing import Tables, as_batch, by_position, enumerate_drafts, target_text_probs
from polydraft.verifiers import greedy
from polydraft.verifiers.list_race import active_paths, list_race
from polydraft.verifiers.race import follow
from tests.exactness.harness import by_depth, ragged
from tests.exactness.oracle import lifted
from tests.fast_equals_slow.walk_rounds import first_nodes, trunk_counted_twice
from tests.support import wrong_rules

V = 3
DEPTH = 2
ROWS = 12_000
TABLES = {"plain": Tables(V, 30), "zeros": Tables(V, 2), "ties": Tables(V, 15)}
IID, WOR, PM, G1, COUPLED, LISTED, SYS = (
    DraftSampling[name]
    for name in (
        "IID",
        "WITHOUT_REPLACEMENT",
        "POINT_MASS",
        "GREEDY_PLUS_ONE",
        "COUPLED",
        "LISTED",
        "SYSTEMATIC",
    )
)
CHAIN, PATHS, PRODUCT, RAGGED, BY_POSITION = (
    TreeShape[x] for x in ("CHAIN", "PATHS", "PRODUCT", "RAGGED", "BY_POSITION")
)
ONE = by_depth(1, 1)
TWO = by_depth(2, 1)
THREE = by_depth(3, 1)
TRUNK = by_depth(1, 2)
FULL = by_depth(2, 2)
LONG_AND_SHORT = ragged(2, 1)
LEAVES = by_position(-1, 0, 0, 0, 1, 1)


def distributions(tables, which):
    """Row of every text of 0, 1, ... tokens, [V] * length + [V]."""
    found = [TABLES[tables].row(which, ())]
    for length in range(1, DEPTH + 1):
        texts = np.ndindex(*[V] * length)
        found.append(np.array([TABLES[tables].row(which, text) for text in texts]).reshape(*[V] * length, V))
    return found


@lru_cache
def drawn(tables, distribution, shape, counts, said=None):
    """A batch of drafts drawn by their probabilities, logits of the target at their nodes, and the keys of their rounds.

    said: the sibling distribution that the drafts claim, where it is another.
    """
    drafts = enumerate_drafts(TABLES[tables], distribution, counts, DEPTH)
    distribution = said or distribution
    every, p = as_batch(TABLES[tables], distribution, shape, drafts)
    odds = np.array([d.probability for d in drafts], dtype=np.float64)
    at = np.random.default_rng(1).choice(len(odds), ROWS, p=odds / odds.sum())
    tree = TokenTree(every.tree.tokens[at], every.tree.parents[at])
    key = NoiseKey.of(range(ROWS), [1] * ROWS, [5] * ROWS)
    probs = None if every.probs is None else every.probs[at].astype(np.float32)
    return Draft(tree, distribution, shape, probs, every.rows[at], key), np.log(p[at]).astype(np.float32), key


@lru_cache
def raced(tables, distribution, num_paths):
    """Drafts that win races: the first arrivals at the root and the first below each, or each path by clocks of its own."""
    key = NoiseKey.of(range(ROWS), [1] * ROWS, [5] * ROWS)
    own = num_paths if distribution is LISTED else 1
    clocks = [
        noise.clocks(NoiseKey(key.seed, key.sample, key.position + d), own * V).reshape(ROWS, own, V)
        for d in range(DEPTH)
    ]
    q = list(distributions(tables, "q"))
    heads = (
        (clocks[0] / q[0]).argmin(-1)
        if distribution is LISTED
        else (clocks[0][:, 0] / q[0]).argsort(-1)[:, :num_paths]
    )
    tails = (clocks[1] / q[1][heads]).argmin(-1)
    parents = np.tile(np.array([-1, *[0] * num_paths, *range(1, num_paths + 1)]), (ROWS, 1))
    tree = TokenTree(np.concatenate([np.zeros((ROWS, 1), np.int64), heads, tails], axis=1), parents)
    p = list(distributions(tables, "p"))
    at_nodes = np.concatenate([np.broadcast_to(p[0], (ROWS, 1, V)), p[1][heads], p[2][heads, tails]], axis=1)
    probs = np.concatenate([np.broadcast_to(q[0], (ROWS, 1, V)), q[1][heads]], axis=1).astype(np.float32)
    shape = CHAIN if num_paths == 1 else PATHS if distribution is LISTED else PRODUCT
    return (
        Draft(tree, distribution, shape, probs, parents.copy(), key),
        np.log(at_nodes).astype(np.float32),
        key,
    )


def texts(tables, draft, outcome):
    """What is emitted, completed by target rows, [ROWS, 3]."""
    rows = distributions(tables, "p")
    fresh = np.random.default_rng(2).random((ROWS, DEPTH + 1, 1))
    path = outcome.path
    count = outcome.num_accepted
    token = outcome.token
    found = np.zeros((ROWS, DEPTH + 1), np.int64)
    every = np.arange(ROWS)
    for j in range(DEPTH + 1):
        distribution = np.broadcast_to(rows[j][tuple(found[:, :j].T)], (ROWS, V)).cumsum(1)
        found[:, j] = (fresh[:, j] * distribution[:, -1:] >= distribution).sum(1)
        found[:, j] = np.where(count == j, token, found[:, j])
        if j < path.shape[1]:
            found[:, j] = np.where(count > j, draft.tree.tokens[every, path[:, j]], found[:, j])
    return found


def p_value(tables, draft, outcome):
    distribution = target_text_probs(TABLES[tables], DEPTH + 1).ravel()
    seen = np.bincount(
        np.ravel_multi_index(tuple(texts(tables, draft, outcome).T), [V] * (DEPTH + 1)),
        minlength=distribution.size,
    )
    if seen[distribution == 0].any():
        return 0.0
    expected = ROWS * distribution
    rare = expected < 5
    seen, expected = (np.append(x[~rare], x[rare].sum()) for x in (seen, expected))
    return float(
        chi2.sf(
            ((seen - expected) ** 2 / np.maximum(expected, 1e-9)).sum(),
            len(distribution[~rare]) - 1 + rare.any(),
        )
    )


def walk(name):
    return lambda *given: registry.verifier(name).walk(*given)


def sampled(rule):
    """The way of a rule without a walk, or of a wrong one: the verdict of distributions in float32, and two draws."""
    return lambda draft, logits, key: rule(draft, softmax(logits)).sample(key)


RIGHT = [
    ("block", IID, CHAIN, ONE),
    ("greedy_traversal", IID, PATHS, TWO),
    ("greedy_traversal", IID, PRODUCT, TRUNK),
    ("greedy_traversal", IID, PRODUCT, FULL),
    ("greedy_traversal", IID, RAGGED, LONG_AND_SHORT),
    ("greedy_traversal", IID, BY_POSITION, LEAVES),
    ("traversal", IID, PATHS, TWO),
    ("traversal", WOR, PRODUCT, FULL),
    ("traversal", G1, PRODUCT, FULL),
    ("traversal", PM, PATHS, TWO),
    ("traversal_merged", IID, PRODUCT, FULL),
    ("greedy_traversal_wor", WOR, PRODUCT, FULL),
    ("greedy_traversal_wor", WOR, PATHS, THREE),
    ("flow", SYS, CHAIN, ONE),
    ("flow", SYS, PATHS, TWO),
    ("flow", SYS, PATHS, THREE),
    ("flow", SYS, PRODUCT, TRUNK),
    ("flow", SYS, PRODUCT, FULL),
    ("flow", SYS, RAGGED, LONG_AND_SHORT),
    ("flow", SYS, BY_POSITION, LEAVES),
    ("match", IID, CHAIN, ONE),
    ("match", IID, PRODUCT, FULL),
    ("match", WOR, PRODUCT, FULL),
    ("match", PM, PATHS, TWO),
    ("race", IID, PATHS, TWO),
    ("race", PM, PRODUCT, FULL),
]


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize(("name", "distribution", "shape", "counts"), RIGHT)
def test_a_walk_keeps_the_distribution(name, distribution, shape, counts, tables):
    draft, logits, key = drawn(tables, distribution, shape, counts)
    assert p_value(tables, draft, walk(name)(draft, logits, key)) > 1e-3


@pytest.mark.parametrize(
    ("name", "distribution", "shape", "counts"),
    [
        ("block", IID, CHAIN, ONE),
        ("greedy_traversal", IID, CHAIN, ONE),
        ("greedy_traversal", IID, BY_POSITION, LEAVES),
        ("match", IID, BY_POSITION, LEAVES),
        ("race", PM, PRODUCT, FULL),
    ],
)
def test_a_walk_keeps_the_distribution_in_a_batch_of_trees_of_all_sizes(name, distribution, shape, counts):
    draft, logits, key = drawn("plain", distribution, shape, counts)
    draft = first_nodes(draft, [1 + b % draft.tree.num_nodes for b in range(ROWS)])
    assert p_value("plain", draft, walk(name)(draft, logits, key)) > 1e-3


@pytest.mark.parametrize(
    ("distribution", "shape", "counts"),
    [(IID, PATHS, TWO), (WOR, PRODUCT, FULL), (G1, PRODUCT, FULL), (IID, RAGGED, LONG_AND_SHORT)],
)
def test_traversal_keeps_the_distribution_in_float32(distribution, shape, counts):
    draft, logits, key = drawn("plain", distribution, shape, counts)
    assert p_value("plain", draft, sampled(registry.verifier("traversal"))(draft, logits, key)) > 1e-3


RACES = [("race", COUPLED, 1), ("race", COUPLED, 2), ("list_race", LISTED, 1), ("list_race", LISTED, 2)]


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize(("name", "distribution", "num_paths"), RACES)
def test_a_walk_of_shared_races_keeps_the_distribution(name, distribution, num_paths, tables):
    draft, logits, key = raced(tables, distribution, num_paths)
    assert p_value(tables, draft, walk(name)(draft, logits, key)) > 1e-3


def likeliest(tables):
    """The text of largest logits, the lowest id among equals."""
    text = ()
    for _ in range(DEPTH + 1):
        text += (int(TABLES[tables].row("p", text).argmax()),)
    return text


def misses(way, tables, distribution, shape, counts):
    """Emitted tokens that are not the likeliest, by number of accepted drafts."""
    draft, logits, key = drawn(tables, distribution, shape, counts)
    draft = first_nodes(draft, [1 + b % draft.tree.num_nodes for b in range(ROWS)])
    outcome = way(draft, logits, key)
    count = outcome.num_accepted
    wrong = (texts(tables, draft, outcome) != likeliest(tables)) & (np.arange(DEPTH + 1) <= count[:, None])
    return {k: int(wrong[count == k].sum()) for k in set(count.tolist())}


@pytest.mark.parametrize("tables", ["plain", "ties"])
@pytest.mark.parametrize(
    ("distribution", "shape", "counts"), [(IID, CHAIN, ONE), (IID, PRODUCT, FULL), (PM, PATHS, TWO)]
)
def test_the_greedy_walk_emits_the_likeliest_text(distribution, shape, counts, tables):
    assert misses(greedy.walk, tables, distribution, shape, counts) == {0: 0, 1: 0, 2: 0}


@pytest.mark.parametrize("tables", ["plain", "ties"])
def test_a_broken_greedy_walk_misses_the_likeliest_text(tables):
    assert sum(misses(wrong_rules.keep_all, tables, IID, CHAIN, ONE).values()) > ROWS / 10


# What would have been caught: wrong rules, right walks on drafts that are not what they say, and broken walks


def copies_dropped(draft, logits):
    """Of two equal children of the root one is dropped, and what was below it hangs below the other."""
    equal = (draft.tree.tokens[:, 1] == draft.tree.tokens[:, 2])[:, None]
    order = np.array([0, 1, 3, 4, 2])
    tokens = np.where(equal, draft.tree.tokens[:, order] * np.array([1, 1, 1, 1, 0]), draft.tree.tokens)
    parents = np.where(equal, np.array([-1, 0, 1, 1, -1]), draft.tree.parents)
    rows = np.where(equal, np.array([-1, 0, 1, 1, -1]), draft.rows)
    return replace(draft, tree=TokenTree(tokens, parents), rows=rows), np.where(
        equal[..., None], logits[:, order], logits
    )


def likeliest_first(draft, logits):
    """Two paths sorted by the draft's probability of their first tokens."""
    order = wrong_rules.likeliest_first(draft)
    return wrong_rules.permuted(draft, order), np.take_along_axis(logits, order[..., None], 1)


def sharpened(draft, logits):
    """Another q reported than the tokens were drawn from."""
    return replace(draft, probs=draft.probs**2 / (draft.probs**2).sum(-1, keepdims=True)), logits


def as_it_is(draft, logits):
    return draft, logits


WRONG = {
    **{
        f"block, {mistake}": (
            "plain",
            IID,
            CHAIN,
            ONE,
            None,
            as_it_is,
            sampled(partial(wrong_rules.block, **{mistake: True})),
        )
        for mistake in ("clamp_factors", "plain_residual", "uncapped", "first_failure")
    },
    "block, another q": ("plain", IID, CHAIN, ONE, None, sharpened, walk("block")),
    "block, deterministic drafts": ("plain", PM, CHAIN, ONE, IID, as_it_is, walk("block")),
    "greedy traversal, distinct draws told to be iid": (
        "plain",
        WOR,
        PATHS,
        TWO,
        IID,
        as_it_is,
        walk("greedy_traversal"),
    ),
    "greedy traversal, distinct draws in a whole tree told to be iid": (
        "plain",
        WOR,
        PRODUCT,
        FULL,
        IID,
        as_it_is,
        walk("greedy_traversal"),
    ),
    "greedy traversal, copies dropped": (
        "plain",
        IID,
        PATHS,
        TWO,
        None,
        copies_dropped,
        walk("greedy_traversal"),
    ),
    "greedy traversal, sorted": ("ties", IID, PATHS, TWO, None, likeliest_first, walk("greedy_traversal")),
    "greedy traversal, a trunk counted twice": (
        "plain",
        IID,
        PRODUCT,
        TRUNK,
        None,
        trunk_counted_twice,
        walk("greedy_traversal"),
    ),
    "greedy traversal, a chain counted twice": (
        "plain",
        IID,
        CHAIN,
        ONE,
        None,
        as_it_is,
        sampled(wrong_rules.counted_twice),
    ),
    "greedy traversal, another q": ("plain", IID, PATHS, TWO, None, sharpened, walk("greedy_traversal")),
    "traversal, distinct draws told to be iid": (
        "plain",
        WOR,
        PRODUCT,
        FULL,
        IID,
        as_it_is,
        sampled(registry.verifier("traversal")),
    ),
    "traversal, iid draws told to be distinct": (
        "plain",
        IID,
        PATHS,
        TWO,
        WOR,
        as_it_is,
        sampled(registry.verifier("traversal")),
    ),
    "traversal, the whole q for a sampled child": (
        "plain",
        G1,
        PRODUCT,
        FULL,
        IID,
        as_it_is,
        sampled(registry.verifier("traversal")),
    ),
    "traversal, copies dropped": (
        "zeros",
        IID,
        PATHS,
        TWO,
        None,
        copies_dropped,
        sampled(registry.verifier("traversal")),
    ),
    "traversal, sorted": (
        "plain",
        IID,
        PATHS,
        TWO,
        None,
        likeliest_first,
        sampled(registry.verifier("traversal")),
    ),
    "flow, iid draws told to be systematic": ("plain", IID, PATHS, THREE, SYS, as_it_is, walk("flow")),
    "flow, iid draws in a whole tree": ("plain", IID, PRODUCT, FULL, SYS, as_it_is, walk("flow")),
    "flow, distinct draws": ("plain", WOR, PATHS, TWO, SYS, as_it_is, walk("flow")),
    "flow, another q": ("plain", SYS, PATHS, TWO, None, sharpened, walk("flow")),
    "flow, copies dropped": ("plain", SYS, PATHS, TWO, None, copies_dropped, walk("flow")),
    "greedy traversal, systematic draws told to be iid": (
        "plain",
        SYS,
        PATHS,
        TWO,
        IID,
        as_it_is,
        walk("greedy_traversal"),
    ),
    "match, a new draw after a mismatch": (
        "plain",
        IID,
        CHAIN,
        ONE,
        None,
        as_it_is,
        sampled(lifted(wrong_rules.redraws)),
    ),
    "match, a new draw after a mismatch of several": (
        "plain",
        IID,
        PATHS,
        TWO,
        None,
        as_it_is,
        sampled(lifted(wrong_rules.redraws)),
    ),
    "a broken walk of a chain": ("plain", IID, CHAIN, ONE, None, as_it_is, wrong_rules.keep_all),
    "a broken walk of paths": ("plain", IID, PATHS, TWO, None, as_it_is, wrong_rules.keep_all),
    "a broken walk of fixed tokens": ("plain", PM, PATHS, TWO, None, as_it_is, wrong_rules.keep_all),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_variant_is_caught(mistake):
    *given, change, way = WRONG[mistake]
    draft, logits, key = drawn(*given)
    draft, logits = change(draft, logits)
    assert p_value(given[0], draft, way(draft, logits, key)) < 1e-6


def clocks_of_the_round(draft, logits, key):
    """A race with one clock vector for all positions of a round."""
    picks = (noise.clocks(key, V)[:, None] / softmax(logits)).argmin(-1)
    node = follow(draft.tree, picks)
    return Outcome(*trees.path_to(draft.tree, node), np.take_along_axis(picks, node[:, None], 1)[:, 0])


@pytest.mark.parametrize("way", [clocks_of_the_round, wrong_rules.keep_all])
def test_a_wrong_race_is_caught(way):
    draft, logits, key = raced("plain", COUPLED, 1)
    assert p_value("plain", draft, way(draft, logits, key)) < 1e-6


def test_a_list_race_that_drops_paths_by_their_tokens_is_caught():
    draft, logits, key = raced("plain", LISTED, 2)
    active = active_paths(draft.tree)
    likely = draft.tree.tokens[:, 1:3] == int(TABLES["plain"].row("p", ()).argmax())
    active[:, 0] &= likely | ~likely.any(1, keepdims=True)
    wrong = replace(list_race, active=lambda tree: active)
    assert p_value("plain", draft, wrong.walk(draft, logits, key)) < 1e-6
