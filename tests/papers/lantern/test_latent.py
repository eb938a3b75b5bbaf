"""Latent neighbourhoods: the exact rule at budget 0, the total variation that the formula says, and mistakes that are found."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from polydraft.core import Draft, DraftSampling, TokenTree, TreeShape
from polydraft.errors import InvalidInputError
from polydraft.methods import registry
from polydraft.papers.lantern import latent
from polydraft.testing import Tables, as_batch, enumerate_drafts, measure
from polydraft.verifiers.residual import normalise_or
from tests.exactness.harness import by_depth

CHAIN = TreeShape.CHAIN
PRODUCT = TreeShape.PRODUCT
V = 4
NEAR = torch.tensor([[1, 3, 2], [2, 0, 3], [3, 1, 0], [0, 2, 1]])
BUDGETS = [{"delta": 0.1}, {"delta": 0.6}, {"factor": 0.5}, {"factor": 3.0}]


def distributions(seed, rows=50, size=V):
    drawn = np.random.default_rng(seed).dirichlet(np.full(size, 0.5), (2, rows))
    return torch.from_numpy(drawn[0]), torch.from_numpy(drawn[1])


@pytest.mark.parametrize(
    ("distribution", "name"),
    [
        (DraftSampling.IID, "recursive"),
        (DraftSampling.WITHOUT_REPLACEMENT, "recursive_wor"),
        (DraftSampling.POINT_MASS, "match"),
    ],
)
def test_without_a_budget_the_verdict_is_the_exact_rules_bit_for_bit(distribution, name):
    tables = Tables(V, 1)
    batch = as_batch(
        tables,
        distribution,
        PRODUCT,
        enumerate_drafts(tables, distribution, by_depth(2, 1), 2),
        torch.from_numpy,
    )
    rule = latent.latent(NEAR, replacement=distribution is not DraftSampling.WITHOUT_REPLACEMENT)
    ours = rule(*batch)
    exact = registry.verifier(name)(*batch)
    assert torch.equal(ours.stop, exact.stop)
    for node in range(batch[0].tree.num_nodes):
        at = torch.full((len(ours.stop),), node)
        assert torch.equal(ours.after(at), exact.after(at))


@pytest.mark.parametrize(
    "distribution", [DraftSampling.IID, DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.POINT_MASS]
)
def test_without_a_budget_trees_keep_the_distribution(distribution):
    rule = latent.latent(NEAR, replacement=distribution is not DraftSampling.WITHOUT_REPLACEMENT)
    assert (
        measure(rule, Tables(V, 3), distribution, PRODUCT, by_depth(2, 1), 2, arrays=torch.from_numpy).error
        < 1e-12
    )
    assert (
        measure(
            latent.latent(NEAR, delta=0.5),
            Tables(V, 3),
            DraftSampling.IID,
            PRODUCT,
            by_depth(2, 1),
            2,
            arrays=torch.from_numpy,
        ).tv
        > 0.01
    )


def test_neighbours_without_mass_change_nothing():
    p = torch.tensor([[0.6, 0.0, 0.4, 0.0]], dtype=torch.float64)
    rule = latent.latent(NEAR[:, :1], delta=0.5)
    assert torch.equal(rule.emitted_probs(p, None, torch.tensor([[0, 2]])), p)


@pytest.mark.parametrize("budget", BUDGETS)
def test_total_variation_of_one_sampled_draft_is_the_mass_that_was_borrowed_and_used(budget):
    p, q = distributions(5)
    every = torch.arange(V).expand(len(p), -1)
    borrowed = latent.borrowed(p, every, NEAR, **budget)[0]
    tv = (latent.output_probs(p, q, NEAR, **budget) - p).abs().sum(1) / 2
    assert torch.allclose(tv, torch.minimum(borrowed, (q - p).clamp(min=0)).sum(1), atol=1e-14)


def test_a_budget_does_not_bound_the_total_variation():
    p, q = distributions(6, rows=300)
    tv = (latent.output_probs(p, q, NEAR, delta=0.1) - p).abs().sum(1) / 2
    assert (tv > 0.1).any()


def test_a_deterministic_draft_moves_the_mass_that_it_borrowed():
    p, _ = distributions(7)
    x = torch.full((len(p), 1), 2)
    rule = latent.latent(NEAR, delta=0.3)
    distribution = rule.emitted_probs(p, None, x)
    borrowed = latent.borrowed(p, x, NEAR, delta=0.3)[0][:, 0]
    assert torch.allclose(distribution.sum(1), torch.ones(len(p), dtype=p.dtype))
    assert torch.allclose(distribution[:, 2] - p[:, 2], borrowed)
    assert torch.allclose((distribution - p).abs().sum(1) / 2, borrowed)


@pytest.mark.parametrize("distribution", [DraftSampling.IID, DraftSampling.POINT_MASS])
def test_deviation_is_that_of_the_enumerated_rounds(distribution):
    """One token deep: the expected total variation of the round's first token, counted once for each token of the round."""
    tables = Tables(V, 9)
    rule = latent.latent(NEAR, delta=0.4)
    drafts = enumerate_drafts(tables, distribution, by_depth(1), 1)
    draft, p = as_batch(tables, distribution, CHAIN, drafts, torch.from_numpy)
    tv, tokens = rule.deviation(draft, p)
    weight = torch.tensor([d.probability for d in drafts], dtype=p.dtype)
    verdict = rule(draft, p)
    assert torch.allclose(tokens, 1 + verdict.stop[:, 1])
    found = torch.zeros(V, dtype=p.dtype)
    own = torch.tensor([d.tokens[1] for d in drafts])
    found.index_add_(0, own, weight * verdict.stop[:, 1])
    found += (weight * verdict.stop[:, 0]) @ verdict.after(torch.zeros_like(own))
    assert float(tv @ weight) == pytest.approx(float((found - p[0, 0]).abs().sum()) / 2, abs=1e-12)


def test_acceptance_grows_with_the_budget():
    p, q = distributions(8)
    kept = [
        latent.accept_probability(p, q, torch.zeros(50, 1, dtype=torch.long), NEAR, delta=d)
        for d in (0, 0.1, 0.3, 0.9)
    ]
    assert all((less <= more).all() for less, more in pairwise(kept))
    assert (kept[0] < kept[-1]).any()


def test_greedily_a_draft_is_kept_where_its_neighbourhood_outweighs_the_best():
    p = torch.tensor([[[0.4, 0.25, 0.2, 0.15], [0.1, 0.2, 0.3, 0.4]]], dtype=torch.float64)
    for x, delta, path, token in ((1, 0.0, [], 0), (1, 0.3, [1], 3), (3, 0.3, [], 0)):
        draft = Draft(
            TokenTree.chain(torch.tensor([[0, x]])),
            DraftSampling.POINT_MASS,
            CHAIN,
            None,
            torch.full((1, 2), -1),
        )
        verdict = latent.latent(NEAR[:, :1], delta=delta, greedy=True)(draft, p)
        stop = torch.tensor([len(path)])
        assert verdict.stop[0, len(path)] == 1
        assert verdict.after(stop).argmax() == token


def test_mistaken_variants_are_found():
    p, q = distributions(10)
    exact = p
    rule = latent.latent(NEAR)
    x = torch.full((len(p), 1), 1)

    def error(distribution):
        return float((distribution - exact).abs().max())

    def released(p, x):
        """Takes all listed neighbours away after a rejection, whatever was borrowed."""
        own = p.gather(1, x)
        rest = p.scatter(1, torch.cat([x, NEAR[x[:, 0], :2]], 1), 0.0)
        return ((1 - own) * normalise_or(rest, otherwise=p)).scatter_add(1, x, own)

    every = torch.arange(V).expand(len(p), -1)
    members = torch.where(
        every.eq(1) | every.eq(2), 1.0, (p / q).clamp(max=1)
    )  # kept because it is near, not by its mass
    taken = q * members
    toy = taken + (1 - taken.sum(1, keepdim=True)) * normalise_or((p - q).clamp(min=0), otherwise=p)
    assert error(rule.emitted_probs(p, None, x)) < 1e-12 < 1e-2 < error(released(p, x))
    assert error(latent.output_probs(p, q, NEAR)) < 1e-12 < 1e-2 < error(toy)


@pytest.mark.parametrize(
    ("table", "budget"),
    [
        (NEAR, {"delta": -0.1}),
        (NEAR, {"delta": 1.0}),
        (NEAR, {"factor": -0.5}),
        (NEAR, {"factor": float("inf")}),
        (torch.tensor([[7], [0]]), {}),
        (torch.tensor([[0], [0]]), {}),
    ],
)
def test_what_means_nothing_is_refused(table, budget):
    with pytest.raises(InvalidInputError, match=r"expected|own neighbours"):
        latent.latent(table, **budget)


def test_a_table_of_another_codebook_is_refused():
    p = torch.full((1, 1, 9), 1 / 9, dtype=torch.float64)
    with pytest.raises(InvalidInputError, match="9 tokens"):
        latent.latent(NEAR, delta=0.1)(Draft.bare(torch.tensor([0])), p)


def test_the_rule_is_not_had_by_name_alone():
    with pytest.raises(
        InvalidInputError, match=r"made for one model's data. Make it with the module .*latent"
    ):
        registry.verifier("latent")
