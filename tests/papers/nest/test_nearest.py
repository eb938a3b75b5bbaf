"""NEST: passages and their states, the mixture, spans, attribution, the relaxed test; limits by enumeration, fakes that are noticed."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from polydraft import Engine, SamplingParams, TokenTree
from polydraft.core import Draft, DraftSampling, Needs, TreeShape
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.torch.hf import HFTarget
from polydraft.papers.nest.lenient import Lenient, deviation, lenient
from polydraft.papers.nest.nearest import Hits, Nearest, mixed
from polydraft.papers.nest.passages import LONGEST, Passages
from tests.exactness.runs import every_run
from tests.support.tiny import llama_config

pytest.importorskip("usearch")
GREEDY = SamplingParams(temperature=0, max_tokens=24)
TEXTS = {"rising": [*range(1, 31)] * 2, "threes": [3, 6, 9, 12, 15, 18, 21, 24, 27, 30] * 4}


def module(seed=0):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
    }
    return LlamaForCausalLM(llama_config(**sizes)).eval()


@pytest.fixture
def target():
    return CompiledModel(module(), max_num_seqs=2, cache_dtype="float32")


@pytest.fixture
def store(target, tmp_path):
    made = Passages.create(tmp_path / "passages", target)
    made.append(TEXTS.items(), target)
    return made


def sure(store, target, **options):
    """A distribution that trusts what it finds."""
    return Nearest(store, target, **{"alpha": 1.5, "temperature": 0.05, **options})


def engine(target, distribution, drafter="nest", **options):
    return Engine.of(
        target, decoding=distribution, drafter=drafter, **({} if drafter is None else {"depth": 6}), **options
    )


def test_keys_are_the_states_of_a_fresh_pass_and_passages_are_short(store):
    for number in (1, 2):
        passage = store.passage(number)
        with torch.no_grad():
            ids = torch.tensor([passage.tokens.tolist()])
            fresh = module()(ids, output_hidden_states=True).hidden_states[1][0, :-1].numpy()
        assert np.abs(passage.keys - fresh).max() < 2e-3 * float(np.abs(fresh).max())
        assert len(passage.tokens) <= LONGEST < 200


def test_the_mixture_counts_every_hit_with_its_weight():
    hits = Hits(np.array([1, 1, 2]), np.array([0.5, 0.25, 0.25]), np.zeros(3), np.zeros(3), 0.2)
    logs = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float64))
    assert np.exp(mixed(logs, hits)).tolist() == pytest.approx([0.1, 0.66, 0.24])


def test_spans_change_no_token_and_every_quotation_stands_where_it_is_said_to(target, store):
    distribution = sure(store, target)
    prompts = [TEXTS["rising"][:8], TEXTS["threes"][:5]]
    quoted = engine(target, distribution).generate(prompts, GREEDY)
    plain = engine(target, distribution, None).generate(prompts, GREEDY)
    assert [r.token_ids for r in quoted] == [r.token_ids for r in plain]
    assert sum(r.stats.accepted_tokens for r in quoted) > 8 and all(r.lossless and r.sources for r in quoted)
    for result in quoted:
        assert len(result.samples[0].sources) == len(result.token_ids)
        for q in result.sources:
            passage = store.passage(q.passage)
            assert passage.source == q.source
            assert (
                passage.tokens[q.position : q.position + q.end - q.start].tolist()
                == result.token_ids[q.start : q.end]
            )
    assert {q.source for r in quoted for q in r.sources} <= {*TEXTS} and plain[0].sources == []
    assert Engine.of(target, decoding=distribution).drafter.info.name == "nest"


def test_a_span_goes_on_without_a_search_and_passages_are_sought_seldom(target, store, monkeypatch):
    distribution = sure(store, target)
    selected = []
    made = engine(target, distribution)
    monkeypatch.setattr(
        made.drafter, "_selected", lambda *given, f=made.drafter._selected: selected.append(0) or f(*given)
    )
    (result,) = made.generate([TEXTS["rising"][:8]], GREEDY)
    assert result.stats.accepted_tokens > 12 and len(selected) < 8
    assert store.searches <= 4  # at 8, 16 and 32 tokens, and once for what is left


class Wide(Nearest):
    """The same in float64, which no fused walk takes: every draw is then enumerated."""

    def __call__(self, *given):
        return super().__call__(*given).astype(np.float64)


class Bare:
    """The target's own distribution, likewise."""

    needs = Needs()
    gives_logits = True

    def __call__(self, scores, tree, contexts, second=None):
        return scores.logits.astype(np.float64)


def emitted(target, distribution, drafter, verifier, monkeypatch):
    """The distribution of three tokens, of those three that are not banned; the first begins a span, the second is drafted."""
    bans = {t: -float("inf") for t in range(32) if t not in (4, 5, 6)}
    params = SamplingParams(max_tokens=3, seed=0, logit_bias=bans)
    made = engine(target, distribution, drafter, verifier=verifier)
    found = np.zeros((32, 32, 32))
    for probability, (result,) in every_run(lambda: made.generate([[1, 2, 3]], params), monkeypatch):
        found[tuple(result.token_ids)] += probability
    assert found.sum() == pytest.approx(1)
    return found


def test_limits_of_the_two_tests_by_enumeration(target, store, monkeypatch):
    def distribution(**options):
        return Wide(store, target, **{"alpha": 1.5, "temperature": 1.0, **options})

    def distance(a, b):
        return np.abs(a - b).sum() / 2

    bare = emitted(target, Bare(), None, "auto", monkeypatch)
    mixture = emitted(target, distribution(), None, "auto", monkeypatch)
    assert distance(mixture, bare) > 0.01
    assert (
        distance(emitted(target, distribution(alpha=-1e6), None, "auto", monkeypatch), bare) < 1e-6
    )  # lambda = 1
    assert distance(emitted(target, distribution(), "nest", "match", monkeypatch), mixture) < 1e-6
    never = Lenient(lenient.info, gamma=1e12)
    assert distance(emitted(target, distribution(), "nest", never, monkeypatch), mixture) < 1e-6
    assert (
        distance(emitted(target, distribution(), "nest", lenient, monkeypatch), mixture) > 0.01
        and not lenient.info.lossless
    )


def test_the_lenient_test_deviates_by_what_it_says():
    p = np.array([0.6, 0.3, 0.1], dtype=np.float64)
    for token, gamma in ((0, 1.0), (1, 1.0), (2, 0.05), (1, 1e9)):
        tokens = np.array([[0, token]])
        draft = Draft(
            TokenTree.chain(tokens), DraftSampling.POINT_MASS, TreeShape.CHAIN, None, np.full((1, 2), -1)
        )
        verdict = Lenient(lenient.info, gamma)(draft, np.broadcast_to(p, (1, 2, 3)))
        distribution = verdict.stop[0, 0] * p + verdict.stop[0, 1] * np.eye(3)[token]
        assert np.abs(distribution - p).sum() / 2 == pytest.approx(float(deviation(p, p[token], gamma)))


def test_a_deleted_passage_is_never_quoted_again(target, store, tmp_path):
    distribution = sure(Passages.open(tmp_path / "passages", target), target)
    made = engine(target, distribution)
    prompt = TEXTS["rising"][:8]
    assert "rising" in {q.source for q in made.generate([prompt], GREEDY)[0].sources}
    assert store.delete("rising") == 1  # through another connection
    again = made.generate(
        [prompt] * 3, [GREEDY, GREEDY.with_(temperature=1.0, seed=1), GREEDY.with_(temperature=1.0, seed=2)]
    )
    assert all(q.source != "rising" for r in again for q in r.sources)
    store.delete("threes")
    assert (
        made.generate([prompt], GREEDY)[0].token_ids
        == Engine.of(target, drafter=None).generate([prompt], GREEDY)[0].token_ids
    )
    assert Passages.open(tmp_path / "passages", target).sources == {}


def test_a_context_that_holds_no_passage_is_refused_and_nothing_is_stored(target, store):
    short = CompiledModel(module(), max_num_seqs=1, max_model_len=LONGEST - 1, cache_dtype="float32")
    with pytest.raises(CapacityError, match=f"up to {LONGEST} tokens"):
        store.append([("more", [1, 2, 3])], short)
    assert store.sources == {"rising": 1, "threes": 1}


def test_files_that_cannot_be_used_are_refused_and_kept(target, store, tmp_path):
    path = tmp_path / "passages"
    with pytest.raises(IncompatibleError, match="another model"):
        Passages.open(path, CompiledModel(module(1), max_num_seqs=1, cache_dtype="float32"))
    assert Passages.open(path, HFTarget(module(), max_num_seqs=1)).sources == {"rising": 1, "threes": 1}
    with pytest.raises(InvalidInputError, match="new name"):
        Passages.create(path, target)
    with pytest.raises(InvalidInputError, match="no such file"):
        Passages.open(tmp_path / "none", target)
    with pytest.raises(InvalidInputError, match="expected 0 <= id < 32"):
        store.append([("good", [1, 2, 3]), ("bad", [1, 99])], target)
    assert store.sources == {"rising": 1, "threes": 1}
    with pytest.raises(InvalidInputError, match="count=0"):
        sure(store, target, count=0)
    Passages.create(tmp_path / "empty", target)
    with pytest.raises(InvalidInputError, match="has no passages"):
        Engine.of(target, decoding="nest", decoding_options={"passages": tmp_path / "empty"})
    for distribution, drafter, said in (
        (None, "nest", "without the decoding method"),
        ("nest", None, "without passages"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            Engine.of(target, decoding=distribution, drafter=drafter)
    store._connection.execute("UPDATE passages SET tokens = zeroblob(8) WHERE id = 2")
    store._connection.commit()
    with pytest.raises(InvalidInputError, match="passage 2 does not add up"):
        Passages.open(path, target)
    (tmp_path / "text").write_text("no database, but words enough to be read as one" * 10)
    with pytest.raises(InvalidInputError, match="not a database"):
        Passages.open(tmp_path / "text", target)
