"""Lossy rules: declared as such, as far from the target as they say, and exact where their papers say so."""

import numpy as np
import pytest
import torch

from polydraft import registry
from polydraft.core import Draft, SiblingLaw, TokenTree, TreeShape
from polydraft.errors import InvalidInputError
from polydraft.verifiers.lift.per_node import PerNode
from polydraft.verifiers.lossy import latent, top_beta, typical
from polydraft.verifiers.pairing import fitting
from tests.laws.harness import SHAPES, Tables, as_batch, by_depth, enumerate_drafts, measure

IID, CHAIN = SiblingLaw.IID, TreeShape.CHAIN
RING = torch.tensor([[1, 3], [2, 0], [3, 1], [0, 2]])
RULES = {
    "typical": (registry.verifier("typical"), typical.output_law),
    "top_beta": (registry.verifier("top_beta"), top_beta.output_law),
    "latent, additive": (latent.latent(RING, delta=0.3), lambda p, q: latent.output_law(p, q, RING, delta=0.3)),
    "latent, multiplicative": (latent.latent(RING, factor=2.0), lambda p, q: latent.output_law(p, q, RING, factor=2.0)),
}


@pytest.mark.parametrize("name", RULES)
def test_reported_law_of_one_draft_is_the_enumerated_one(name):
    rule, output_law = RULES[name]
    assert not rule.info.lossless
    largest = 0.0
    for seed in range(6):
        tables = Tables(4, seed)
        p, q = (torch.from_numpy(tables.row(k, ()))[None] for k in "pq")
        drafts = enumerate_drafts(tables, IID, by_depth(1), 1)
        draft, rows = as_batch(tables, IID, CHAIN, drafts)
        verdict = rule(draft, rows)
        first = torch.zeros(4, dtype=torch.float64)
        for b, d in enumerate(drafts):
            first[d.tokens[1]] += d.probability * verdict.stop[b, 1]
        rejected = verdict.after(torch.zeros(len(drafts), dtype=torch.int64))
        weight = torch.tensor([d.probability for d in drafts], dtype=torch.float64)
        first += ((weight * verdict.stop[:, 0])[:, None] * rejected).sum(0)
        assert first.tolist() == pytest.approx(output_law(p, q)[0].tolist(), abs=1e-12)
        largest = max(largest, measure(rule, tables, IID, CHAIN, by_depth(1), 1).tv)
    assert largest > 0.05, "a lossy rule whose loss cannot be measured shows nothing"


def test_lossy_rules_are_never_offered_by_themselves():
    assert not {"typical", "top_beta"} & set(fitting(registry.verifier("match").info))


def test_typical_acceptance_is_exact_matching_for_a_greedy_target():
    p = torch.tensor([[[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]], dtype=torch.float64)
    for x, kept in ((1, [0.0, 0.0, 1.0]), (0, [1.0, 0.0, 0.0])):
        draft = Draft(TokenTree.chain(torch.tensor([[0, x, 0]])), SiblingLaw.POINT_MASS, CHAIN, None, torch.full((1, 3), -1))
        assert registry.verifier("typical")(draft, p).stop[0].tolist() == kept


def test_typical_acceptance_takes_the_longest_path():
    p = torch.full((1, 4, 3), 1 / 3, dtype=torch.float64)
    p[0, 0] = torch.tensor([0.3, 0.6, 0.1])
    tree = TokenTree(torch.tensor([[0, 1, 0, 2]]), torch.tensor([[-1, 0, 0, 2]]))
    draft = Draft(tree, SiblingLaw.POINT_MASS, TreeShape.GROWN, None, torch.full((1, 4), -1))
    assert registry.verifier("typical")(draft, p).stop[0].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_top_beta_of_one_is_greedy_decoding():
    p, q = (torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(5), 3)) for _ in range(2))
    greedy = torch.zeros_like(p).scatter_(1, p.argmax(1, keepdim=True), 1.0)
    assert torch.allclose(top_beta.output_law(p, q, beta=1), greedy)
    assert torch.allclose(top_beta.output_law(p, q, tau=0.0), greedy)


@pytest.mark.parametrize("seed", range(4))
def test_latent_neighbourhoods_without_a_budget_are_lossless(seed):
    found = measure(latent.latent(RING), Tables(4, seed), IID, CHAIN, by_depth(1, 1), 2)
    assert found.error < 1e-12


def test_small_budget_for_each_candidate_can_move_all_of_the_mass():
    """p on even, q on odd tokens, neighbours in pairs, budget 0.005 a candidate."""
    V = 400
    p, q = torch.zeros(1, V, dtype=torch.float64), torch.zeros(1, V, dtype=torch.float64)
    p[0, ::2], q[0, 1::2] = 2 / V, 2 / V
    pairs = (torch.arange(V) ^ 1)[:, None]
    law = latent.output_law(p, q, pairs, delta=0.005)
    assert (law - p).abs().sum().item() / 2 == pytest.approx(1.0)


def test_budgets_and_tables_that_mean_nothing_are_refused():
    with pytest.raises(InvalidInputError, match="expected"):
        latent.latent(RING, delta=-0.1)
    with pytest.raises(InvalidInputError, match="expected"):
        latent.latent(torch.tensor([[7], [0]]))


def test_declared_shapes_run():
    for name in ("typical", "top_beta"):
        rule = registry.verifier(name)
        for shape in rule.info.shapes:
            _, counts, depth = SHAPES[shape][0]
            tables = Tables(3, 0)
            draft, p = as_batch(tables, IID, shape, enumerate_drafts(tables, IID, counts, depth))
            stop = rule(draft, p).stop
            assert torch.allclose(stop.sum(1), torch.ones(len(stop), dtype=torch.float64))
    assert isinstance(registry.verifier("top_beta"), PerNode)
