"""What fails stays with its request: it ends or loses its drafts, and its neighbours keep their very tokens."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from polydraft import Engine, FixedPolicy, Request, SamplingParams
from polydraft.core import Budget, Draft, DraftSampling, TokenTree, TreeShape
from polydraft.core.geometry import Dedup, chain, paths
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.engine.reader import Reader
from polydraft.engine.step import Stepper
from polydraft.errors import DrafterWarning, GrammarError, InvalidInputError, RequestWarning
from polydraft.models.slot_pool import Slots
from polydraft.papers.mixture.drafter import MixtureDrafter
from polydraft.sampling.softmax import softmax
from tests.engine.tables import TableModel, plain_greedy, table_engine
from tests.exactness.runs import every_run

pytestmark = pytest.mark.filterwarnings("ignore::polydraft.errors.DrafterWarning")
ONLY_3 = (2, 4)
"""A context after which the faulty table knows one token."""


def faulty(dtype, seqs=4):
    """After ONLY_3 there is token 3 and no other; after (6, 6), which is in no text, nothing is a number."""
    made = TableModel(max_num_seqs=seqs)
    made.logits = made.logits.astype(dtype)
    made.logits[..., 6] = -np.inf
    made.logits[ONLY_3] = -np.inf
    made.logits[(*ONLY_3, 3)] = 0.0
    made.logits[6, 6] = np.nan
    return made


def served(engine, requests):
    """Samples by request id."""
    samples = {r.id: engine.add_request(r) for r in requests}
    while engine.has_unfinished_requests:
        engine.step()
    return samples


@pytest.mark.parametrize(
    ("drafter", "verifier"),
    [(None, "match"), ("model", "auto"), ("model:coupled", "race"), ("model:top_k", "match")],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_request_whose_distribution_fails_ends_alone(drafter, verifier, dtype):
    def run(*ids):
        small = TableModel(seed=1)
        small.logits = small.logits.astype(dtype)
        policy = (
            {}
            if drafter is None
            else {"draft_model": small, "policy": FixedPolicy(Budget.fixed(paths(2, 3)))}
        )
        bans = {"bans": {3: -math.inf}}
        every = {
            name: Request(
                name,
                ONLY_3 if name == "bans" else prompt,
                SamplingParams(max_tokens=12, logit_bias=bans.get(name, {})),
                seed,
            )
            for seed, (name, prompt) in enumerate(
                [("one", (1, 2)), ("bans", ()), ("nan", (6, 6)), ("two", (5,))]
            )
        }
        return served(
            Engine.of(faulty(dtype), drafter=drafter, verifier=verifier, **policy),
            [every[name] for name in ids],
        )

    with pytest.warns(RequestWarning):
        together = run("one", "bans", "nan", "two")
    alone = run("one", "two")
    assert {name: s.token_ids for name, s in alone.items()} == {
        name: together[name].token_ids for name in alone
    }
    assert {together[name].finish_reason for name in alone} == {"length"}
    for name, cause in (("bans", "only -inf"), ("nan", "NaN")):
        assert (together[name].finish_reason, together[name].token_ids) == ("error", [])
        assert f"request {name!r}" in together[name].error and cause in together[name].error


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_steps_in_which_every_request_fails_end_them_and_count_the_rows_of_their_passes(monkeypatch, drafter):
    seen = []
    learn = Reader.learn
    monkeypatch.setattr(
        Reader, "learn", lambda self, times, riding: seen.append(times[0].rows) or learn(self, times, riding)
    )
    policy = {} if drafter is None else {"policy": FixedPolicy(Budget.fixed(chain(1)))}
    engine = Engine.of(faulty(np.float32), drafter=drafter, **policy)
    with pytest.warns(RequestWarning):
        samples = served(engine, [Request(str(i), (6, 6), SamplingParams(max_tokens=4), i) for i in range(3)])
    assert [(s.finish_reason, s.token_ids) for s in samples.values()] == [("error", [])] * 3
    assert seen == [3 if drafter is None else 6] and engine.num_free == 4
    assert (
        served(engine, [Request("next", (1, 2), SamplingParams(max_tokens=4), 0)])["next"].finish_reason
        == "length"
    )


class OneFails:
    """A form of which one output, by the order in which they begin, cannot be followed beyond two tokens. Any token may come next."""

    def __init__(self, failing):
        self.failing = failing
        self.begun = 0

    def constraint(self, prompt_length):
        self.begun += 1
        return OneOutput(prompt_length + 2 if self.begun == self.failing else math.inf)


class OneOutput:
    def __init__(self, longest):
        self.longest = longest

    def allowed(self, context, tokens, parents):
        if len(context) >= self.longest:
            raise GrammarError("too many states")
        return np.ones((len(tokens), 7), bool)


@pytest.mark.filterwarnings("ignore::polydraft.errors.RequestWarning")
@pytest.mark.parametrize(
    ("drafter", "temperature"), [(None, 1.0), ("model:coupled", 1.0), ("model", 0.0), ("ngram", 0.0)], ids=str
)
def test_a_sample_whose_grammar_fails_leaves_its_siblings_their_tokens(drafter, temperature):
    def samples(failing):
        verifier = "race" if drafter == "model:coupled" else "match" if drafter is None else "auto"
        small = {"draft_model": TableModel(seed=1)} if "model" in str(drafter) else {}
        made = Engine.of(TableModel(max_num_seqs=4), drafter=drafter, verifier=verifier, **small)
        params = SamplingParams(temperature, n=4, seed=5, max_tokens=8, structured_outputs=OneFails(failing))
        return made.generate([[1, 2]], params)[0].samples

    found = samples(3)
    good = samples(None)
    assert [s.finish_reason for s in found] == [
        "length",
        "length",
        "error",
        "length",
    ] and "too many states" in found[2].error
    assert [s.token_ids for s in found if s.index != 2] == [s.token_ids for s in good if s.index != 2]
    assert found[2].token_ids == good[2].token_ids[: len(found[2].token_ids)]


def test_what_was_emitted_before_an_error_stays():
    engine = Engine.of(faulty(np.float64), drafter="ngram", depth=3)
    engine.target.logits[:, 2, 4] = 99.0
    engine.target.logits[:, 4, 2] = 99.0  # 2 4 2, then ONLY_3 after the next 2
    engine.target.logits[(*ONLY_3, 2)] = -np.inf
    with pytest.warns(RequestWarning, match="only -inf"):
        sample = served(
            engine, [Request("a", (2,), SamplingParams(temperature=0, logit_bias={3: -math.inf}), 0)]
        )["a"]
    assert (sample.token_ids, sample.finish_reason) == ([4], "error")


class Threes(NgramDrafter):
    """Drafts 3 3 and nothing else."""

    def propose(self, states, budgets):
        tokens = np.array([[s.tokens[-1], 3, 3] for s in states])
        tree = TokenTree.chain(tokens)
        return Draft(tree, DraftSampling.POINT_MASS, TreeShape.GROWN, None, np.full_like(tokens, -1))


def test_a_faulty_node_that_a_text_never_reaches_harms_nothing():
    target = faulty(np.float64)
    target.logits[..., 3] -= 99.0
    made = Engine.of(target, drafter=Threes(), verifier="match", depth=2).generate(
        [[1, 2], [5]], SamplingParams(temperature=0, max_tokens=9)
    )
    assert [r.token_ids for r in made] == [plain_greedy(target, p, 9) for p in ([1, 2], [5])]
    assert {r.finish_reason for r in made} == {"length"}


def texts_until_the_fault(monkeypatch, rule):
    """Of every run: probability of each text and how it ended, where nothing is a number behind (1, 1); and by the tables alone."""
    seen = Counter()
    by_tables = Counter()
    target = TableModel(2)
    target.logits[1, 1] = np.nan

    def run():
        drafter = ModelDrafter(TableModel(2, seed=3), "chain")
        engine = Engine.of(target, drafter=drafter, verifier=rule, policy=FixedPolicy(Budget.fixed(chain(2))))
        return served(engine, [Request("a", (0, 0), SamplingParams(max_tokens=3), 0)])["a"]

    for probability, sample in every_run(run, monkeypatch):
        seen[tuple(sample.token_ids), sample.finish_reason] += probability
    open_ = [((), 1.0)]
    for text, probability in open_:
        context = (0, 0, *text)[-2:]
        if len(text) == 3 or context == (1, 1):
            by_tables[text, "length" if len(text) == 3 else "error"] += probability
        else:
            open_ += [
                ((*text, t), probability * p) for t, p in enumerate(softmax(target.logits[context]).tolist())
            ]
    return max(abs(seen[text] - by_tables[text]) for text in {*seen, *by_tables})


@pytest.mark.filterwarnings("ignore::polydraft.errors.RequestWarning")
@pytest.mark.parametrize("rule", ["block", "traversal", "speculative", "match", "greedy_traversal"])
def test_a_text_ends_at_a_faulty_row_where_plain_decoding_ends_and_follows_the_tables_until_then(
    rule, monkeypatch
):
    assert texts_until_the_fault(monkeypatch, rule) < 1e-12


@pytest.mark.filterwarnings("ignore::polydraft.errors.RequestWarning")
def test_a_token_that_is_drawn_anew_where_a_row_failed_is_not_exact(monkeypatch):
    right = Stepper._verify

    def anew(self, sequences, draft, unique, scored, key, *, beyond_faults=False):
        """Wrong: decided without its draft where a row of it failed."""
        if not beyond_faults:
            return right(self, sequences, draft, unique, scored, key)
        bare = Draft.bare(draft.tree.tokens[:, 0])
        at_root = replace(scored, tree=bare.tree, logits=scored.logits[:, :1])
        return right(self, sequences, bare, Dedup(bare.tree), at_root, key)

    monkeypatch.setattr(Stepper, "_verify", anew)
    assert texts_until_the_fault(monkeypatch, "block") > 1e-3


class Unreadable:
    """A tokenizer that cannot decode token 6."""

    def decode(self, ids, **_):
        if 6 in ids:
            raise ValueError("no such piece")
        return "".join(map(str, ids))


def test_a_text_that_cannot_be_read_ends_its_own_request():
    prompts = [[1, 2], [4], [5]]
    expected = [plain_greedy(TableModel(), p, 20) for p in prompts]
    assert sum(6 in ids for ids in expected) in (1, 2)
    with pytest.warns(RequestWarning, match="no such piece"):
        made = Engine.of(TableModel(), tokenizer=Unreadable(), drafter="ngram", depth=3).generate(
            prompts, SamplingParams(temperature=0, max_tokens=20)
        )
    for result, ids in zip(made, expected, strict=True):
        kept = ids[: ids.index(6)] if 6 in ids else ids
        assert (result.token_ids, result.finish_reason) == (kept, "error" if 6 in ids else "length")
        assert result.text == "".join(map(str, kept))


def test_bans_that_leave_no_token_are_refused_at_once():
    engine = table_engine()
    every, but_one = (dict.fromkeys(range(count), -math.inf) for count in (7, 6))
    with pytest.raises(InvalidInputError, match="bans 7 ids"):
        engine.generate([[1, 2]], SamplingParams(logit_bias=every))
    with pytest.raises(InvalidInputError, match="min_tokens=2 1 more"):
        engine.generate([[1, 2]], SamplingParams(logit_bias=but_one, stop_token_ids=[6], min_tokens=2))
    assert not engine.has_unfinished_requests


class Fails(ModelDrafter):
    """One call fails, for requests of odd seeds or always."""

    call = ""
    when = staticmethod(lambda states: any(s.request.seed % 2 for s in states))

    def _meet(self, call, states):
        if self.call == call and self.when(states):
            raise RuntimeError(f"{call} is broken")

    def start(self, requests):
        states = super().start(requests)
        self._meet("start", states)
        return states

    def propose(self, states, budgets):
        self._meet("propose", states)
        return super().propose(states, budgets)

    def observe(self, states, outcome, scores):
        self._meet("observe", states)
        return super().observe(states, outcome, scores)

    def release(self, states):
        self._meet("release", states)
        super().release(states)


@pytest.mark.parametrize("call", ["start", "propose", "observe", "release"])
def test_a_failing_drafter_harms_only_the_requests_that_it_fails_for(call):
    drafter = Fails(TableModel(seed=1))
    drafter.call = call
    engine = Engine.of(TableModel(max_num_seqs=2), drafter=drafter, depth=3)
    seen = []
    prompts = [[1, 2], [4], [5, 5], [0], [3]]
    for seed, prompt in enumerate(prompts):
        engine.add_request(
            Request(str(seed), tuple(prompt), SamplingParams(temperature=0, max_tokens=8), seed)
        )
    while engine.has_unfinished_requests:
        outputs = engine.step()
        assert len(outputs) <= 2
        seen += outputs
    for seed, prompt in enumerate(prompts):
        own = [o for o in seen if o.request_id == str(seed)]
        assert (
            [t for o in own for t in o.token_ids]
            == own[-1].sample.token_ids
            == plain_greedy(TableModel(), prompt, 8)
        )
        assert (own[-1].sample.stats.drafter_error is not None) == (seed % 2 == 1)
    assert engine.num_free == 2
    assert drafter.slots.num_free == (
        2 if call == "release" else 4
    )  # what a failing release holds is the drafter's to mend


def test_a_drafter_that_fails_for_batches_alone_is_switched_off():
    drafter = Fails(TableModel(seed=1))
    drafter.call = "propose"
    drafter.when = lambda states: len(states) > 1
    made = Engine.of(TableModel(), drafter=drafter, depth=3).generate(
        [[1, 2], [4]], SamplingParams(temperature=0, max_tokens=8)
    )
    assert [r.token_ids for r in made] == [plain_greedy(TableModel(), p, 8) for p in ([1, 2], [4])]
    assert drafter.slots.num_free == 4


class NoRelease(TableModel):
    """The second slot cannot be emptied at first."""

    releases = 0

    def release(self, slots):
        self.releases += 1
        if self.releases == 2:
            raise MemoryError("no room")
        super().release(slots)


def test_a_draft_model_whose_second_slot_fails_keeps_its_slots():
    drafter = ModelDrafter(NoRelease(max_num_seqs=2))
    requests = [Request(str(i), (1, 2), SamplingParams(), i) for i in range(2)]
    with pytest.raises(MemoryError):
        drafter.start(requests)
    assert drafter.slots.num_free == 2
    drafter.release(drafter.start(requests))
    assert drafter.slots.num_free == 2


class NoCopy(TableModel):
    """Cannot copy what another slot holds."""

    def copy(self, source, slot, length):
        raise MemoryError("no room")


def test_a_slot_whose_beginning_cannot_be_copied_is_not_taken():
    slots = Slots(model := NoCopy(max_num_seqs=2))
    model.prefill([held := slots.take()], [text := [1, 2, 3, 4, 5]])
    slots.holds(held, text)
    with pytest.raises(MemoryError):
        slots.take(text)
    assert slots.num_free == 1 and slots.take() != held


def test_of_several_drafters_one_that_fails_leaves_the_others_released():
    good = ModelDrafter(TableModel(max_num_seqs=2), "top_k")
    bad = ModelDrafter(NoRelease(max_num_seqs=2), "top_k")
    both = MixtureDrafter({"good": good, "bad": bad})
    requests = [Request(str(i), (1, 2), SamplingParams(), i) for i in range(2)]
    with pytest.raises(MemoryError):
        both.start(requests)
    assert good.slots.num_free == bad.slots.num_free == 2
    states = both.start(requests)
    bad.release = lambda states: 1 / 0
    with pytest.raises(ZeroDivisionError):
        MixtureDrafter({"bad": bad, "good": good}).release([_turned(s) for s in states])
    assert good.slots.num_free == 2


def _turned(state):
    """The same state with its two members in the other order."""
    if hasattr(state, "members"):
        state.members.reverse()
    else:
        state.states = {0: state.states[1], 1: state.states[0]}
    return state


def test_a_failing_drafter_warns_with_the_request_and_the_cause():
    drafter = Fails(TableModel(seed=1))
    drafter.call = "release"
    with pytest.warns(
        DrafterWarning, match=r"request .* \(RuntimeError: release is broken, at .*test_failures\.py:\d+\)"
    ):
        Engine.of(TableModel(), drafter=drafter, depth=3).generate(
            [[1, 2]], SamplingParams(max_tokens=8, seed=1)
        )
