"""The study of the limits: the same numbers by the same seed, paths that a smaller budget would have drawn, files that can be read."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from polydraft.core import Budget, Request, SamplingParams, TreeShape
from polydraft.core import geometry as trees
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.theory import compare
from polydraft.theory.trees import race_tree
from studies.limits import tables
from studies.limits.branching import places, shapes
from studies.limits.contexts import LimitSettings
from studies.limits.measurement import Limits
from studies.limits.nodes import accepted
from studies.limits.paths import restrict

SMALL = LimitSettings(
    contexts=6,
    node_contexts=2,
    temperatures=(0.7, 1.0),
    num_drafts=(1, 2),
    drafts_by_temperature=2,
    num_paths=(2,),
    depths=(2, 3),
)


@pytest.fixture(scope="module")
def limits():
    return Limits(SMALL)


@pytest.fixture(scope="module")
def found(limits):
    return limits.run()


def by(rows, **where):
    return [r for r in rows if all(r[k] == v for k, v in where.items())]


def test_one_draft_is_worth_the_same_to_every_rule_that_tests_it(found):
    single = by(found.nodes, rule="speculative", drafts=1, temperature=1.0)[0]["acceptance"]
    for rule in ("recursive", "kseq", "transport", "max_ratio", "importance", "single_with_spares"):
        assert by(found.nodes, rule=rule, drafts=1, temperature=1.0)[0]["acceptance"] == pytest.approx(
            single, abs=1e-9
        ), rule


def test_no_rule_for_iid_draws_is_above_the_optimum(found):
    for row in by(found.nodes, distribution="IID"):
        if row["rule"] == "greedy_traversal":
            continue  # its draws are sampled; the next test has all of them
        best = by(
            found.nodes,
            rule="optimum",
            distribution="IID",
            drafts=row["drafts"],
            temperature=row["temperature"],
        )[0]
        assert row["acceptance"] <= best["acceptance"] + 1e-9, row


def test_one_node_of_greedy_traversal_is_the_verifier_s_own_acceptance():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    q = np.full(4, 0.25)
    draws = np.array(list(product(range(4), repeat=2)))
    compared = compare(p, q, 2, verifiers=["greedy_traversal"]).rows[0]
    assert accepted("greedy_traversal", p, q, draws) == pytest.approx(compared.tokens - 1, abs=1e-9)
    assert compared.tokens <= compared.bound + 1e-9


def test_restricted_draft_is_what_a_smaller_budget_draws(limits):
    drafter = ModelDrafter(limits.draft, "paths")

    def drawn(width, depth):
        request = Request("r", limits.contexts(2)[0], SamplingParams(), seed=5)
        states = drafter.start([request])
        draft = drafter.propose(states, [Budget.fixed(trees.paths(width, depth))])
        drafter.release(states)
        return draft

    large = drawn(3, 4)
    small = drawn(2, 3)
    p = torch.zeros(1, large.tree.num_nodes, 1)
    cut, rows = restrict(large, p, 2, 3)
    assert cut.tree.num_nodes == small.tree.num_nodes == rows.shape[1] == 7
    assert cut.shape is TreeShape.PATHS
    assert trees.depths(cut.tree).tolist() == trees.depths(small.tree).tolist()
    assert restrict(large, p, 1, 3)[0].shape is TreeShape.CHAIN


def test_few_contexts_have_no_bound_that_rules_exceed_by_chance(found):
    """At six contexts greedy traversal sampled 7.8 tokens where the bound's own texts gave 6.0."""
    assert not SMALL.bounded and not by(found.paths, rule="bound")
    assert "No bound" in tables.markdown(tables.as_dict(found))


@pytest.mark.slow
def test_no_rule_is_above_the_bound_of_enough_contexts():
    many = Limits(
        replace(SMALL, contexts=200, node_contexts=0, rules=("bound", "greedy_traversal"), depths=(3,))
    ).run()
    (bound,), (best,) = (
        by(many.paths, rule=rule, paths=2, drafts="paths") for rule in ("bound", "greedy_traversal")
    )
    assert best["tokens_per_step"] < bound["tokens_per_step"]
    assert "No bound" not in tables.markdown(tables.as_dict(many))


def test_trees_of_equal_size_are_measured_and_the_race_tree_is_the_race_s_own():
    limits = Limits(replace(SMALL, node_contexts=6, tree_contexts=6, rules=("traversal",)))
    rows = limits.run().trees
    assert {row["tree"] for row in rows} == {"paths", "branching", "race tree"}
    for row in rows:
        assert row["nodes"] in (30, 32), row
        assert 1 <= row["tokens_per_step"] <= 1 + row["depth"], row
    counted = places(limits)
    assert counted[0] == max(counted) and counted.sum() <= 1
    assert shapes(counted)["race tree"] == race_tree(counted.tolist(), 33).parents
