"""What drafters and distributions need of the target: they get it for every committed token, or the engine is not built."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from polydraft import Engine, Request, SamplingParams
from polydraft.core import Budget, Needs
from polydraft.core.arrays import scatter_add
from polydraft.decoding.guidance import Guidance
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.engine import reader
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError
from polydraft.models.torch.hf import HFTarget
from polydraft.papers.mixture.drafter import MixtureDrafter
from polydraft.policy.fixed import Policy
from polydraft.sampling.softmax import log_softmax, softmax
from tests.engine.tables import TableModel, p_value
from tests.support.closeness import assert_close
from tests.support.reading import read_counts
from tests.support.tiny import compiled, llama_config

BACKENDS = pytest.mark.parametrize("kind", [compiled, HFTarget])


def module(seed=0):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
    }
    return LlamaForCausalLM(llama_config(**sizes)).eval()


class Collector(NgramDrafter):
    """Drafts by n-grams, and keeps the states of every token that it is told of."""

    info = replace(NgramDrafter.info, name="collector")
    needs = Needs(hidden=(0, 2))

    def __init__(self, fail=()):
        super().__init__()
        self.seen = {}
        self.fail = list(fail)
        self.told = 0

    @property
    def offers(self):
        return replace(super().offers, read=self.read)

    def start(self, requests):
        states = super().start(requests)
        for request, state in zip(requests, states, strict=True):
            self.seen[id(state)] = {layer: [] for layer in self.needs.hidden}
            state.mine = self.seen[id(state)], list(request.prompt_token_ids)
        return states

    def read(self, states, scores):
        for b, state in enumerate(states):
            for layer, rows in state.mine[0].items():
                rows.extend(scores.hidden[layer][b])
        return states

    def observe(self, states, outcome, scores):
        self.told += 1
        if self.told in self.fail:
            raise RuntimeError("told once too often")
        emitted = outcome.emitted(scores.tree)
        paths = outcome.lists.paths
        mine = [state.mine for state in states]
        new = super().observe(states, outcome, scores)
        for b, (state, (rows, text)) in enumerate(zip(new, mine, strict=True)):
            for layer in rows:
                rows[layer].extend(scores.hidden[layer][b, [0, *paths[b]]])
            text += emitted[b]
            state.mine = rows, text
        return new

    def release(self, states):
        self.last = [state.mine for state in states] + getattr(self, "last", [])
        super().release(states)


def check_states(model, kept, least):
    assert len(kept) >= least
    for rows, text in kept:
        with torch.no_grad():
            whole = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        for layer, found in rows.items():
            assert len(found) == len(text) - 1
            assert_close(np.stack(found), whole[layer][0, : len(found)].numpy())


@BACKENDS
def test_a_drafter_has_the_states_of_every_committed_token_but_the_last(kind):
    drafter = Collector()
    engine = Engine.of(kind(module(), max_num_seqs=2), drafter=drafter, depth=3)
    prompts = [[1, 2, 3, 1, 2], [7], [5, 6, 5, 6, 5, 6, 5]]
    engine.generate(prompts, SamplingParams(temperature=0.3, max_tokens=20, seed=3))
    check_states(module(), drafter.last, 3)


@BACKENDS
def test_states_are_made_once_more_where_the_drafter_has_to_begin_anew(kind):
    drafter = Collector(fail=(3, 9))
    engine = Engine.of(kind(module(), max_num_seqs=2), drafter=drafter, depth=3)
    plain = Engine.of(kind(module(), max_num_seqs=2), drafter=None)
    prompts = [[1, 2, 3, 1, 2], [7, 1]]
    greedy = SamplingParams(temperature=0, max_tokens=20)
    found = engine.generate(prompts, greedy)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain.generate(prompts, greedy)]
    check_states(module(), drafter.last, 4)
    assert not any(r.stats.drafter_error for r in found)


class Seldom(Policy):
    """Drafts in one round of four."""

    def __init__(self):
        self.rounds = 0

    def budgets(self, sequences):
        self.rounds += 1
        return [Budget.grown(*((0, 0) if self.rounds % 4 else (3, 3)))] * len(sequences)


@pytest.mark.parametrize("fail", [(), (2,)], ids=["", "failing"])
@BACKENDS
def test_states_of_rounds_without_drafts_come_with_the_next_draft(kind, fail, monkeypatch):
    drafter = Collector(fail=fail)
    policy = Seldom()
    told = []
    observe = drafter.observe
    monkeypatch.setattr(drafter, "observe", lambda *given: told.append(0) or observe(*given))
    engine = Engine.of(kind(module(), max_num_seqs=2), drafter=drafter, policy=policy)
    engine.generate(
        [[1, 2, 3, 1, 2], [7], [5, 6, 5, 6, 5, 6, 5]], SamplingParams(temperature=0.3, max_tokens=20, seed=3)
    )
    check_states(module(), drafter.last, 3)
    assert len(told) <= policy.rounds // 2 + 4 * len(fail)


def test_a_mixture_hands_states_to_the_source_that_needs_them():
    drafter = Collector()
    mixed = MixtureDrafter({"collector": drafter, "ngram": NgramDrafter()})
    assert mixed.needs == drafter.needs
    Engine.of(compiled(module(), max_num_seqs=1), drafter=mixed, depth=3).generate(
        [[1, 2, 3, 1, 2]], SamplingParams(temperature=0.3, max_tokens=20, seed=3)
    )
    check_states(module(), drafter.last, 1)


@pytest.mark.parametrize("mixed", [False, True])
@BACKENDS
def test_a_text_whose_states_are_needed_is_read_in_pieces_beside_others(kind, mixed, monkeypatch):
    monkeypatch.setattr(reader.Reader, "room", lambda self, *_: 8)
    collector = Collector()
    target = kind(module(), max_num_seqs=3)
    prompt = tuple(range(1, 31)) * 2
    drafter = MixtureDrafter({"collector": collector, "ngram": NgramDrafter()}) if mixed else collector
    engine = Engine.of(target, drafter=drafter, depth=3)
    engine.add_request(
        Request("short", (7, 5), SamplingParams(temperature=0.3, max_tokens=100, ignore_eos=True), 3)
    )
    engine.step()
    counts = read_counts(target, monkeypatch)
    engine.add_request(Request("long", prompt, SamplingParams(temperature=0.3, max_tokens=8), 3, 0))
    engine.add_request(Request("long", prompt, SamplingParams(temperature=0.3, max_tokens=8), 3, 1))
    while engine.has_unfinished_requests:
        engine.step()
    assert max(counts) <= 8 and sum(counts) == 2 * (len(prompt) - 1)
    check_states(module(), collector.last, 3)


@pytest.mark.parametrize(
    ("needs", "lacking"),
    [
        (Needs(hidden=(1, 9)), "hidden states of layer 9"),
        (Needs(embeddings=True), "embed"),
        (Needs(head=True), "head"),
        (Needs(hidden=(0,)), "`read`"),
    ],
)
def test_a_need_that_cannot_be_met_is_refused_when_the_engine_is_built(needs, lacking):
    drafter = NgramDrafter()
    drafter.needs = needs
    target = compiled(module(), max_num_seqs=1)
    if lacking in ("embed", "head"):
        target = TableModel()
        target.offers = Needs()
    with pytest.raises(IncompatibleError, match=lacking):
        Engine.of(target, drafter=drafter)


class Contrastive:
    """log p of an expert less a share of an amateur's, where the expert's own distribution allows it."""

    needs = Needs()
    gives_logits = True

    def __init__(self, amateur):
        self.second_model = amateur

    def second_prompt(self, request):
        return request.prompt_token_ids

    def __call__(self, scores, tree, contexts, second=None):
        expert = log_softmax(scores.logits)
        amateur = log_softmax(second.logits)
        allowed = expert > expert.max(axis=-1, keepdims=True) - 2.0
        return np.where(allowed, expert - 0.5 * amateur, -np.inf)


def nearest(states, keys):
    return np.square(states[..., None, :] - keys).sum(-1).argmin(-1)


class Nearest:
    """Half of the distribution is that of what followed the nearest of some stored states."""

    gives_logits = False

    def __init__(self, keys, values, layer=2):
        self.keys = keys
        self.values = values
        self.needs = Needs(hidden=(layer,))

    def __call__(self, scores, tree, contexts, second=None):
        (states,) = scores.hidden.values()
        p = softmax(scores.logits) / 2
        found = self.values[nearest(states, self.keys)]
        return scatter_add(p, found[..., None], np.full((*found.shape, 1), 0.5))


def greedy_texts(distribution, rows, prompt, count):
    """Decoding straight by a distribution's logits; rows(text) -> [V]."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(rows(text).argmax()))
    return text[len(prompt) :]


def last_row(model, text):
    with torch.no_grad():
        return model(torch.tensor([text])).logits[0, -1].numpy()


@BACKENDS
def test_a_distribution_reads_a_second_model_over_the_same_tree(kind):
    distribution = Contrastive(kind(module(1), max_num_seqs=2))
    greedy = SamplingParams(temperature=0, max_tokens=16)
    prompts = [[1, 2, 3, 1, 2, 3], [7]]

    def rows(text):
        expert, amateur = (log_softmax(last_row(module(seed), text)) for seed in (0, 1))
        return np.where(expert > expert.max() - 2.0, expert - 0.5 * amateur, -np.inf)

    for drafter in (None, "ngram"):
        depth = None if drafter is None else 4
        engine = Engine.of(
            kind(module(), max_num_seqs=2), drafter=drafter, depth=depth, decoding=distribution
        )
        found = [r.token_ids for r in engine.generate(prompts, greedy)]
        assert found == [greedy_texts(distribution, rows, p, 16) for p in prompts]
    assert distribution.second_model.lengths.tolist() == [0, 0]


@BACKENDS
def test_a_request_owns_two_slots_where_a_distribution_reads_the_target_after_another_prompt(kind):
    target = kind(module(), max_num_seqs=4)
    greedy = SamplingParams(temperature=0, max_tokens=16)
    prompts = [[1, 2, 3, 1, 2, 3], [7], [4, 4, 4]]

    def decode(prompt):
        text = []
        for _ in range(16):
            ours = last_row(module(), [*prompt, *text])
            theirs = last_row(module(), [2, 3, *text])
            text.append(int((1.5 * ours - 0.5 * theirs).argmax()))
        return text

    for drafter in (None, "ngram"):
        engine = Engine.of(
            target, drafter=drafter, depth=None if drafter is None else 4, decoding=Guidance([2, 3], 1.5)
        )
        assert [r.token_ids for r in engine.generate(prompts, greedy)] == [decode(p) for p in prompts]
        assert engine.num_free == 4 and target.lengths.tolist() == [0] * 4


def test_second_sequences_are_scored_in_the_targets_own_pass():
    target = compiled(module(), max_num_seqs=2)
    engine = Engine.of(target, drafter=None, decoding=Guidance([2, 3], 1.5))
    engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=10))
    assert target.passes == 2 + 10


class Cooler:
    needs = Needs()
    gives_logits = True

    def __call__(self, scores, tree, contexts, second=None):
        return 0.5 * scores.logits


def test_fused_walks_apply_to_the_logits_of_a_distribution_and_sampling_parameters_too(monkeypatch):
    target, small, halved = (TableModel(seed=seed, dtype=np.float32) for seed in (0, 1, 0))
    halved.logits = 0.5 * halved.logits
    engine = Engine.of(target, draft_model=small, depth=3, num_paths=2, decoding=Cooler())
    plain = Engine.of(halved, draft_model=small, depth=3, num_paths=2)
    params = [
        SamplingParams(temperature=t, top_k=k, seed=5, max_tokens=24)
        for t, k in ((1.0, 0), (0.7, 3), (0.0, 0))
    ]
    expected = [r.token_ids for r in plain.generate([[1, 2]] * 3, params)]
    monkeypatch.setattr(type(engine.verifier), "__call__", None)
    assert [r.token_ids for r in engine.generate([[1, 2]] * 3, params)] == expected


def test_the_output_follows_the_distribution():
    target, small, halved = (TableModel(seed=seed, max_num_seqs=256) for seed in (0, 1, 0))
    halved.logits = 0.5 * halved.logits
    engine = Engine.of(target, draft_model=small, depth=3, num_paths=2, decoding=Cooler())
    assert p_value(engine, [1, 2], 2, 256) < 1e-6
    assert p_value(engine, [1, 2], 2, 768, against=halved) > 1e-3


def test_a_distribution_reads_hidden_states_and_gives_the_probabilities_themselves():
    model = module()
    keys = np.random.default_rng(0).standard_normal((40, 32), np.float32)
    distribution = Nearest(keys, np.arange(40) % 32)
    prompts = [[1, 2, 3, 1, 2, 3]]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
    made = {}
    for drafter in (None, "ngram"):
        target = compiled(model, max_num_seqs=1)
        engine = Engine.of(
            target,
            drafter=drafter,
            depth=None if drafter is None else 3,
            verifier="auto",
            decoding=distribution,
        )
        made[drafter] = engine.generate(prompts, params.with_(logprobs=1, logprobs_mode="processed"))[0]
    for result in made.values():
        text = list(prompts[0])
        for logprob in result.samples[0].logprobs:
            with torch.no_grad():
                out = model(torch.tensor([text]), output_hidden_states=True)
            p = softmax(out.logits[0, -1].numpy()) / 2
            p[distribution.values[nearest(out.hidden_states[2][0, -1].numpy(), keys)]] += 0.5
            assert logprob.logprob == pytest.approx(float(np.log(p[logprob.token_id])), abs=1e-3)
            text.append(logprob.token_id)


def test_a_distribution_that_fails_for_one_request_leaves_the_others_their_tokens():
    class Odd:
        needs = Needs()
        gives_logits = True

        def __call__(self, scores, tree, contexts, second=None):
            if any(text[0] == 3 and len(text) > 6 for text in contexts):
                raise ValueError("no such text")
            return scores.logits

    params = SamplingParams(temperature=0, max_tokens=10)
    prompts = [[1, 2], [3, 4], [5]]
    with pytest.warns(match="no such text"):
        found = Engine.of(TableModel(), drafter="ngram", depth=2, decoding=Odd()).generate(prompts, params)
    plain = Engine.of(TableModel(), drafter=None).generate(prompts, params)
    assert [r.finish_reason for r in found] == ["length", "error", "length"]
    assert [found[i].token_ids for i in (0, 2)] == [plain[i].token_ids for i in (0, 2)]
    assert found[1].token_ids == plain[1].token_ids[: len(found[1].token_ids)]


def test_distributions_that_cannot_be_followed_are_refused():
    with pytest.raises(CapacityError, match="two slots"):
        Engine.of(TableModel(max_num_seqs=1), drafter=None, decoding=Guidance([2, 3], 1.5))
    with pytest.raises(IncompatibleError, match="hidden states"):
        Engine.of(
            TableModel(),
            drafter=None,
            decoding=Nearest(np.zeros((1, 2), np.float32), np.zeros(1, np.float32)),
        )
    with pytest.raises(IncompatibleError, match="vocabulary"):
        Engine.of(TableModel(), drafter=None, decoding=Contrastive(TableModel(V=9)))
    with pytest.raises(InvalidInputError, match="Decoding"):
        Engine.of(TableModel(), drafter=None, decoding=lambda *given: None)
    with pytest.raises(IncompatibleError, match="tie_margin"):
        Engine.of(
            HFTarget(module(), max_num_seqs=1),
            drafter=None,
            decoding=Nearest(np.zeros((1, 32), np.float32), np.zeros(1, np.float32)),
            tie_margin=0.1,
        )

    class Nothing(Guidance):
        def second_prompt(self, request):
            return ()

    with pytest.raises(InvalidInputError, match="at least one token"):
        Engine.of(TableModel(), drafter=None, decoding=Nothing([1])).generate([[1]])


@BACKENDS
def test_samples_of_one_prompt_read_it_once(kind):
    target = kind(module(), max_num_seqs=4)
    prompt = list(range(1, 30))
    fed = []
    prefill = target.prefill
    target.prefill = lambda slots, ids, **options: fed.extend(map(len, ids)) or prefill(slots, ids, **options)
    engine = Engine.of(target, drafter="ngram", depth=3)
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=3)
    together = engine.generate([prompt, prompt[:-1]], [params.with_(n=3), params])
    assert sorted(fed) == [27, 28]
    alone = Engine.of(kind(module(), max_num_seqs=1), drafter="ngram", depth=3).generate(
        [prompt], params.with_(n=3)
    )
    assert [s.token_ids for s in together[0].samples] == [s.token_ids for s in alone[0].samples]
