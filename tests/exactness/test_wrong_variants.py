"""Known mistakes, kept as rules that the exact harness must catch: a check that cannot fail proves nothing."""

from functools import partial

import numpy as np
import pytest

from polydraft.core import Draft, DraftSampling, TreeShape
from polydraft.core import geometry as tree
from polydraft.core.arrays import scatter_add
from polydraft.methods.registry import verifier
from polydraft.testing import Tables, enumerate_drafts, measure
from polydraft.verifiers import kseq, recursive, speculative
from polydraft.verifiers import multipath as multipath_module
from polydraft.verifiers.lift.draws import without_repeats
from polydraft.verifiers.lift.verdict import TreeVerdict
from polydraft.verifiers.residual import normalise_or, positive_part
from tests.exactness.harness import by_depth
from tests.exactness.oracle import Fixed, Q, lifted
from tests.fast_equals_slow.walk_rounds import trunk_counted_twice
from tests.support import wrong_rules
from tests.support.hierarchical import hierarchical

with_replacement = partial(recursive.emitted_probs, replacement=True)
without_replacement = partial(recursive.emitted_probs, replacement=False)


@pytest.mark.parametrize(
    ("emitted", "distribution", "tv"),
    [
        (wrong_rules.duplicates_skipped, DraftSampling.IID, 0.099),
        (wrong_rules.iid_as_distinct, DraftSampling.IID, 0.098),
        (with_replacement, DraftSampling.WITHOUT_REPLACEMENT, 0.135),
        (wrong_rules.resorted, DraftSampling.WITHOUT_REPLACEMENT, 0.205),
    ],
    ids=["duplicates skipped", "iid as without", "without as iid", "sorted siblings"],
)
def test_wrong_child_distribution_has_the_documented_bias(emitted, distribution, tv):
    found = measure(lifted(emitted), Fixed(), distribution, TreeShape.PATHS, by_depth(3), 1)
    assert found.tv == pytest.approx(tv, abs=6e-4)


def test_deterministic_children_with_a_real_q_have_the_documented_bias():
    top = tuple(np.argsort(-Q)[:3])
    drafts = enumerate_drafts(Fixed(), DraftSampling.POINT_MASS, by_depth(3), 1)
    assert drafts[0].tokens[1:] == list(top)
    found = measure(
        lifted(without_replacement),
        Fixed(),
        DraftSampling.WITHOUT_REPLACEMENT,
        TreeShape.PATHS,
        by_depth(3),
        1,
        drafts,
    )
    assert found.tv == pytest.approx(0.300, abs=6e-4)


def test_redrawing_after_a_mismatch_is_caught():
    found = measure(
        lifted(wrong_rules.redraws), Tables(3, 0), DraftSampling.IID, TreeShape.CHAIN, by_depth(1), 1
    )
    assert found.tv > 0.01


def test_dropping_an_unlikely_token_after_sampling_it_is_caught():
    tables = Tables(4, 0)
    drafts = enumerate_drafts(tables, DraftSampling.IID, by_depth(1), 1)
    for d in drafts:
        if tables.row("q", ())[d.tokens[1]] < 0.25:
            d.tokens = d.tokens[:1]
            d.parents = d.parents[:1]
            d.paths = d.paths[:1]
    found = measure(
        lifted(speculative.emitted_probs), tables, DraftSampling.IID, TreeShape.CHAIN, by_depth(1), 1, drafts
    )
    assert found.tv > 0.01


def worst(rule):
    return max(
        measure(rule, Tables(3, s), DraftSampling.IID, TreeShape.CHAIN, by_depth(1, 1), 2).tv
        for s in range(6)
    )


def test_plain_torch_block_rule_agrees_with_the_registered_one():
    assert worst(wrong_rules.block) < 1e-12
    for seed in range(6):
        args = Tables(3, seed), DraftSampling.IID, TreeShape.CHAIN, by_depth(1, 1), 2
        ours = measure(verifier("block"), *args)
        theirs = measure(wrong_rules.block, *args)
        assert ours.block_efficiency == pytest.approx(theirs.block_efficiency, abs=1e-12)


@pytest.mark.parametrize("mistake", ["clamp_factors", "plain_residual", "uncapped", "first_failure"])
def test_block_rule_with_a_known_mistake_is_caught(mistake):
    assert worst(partial(wrong_rules.block, **{mistake: True})) > 1e-3


def of_paths(rule, V, seed, *counts):
    shape = TreeShape.PATHS if counts[0] > 1 else TreeShape.CHAIN
    return measure(rule, Tables(V, seed), DraftSampling.IID, shape, by_depth(*counts), len(counts))


@pytest.mark.parametrize("seed", [0, 5, 6, 12])
def test_hierarchical_verification_with_its_cap_is_block_verification(seed):
    capped = of_paths(partial(hierarchical, capped=True), 3, seed, 1, 1, 1)
    assert capped.tv < 1e-12
    assert capped.block_efficiency == pytest.approx(
        of_paths(verifier("block"), 3, seed, 1, 1, 1).block_efficiency, abs=1e-12
    )


@pytest.mark.parametrize(("V", "seed", "tv"), [(3, 0, 0.0565), (3, 6, 0.132), (4, 12, 0.0311)])
def test_hierarchical_verification_as_published_keeps_more_than_the_optimum_and_has_the_documented_bias(
    V, seed, tv
):
    published = of_paths(hierarchical, V, seed, 1, 1)
    assert published.tv == pytest.approx(tv, abs=6e-4)
    assert published.block_efficiency > of_paths(verifier("block"), V, seed, 1, 1).block_efficiency + 0.02


def test_hierarchical_verification_of_several_paths_has_the_documented_bias_with_and_without_its_cap():
    assert of_paths(hierarchical, 4, 12, 2, 1).tv == pytest.approx(0.0545, abs=6e-4)
    capped = of_paths(partial(hierarchical, capped=True), 4, 12, 2, 1)
    assert capped.tv == pytest.approx(0.0051, abs=6e-4)
    assert capped.block_efficiency < of_paths(verifier("traversal"), 4, 12, 2, 1).block_efficiency


def test_sorted_paths_break_recursive_rejection_and_are_caught():
    assert biggest(wrong_rules.sorted_paths, DraftSampling.IID, TreeShape.PATHS, 2, 1) > 1e-3


def test_a_chain_counted_twice_is_caught():
    assert biggest(wrong_rules.counted_twice, DraftSampling.IID, TreeShape.CHAIN, 1, 1) > 1e-3


def test_trunk_token_counted_once_for_each_path_is_caught():
    """GTV told of two draws on the trunk where there was one."""

    def rule(draft, p):
        verdict = verifier("greedy_traversal")(*trunk_counted_twice(draft, p))
        stop = verdict.stop[:, [0, 1, 3, 4]]
        assert (verdict.stop[:, 2] == 0).all()  # a copy
        at = np.array([0, 1, 3, 4])
        return TreeVerdict(draft.tree, stop, lambda node: verdict.after(at[node]))

    assert biggest(rule, DraftSampling.IID, TreeShape.PATHS, 1, 2) > 1e-3


def kseq_with_divisor_one(p, q, draws):
    """K-SEQ with rho = 1 where its root is above 1."""
    n = (draws >= 0).sum(1)
    b = np.minimum(p, q).sum(-1)
    A = 1 - (1 - b) ** n
    distribution = np.zeros_like(p)
    alive = np.ones_like(p[:, 0])
    for x in draws.T:
        accept = speculative.accept_probability(p, q, x)
        distribution = scatter_add(distribution, x[:, None], (alive * accept)[:, None])
        alive = alive * (1 - accept)
    return distribution + alive[:, None] * normalise_or(
        positive_part(p - np.minimum(p, q) * (A / b)[:, None]), otherwise=p
    )


def kseq_of_merged_children(p, q, draws):
    return kseq.emitted_probs(p, q, without_repeats(draws))


def greedy_against_the_whole_q(p, q, draws):
    x = draws[:, -1]
    accept = speculative.accept_probability(p, q, x)
    distribution = (1 - accept)[:, None] * normalise_or(positive_part(p - q), otherwise=p)
    return scatter_add(distribution, x[:, None], accept[:, None])


@pytest.mark.parametrize(
    ("emitted", "distribution", "tv"),
    [
        (kseq_with_divisor_one, DraftSampling.IID, 0.111),
        (kseq_of_merged_children, DraftSampling.IID, None),
        (greedy_against_the_whole_q, DraftSampling.GREEDY_PLUS_ONE, 0.367),
    ],
    ids=["divisor below its root", "kseq merged", "q in the place of qt"],
)
def test_wrong_rule_at_one_node_has_the_documented_bias(emitted, distribution, tv):
    found = measure(lifted(emitted), Fixed(), distribution, TreeShape.PATHS, by_depth(3), 1)
    assert found.tv > 1e-3 if tv is None else found.tv == pytest.approx(tv, abs=6e-4)


def told(distribution, name):
    """The rule `name` on drafts that claim to be of another sibling distribution than they are."""
    return lambda draft, p: verifier(name)(
        Draft(draft.tree, distribution, draft.shape, draft.probs, draft.rows), p
    )


def biggest(rule, distribution, shape, *counts):
    return max(
        measure(rule, Tables(4, s), distribution, shape, by_depth(*counts), len(counts)).tv for s in (0, 5, 6)
    )


def test_traversal_that_takes_draws_without_replacement_for_iid_is_caught():
    wrong = told(DraftSampling.IID, "traversal")
    assert biggest(wrong, DraftSampling.WITHOUT_REPLACEMENT, TreeShape.PRODUCT, 2, 2) > 1e-3


def test_traversal_that_takes_iid_draws_for_draws_without_replacement_is_caught():
    wrong = told(DraftSampling.WITHOUT_REPLACEMENT, "traversal")
    assert biggest(wrong, DraftSampling.IID, TreeShape.PATHS, 3) > 1e-3


def test_traversal_that_tests_greedy_drafts_with_the_whole_q_is_caught():
    wrong = told(DraftSampling.IID, "traversal")
    assert biggest(wrong, DraftSampling.GREEDY_PLUS_ONE, TreeShape.PRODUCT, 2, 2) > 1e-2


def test_selected_path_verified_with_q_in_the_place_of_its_own_distribution_is_caught():
    """GBV whose picked path, which is no draw of q, meets block verification as if it were one."""

    def rule(draft, p):
        picked, distributions = multipath_module._pick(draft, p)
        path = picked
        chain = tree.TokenTree.chain(np.take_along_axis(draft.tree.tokens, path, 1))
        rows = np.take_along_axis(p, path[..., None], 1)
        q = np.take_along_axis(draft.probs, path[:, :-1, None], 1)
        assert q.shape == distributions.shape
        verdict = verifier("block")(Draft(chain, draft.sampling, TreeShape.CHAIN, q, chain.parents), rows)
        stop = scatter_add(np.zeros_like(draft.tree.tokens, dtype=np.float64), path, verdict.stop)
        return TreeVerdict(
            draft.tree, stop, lambda node: verdict.after((path == node[:, None]).astype(int).argmax(1))
        )

    assert biggest(rule, DraftSampling.IID, TreeShape.PATHS, 2, 1) > 1e-2
