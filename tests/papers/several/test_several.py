"""Several models draft independently of each other, each from the row that is reported; the list drafts win races of their own."""

import numpy as np
import pytest
from scipy.stats import chi2

from polydraft import Engine, SamplingParams
from polydraft.core import Budget, NoiseKey, Request, TreeShape
from polydraft.core import geometry as trees
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.errors import InvalidInputError
from polydraft.models import pair
from polydraft.papers.several import drafter as paths_of_models
from polydraft.sampling import noise
from polydraft.verifiers.list_race import path_numbers
from tests.drafters.sessions import V, begin, models, proposed, requests, trained
from tests.engine.tables import TableModel, plain_greedy

COUNT = 1000


def alike():
    """Two members of equal distributions: where their noise is shared, they draw the same tokens."""
    return paths_of_models.SeveralDrafter([TableModel(V, seed=1, max_num_seqs=COUNT) for _ in range(2)])


def p_value_of_pairs(drafter):
    """Chi-square of the two children of the root against the product of their rows."""
    states = drafter.start([Request(str(i), (1, 2), SamplingParams(), seed=i) for i in range(COUNT)])
    draft = proposed(drafter, states, [Budget.grown(2, 1, 2)] * COUNT)
    a, b = (draft.probs[0, draft.rows[0, n]].astype(np.float64) for n in (1, 2))
    expected = COUNT * np.outer(a, b).ravel()
    seen = np.bincount(draft.tree.tokens[:, 1] * V + draft.tree.tokens[:, 2], minlength=V * V)
    return chi2.sf(float(((seen - expected) ** 2 / expected).sum()), V * V - 1)


def test_members_draw_independently():
    assert p_value_of_pairs(alike()) > 1e-3


def test_members_that_share_their_noise_are_caught(monkeypatch):
    monkeypatch.setattr(paths_of_models, "_own", lambda request, member: request)
    assert p_value_of_pairs(alike()) < 1e-9


def test_a_path_is_the_chain_that_its_model_draws_alone():
    one, two = (TableModel(V, seed=s) for s in (1, 2))
    drafter = paths_of_models.SeveralDrafter([one, two])
    alone = ModelDrafter(TableModel(V, seed=2), "chain")
    asked = requests([1, 2, 3], [4])
    draft = proposed(drafter, drafter.start(asked), [Budget.grown(8, 3, 2), Budget.grown(4, 2, 2)])
    chains = proposed(
        alone,
        alone.start([paths_of_models._own(r, 1) for r in asked]),
        [Budget.grown(3, 3), Budget.grown(2, 2)],
    )
    assert draft.shape is TreeShape.PATHS
    for b, depth in enumerate((3, 2)):
        nodes = [2 + 2 * d for d in range(depth)]
        assert draft.tree.tokens[b, nodes].tolist() == chains.tree.tokens[b, 1 : depth + 1].tolist()
        assert draft.tree.parents[b, nodes].tolist() == [0, 2, 4][:depth]
        assert np.array_equal(
            draft.probs[b, draft.rows[b, nodes]], chains.probs[b, chains.rows[b, 1 : depth + 1]]
        )


def test_one_model_is_refused():
    with pytest.raises(InvalidInputError, match="two or more"):
        paths_of_models.SeveralDrafter([TableModel(V)])


def test_engine_takes_folders_of_further_models():
    engine = Engine.embedded(
        drafter="several", drafter_options={"models": [str(pair.draft_folder())]}, depth=3, num_paths=2
    )
    plain = Engine.embedded(drafter=None)
    prompt = pair.prompts()[0].text
    params = SamplingParams(temperature=0, max_tokens=24)
    made = engine.generate([prompt], params)[0]
    assert engine.verifier.info.name == "traversal"
    assert made.token_ids == plain.generate([prompt], params)[0].token_ids
    assert made.stats.tokens_per_step > 1.5


def test_listed_paths_win_their_own_races():
    drafter = ModelDrafter(models()[1], "listed")
    draft = proposed(
        drafter, drafter.start(requests([1, 2, 3], [4])), [Budget.grown(12, 4, 3), Budget.grown(6, 3, 2)]
    )
    number = path_numbers(draft.tree)
    depth = trees.depths(draft.tree)
    assert draft.tree.is_node.sum(1).tolist() == [13, 7]
    for b, length in enumerate((3, 1)):
        for n in range(1, int(draft.tree.is_node[b].sum())):
            at = NoiseKey.of([b], [0], [length + int(depth[b, n]) - 1])
            k = int(number[b, n])
            clocks = noise.clocks(at, (k + 1) * V)[0, k * V :]
            assert int((clocks / draft.probs[b, draft.rows[b, n]]).argmin()) == int(draft.tree.tokens[b, n])


@pytest.mark.parametrize("rule", ["traversal", "importance"])
def test_a_head_draws_the_first_path_and_the_text_is_the_targets(tmp_path, rule):
    options = {"head": str(trained("eagle")(tmp_path, V)["weights"])}
    target = TableModel(V, max_num_seqs=4)
    model = TableModel(V, seed=2, max_num_seqs=4)
    engine = Engine.of(
        target,
        draft_model=model,
        drafter="several",
        drafter_options=options,
        verifier=rule,
        depth=2,
        num_paths=2,
    )
    assert [len(member.needs.hidden) for member in engine.drafter.members] == [2, 0]
    alone = Engine.of(target, drafter="eagle:chain", drafter_options={"weights": options["head"]})
    asked = requests([1, 2, 3], [4, 0])
    head, small = engine.drafter.members
    states = zip(begin(head, asked), small.start([paths_of_models._own(r, 1) for r in asked]), strict=True)
    draft = proposed(engine.drafter, list(states), [Budget.grown(4, 2, 2)] * 2)
    first = proposed(alone.drafter, begin(alone.drafter, asked), [Budget.grown(2, 2)] * 2)
    assert draft.tree.tokens[:, [1, 3]].tolist() == first.tree.tokens[:, 1:].tolist()
    assert np.array_equal(draft.probs[0, draft.rows[0, [1, 3]]], first.probs[0, first.rows[0, 1:]])
    (result,) = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=40))
    assert result.token_ids == plain_greedy(target, [1, 2, 3], 40) and result.stats.accepted_tokens
