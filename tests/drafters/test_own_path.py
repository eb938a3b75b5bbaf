"""A model's drafts that end where they are unsure: where they end, what is drawn until there, and what the caches hold."""

import numpy as np
import pytest

from polydraft import SamplingParams
from polydraft.core import DraftSampling, Outcome, Scores, TreeShape
from polydraft.core import geometry as trees
from polydraft.core.budget import Budget, Stop
from polydraft.core.confidence import BINS, IDENTITY, acceptance_at, ranked_acceptance_at
from polydraft.core.geometry import chain, paths
from polydraft.drafters.model import best_first
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine.api import Engine
from polydraft.models import load, pair
from polydraft.models.slot_pool import Slots
from polydraft.policy.fixed import FixedPolicy
from tests.drafters.sessions import models, play, proposed, requests

UNSURE = Stop((0.12, 0.08))
SPARES = Stop(
    (0.3, 0.4),
    tuple(0.9 * a for a in IDENTITY),
    min_spare_chance=(0.02, 0.02, 0.06, 0.06, 0.1, 0.2),
    spare_acceptance=0.5,
)
SHAPES = [Budget.fixed(chain(6)), Budget.fixed(paths(3, 4)), Budget.fixed(paths(2, 4, 2))]
CHAINS = [
    Budget.fixed(chain(5)).ending(SPARES),
    Budget.fixed(chain(3)).ending(SPARES),
    Budget.fixed(chain(4)).ending(UNSURE),
]


def embedded(slots=8):
    model = load.load_model(str(pair.draft_folder()), device="cpu", max_num_seqs=slots)
    tokenizer = load.load_tokenizer(str(pair.draft_folder()))
    return model, [load.encode(tokenizer, p.text)[:80] for p in pair.prompts()[:3]]


def ended(budget, stop=UNSURE):
    return budget.ending(stop)


def nodes(draft, b):
    """By path: confidence, and whether there are children."""
    tokens, parents = (x[b] for x in draft.tree.lists)
    place = {0: ()}
    found = dict[tuple[int, ...], tuple[float, bool]]()
    for n in range(1, len(tokens)):
        if parents[n] >= 0:
            place[n] = (*place[parents[n]], tokens[n])
            found[place[n]] = float(draft.confidence[b, n]), n in parents
    return found


@pytest.mark.parametrize("kind", ["paths", "without_replacement", "coupled", "systematic"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_compiled_draft_that_ends_early_is_the_one_grown_depth_by_depth(kind, temperature):
    model, texts = embedded()
    one = ModelDrafter(model, kind)
    two = ModelDrafter(model, kind)
    two.slots = Slots(model, [4, 5, 6])
    two._propose_paths = None
    budgets = [ended(g) for g in SHAPES]
    compiled, grown = (
        d.propose(d.start(requests(*texts, temperature=temperature)), budgets) for d in (one, two)
    )
    assert compiled.tree.lists == grown.tree.lists and compiled.shape is grown.shape
    np.testing.assert_allclose(
        compiled.confidence.astype(np.float64), grown.confidence.astype(np.float64), rtol=0, atol=1e-4
    )
    for b, n in np.argwhere(compiled.rows >= 0).tolist():
        np.testing.assert_allclose(*(d.probs[b, d.rows[b, n]] for d in (compiled, grown)), rtol=0, atol=1e-5)


def test_a_sampled_chain_goes_on_behind_an_unlikely_token_as_its_bin_is_accepted():
    """Such a token is accepted with min(1, p / q), which does not fall with q; of one that is chosen for its rank acceptance does."""
    model, texts = embedded()
    stop = Stop((0.5,), (0.6,) * BINS)  # two tokens, whatever the confidence in the first
    drafter = ModelDrafter(model)
    confidences = list[float]()
    for length in range(20, 76, 8):
        states = drafter.start(requests(*(text[:length] for text in texts), temperature=1.0))
        draft = drafter.propose(states, [Budget.fixed(chain(4)).ending(stop)] * len(states))
        assert draft.tree.lists.parents == [[-1, 0, 1]] * len(states)
        confidences += draft.confidence[:, 1].tolist()
        drafter.release(states)
    assert min(confidences) < 0.005
    ranked = [ranked_acceptance_at(c, np.full(BINS, 0.6)) for c in (1e-4, 1e-3)]
    lowest, *_ = IDENTITY
    assert ranked == pytest.approx([0.6e-4 / lowest, 0.6e-3 / lowest])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_node_goes_on_where_the_product_of_acceptances_along_its_path_is_large_enough(temperature):
    model, texts = embedded()
    drafter = ModelDrafter(model)
    states = drafter.start(requests(*texts, temperature=temperature))
    ends = 0
    inner = 0
    for budget in SHAPES:
        whole = drafter.propose(states, [budget] * 3)
        draft = drafter.propose(states, [ended(budget)] * 3)
        for b in range(3):
            drawn = nodes(draft, b)
            every = nodes(whole, b)
            for path, (confidence, goes_on) in drawn.items():
                reach = np.prod(
                    [acceptance_at(drawn[path[: d + 1]][0], np.array(IDENTITY)) for d in range(len(path))]
                )
                assert confidence == pytest.approx(
                    every[path][0], abs=1e-5
                )  # what is drawn is what the whole tree has there
                if every[path][1]:
                    assert goes_on == (reach >= UNSURE.min_reach[min(len(path), 2) - 1])
                    inner = inner + goes_on
                    ends = ends + (not goes_on)
    assert inner > 2 and ends > 2


@pytest.mark.parametrize("budget", [SHAPES[1].ending(UNSURE), CHAINS[0]], ids=["paths", "spares"])
@pytest.mark.parametrize("compiled", [True, False])
def test_rounds_of_drafts_that_end_early_leave_the_cache_of_a_fresh_start(compiled, budget):
    model, texts = embedded()
    drafter = ModelDrafter(model)
    if not compiled:
        drafter._propose_paths = None
    states = drafter.start(requests(*texts))
    for accepted in (2, 0, 4, 1):
        draft = drafter.propose(states, [budget] * 3)
        depth = trees.depths(draft.tree)
        parents = draft.tree.lists.parents
        paths_taken = []
        for b in range(3):
            deep = np.flatnonzero(depth[b] == min(accepted, int(depth[b].max())))
            node = int(deep[-1])  # of a chain the spare sibling there
            path = []
            while node > 0:
                path = [node, *path]
                node = parents[b][node]
            paths_taken.append(path)
        longest = max(map(len, paths_taken))
        path = np.array([x + [-1] * (longest - len(x)) for x in paths_taken], dtype=np.int64)
        outcome = Outcome(path, np.array([len(x) for x in paths_taken]), np.array([7, 11, 5]))
        texts = [[*text, *new] for text, new in zip(texts, outcome.emitted(draft.tree), strict=True)]
        states = drafter.observe(
            states, outcome, Scores(draft.tree, np.zeros((3, draft.tree.num_nodes, 1), np.float32))
        )
    fresh = ModelDrafter(model)
    fresh.slots = Slots(model, [4, 5, 6])
    expected = fresh.propose(fresh.start(requests(*texts)), [ended(SHAPES[0])] * 3)
    found = drafter.propose(states, [ended(SHAPES[0])] * 3)
    assert found.tree.lists == expected.tree.lists
    for b, n in np.argwhere(found.rows >= 0).tolist():
        np.testing.assert_allclose(*(d.probs[b, d.rows[b, n]] for d in (found, expected)), rtol=0, atol=1e-4)


def test_twenty_rounds_leave_exactly_the_committed_tokens_in_the_cache():
    prompts = [[1, 2, 3, 1, 2], [4], [0, 0, 1]]
    target, small = models()
    drafter = ModelDrafter(small)
    states, texts = play(
        drafter, drafter.start(requests(*prompts)), prompts, target, [ended(g) for g in SHAPES], 20
    )
    for state, text in zip(states, texts, strict=True):
        assert list(state.context) == text and small.texts[state.slot] == text[: len(small.texts[state.slot])]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_compiled_tree_with_calibrated_probabilities_is_the_one_grown_depth_by_depth(temperature):
    model, texts = embedded()
    wary = Stop((0.6, 0.5), tuple(0.8 * a for a in IDENTITY))
    budgets = [Budget.grown(n, 5, w, min_path_prob=0.03).ending(wary) for n, w in ((12, 3), (20, 2), (6, 1))]
    one = ModelDrafter(model, "top_k")
    two = ModelDrafter(model, "top_k")
    two.slots = Slots(model, [4, 5, 6])
    states, others = (d.start(requests(*texts, temperature=temperature)) for d in (one, two))
    draft = one.propose(states, budgets)
    tree, confidence, _ = best_first._by_depth(model, others, budgets, ())
    assert draft.tree.lists == tree.lists
    np.testing.assert_allclose(draft.confidence, confidence, atol=1e-4)
    for b, g in enumerate(budgets):
        reach = {0: 1.0}
        for n in range(1, trees.subtree(tree, b).num_nodes):
            parent = tree.lists.parents[b][n]
            reach[n] = reach[parent] * ranked_acceptance_at(
                float(confidence[b, n]), np.array(wary.acceptance)
            )
            assert reach[n] >= g.min_path_prob
    assert trees.depths(tree).max() < 5


@pytest.mark.parametrize(("drafter", "verifier"), [("model:coupled", "race"), ("model:listed", "list_race")])
def test_a_race_gives_its_text_wherever_drafts_end(drafter, verifier):
    params = SamplingParams(temperature=0.9, max_tokens=24, seed=5)
    texts = set()
    for stop in (None, UNSURE, Stop((0.9,))):
        policy = FixedPolicy(Budget.fixed(chain(5)).ending(stop))
        engine = Engine.embedded(drafter=drafter, verifier=verifier, policy=policy, max_num_seqs=1)
        texts.add(tuple(engine.generate("def add(a, b):\n", params)[0].token_ids))
    assert len(texts) == 1


def two_drafters():
    """Of one model, the second of which draws depth by depth; and texts."""
    model, texts = embedded()
    one = ModelDrafter(model)
    two = ModelDrafter(model)
    one.slots = Slots(model, [0, 1, 2])
    two.slots = Slots(model, [4, 5, 6])
    two._propose_paths = None
    return (one, two), texts


def parts_of(draft, b):
    """Length of the chain, and the parents of the spare siblings behind it."""
    parents = [p for p in draft.tree.lists.parents[b][1:] if p >= 0]
    length = next((n for n, p in enumerate(parents) if p != n), len(parents))
    return length, parents[length:]


def test_spare_siblings_follow_the_chain_best_first_and_are_the_same_compiled_and_grown():
    drafters, texts = two_drafters()
    numbers = set()
    for end in range(20, 60, 4):
        prompts = [text[:end] for text in texts]
        (compiled, states), (grown, others) = [
            (d.propose(s, CHAINS), s)
            for d in drafters
            for s in [d.start(requests(*prompts, temperature=1.0))]
        ]
        assert (
            compiled.tree.lists == grown.tree.lists
            and compiled.sampling is grown.sampling is DraftSampling.WITHOUT_REPLACEMENT
        )
        assert compiled.shape is grown.shape is TreeShape.GROWN
        np.testing.assert_allclose(
            compiled.confidence.astype(np.float64), grown.confidence.astype(np.float64), rtol=0, atol=1e-4
        )
        plain = drafters[0].propose(states, [g.without_spares() for g in CHAINS])
        for b in range(3):
            tokens = compiled.tree.lists.tokens[b]
            length, spares = parts_of(compiled, b)
            assert (
                tokens[1 : length + 1] == plain.tree.lists.tokens[b][1 : length + 1]
            )  # the chain is drawn as without them
            assert len({*spares}) == len(spares) and all(
                tokens[1 + length + i] != tokens[p + 1] for i, p in enumerate(spares)
            )
            acceptance = [
                acceptance_at(float(c), np.array(SPARES.acceptance))
                for c in compiled.confidence[b, 1 : length + 1]
            ]
            chances = {n: np.prod(acceptance[:n]) * (1 - acceptance[n]) * 0.5 for n in range(length)}
            if CHAINS[b].has_spares:
                best = sorted(chances, key=chances.get, reverse=True)
                assert spares == best[: len(spares)] and all(
                    chances[n] >= SPARES.min_spare_chance[length - 1 + i] for i, n in enumerate(spares)
                )
                drawn = length + len(spares)
                assert (
                    len(spares) == length
                    or drawn > len(SPARES.min_spare_chance)
                    or chances[best[len(spares)]] < SPARES.min_spare_chance[drawn - 1]
                )
            else:
                assert not spares
            for n in range(1, length + len(spares) + 1):
                parent = compiled.tree.lists.parents[b][n]
                assert (
                    compiled.rows[b, n] == compiled.rows[b, parent + 1]
                    and compiled.probs[b, compiled.rows[b, n], tokens[n]] > 0
                )
            numbers.add(len(spares))
        for d, s in zip(drafters, (states, others), strict=True):
            d.release(s)
    assert numbers >= {0, 1, 2}


def test_beside_several_paths_no_spare_sibling_is_drawn():
    """Siblings of one draft are drawn one way."""
    (one, _), texts = two_drafters()
    draft = proposed(one, one.start(requests(*texts, temperature=1.0)), [CHAINS[0], SHAPES[1], CHAINS[2]])
    assert (
        draft.sampling is DraftSampling.IID and draft.shape is TreeShape.PATHS and parts_of(draft, 0)[1] == []
    )


def test_rounds_in_which_spare_siblings_are_accepted_leave_the_committed_tokens_in_the_cache():
    prompts = [[1, 2, 3, 1, 2], [4], [0, 0, 1]]
    target, small = models()
    drafter = ModelDrafter(small)
    states, texts = play(drafter, drafter.start(requests(*prompts)), prompts, target, CHAINS, 20, "traversal")
    for state, text in zip(states, texts, strict=True):
        assert list(state.context) == text and small.texts[state.slot] == text[: len(small.texts[state.slot])]
