"""Bounds and expected tokens against the exact enumeration of drafts."""

import numpy as np
import pytest

from polydraft.core import DraftSampling, TreeShape
from polydraft.methods.registry import verifier
from polydraft.testing import as_batch, enumerate_drafts, measure
from polydraft.theory import acceptance, bounds, speed
from studies.theory import efficiency
from tests.exactness.harness import Markov, by_depth
from tests.exactness.oracle import ORACLE, markov

PATHS = [c for c in ORACLE["block_level"] if c["draft"] == "iid_paths"]


@pytest.mark.parametrize("case", PATHS, ids=lambda c: c["name"])
def test_bound_for_paths_equals_the_oracle(case):
    tables = markov(case)
    found = bounds.block_efficiency_of_paths(
        lambda path: tables.row("p", path), lambda path: tables.row("q", path), case["paths"], case["depth"]
    )
    assert found == pytest.approx(case["simple_upper_bound"], abs=1e-9)


@pytest.mark.parametrize("case", PATHS, ids=lambda c: c["name"])
def test_linear_programme_over_blocks_equals_the_oracle(case):
    tables = markov(case)
    drafts = enumerate_drafts(tables, DraftSampling.IID, by_depth(*case["branching"]), case["depth"])
    found = bounds.best_block_efficiency(
        lambda path: tables.row("p", path), [(d.probability, d.paths) for d in drafts]
    )
    assert found == pytest.approx(case["lp_upper_bound"], abs=1e-7)


@pytest.mark.parametrize("case", PATHS, ids=lambda c: c["name"])
def test_no_rule_is_above_the_linear_programme(case):
    assert (
        max(case["expected_block_efficiency"].values())
        <= case["lp_upper_bound"] + 1e-9
        <= case["simple_upper_bound"] + 2e-9
    )


def tables(seed, V=4):
    rng = np.random.default_rng(seed)
    return Markov(rng.dirichlet(np.ones(V), V), rng.dirichlet(np.ones(V), V), 0)


def accepted_rows(rule, t, distribution, n):
    """For each last token: the mass that the rule emits on each drafted token, by enumeration of one node."""
    rows = []
    for x in range(t.V):
        here = Markov(t.p, t.q, x)
        drafts = enumerate_drafts(here, distribution, by_depth(n), 1)
        draft, p = as_batch(here, distribution, TreeShape.PRODUCT, drafts)
        stop = rule(draft, p).stop
        row = np.zeros(t.V)
        for b, d in enumerate(drafts):
            np.add.at(row, d.tokens[1:], d.probability * stop[b, 1 : len(d.tokens)])
        rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("recursive_wor", DraftSampling.WITHOUT_REPLACEMENT),
        ("greedy_plus_one", DraftSampling.GREEDY_PLUS_ONE),
    ],
)
def test_the_sum_over_depths_equals_the_enumeration_of_all_trees(name, distribution):
    t = tables(1)
    rule = verifier(name)
    found = acceptance.of_tables(accepted_rows(rule, t, distribution, 2), 0, 2)
    assert found == pytest.approx(
        measure(rule, t, distribution, TreeShape.PRODUCT, by_depth(2, 2), 2).block_efficiency, abs=1e-12
    )


def test_sampled_drafts_estimate_the_enumerated_efficiency_within_their_error():
    t = tables(2)
    rule = verifier("traversal")
    rng = np.random.default_rng(0)
    drafts = enumerate_drafts(t, DraftSampling.IID, by_depth(2, 1), 2)
    draft, p = as_batch(t, DraftSampling.IID, TreeShape.PATHS, drafts)
    values = efficiency.expected_tokens(draft, rule(draft, p))
    weight = np.array([d.probability for d in drafts])
    exact = float(weight @ values)
    assert exact == pytest.approx(
        measure(rule, t, DraftSampling.IID, TreeShape.PATHS, by_depth(2, 1), 2).block_efficiency
    )
    found = efficiency.estimate(values[rng.choice(len(values), 4000, p=weight / weight.sum())])
    assert abs(found.mean - exact) < 4 * found.standard_error < 0.1


def test_ratio_of_paired_values_is_more_certain_than_of_unpaired_ones():
    rng = np.random.default_rng(0)
    theirs = 2 + rng.random(400)
    ours = 1.1 * theirs + 0.01 * rng.standard_normal(400)
    found = efficiency.paired(ours, theirs)
    assert found.mean == pytest.approx(1.1, abs=4 * found.standard_error)
    assert found.standard_error < efficiency.estimate(ours).standard_error / 10


def test_bound_of_the_race_holds_for_chains_and_the_relative_entropy_cannot_take_its_place():
    rng = np.random.default_rng(5)
    broken = 0
    for _ in range(20):
        p, q = rng.dirichlet(np.ones(5), 2)
        distribution = acceptance.race_places(p, q, len(p))
        assert distribution.sum() == pytest.approx(1, abs=1e-9)
        for k in (1, 3, 6):  # a chain of k nodes of place 1
            tokens = speed.tokens_of_chain(distribution[0], k)
            assert tokens <= bounds.tokens_of_race(5, k, bounds.entropy(distribution)) + 1e-9
            broken += tokens > bounds.tokens_of_race(5, k, float((p * np.log(p / q)).sum()))
    assert broken


def test_tree_of_fixed_tokens_attains_its_bound():
    t = tables(4)
    drafts = enumerate_drafts(t, DraftSampling.POINT_MASS, by_depth(2, 2), 2)
    masses = [np.prod([t.row("p", path[:i])[x] for i, x in enumerate(path)]) for path in drafts[0].paths[1:]]
    found = measure(
        verifier("match"), t, DraftSampling.POINT_MASS, TreeShape.PRODUCT, by_depth(2, 2), 2
    ).block_efficiency
    assert found == pytest.approx(bounds.tokens_of_tree(np.array(masses)), abs=1e-12)


def test_deeper_drafts_pay_only_while_they_are_cheap():
    assert (
        speed.best_depth(0.7, draft_cost=0.01)
        > speed.best_depth(0.7, draft_cost=0.1)
        > speed.best_depth(0.7, draft_cost=0.6)
    )
