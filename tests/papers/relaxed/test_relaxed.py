"""Lossy rules: declared as such, as far from the target as they say, and exact where their papers say so."""

import numpy as np
import pytest

from polydraft.core import Draft, DraftSampling, TokenTree, TreeShape
from polydraft.core.arrays import scatter
from polydraft.errors import InvalidInputError
from polydraft.methods import registry
from polydraft.papers.lantern import latent
from polydraft.papers.relaxed import top_beta, typical
from polydraft.papers.relaxed.top_beta import TopBeta
from polydraft.testing import Tables, as_batch, enumerate_drafts, measure
from polydraft.verifiers.pairing import fitting
from tests.exactness.harness import SHAPES, by_depth

IID = DraftSampling.IID
CHAIN = TreeShape.CHAIN
RING = np.array([[1, 3], [2, 0], [3, 1], [0, 2]])
RULES = {
    "typical": (registry.verifier("typical"), typical.output_probs),
    "top_beta": (registry.verifier("top_beta"), top_beta.output_probs),
    "latent, additive": (
        latent.latent(RING, delta=0.3),
        lambda p, q: latent.output_probs(p, q, RING, delta=0.3),
    ),
    "latent, multiplicative": (
        latent.latent(RING, factor=2.0),
        lambda p, q: latent.output_probs(p, q, RING, factor=2.0),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_reported_distribution_of_one_draft_is_the_enumerated_one(name):
    rule, output_probs = RULES[name]
    assert not rule.info.lossless
    largest = 0.0
    for seed in range(6):
        tables = Tables(4, seed)
        p, q = (tables.row(k, ())[None] for k in "pq")
        drafts = enumerate_drafts(tables, IID, by_depth(1), 1)
        draft, rows = as_batch(tables, IID, CHAIN, drafts)
        verdict = rule(draft, rows)
        first = np.zeros(4, np.float64)
        for b, d in enumerate(drafts):
            first[d.tokens[1]] += d.probability * verdict.stop[b, 1]
        rejected = verdict.after(np.zeros(len(drafts), np.int64))
        weight = np.array([d.probability for d in drafts], dtype=np.float64)
        first += ((weight * verdict.stop[:, 0])[:, None] * rejected).sum(0)
        assert first.tolist() == pytest.approx(output_probs(p, q)[0].tolist(), abs=1e-12)
        largest = max(largest, measure(rule, tables, IID, CHAIN, by_depth(1), 1).tv)
    assert largest > 0.05, "a lossy rule whose loss cannot be measured shows nothing"


def test_lossy_rules_are_never_offered_by_themselves():
    assert not {"typical", "top_beta"} & set(fitting(registry.verifier("match").info))


def test_typical_acceptance_is_exact_matching_for_a_greedy_target():
    p = np.array([[[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]], dtype=np.float64)
    for x, kept in ((1, [0.0, 0.0, 1.0]), (0, [1.0, 0.0, 0.0])):
        draft = Draft(
            TokenTree.chain(np.array([[0, x, 0]])),
            DraftSampling.POINT_MASS,
            CHAIN,
            None,
            np.full((1, 3), -1),
        )
        assert registry.verifier("typical")(draft, p).stop[0].tolist() == kept


def test_typical_acceptance_takes_the_longest_path():
    p = np.full((1, 4, 3), 1 / 3, np.float64)
    p[0, 0] = np.array([0.3, 0.6, 0.1])
    tree = TokenTree(np.array([[0, 1, 0, 2]]), np.array([[-1, 0, 0, 2]]))
    draft = Draft(tree, DraftSampling.POINT_MASS, TreeShape.GROWN, None, np.full((1, 4), -1))
    assert registry.verifier("typical")(draft, p).stop[0].tolist() == [0.0, 0.0, 0.0, 1.0]


def test_top_beta_of_one_is_greedy_decoding():
    p, q = (np.random.default_rng(0).dirichlet(np.ones(5), 3) for _ in range(2))
    greedy = scatter(np.zeros_like(p), p.argmax(1, keepdims=True), 1.0)
    assert np.allclose(top_beta.output_probs(p, q, beta=1), greedy)
    assert np.allclose(top_beta.output_probs(p, q, tau=0.0), greedy)


def _point_mass(tokens):
    tree = TokenTree.chain(np.array([[0, *tokens]]))
    return Draft(tree, DraftSampling.POINT_MASS, CHAIN, None, np.full_like(tree.tokens, -1))


def _kept_of(rule, tokens, p):
    return rule(_point_mass(tokens), p[None]).stop[0].argmax().item()


def test_top_beta_of_one_or_without_tolerance_emits_the_likeliest_at_every_node():
    """A hundred drafts, tied rows among them, with an end that is kept whole."""
    rng = np.random.default_rng(0)
    for rule in (TopBeta(top_beta.top_beta.info, beta=1), TopBeta(top_beta.top_beta.info, beta=5, tau=0.0)):
        assert rule.greedy and not rule.info.lossless
        for _ in range(100):
            p = rng.dirichlet(np.ones(4), 4).round(1) + 0.01
            tokens = rng.integers(0, 4, 3)
            if rng.random() < 0.3:
                tokens = p[:3].argmax(-1)
            verdict = rule(_point_mass(tokens), p[None])
            greedy = p.argmax(-1).tolist()
            count = verdict.stop[0].argmax().item()
            assert tokens[:count].tolist() == greedy[:count] and (
                count == 3 or tokens[count] != greedy[count]
            )
            assert verdict.after(np.array([count]))[0].argmax() == greedy[count]


def test_a_larger_tolerance_never_keeps_less_of_the_same_round_and_a_larger_beta_neither():
    rng = np.random.default_rng(1)
    for _ in range(50):
        p = rng.dirichlet(np.ones(8), 6)
        tokens = rng.integers(0, 8, 5)
        by_tau = [
            _kept_of(TopBeta(top_beta.top_beta.info, 5, tau), tokens, p)
            for tau in (0.0, 0.3, 1.0, 3.0, np.inf)
        ]
        by_beta = [
            _kept_of(TopBeta(top_beta.top_beta.info, beta, 2.0), tokens, p) for beta in (1, 2, 5, 8, 100)
        ]
        assert by_tau == sorted(by_tau) and by_beta == sorted(by_beta)
    assert by_tau[-1] > by_tau[0] or by_beta[-1] > by_beta[0]


def test_top_beta_deviates_by_what_it_says_and_needs_both_conditions():
    p = np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float64)
    for beta, tau, kept in (
        (2, 9.0, [1, 1, 0, 0]),
        (4, 0.6, [1, 1, 0, 0]),
        (4, 1.3, [1, 1, 1, 0]),
        (9, 9.0, [1, 1, 1, 1]),
    ):
        rule = TopBeta(top_beta.top_beta.info, beta, tau)
        each = range(4)
        assert [_kept_of(rule, [x], np.broadcast_to(p, (2, 4))) for x in each] == kept
        found = [top_beta.deviation(p, np.array(x), beta, tau).item() for x in each]
        assert found == [0, *kept[1:]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"beta": 0}, "beta=0"),
        ({"beta": 2.5}, "beta=2.5"),
        ({"tau": -0.1}, "tau=-0.1"),
        ({"tau": float("nan")}, "tau=nan"),
    ],
)
def test_a_rank_and_a_tolerance_that_mean_nothing_are_refused(given, said):
    with pytest.raises(InvalidInputError, match=f"{said} was given to the verifier 'top_beta'; expected"):
        TopBeta(top_beta.top_beta.info, **given)


@pytest.mark.parametrize("seed", range(4))
def test_latent_neighbourhoods_without_a_budget_are_lossless(seed):
    found = measure(latent.latent(RING), Tables(4, seed), IID, CHAIN, by_depth(1, 1), 2)
    assert found.error < 1e-12


def test_small_budget_for_each_candidate_can_move_all_of_the_mass():
    """p on even, q on odd tokens, neighbours in pairs, budget 0.005 a candidate."""
    V = 400
    p = np.zeros((1, V), np.float64)
    q = np.zeros((1, V), np.float64)
    p[0, ::2] = 2 / V
    q[0, 1::2] = 2 / V
    pairs = (np.arange(V) ^ 1)[:, None]
    distribution = latent.output_probs(p, q, pairs, delta=0.005)
    assert np.abs(distribution - p).sum().item() / 2 == pytest.approx(1.0)


def test_budgets_and_tables_that_mean_nothing_are_refused():
    with pytest.raises(InvalidInputError, match="expected"):
        latent.latent(RING, delta=-0.1)
    with pytest.raises(InvalidInputError, match="expected"):
        latent.latent(np.array([[7], [0]]))


def test_declared_shapes_run():
    for name in ("typical", "top_beta"):
        rule = registry.verifier(name)
        for shape in rule.info.shapes:
            _, counts, depth = SHAPES[shape][0]
            tables = Tables(3, 0)
            draft, p = as_batch(tables, IID, shape, enumerate_drafts(tables, IID, counts, depth))
            stop = rule(draft, p).stop
            assert np.allclose(stop.sum(1), np.ones(len(stop), np.float64))
