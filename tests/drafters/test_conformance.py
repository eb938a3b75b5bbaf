"""What every registered drafter promises, whatever it drafts from."""

from collections import Counter

import numpy as np
import pytest
from scipy.stats import chi2

from polydraft import Engine, FixedPolicy, SamplingParams
from polydraft.core import Budget, Draft, DraftSampling, Outcome, TokenTree
from polydraft.core import geometry as trees
from polydraft.core.geometry import chain, paths
from polydraft.methods import registry
from polydraft.verifiers import pairing
from tests.drafters.sessions import Head, V, begin, build, kinds, models, play, proposed, requests, same, told
from tests.engine.tables import distribution, plain_greedy

KINDS = kinds()
INFO = {info.name: info for name in registry.names("drafter") for info in registry.drafter(name).methods} | {
    "head": Head.info
}
PROMPTS = [[1, 2, 3, 1, 2], [4], [0, 0, 1, 0, 0]]
WIDE = Budget.grown(12, 4, width=3)


def pairs():
    """Every drafter with the verifier of `auto`, and one of each way of drawing with every verifier, but no slow model:
    tests/exactness enumerates these."""
    first = dict[tuple, str]()
    for kind in KINDS:
        for rule in pairing.fitting(INFO[kind]):
            drawing = INFO[kind].draft_sampling, rule
            is_first = not kind.startswith("model") and first.setdefault(drawing, kind) == kind
            if is_first or rule == pairing.best_for(INFO[kind]):
                yield kind, rule


PAIRS = [*pairs()]


def engine(kind, folder, verifier="auto", depth=3, num_paths=2, seqs=4, eos=(), **options):
    target, small = models(seqs=seqs, **options)
    drafter = build(kind, target, small, folder, eos)
    rule = pairing.best_for(INFO[kind]) if verifier == "auto" else verifier
    sizes = [paths(num_paths, depth), chain(depth)]
    budget, *_ = pairing.allowed(map(Budget.fixed, sizes), INFO[kind], registry.verifier(rule).info)
    return Engine.of(target, drafter=drafter, verifier=rule, policy=FixedPolicy(budget), eos_token_ids=eos)


def played(kind, folder, prompts=PROMPTS, rounds=12, verifier="match", **options):
    """A drafter after some rounds, with its states, the texts and the target."""
    target, small = models()
    drafter = build(kind, target, small, folder, **options)
    states = begin(drafter, requests(*prompts))
    states, texts = play(
        drafter, states, [list(p) for p in prompts], target, [WIDE] * len(prompts), rounds, verifier
    )
    return drafter, states, texts, target


@pytest.fixture(scope="module", params=KINDS)
def after_rounds(request, tmp_path_factory):
    """What `played` gives, for tests that only propose: that changes no state."""
    return played(request.param, tmp_path_factory.mktemp("drafter"))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_the_targets_with_every_drafter(kind, tmp_path):
    results = engine(kind, tmp_path).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    assert [r.token_ids for r in results] == [plain_greedy(models()[0], p, 24) for p in PROMPTS]
    assert [r.stats.drafter_error for r in results] == [None] * 3


@pytest.mark.parametrize(("kind", "rule"), PAIRS)
def test_distribution_of_the_text_is_the_targets_with_every_verifier(kind, rule, tmp_path):
    """Chi-square of two tokens in the middle of a text, so that what was learnt from earlier rounds is in play."""
    fast = engine(kind, tmp_path, rule, seqs=128, V=3)
    start = [1, 2, 1, 2, 0]
    count = 5
    samples = fast.generate([start], SamplingParams(max_tokens=count, n=128, seed=5, temperature=1.2))[
        0
    ].samples
    tempered = models(V=3)[0]
    tempered.logits = tempered.logits / 1.2
    expected = distribution(tempered, start, count).sum((0, 1, 2)).ravel() * len(samples)
    seen = Counter(s.token_ids[3] * 3 + s.token_ids[4] for s in samples)
    observed = np.array([float(seen[i]) for i in range(9)], dtype=np.float64)
    assert chi2.sf(float(((observed - expected) ** 2 / expected).sum()), 8) > 1e-4


def test_a_budget_of_nothing_gives_bare_roots(after_rounds):
    drafter, states, texts, _ = after_rounds
    for budget in (Budget.grown(0, 3, 2), Budget.grown(5, 0, 2)):
        draft = proposed(drafter, states, [budget] * 3)
        assert draft.tree.tokens.tolist() == [[text[-1]] for text in texts]


def test_the_budget_holds_at_every_depth(after_rounds):
    drafter, states, *_ = after_rounds
    for budget in (
        Budget.grown(*sizes) for sizes in ((1, 4, 1), (4, 4, 1), (7, 3, 2), (6, 2, 3), (40, 8, 8))
    ):
        tree = proposed(drafter, states, [budget] * 3).tree
        depth = trees.depths(tree)
        assert int(tree.is_node.sum(1).max()) - 1 <= budget.max_nodes
        assert int(depth.max()) <= budget.max_depth
        if not drafter.info.ranked:  # there the width bounds what is expanded, not what is kept
            assert all(
                int((row == d).sum()) <= budget.width for row in depth for d in range(1, budget.max_depth + 1)
            )


def test_drafts_are_of_the_declared_distribution_rooted_at_the_last_token_and_repeatable(after_rounds):
    drafter, states, texts, _ = after_rounds
    draft, again = (proposed(drafter, states, [WIDE] * 3) for _ in range(2))
    trees.check(draft.tree, V)
    assert draft.tree.tokens[:, 0].tolist() == [text[-1] for text in texts]
    assert draft.sampling in drafter.info.draft_sampling
    assert draft.shape in drafter.info.shapes
    assert (draft.probs is None) == (draft.sampling is DraftSampling.POINT_MASS)
    assert same(draft, again)
    if draft.sampling not in (
        DraftSampling.IID,
        DraftSampling.INDEPENDENT,
        DraftSampling.LISTED,
        DraftSampling.SYSTEMATIC,
    ):
        assert np.array_equal(
            trees.first_copies(draft.tree)[draft.tree.is_node], nodes(draft)[draft.tree.is_node]
        )


def nodes(draft: Draft):
    return np.tile(np.arange(draft.tree.num_nodes), (draft.tree.batch_size, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_drafts_something_once_the_text_repeats_itself(kind, tmp_path):
    target, small = models()
    drafter = build(kind, target, small, tmp_path)
    states = begin(drafter, requests([1, 2, 3, 4] * 4))
    assert proposed(drafter, states, [WIDE]).tree.num_nodes > 1


def test_rows_of_a_batch_draft_as_they_do_alone(after_rounds):
    drafter, states, *_ = after_rounds
    together = proposed(drafter, states, [WIDE, Budget.grown(2, 2, 1), Budget.grown(0, 0)])
    for b, budget in enumerate([WIDE, Budget.grown(2, 2, 1), Budget.grown(0, 0)]):
        alone = proposed(drafter, [states[b]], [budget]).tree
        row = trees.subtree(together.tree, b)
        assert np.array_equal(row.tokens, trees.subtree(alone, 0).tokens)
        assert np.array_equal(row.parents, trees.subtree(alone, 0).parents)


@pytest.mark.parametrize("kind", KINDS)
def test_rejection_of_everything_moves_the_draft_to_the_new_token(kind, tmp_path):
    """The worst round: a whole tree is rejected, and the extra token is one that no rule would have emitted."""
    drafter, states, *_ = played(kind, tmp_path, verifier=pairing.best_for(INFO[kind]))
    for token in (4, 0, 4):
        draft = proposed(drafter, states, [WIDE] * 3)
        nothing = Outcome(np.full((3, 0), -1), np.zeros(3, np.int64), np.full((3,), token))
        states = drafter.observe(states, nothing, told(drafter, draft.tree))
    assert proposed(drafter, states, [WIDE] * 3).tree.tokens[:, 0].tolist() == [4, 4, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_that_scored_another_tree_is_understood(kind, tmp_path):
    """In a mixture, and where drafting was off for a round, the scored tree is not the one proposed."""
    drafter, states, texts, _ = played(kind, tmp_path, prompts=[[1, 2, 3, 1, 2]])
    proposed(drafter, states, [WIDE])
    scored = TokenTree.chain(np.array([[texts[0][-1], 3, 1]]))
    states = drafter.observe(
        states, Outcome(np.array([[1, 2]]), np.array([2]), np.array([2])), told(drafter, scored)
    )
    assert proposed(drafter, states, [WIDE]).tree.tokens[0, 0] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_ends_at_end_of_sequence_inside_a_draft(kind, tmp_path):
    eos = plain_greedy(models()[0], PROMPTS[0], 12)[-1]
    expected = plain_greedy(models()[0], PROMPTS[0], 12)
    expected = expected[: expected.index(eos) + 1]
    made = engine(kind, tmp_path, depth=4, eos=(eos,)).generate(
        PROMPTS[:1], SamplingParams(temperature=0, max_tokens=24)
    )[0]
    assert made.token_ids == expected
    assert made.finish_reason == "stop"


@pytest.mark.parametrize(
    "kind",
    [k for k in KINDS if DraftSampling.POINT_MASS in INFO[k].draft_sampling and not k.startswith("model")],
)
def test_nothing_is_drafted_behind_end_of_sequence(kind, tmp_path):
    drafter, states, *_ = played(kind, tmp_path, eos=(2,))
    tree = proposed(drafter, states, [WIDE] * 3).tree
    above = tree.parents[:, 1:]
    assert not ((np.take_along_axis(tree.tokens, above.clip(min=0), 1) == 2) & (above > 0)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_request_taught_is_not_seen_by_the_next(kind, tmp_path):
    drafter, states, *_ = played(kind, tmp_path)
    drafter.release(states)
    target, small = models()
    fresh = build(kind, target, small, tmp_path)
    prompt = requests([3, 3, 2])
    assert same(
        proposed(drafter, begin(drafter, prompt), [WIDE]), proposed(fresh, begin(fresh, prompt), [WIDE])
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_one_token_is_legal_and_released_requests_make_room(kind, tmp_path):
    target, small = models(seqs=2)
    drafter = build(kind, target, small, tmp_path)
    for _ in range(3):
        states = begin(drafter, requests([1], [2]))
        assert proposed(drafter, states, [WIDE] * 2).tree.tokens[:, 0].tolist() == [1, 2]
        drafter.release(states)
