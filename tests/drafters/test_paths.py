"""A smaller model as a drafter: what is drawn, from which rows, and what its cache holds afterwards."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from polydraft.core import Budget, NoiseKey, Outcome, Scores, TreeShape
from polydraft.core import geometry as trees
from polydraft.core.geometry import chain, paths, product, ragged
from polydraft.drafters.model.kinds import KINDS
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.errors import CapacityError, InvalidInputError, UnknownNameError
from polydraft.models import load, pair
from polydraft.models.slot_pool import Slots
from polydraft.sampling import noise
from polydraft.sampling.softmax import softmax
from polydraft.verifiers.inputs import check_draft
from tests.drafters.sessions import distributions, models, play, proposed, requests
from tests.engine.tables import TableModel

WIDE = Budget.fixed(paths(3, 4))
TREE = Budget.fixed((-1, 0, 1, 0, 1, 2, 3, 6))
PROMPTS = [[1, 2, 3, 1, 2], [4], [0, 0, 1]]
SAMPLED = [kind for kind in KINDS if kind != "top_k"]


def started(kind, *prompts, **params):
    _, small = models()
    drafter = ModelDrafter(small, kind)
    return drafter, drafter.start(requests(*prompts, **params))


def table_distribution(model, text):
    """The table's distribution after a text, computed from the table alone."""
    return softmax(model.logits[text[-2] if len(text) > 1 else 0, text[-1]])


@pytest.mark.parametrize("kind", SAMPLED)
def test_the_reported_rows_are_the_draft_models_distributions_at_the_parents(kind):
    drafter, states = started(kind, *PROMPTS)
    draft = proposed(drafter, states, [WIDE] * 3)
    for b, prompt in enumerate(PROMPTS):
        for n in range(1, trees.subtree(draft.tree, b).num_nodes):
            parent = draft.tree.parents[b, n : n + 1]
            path, _ = trees.path_to(trees.subtree(draft.tree, b), parent)
            text = prompt + draft.tree.tokens[b, path[0]].tolist()
            np.testing.assert_allclose(
                draft.probs[b, draft.rows[b, n]].astype(np.float64),
                table_distribution(drafter.model, text),
                rtol=0,
                atol=1e-6,
            )


def first_children(kind, width, seeds=2000):
    """The root's children in draw order, for many seeds."""
    model = TableModel(5, seed=1, max_num_seqs=seeds)
    drafter = ModelDrafter(model, kind)
    states = drafter.start(requests(*[[1, 2]] * seeds))
    return drafter.propose(states, [Budget.fixed(paths(width, 1))] * seeds).tree.tokens[
        :, 1:
    ], table_distribution(model, [1, 2])


def test_iid_children_follow_the_product_distribution_with_duplicates():
    drawn, q = first_children("paths", 2)
    seen = np.bincount(drawn[:, 0] * 5 + drawn[:, 1], minlength=25) / len(drawn)
    assert np.abs(seen - np.outer(q, q).ravel()).max() < 0.045
    assert (drawn[:, 0] == drawn[:, 1]).any()


@pytest.mark.parametrize("kind", ["without_replacement", "coupled"])
def test_distinct_children_follow_the_distribution_of_draws_without_replacement(kind):
    drawn, q = first_children(kind, 2)
    expected = (np.outer(q / (1 - q), q) * (1 - np.eye(len(q)))).ravel()
    seen = np.bincount(drawn[:, 0] * 5 + drawn[:, 1], minlength=25) / len(drawn)
    assert np.abs(seen - expected).max() < 0.045


def test_greedy_plus_one_takes_the_top_and_draws_the_last_from_the_rest():
    drawn, q = first_children("greedy_plus_one", 3)
    top = (-q).argsort()[:2]
    assert (drawn[:, :2] == top).all()
    rest = q.copy()
    rest[top] = 0.0
    seen = np.bincount(drawn[:, 2], minlength=5) / len(drawn)
    assert np.abs(seen - rest / rest.sum()).max() < 0.045


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_rounds_leave_exactly_the_committed_tokens_in_the_cache(kind):
    target, small = models()
    drafter = ModelDrafter(small, kind)
    states = drafter.start(requests(*PROMPTS))
    states, texts = play(
        drafter, states, PROMPTS, target, [WIDE, Budget.fixed(paths(2, 4, 2)), Budget.fixed(chain(0))], 20
    )
    states, texts = play(
        drafter, states, texts, target, [TREE, Budget.fixed(chain(0)), Budget.fixed(paths(3, 2))], 10
    )
    for state, text in zip(states, texts, strict=True):
        assert list(state.context) == text
        cached = small.texts[state.slot]
        assert cached == text[: len(cached)]
        assert list(state.pending) == text[len(cached) :]


@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        ("paths", Budget.fixed(paths(2, 4))),
        ("paths", TREE),
        ("chain", Budget.fixed(chain(8))),
        ("top_k", Budget.grown(8, 4, 2)),
    ],
)
def test_drafts_of_the_embedded_model_after_rounds_equal_those_of_a_fresh_cache(kind, budget):
    model = load.load_model(str(pair.draft_folder()), device="cpu", max_num_seqs=2)
    drafter = ModelDrafter(model, kind)
    text = load.encode(load.load_tokenizer(str(pair.draft_folder())), pair.prompts()[0].text)
    (state,) = drafter.start(requests(text))
    for accepted, extra in ((4, 7), (0, 11), (2, 5)):
        tree = proposed(drafter, [state], [budget]).tree
        path, _ = trees.path_to(tree, (trees.depths(tree) == max(accepted, 0)).astype(int).argmax(1))
        outcome = Outcome(path, np.array([accepted]), np.array([extra]))
        text = [*text, *outcome.emitted(tree)[0]]
        (state,) = drafter.observe(
            [state], outcome, Scores(tree, np.zeros((1, tree.num_nodes, 1), np.float32))
        )
    (fresh,) = drafter.start(requests(text))
    draft, expected = (proposed(drafter, [s], [budget]) for s in (state, fresh))
    assert np.array_equal(draft.tree.tokens, expected.tree.tokens)
    if draft.probs is not None:
        np.testing.assert_allclose(draft.probs, expected.probs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("parents", [paths(4, 3), paths(3, 3, 1), ragged(4, 2, 1), TREE.parents], ids=str)
def test_systematic_draws_stand_where_the_sums_of_the_reported_row_pass_equal_steps(parents):
    """By a float64 sum of the very row: the pooled children of a context, in node order, are the points of its one uniform."""
    model = load.load_model(str(pair.draft_folder()), device="cpu", max_num_seqs=2)
    text = load.encode(load.load_tokenizer(str(pair.draft_folder())), pair.prompts()[0].text)
    drafters = [ModelDrafter(model, "systematic") for _ in range(2)]
    drafters[1].slots = Slots(model, [1])
    drafters[1]._propose_paths = None
    drafters[0].slots = Slots(model, [0])
    many = 0
    for drafter in drafters:
        draft = drafter.propose(drafter.start(requests(text, temperature=0.6)), [Budget.fixed(parents)])
        assert {*draft.sampling.name.split()} == {"SYSTEMATIC"} and draft.tree.num_nodes == len(parents)
        u = noise.uniforms(NoiseKey.of([0], [0], [len(text)]), noise.Stream.DRAFT, len(parents))[0]
        for context, drawn in enumerate(trees.children(draft.tree)[0].tolist()):
            nodes = [n for n in drawn if n >= 0]
            many = max(many, len(nodes)) if context else many
            for j, n in enumerate(nodes):
                sums = np.cumsum(draft.probs[0, draft.rows[0, n]], dtype=np.float64)
                assert draft.tree.tokens[0, n] == np.argmax(
                    sums / sums[-1] > (u[context].item() + j) / len(nodes)
                )
    assert many > 1  # copies pooled


def compiled_and_grown(kind, sizes, **params):
    """The draft of the embedded model in one compiled call and depth by depth, for three texts; equal but for rounding."""
    model = load.load_model(str(pair.draft_folder()), device="cpu", max_num_seqs=6)
    texts = [load.encode(load.load_tokenizer(str(pair.draft_folder())), p.text) for p in pair.prompts()[:3]]
    one = ModelDrafter(model, kind)
    two = ModelDrafter(model, kind)
    two.slots = Slots(model, [3, 4, 5])
    two._propose_paths = None
    drafts = [d.propose(d.start(requests(*texts, **params)), sizes) for d in (one, two)]
    assert np.array_equal(drafts[0].tree.tokens, drafts[1].tree.tokens)
    assert np.array_equal(drafts[0].tree.parents, drafts[1].tree.parents)
    assert drafts[0].shape is drafts[1].shape
    for b, n in np.argwhere(drafts[0].rows >= 0).tolist():
        compiled, grown = (d.probs[b, d.rows[b, n]] for d in drafts)
        np.testing.assert_allclose(compiled, grown, rtol=0, atol=1e-4)
    return drafts[0]


def test_a_race_has_no_more_children_than_its_distribution_has_tokens():
    """The compiled call leaves such a draft to growing; the second child of the root is none, nor is what hangs on it."""
    model = load.load_model(str(pair.draft_folder()), device="cpu", max_num_seqs=2)
    drafter = ModelDrafter(model, "coupled")
    states = drafter.start(requests([3, 1, 4], [1, 5, 9], top_k=1))
    draft = drafter.propose(states, [Budget.fixed(paths(2, 3)), Budget.fixed(chain(2))])
    assert draft.tree.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, 1, -1]]
    check_draft(draft, model.vocab_size)
    again = drafter.propose(states, [Budget.fixed(chain(3)), Budget.fixed(chain(2))])
    assert np.array_equal(again.tree.tokens, draft.tree.tokens)


def test_distinct_children_are_no_more_than_their_distribution_has_tokens():
    """Nor is there anything below those that are missing, in the compiled call as in growing."""
    draft = compiled_and_grown(
        "without_replacement",
        [Budget.fixed(paths(3, 3)), Budget.fixed(product(2, 2)), Budget.fixed(chain(2))],
        top_k=2,
    )
    assert [(parents >= 0).sum() for parents in draft.tree.parents] == [6, 6, 2]
    alone = compiled_and_grown(
        "without_replacement",
        [Budget.fixed(paths(2, 2, 1)), Budget.fixed(paths(2, 2)), Budget.fixed(product(1, 2))],
        top_k=1,
    )
    assert alone.tree.parents.tolist() == [[-1, 0, 1]] * 3


@pytest.mark.parametrize("kind", ["paths", "without_replacement", "coupled", "systematic"])
def test_a_compiled_proposal_with_a_trunk_is_the_grown_one(kind):
    draft = compiled_and_grown(
        kind, [Budget.fixed(paths(2, 4, 1)), Budget.fixed(paths(3, 4, 3)), Budget.fixed(paths(2, 3))]
    )
    assert trees.depths(draft.tree).max(axis=1).tolist() == [4, 4, 3]


@pytest.mark.parametrize("lengths", [[(6, 2), (4, 1, 1), (4, 3)], [(6, 1), (4, 2, 2), (4, 4)]])
def test_a_compiled_ragged_proposal_is_the_grown_one(lengths):
    draft = compiled_and_grown("paths", [Budget.fixed(ragged(*each)) for each in lengths])
    assert draft.shape is TreeShape.RAGGED
    for levels, each in zip(trees.depths(draft.tree).tolist(), lengths, strict=True):
        assert [levels.count(d) for d in range(1, max(each) + 1)] == [
            sum(n >= d for n in each) for d in range(1, max(each) + 1)
        ]
    assert draft.tree.parents[1].tolist()[:5] == [-1, 0, 0, 0, 1]  # the first path goes on


@pytest.mark.parametrize("kind", ["paths", "without_replacement", "coupled", "systematic"])
def test_a_compiled_tree_by_position_is_the_grown_one(kind):
    given = (-1, 0, 0, 0, 1, 1, 2, 4, 6, 7), (-1, 0, 0, 2, 2, 3)
    draft = compiled_and_grown(kind, [*map(Budget.fixed, given), Budget.fixed(paths(2, 3))])
    assert draft.shape is TreeShape.BY_POSITION
    found = [[p for p in parents if p != -1] for parents in draft.tree.parents.tolist()]
    assert found == [
        [0, 0, 0, 1, 2, 1, 4, 5, 7],
        [0, 0, 1, 1, 3],
        [0, 0, 1, 2, 3, 4],
    ]  # those with children first


def test_paths_are_drawn_as_ever():
    """What was drawn before trees by position were known, when nodes were numbered by a formula."""
    model = load.load_model(str(pair.draft_folder()), device="cpu", max_num_seqs=3, cache_dtype="float32")
    texts = [
        load.encode(load.load_tokenizer(str(pair.draft_folder())), p.text)[:60] for p in pair.prompts()[:3]
    ]
    both = [chain(4), paths(2, 4), paths(3, 3), paths(2, 4, 1), paths(3, 4, 2)]
    rest = {
        "paths": [ragged(6, 2), ragged(4, 1, 1), chain(0), ragged(5, 3)],
        "coupled": [paths(2, 4), paths(3, 2), chain(0), paths(2, 4)],
    }
    found = hashlib.sha256()
    for kind, others in rest.items():
        for i in range(0, 9, 3):
            drafter = ModelDrafter(model, kind)
            draft = drafter.propose(
                drafter.start(requests(*texts)), [*map(Budget.fixed, [*both, *others][i : i + 3])]
            )
            for x in (draft.tree.tokens, draft.tree.parents, draft.rows):
                found.update(x.tobytes())
    assert found.hexdigest()[:16] == "9d545d4cc2a31622"


@pytest.mark.parametrize(
    ("parents", "nodes", "depth", "shape"),
    [
        (TREE.parents, 5, 2, TreeShape.BY_POSITION),
        (paths(2, 4, trunk=1), 3, 2, TreeShape.PRODUCT),
        (paths(2, 4, trunk=2), 2, 2, TreeShape.CHAIN),
        (ragged(6, 2), 4, 2, TreeShape.PATHS),
        (ragged(4, 1, 1), 4, 2, TreeShape.RAGGED),
        (chain(4), 2, 2, TreeShape.CHAIN),
    ],
)
def test_trees_are_cut_to_the_models_context_before_they_are_drawn(parents, nodes, depth, shape):
    budget = Budget.fixed(parents)
    drafter, (state,) = started("paths", [1, 2])
    whole = drafter.propose([state], [budget])
    assert tuple(whole.tree.parents[0].tolist()) == budget.parents and whole.shape is budget.shape
    small = ModelDrafter(TableModel(5, max_model_len=6))
    draft = proposed(small, small.start(requests([1, 2, 3])), [budget])
    assert (
        draft.tree.num_nodes == 1 + nodes
        and int(trees.depths(draft.tree).max()) == depth
        and draft.shape is shape
    )


SIZES = {"trunk": paths(2, 3, 1), "ragged": ragged(4, 1), "by position": TREE.parents}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("kind", SAMPLED)
def test_a_kind_draws_the_tree_of_its_budget_or_equal_paths_within_it(kind, name):
    drafter, states = started(kind, [1, 2], [3])
    budget = Budget.fixed(SIZES[name])
    draft = proposed(drafter, states, [budget, Budget.fixed(paths(2, 3))])
    drawn = tuple(p for n, p in enumerate(draft.tree.parents[0].tolist()) if n == 0 or p >= 0)
    assert draft.shape in drafter.info.shapes
    if budget.shape in drafter.info.shapes:
        assert drawn == budget.parents
    else:
        within = Budget.fixed(drawn)
        assert (
            within.shape in drafter.info.shapes
            and within.max_nodes <= budget.max_nodes
            and 0 < within.max_depth <= budget.max_depth
        )


@pytest.mark.parametrize("parents", [(0, 0), (-1, 1), (-1, -1), (-1, 0, 3)])
def test_parents_that_are_no_tree_are_refused(parents):
    with pytest.raises(InvalidInputError, match="such as"):
        Budget.fixed(parents)


def test_accepted_tokens_are_not_fed_twice():
    drafter = ModelDrafter(models()[1], "chain")
    (state,) = drafter.start(requests([1, 2]))
    tree = drafter.propose([state], [Budget.fixed(chain(4))]).tree
    outcome = Outcome(np.array([[1, 2, 3]]), np.array([3]), np.array([0]))
    (state,) = drafter.observe([state], outcome, Scores(tree, np.zeros((1, 5, 5), np.float32)))
    assert state.pending == (0,)


def test_one_pass_of_the_model_a_depth():
    drafter, states = started("paths", *PROMPTS)
    before = drafter.model.passes
    drafter.propose(states, [WIDE] * 3)
    assert drafter.model.passes - before == 4


def test_a_draft_follows_the_requests_sampling_parameters():
    drafter, states = started("chain", [1, 2], top_k=1)
    draft = drafter.propose(states, [Budget.fixed(chain(3))])
    p, _ = distributions(drafter.model, draft, [[1, 2]])
    assert draft.tree.tokens[0, 1:].tolist() == p[0, :3].argmax(-1).tolist()
    assert (draft.probs[0].max(-1) == 1).all()


def test_drafting_stops_where_the_draft_models_context_ends():
    drafter = ModelDrafter(TableModel(5, max_model_len=8), "chain")
    (state,) = drafter.start(requests([1, 2, 3, 4, 0]))
    assert proposed(drafter, [state], [Budget.fixed(chain(9))]).tree.num_nodes == 1 + 2
    (state,) = drafter.start(requests([1] * 20))
    assert proposed(drafter, [state], [Budget.fixed(chain(9))]).tree.num_nodes == 1


@pytest.fixture(scope="module")
def small():
    return load.load_model(str(pair.draft_folder()), device="cpu", max_num_seqs=2)


@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        ("paths", Budget.fixed(paths(256, 8))),
        ("coupled", Budget.fixed(paths(500, 4))),
        ("top_k", Budget.grown(255, 50, 250)),
    ],
)
def test_more_rows_than_a_pass_takes_are_refused_before_anything_is_written(small, kind, budget):
    drafter = ModelDrafter(small, kind)
    states = drafter.start(requests([1, 2]))
    with pytest.raises(CapacityError, match="a forward pass takes at most 256"):
        drafter.propose(states, [budget])
    drafter.release(states)


@pytest.mark.parametrize(
    ("kind", "budget"), [("paths", Budget.fixed(chain(255))), ("top_k", Budget.grown(255, 51, 5))]
)
def test_the_largest_draft_is_the_same_behind_unread_tokens(small, kind, budget):
    text = [(7 * i) % 97 + 3 for i in range(60)]
    drafter = ModelDrafter(small, kind)
    fresh, behind = drafter.start(requests(text, text))
    for state, length in ((fresh, 59), (behind, 10)):
        state.cursor.cut(0)
        state.cursor.read(text, length)
    drafts = [drafter.propose([s], [budget]).tree for s in (fresh, replace(behind, request=fresh.request))]
    assert drafts[0].num_nodes == 256 and np.array_equal(drafts[0].tokens, drafts[1].tokens)
    drafter.release([fresh, behind])


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-38])
def test_the_coldest_distribution_is_the_greedy_one(small, temperature):
    drawn = []
    for cold in (temperature, 0):
        drafter = ModelDrafter(small)
        states = drafter.start(requests([3, 1, 4], temperature=cold))
        drawn.append(drafter.propose(states, [Budget.fixed(paths(2, 4))]))
        drafter.release(states)
    assert np.array_equal(drawn[0].tree.tokens, drawn[1].tree.tokens)
    assert np.allclose(drawn[0].probs, drawn[1].probs)


def test_more_requests_than_slots_are_refused():
    drafter = ModelDrafter(TableModel(5, max_num_seqs=1))
    drafter.start(requests([1]))
    with pytest.raises(CapacityError, match="raise max_num_seqs"):
        drafter.start(requests([2]))


def test_unknown_kinds_and_a_missing_draft_model_are_refused():
    from polydraft.drafters.base import Parts

    with pytest.raises(UnknownNameError, match="did you mean 'chain'"):
        ModelDrafter(TableModel(), "chian")
    with pytest.raises(InvalidInputError, match="without a draft model"):
        ModelDrafter.build(Parts(TableModel(), None, None, ()))


def test_texts_that_begin_alike_are_read_once(monkeypatch):
    """The next turn of a chat, and further samples of one prompt: only what is new is read, and drafts are those of a fresh slot."""
    model = load.load_model(str(pair.draft_folder()), max_num_seqs=3)
    drafter = ModelDrafter(model, "chain")
    text = list(range(40, 72))
    states = drafter.start(requests(text))
    budgets = [Budget.fixed(chain(4))]
    draft = drafter.propose(states, budgets)
    emitted = Outcome.of(np.array([[1, 2]]), np.array([2]), np.array([7]))
    states = drafter.observe(
        states, emitted, Scores(draft.tree, np.zeros((1, draft.tree.num_nodes, 1), np.float32))
    )
    drafter.propose(states, budgets)  # nobody is told of what the last step of a text emits
    drafter.release(states)
    turn = [*states[0].context, 50, 51, 52]
    fresh = ModelDrafter(load.load_model(str(pair.draft_folder()), max_num_seqs=1), "chain")
    expected = fresh.propose(fresh.start(requests(turn)), budgets)
    read = list[int]()
    prefill = model.prefill
    monkeypatch.setattr(
        model, "prefill", lambda slots, ids: (read.extend(map(len, ids)), prefill(slots, ids))[1]
    )
    states = drafter.start(requests(turn, turn))
    assert sum(read) < len(turn) - len(text) + 1
    for b in range(2):
        again = drafter.propose(states[b : b + 1], budgets)
        assert np.array_equal(again.tree.tokens, expected.tree.tokens) or b
        np.testing.assert_allclose(again.probs[0, 0], expected.probs[0, 0], rtol=1e-4, atol=1e-6)


def test_a_text_that_the_draft_model_has_no_room_for_is_not_read():
    drafter = ModelDrafter(TableModel(5, max_model_len=8), "chain")
    short, long = drafter.start(requests([1, 2, 3], [1] * 8))
    assert drafter.cursor(short).num_unread([1, 2, 3]) == 2 and drafter.cursor(long) is None
    draft = drafter.propose([short, long], [Budget.fixed(chain(n)) for n in (2, drafter.room(8))])
    assert draft.tree.is_node.sum(1).tolist() == [3, 1]
    assert drafter.model.lengths[long.slot] == 0
    drafter.release([short, long])
