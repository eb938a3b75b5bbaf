"""One drafter draws by temperature: a greedy request gets its most probable tree, one above temperature 0 sampled chains, in one batch."""

import numpy as np
import pytest

from polydraft import Budget, Engine, SamplingParams
from polydraft.core import DraftSampling, TreeShape
from polydraft.core.geometry import chain
from polydraft.policy.adaptive import AdaptivePolicy
from tests.engine.scripted import Script, engine, shapes_of
from tests.engine.tables import TableModel
from tests.policy.planning import costs, known

TREE = Budget.grown(9, 3, 3)
CHAIN = Budget.fixed(chain(3))
PROMPTS = [[1, 2], [3], [0, 4, 4]]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SAMPLED = SamplingParams(temperature=1, max_tokens=20)


def mixed(dtype=np.float64, verifier="auto", budgets=(TREE, CHAIN, TREE), seqs=3):
    target, small = (TableModel(5, seed=seed, max_num_seqs=seqs, dtype=dtype) for seed in (0, 1))
    return Engine.of(target, draft_model=small, verifier=verifier, policy=Script(budgets))


def texts(fast, prompts, params):
    return [r.token_ids for r in fast.generate(prompts, params)]


def params_of_all():
    return [params.with_(seed=b) for b, params in enumerate((GREEDY, SAMPLED, GREEDY))]


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["walks", "verdicts"])
@pytest.mark.parametrize("verifier", ["block", "speculative", "traversal", "match"])
def test_in_one_batch_each_request_has_the_text_that_it_has_alone(dtype, verifier):
    together = texts(mixed(dtype, verifier), PROMPTS, params_of_all())
    alone = texts(mixed(dtype, verifier, seqs=1), PROMPTS, params_of_all())
    plain = texts(
        Engine.of(TableModel(5, seed=0, max_num_seqs=8, dtype=dtype), drafter=None), PROMPTS[::2], GREEDY
    )
    assert together == alone and together[::2] == plain


def test_greedy_rows_are_trees_without_rows_beside_chains_that_were_drawn(monkeypatch):
    fast = mixed()
    drafts = shapes_of(fast, monkeypatch)
    fast.generate(PROMPTS, params_of_all())
    first = drafts[0]
    assert first.sampling is DraftSampling.IID and first.shape is TreeShape.CHAIN
    parents = first.tree.lists.parents
    assert max(map(parents[0].count, parents[0][1:])) > 1 and parents[1][:4] == [-1, 0, 1, 2]
    assert (first.rows[0] == -1).all() and (first.rows[1, 1:4] >= 0).all()
    assert first.confidence is not None


def test_a_batch_of_greedy_requests_is_drafted_point_masses_and_takes_fewer_steps_than_chains(monkeypatch):
    params = GREEDY.with_(max_tokens=40)
    trees = mixed(budgets=(TREE, TREE))
    chains = mixed(budgets=(CHAIN, CHAIN))
    drafts = shapes_of(trees, monkeypatch)
    steps = [
        sum(r.stats.steps for r in fast.generate(PROMPTS[:2], params.with_(seed=0)))
        for fast in (trees, chains)
    ]
    assert {d.sampling for d in drafts} == {DraftSampling.POINT_MASS} and steps[0] < steps[1]


class Noting(AdaptivePolicy):
    """Remembers the shapes that it asks for."""

    def budgets(self, sequences):
        budgets = super().budgets(sequences)
        self.shapes = getattr(self, "shapes", set()) | {g.shape for g in budgets if g.max_depth}
        return budgets


@pytest.mark.parametrize(
    ("verifier", "params", "row", "shape"),
    [
        ("block", GREEDY, 0.02, TreeShape.GROWN),
        ("block", GREEDY, 0.12, TreeShape.CHAIN),
        ("block", SAMPLED, 0.02, TreeShape.CHAIN),
        ("typical", GREEDY, 0.02, TreeShape.CHAIN),
    ],
)
def test_the_adaptive_policy_asks_for_trees_at_temperature_0_where_rows_are_cheap(
    verifier, params, row, shape
):
    """Of a lossless verifier."""
    target, small = (TableModel(5, seed=seed) for seed in (0, 1))
    policy = Noting(known(costs(row, 0.1), 0.9))
    Engine.of(target, draft_model=small, verifier=verifier, policy=policy).generate([[1, 2]], params)
    assert policy.shapes == {shape}


def test_a_tree_for_a_sampled_request_is_refused_and_its_text_goes_on_without_drafts():
    """The wrong variant: most probable nodes that block verification would take for draws. A budget's bounds are drawn as paths instead."""
    fast = engine(Script([TREE]), verifier="block")
    proposed = fast.drafter.sibling("top_k")
    fast.drafter.propose = proposed.propose
    with pytest.warns(UserWarning, match="a draft of shape GROWN"):
        (result,) = fast.generate([[1, 2]], SAMPLED.with_(seed=0))
    assert result.stats.drafted_tokens == 0 and len(result.token_ids) == 20
