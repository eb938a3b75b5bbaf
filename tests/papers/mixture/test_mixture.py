"""What a mixture takes from its sources, what it learns, and that it never hurts the distribution."""

import threading

import numpy as np
import pytest

from polydraft import Engine, SamplingParams
from polydraft.core import Budget, Outcome, Scores, TokenTree
from polydraft.drafters.grown_tree import end_ids
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.drafters.text.suffix import SuffixDrafter
from polydraft.drafters.text.text_index import TextIndex
from polydraft.errors import InvalidInputError, UnknownNameError
from polydraft.methods import registry
from polydraft.papers.mixture.credit import CANDIDATE, SourceCredit
from polydraft.papers.mixture.drafter import MixtureDrafter
from polydraft.papers.trigram.drafter import TrigramDrafter
from polydraft.train.run import untrained
from tests.drafters.sessions import build, distributions, models, play, requests, trigram_table

TABLE = trigram_table([[0, 1, 2, 3, 0, 1, 2, 4]], 5)


def nodes(*rows):
    """Candidates (token, parent, source, score)."""
    return np.array(list(rows), CANDIDATE)


def taken(credit, given, budget):
    """(token, parent) of the nodes that are taken, in their order; a parent of -1 is the root."""
    tree, _ = credit.choose(1, given, budget, end_ids(()))
    return [(token, parent - 1) for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True)]


def test_nodes_are_taken_in_the_order_of_their_value_whoever_proposes_them():
    credit = SourceCredit(2)
    given = nodes((7, -1, 0, 0.9), (8, 0, 0, 0.2), (5, -1, 1, 0.5), (6, 2, 1, 0.9))
    assert taken(credit, given, Budget.grown(4, 2, 2)) == [(7, -1), (5, -1), (6, 1), (8, 0)]
    assert taken(credit, given, Budget.grown(2, 2, 2)) == [(7, -1), (5, -1)]
    assert taken(credit, given, Budget.grown(4, 2, 1)) == [(7, -1), (8, 0)]
    assert taken(credit, given, Budget.grown(4, 1, 2)) == [(7, -1), (5, -1)]


def test_a_node_that_two_sources_propose_is_one_and_worth_more():
    credit = SourceCredit(2)
    given = nodes((7, -1, 0, 0.5), (8, 0, 0, 0.5), (7, -1, 1, 0.5), (9, 2, 1, 0.4))
    assert taken(credit, given, Budget.grown(4, 2, 3)) == [(7, -1), (8, 0), (9, 0)]
    alone, _ = credit.choose(1, nodes((7, -1, 0, 0.5)), Budget.grown(4, 2, 2), end_ids(()))
    both, sources = credit.choose(1, given, Budget.grown(4, 2, 3), end_ids(()))
    assert both.scores[1] > alone.scores[1]
    assert sources[: both.size].tolist() == [-1, 0, 0, 1]


def learnt(rounds, right, decay=1.0):
    credit = SourceCredit(2, decay)
    for i in range(rounds):
        credit.learn_step(
            nodes((7, -1, 0, 0.5), (8, 0, 0, 0.5), (5, -1, 1, 0.5)), [7, 9] if right(i) else [5]
        )
    return credit


def test_the_estimate_is_the_measured_share_of_right_nodes():
    credit = learnt(4000, lambda i: i % 4)
    assert credit.estimate(0, depth=1, score=0.5) == pytest.approx(0.75, abs=0.01)
    assert credit.estimate(1, depth=1, score=0.5) == pytest.approx(0.25, abs=0.01)
    assert credit.estimate(0, depth=2, score=0.5) == pytest.approx(0.0, abs=0.01)
    assert credit.counts.tried.sum() == 4000 + 3000 + 4000, "a node is tried only where its parent was right"


def test_a_source_that_fails_gives_way_to_one_that_does_not():
    given = nodes((7, -1, 0, 0.5), (5, -1, 1, 0.5))
    assert taken(learnt(9, lambda i: True), given, Budget.grown(1, 1)) == [(7, -1)]
    assert taken(learnt(9, lambda i: False), given, Budget.grown(1, 1)) == [(5, -1)]


def test_old_rounds_fade():
    credit = learnt(400, lambda i: i < 300, decay=0.9)
    assert credit.estimate(0, depth=1, score=0.5) < 0.1
    assert learnt(400, lambda i: i < 300).estimate(0, depth=1, score=0.5) > 0.7


def mixture(**options):
    return MixtureDrafter({"ngram": NgramDrafter(), "trigram": TrigramDrafter(TABLE)}, **options)


def test_the_choice_of_this_round_does_not_know_its_outcome():
    """Whatever comes out, the same draft was proposed; the next one may differ."""
    drafts = []
    for token in (2, 4):
        drafter = mixture()
        states = drafter.start(requests([3, 0, 1, 4, 0, 1]))
        draft = drafter.propose(states, [Budget.grown(2, 1, 2)])
        drafts.append(draft.tree.tokens.tolist())
        nothing = Outcome(np.full((1, 0), -1), np.array([0]), np.array([token]))
        (state,) = drafter.observe(
            states, nothing, Scores(draft.tree, np.zeros((1, draft.tree.num_nodes, 5), np.float32))
        )
        drafts.append([counts.tolist() for counts in state.learnt.counts])
    assert drafts[0] == drafts[2]
    assert drafts[1] != drafts[3]


def test_the_match_rule_keeps_the_distribution_over_rounds_of_learning():
    """Enumerated in float64: the distribution of the first token that comes out, after the mixture has learnt from other rounds."""
    target, small = models()
    drafter = MixtureDrafter(
        {"suffix": SuffixDrafter(), "trigram": TrigramDrafter(TABLE), "model": ModelDrafter(small)}
    )
    states, texts = play(
        drafter, drafter.start(requests([0, 1, 2])), [[0, 1, 2]], target, [Budget.grown(6, 3, 3)], 8
    )
    draft = drafter.propose(states, [Budget.grown(6, 3, 3)])
    p, _ = distributions(target, draft, texts)
    verdict = registry.verifier("match")(draft, p)
    first = verdict.stop[0, 0] * verdict.after(np.array([0]))[0]
    top = list(range(draft.tree.num_nodes))
    for n in range(1, draft.tree.num_nodes):
        parent = int(draft.tree.parents[0, n])
        top[n] = n if parent == 0 else top[parent]
        first[draft.tree.tokens[0, top[n]]] += verdict.stop[0, n]
    assert draft.tree.num_nodes > 3
    np.testing.assert_allclose(first, p[0, 0], rtol=0, atol=1e-12)


def test_accepted_tokens_are_credited_to_their_sources():
    target, _ = models()
    engine = Engine.of(target, drafter=mixture(), depth=3, num_paths=3)
    sample = engine.generate([[0, 1, 2, 0, 1, 2]], SamplingParams(max_tokens=48, seed=1))[0].samples[0]
    origins = [o.source for o in sample.origins]
    assert set(origins) == {"ngram", "trigram", "target"}
    assert sum(o != "target" for o in origins) == sample.stats.accepted_tokens
    assert sample.stats.drafter_error is None


def test_a_source_that_no_round_proposed_for_is_not_credited():
    drafter = mixture()
    states = drafter.start(requests([0, 1, 2]))
    scored = TokenTree.chain(np.array([[2, 3]]))
    outcome = Outcome(np.array([[1]]), np.array([1]), np.array([0]))
    (state,) = drafter.observe(states, outcome, Scores(scored, np.zeros((1, 2, 5), np.float32)))
    assert (state.credit, state.tokens) == ([], [0, 1, 2, 3, 0])


def test_sources_are_named_in_one_line_or_with_options(tmp_path):
    target, small = models()
    assert build("mixture:ngram, trigram", target, small, tmp_path).names == ["ngram", "trigram"]
    made = build("mixture", target, small, tmp_path, sources=["model:top_k", ("ngram", {"max_ngram": 2})])
    assert (made.names, made.sources[1].max_ngram, made.sources[0].kind) == (
        ["model:top_k", "ngram"],
        2,
        "top_k",
    )
    assert build("mixture", target, small, tmp_path).names == ["ngram", "trigram", "model:top_k"]


def test_an_index_goes_to_every_source_that_reads_one(tmp_path):
    target, _ = models()
    TextIndex.build([[1, 2, 3]], 5).save(tmp_path / "i")
    made = build("mixture", target, None, tmp_path, index=tmp_path / "i")
    assert made.names == ["ngram", "trigram", "retrieval"]
    assert (made.sources[1].table.num_entries, made.sources[2].index.num_tokens) == (1, 4)
    with pytest.raises(InvalidInputError, match="no source of"):
        build("mixture:ngram,suffix", target, None, tmp_path, index=tmp_path / "i")


@pytest.mark.parametrize(
    ("sources", "error", "words"),
    [
        (["ngram"], InvalidInputError, "two to 8"),
        (["ngram", "ngram"], InvalidInputError, "each once"),
        (["ngram", "mixture"], InvalidInputError, "no mixture in a mixture"),
        (["ngram", "trigrm"], UnknownNameError, "did you mean 'trigram'"),
    ],
)
def test_sources_that_cannot_be_mixed_are_refused(sources, error, words, tmp_path):
    with pytest.raises(error, match=words):
        build("mixture", *models(), tmp_path, sources=sources)


def test_decay_out_of_range_is_refused():
    with pytest.raises(InvalidInputError, match="0 < decay <= 1"):
        mixture(decay=0)


def test_a_shared_credit_teaches_the_next_request_and_a_private_one_does_not():
    target, _ = models()
    for shared in (SourceCredit(2), None):
        drafter = mixture(credit=shared)
        play(
            drafter,
            drafter.start(requests([0, 1, 2, 0, 1])),
            [[0, 1, 2, 0, 1]],
            target,
            [Budget.grown(4, 2, 2)],
            5,
        )
        (fresh,) = drafter.start(requests([1, 2]))
        assert (fresh.learnt.counts.tried.sum() > 0) == (shared is not None)


def test_threads_share_a_credit_without_losing_a_round():
    credit = SourceCredit(2, decay=1.0)

    def work():
        for _ in range(500):
            credit.learn_step(nodes((7, -1, 0, 0.5), (5, -1, 1, 0.5)), [7])

    workers = [threading.Thread(target=work) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert (credit.counts.right.sum(), credit.counts.tried.sum()) == (2000, 4000)


def test_a_head_of_the_target_is_a_source_like_others(tmp_path):
    plain = Engine.embedded(drafter=None)
    head = ("eagle:top_k", {"weights": untrained("eagle", plain.target, tmp_path)})
    params = SamplingParams(temperature=0, max_tokens=24)
    drafted = {}
    text = plain.generate("def add(a, b):\n", params)[0].token_ids
    for name, sources in (("copies", ["ngram", "suffix"]), ("head", ["ngram", head])):
        options = {"drafter": "mixture", "drafter_options": {"sources": sources}, "depth": 3}
        result = Engine.of(plain.target, tokenizer=plain.tokenizer, **options).generate(
            "def add(a, b):\n", params
        )[0]
        assert result.token_ids == text and result.stats.drafter_error is None
        drafted[name] = result.stats.drafted_tokens
    assert drafted["head"] > drafted["copies"], "it drafts where there is nothing to copy"
