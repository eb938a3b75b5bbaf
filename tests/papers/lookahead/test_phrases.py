"""The phrase pool, Lookahead's window in the target's pass, and Ouroboros with each of its three steps."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.core import Budget, Offers, Outcome, Scores, TokenTree
from polydraft.core.geometry import joined
from polydraft.drafters.grown_tree import GrownTree, end_ids
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.errors import CapacityError, InvalidInputError
from polydraft.models import load, pair
from polydraft.papers.lookahead.drafter import GuessWindow, LookaheadDrafter
from polydraft.papers.lookahead.phrase_pool import PhrasePool
from polydraft.papers.mixture.drafter import MixtureDrafter
from polydraft.papers.phrases.drafter import PhraseDrafter
from tests.drafters.sessions import build, models, play, requests
from tests.engine.tables import plain_greedy
from tests.support.closeness import assert_close

WIDE = Budget.grown(12, 6, 3)


# The pool


def test_a_pool_keeps_the_latest_distinct_phrases_of_each_token_and_the_latest_tokens():
    pool = PhrasePool(2, per_token=2, max_tokens=2)
    for token, phrase in [
        (1, (5, 5)),
        (1, (6, 6)),
        (1, (5, 5)),
        (1, (7, 7)),
        (2, (8, 8)),
        (3, (9, 9)),
        (3, (4,)),
    ]:
        pool.add(token, phrase)
    assert pool.latest(1) == []
    assert pool.latest(2) == [(8, 8)]
    assert pool.num_entries == 2
    assert pool.latest(3) == [(9, 9)]


def test_reading_a_text_in_parts_stores_what_reading_it_at_once_stores():
    text = np.random.default_rng(0).integers(0, 4, 60).tolist()
    whole = PhrasePool(3)
    parts = PhrasePool(3)
    whole.read(text)
    for end in range(0, 61, 5):
        parts.read(text[:end], end - 5)
    assert [whole.latest(token) for token in range(4)] == [parts.latest(token) for token in range(4)]
    assert whole.latest(0)


def test_phrases_go_on_until_the_tree_is_full():
    pool = PhrasePool(2)
    pool.read([1, 2, 3, 4, 5, 1])
    assert pool.continuations(1, Budget.grown(6, 6), end_ids(())).tokens == [1, 2, 3, 4, 5]


def test_threads_share_a_pool_within_its_bounds():
    pool = PhrasePool(1, per_token=3, max_tokens=5)

    def work(seed):
        for a, b in np.random.default_rng(seed).integers(0, 9, (500, 2)).tolist():
            pool.add(a, (b,))
            pool.latest(b)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert sum(bool(pool.latest(token)) for token in range(9)) == 5
    assert 5 <= pool.num_entries <= 15


# Lookahead


def below(token, window):
    """A window as a tree below a token."""
    return TokenTree.of(np.array([[token, *window.guesses.ravel()]]), np.append(-1, window.parents)[None])


def embedded():
    return load.load_model(str(pair.draft_folder()), max_num_seqs=1)


def test_a_row_of_the_window_sees_the_text_level_0_and_its_own_column():
    """Each row of the real model equals a plain pass over exactly the tokens that it should see."""
    model = embedded()
    text = [5, 9, 300, 41]
    window = GuessWindow(np.array([[7, 8, 9], [17, 18, 19]]))
    model.prefill([0], [text[:-1]])
    found = model.score([0], below(41, window)).logits[0, 1:]
    for r, w in [(0, 0), (0, 2), (1, 0), (1, 2)]:
        seen = [*text, *window.guesses[0, : w + 1].tolist(), *window.guesses[1 : r + 1, w].tolist()]
        model.release([0])
        plain = model.prefill([0], [seen]).logits[0, 0]
        assert_close(found[3 * r + w], plain)


def test_drafted_rows_and_the_cache_do_not_know_of_the_window():
    model = embedded()
    text = [5, 9, 300, 41]
    tree = TokenTree.chain(np.array([[41, 12, 13]]))
    results = []
    for window in (None, GuessWindow(np.array([[7, 8], [9, 10]]))):
        model.release([0])
        model.prefill([0], [text[:-1]])
        scored = tree if window is None else joined(tree, below(41, window))
        first = model.score([0], scored).logits[:, :3]
        model.commit([0], Outcome(np.array([[1]]), np.array([1]), np.array([3])))
        results.append(
            (first, model.score([0], TokenTree.roots(np.array([3]))).logits, int(model.lengths[0]))
        )
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b)


def test_the_window_moves_by_the_emitted_tokens():
    window = GuessWindow(np.arange(8).reshape(2, 4))
    assert window.advance(np.array([20, 21, 22, 23]), 1, [90, 91]) == [
        (0, 4, 20),
        (1, 5, 21),
        (2, 6, 22),
        (3, 7, 23),
    ]
    assert window.guesses.tolist() == [[5, 6, 7, 90], [21, 22, 23, 91]]
    window.advance(np.array([1, 2, 3, 4]), 9, range(8))
    assert window.guesses.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def lookahead_session(seed=0, rounds=30, **options):
    target, _ = models()
    drafter = LookaheadDrafter(**{"columns": 3, "ngram": 3, "read_text": False, **options})
    target.logits = target.logits * 9  # nearly certain, as the window's argmaxes are
    engine = Engine.of(target, drafter=drafter, depth=3, num_paths=3)
    sample = engine.generate([[0, 1, 2]], SamplingParams(temperature=0, max_tokens=rounds, seed=seed))[
        0
    ].samples[0]
    assert sample.token_ids == plain_greedy(target, [0, 1, 2], rounds)
    return sample.stats


def test_the_window_alone_finds_ngrams_that_are_accepted():
    stats = [lookahead_session(seed) for seed in range(6)]
    assert [s.drafter_error for s in stats] == [None] * 6
    assert sum(s.accepted_tokens for s in stats) > 0


def test_without_the_pass_beside_it_the_window_finds_nothing(monkeypatch):
    monkeypatch.setattr(LookaheadDrafter, "offers", Offers())
    assert [lookahead_session(seed).drafted_tokens for seed in range(6)] == [0] * 6


def test_the_window_changes_between_rounds_and_fills_the_pool_with_the_targets_argmaxes():
    target, _ = models()
    drafter = LookaheadDrafter(columns=2, ngram=3, read_text=False)
    states = drafter.start(requests([1, 2, 3]))
    text = [1, 2, 3]
    (state,) = states
    before = state.window.guesses.copy()
    draft = drafter.propose(states, [WIDE])
    target.prefill([0], [text[:-1]])
    window = drafter.extra_nodes(states)
    scores = target.score([0], joined(draft.tree, window))
    extra = scores.logits[:, draft.tree.num_nodes :]
    scores = replace(scores, tree=draft.tree, extra_logits=extra)
    (state,) = drafter.observe(states, Outcome(np.full((1, 0), -1), np.array([0]), np.array([4])), scores)
    for w in range(2):
        best = int(target.logits[before[0, w], before[1, w]].argmax())
        assert state.window.guesses[:, w].tolist() == [before[1, w], best]
        assert (before[1, w], best) in list(state.pool.latest(int(before[0, w])))


def test_windows_of_a_batch_are_those_of_each_request_alone():
    drafter = LookaheadDrafter(columns=2, ngram=3)
    states = drafter.start(requests([1, 2, 3], [4, 4]))
    together = drafter.extra_nodes(states)
    for b in range(2):
        alone = drafter.extra_nodes([states[b]])
        assert np.array_equal(together.tokens[b], alone.tokens[0])
        assert np.array_equal(together.parents[b], alone.parents[0])


def test_a_failing_window_switches_drafting_off_and_leaves_the_text_alone(monkeypatch):
    def fail(self, states):
        raise ValueError("no window")

    monkeypatch.setattr(LookaheadDrafter, "extra_nodes", fail)
    with pytest.warns(UserWarning, match="no window"):
        stats = lookahead_session()
    assert "no window" in stats.drafter_error


def test_a_mixture_carries_the_rows_of_its_source():
    target, _ = models()
    drafter = MixtureDrafter({"ngram": NgramDrafter(), "lookahead": LookaheadDrafter(columns=2, ngram=3)})
    assert drafter.offers.extra_nodes is not None
    engine = Engine.of(target, drafter=drafter, depth=3, num_paths=2)
    sample = engine.generate([[0, 1, 2]] * 2, SamplingParams(temperature=0, max_tokens=24))[1].samples[0]
    assert sample.token_ids == plain_greedy(target, [0, 1, 2], 24)
    assert sample.stats.drafter_error is None
    with pytest.raises(InvalidInputError, match="all have nodes scored beside the draft"):
        MixtureDrafter({"a": LookaheadDrafter(), "b": LookaheadDrafter()})


@pytest.mark.parametrize("given", [{"columns": 0}, {"ngram": 1}, {"pool": PhrasePool(9)}])
def test_windows_that_cannot_be_are_refused(given):
    with pytest.raises(InvalidInputError, match="expected"):
        LookaheadDrafter(**given)


# Ouroboros


class Counting(PhraseDrafter):
    """Counts the tokens that its small model drafts."""

    made = 0

    def _draft(self, state, gamma):
        drafted = super()._draft(state, gamma)
        self.made += len(drafted)
        return drafted


class OneAPass(Counting):
    """Without step 1: the small model tests no phrases."""

    def _tested(self, state, last, most):
        return GrownTree.rooted(last, Budget.grown(0, 0))


class Short(Counting):
    """Without step 2."""

    def _lengthen(self, state, grown, end):
        pass


class Dull(Counting):
    """Without step 3, but for the text."""

    def observe(self, states, outcome, scores):
        return super().observe(states, outcome, Scores(scores.tree, scores.logits[..., :0]))


def ouroboros(kind=Counting, **options):
    """A session over a text that repeats itself, temperature 0; small model passes a drafted token, and tokens per step."""
    target, small = models(seqs=1, V=12)
    target.logits = 9 * target.logits
    small.logits = 9 * small.logits
    drafter = kind(small, length=2, **options)
    engine = Engine.of(target, drafter=drafter, depth=6, num_paths=3)
    prompt = [1, 2, 3, 4] * 3
    sample = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=48))[0].samples[0]
    assert sample.token_ids == plain_greedy(target, prompt, 48)
    assert sample.stats.drafter_error is None
    return small.passes / drafter.made, sample.stats.tokens_per_step


def test_phrases_save_passes_of_the_small_model():
    assert ouroboros()[0] < 0.8 * ouroboros(OneAPass)[0]
    assert ouroboros(OneAPass)[0] == 1


def test_phrases_at_the_end_lengthen_what_is_accepted():
    assert ouroboros(gamma=3)[1] > ouroboros(Short, gamma=3)[1]


def test_what_the_target_says_of_rejected_nodes_enters_the_pool():
    """Root 0; the draft 1 2 3 is rejected whole. Behind node 1 the target says 2, behind 2 it says 4."""
    drafter = PhraseDrafter(models()[1], length=2)
    (state,) = drafter.start(requests([0]))
    tree = TokenTree.chain(np.array([[0, 1, 2, 3]]))
    logits = np.eye(5, dtype=np.float64)[np.array([[3, 2, 4, 0]])]
    outcome = Outcome(np.full((1, 0), -1), np.array([0]), np.array([3]))
    drafter.observe([state], outcome, Scores(tree, logits))
    drafter.propose([state], [Budget.grown(0, 0)])  # another round follows
    assert (2, 4) in state.pool.latest(1), "as far as they agree, and one further"
    assert state.pool.latest(3) == [], "too short to be stored"
    assert (3, 2) in state.pool.latest(0), "the tested phrase 1 2, rewritten"
    dull = Dull(models()[1], length=2)
    (state,) = dull.start(requests([0]))
    dull.observe([state], outcome, Scores(tree, logits))
    dull.propose([state], [Budget.grown(0, 0)])
    assert state.pool.num_entries == 0


def test_learning_from_rejections_raises_tokens_per_step():
    """72 texts whose next token depends on the last one alone, so that a correction is right wherever its token comes again."""

    def session(kind, seed):
        target, small = models(V=24)
        target.logits = small.logits = 1.5 * np.broadcast_to(target.logits[0], (24, 24, 24)).copy()
        engine = Engine.of(target, drafter=kind(small, length=2, gamma=1), depth=4, num_paths=3)
        found = engine.generate(
            [[i, j] for i in range(6) for j in range(4)], SamplingParams(max_tokens=50, seed=seed)
        )
        return np.mean([r.stats.tokens_per_step for r in found])

    gained = [session(Counting, seed) - session(Dull, seed) for seed in range(3)]
    assert np.mean(gained) > 0.03


def test_the_small_models_cache_holds_the_text_after_every_step():
    target, small = models(V=5)
    drafter = PhraseDrafter(small, length=2)
    states = drafter.start(requests([0, 1, 2], [3]))
    texts = [[0, 1, 2], [3]]
    for _ in range(20):
        states, texts = play(drafter, states, texts, target, [WIDE] * 2, 1)
        for state, text in zip(states, texts, strict=True):
            num_read = state.cursor.length
            assert small.texts[state.cursor.slot] == text[:num_read]
            assert num_read >= len(text) - 2 or not state.drafted


def test_without_a_draft_model_phrases_are_refused(tmp_path):
    target, small = models()
    assert build("phrases", target, small, tmp_path).model is small
    with pytest.raises(InvalidInputError, match="without a draft model"):
        build("phrases", target, None, tmp_path)


def test_more_requests_than_slots_are_refused():
    with pytest.raises(CapacityError, match="slots"):
        PhraseDrafter(models(seqs=1)[1]).start(requests([1], [2]))


def test_a_shared_pool_teaches_the_next_request_and_a_private_one_does_not():
    for pool, expected in ((PhrasePool(2), [5, 1, 4]), (None, [5])):
        drafter = LookaheadDrafter(ngram=3, pool=pool)
        drafter.release(drafter.start(requests([5, 1, 4, 5, 1, 4])))
        assert drafter.continuations(drafter.start(requests([5]))[0], Budget.grown(2, 2)).tokens == expected
        small = models(V=7)[1]
        small.logits[..., 5] = 99.0  # always drafts 5
        drafter = PhraseDrafter(small, length=2, pool=pool, gamma=1)
        drafter.release(drafter.start(requests([5, 1, 4, 5, 1, 4])))
        assert drafter.continuations(drafter.start(requests([6]))[0], Budget.grown(3, 3)).tokens == [
            6,
            *expected,
        ]


@pytest.mark.parametrize("given", [{"length": 0}, {"num_phrases": 0}, {"pool": PhrasePool(9)}])
def test_pools_that_cannot_be_are_refused(given):
    with pytest.raises(InvalidInputError, match="expected"):
        PhraseDrafter(models()[1], **given)
