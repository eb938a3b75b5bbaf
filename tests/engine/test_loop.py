"""The loop: equal to plain decoding, sequences join and leave, failures leave the text unharmed."""

import pytest

from polydraft import Engine, SamplingParams
from polydraft.core import Request
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.errors import (
    CapacityError,
    DrafterWarning,
    IncompatibleError,
    InvalidInputError,
    UnknownNameError,
)
from polydraft.sampling.softmax import log_softmax
from tests.engine.tables import TableModel, plain_greedy
from tests.engine.tables import table_engine as engine

KINDS = ["paths", "chain", "without_replacement", "greedy_plus_one", "top_k", "coupled", "systematic"]
PROMPTS = [[1, 2, 3], [4], [5, 5, 0, 1]]


def plain(verifier="match", seqs=4, **model):
    return Engine.of(TableModel(max_num_seqs=seqs, **model), drafter=None, verifier=verifier)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_equals_the_table_whatever_the_drafter(kind):
    results = engine(kind).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.token_ids == plain_greedy(TableModel(), prompt, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_seed_exact_output_does_not_depend_on_drafter_depth_or_batch(kind):
    params = SamplingParams(max_tokens=20, seed=11)
    expected = [
        plain("race").generate([prompt], params, first_index=i)[0].token_ids
        for i, prompt in enumerate(PROMPTS)
    ]
    for depth, paths in ((1, 1), (4, 2), (3, 3)):
        found = engine(kind, "race", depth, paths).generate(PROMPTS, params)
        assert [r.token_ids for r in found] == expected


def test_one_pass_of_the_draft_for_each_depth_of_the_whole_batch():
    fast = engine(depth=3, seqs=8)
    for i in range(8):
        fast.add_request(Request(str(i), (1, 2), SamplingParams(max_tokens=30), seed=i))
    fast.step()
    before = fast.drafter.model.passes
    fast.step()
    assert fast.drafter.model.passes - before == 3


def test_sequences_join_and_leave_between_steps():
    fast = engine(seqs=2)
    alone = {
        p: fast.generate([list(p)], SamplingParams(temperature=0, max_tokens=9))[0].token_ids
        for p in ((1, 2), (3,), (4, 4))
    }
    done = {}
    for i, prompt in enumerate(alone):
        fast.add_request(Request(str(i), prompt, SamplingParams(temperature=0, max_tokens=9), seed=0))
        for output in fast.step():
            done[output.request_id] = output.sample.token_ids
    while fast.has_unfinished_requests:
        for output in fast.step():
            done[output.request_id] = output.sample.token_ids
    assert done == {str(i): ids for i, ids in enumerate(alone.values())}


def test_caches_are_empty_and_slots_free_when_all_is_done_or_aborted():
    fast = engine()
    fast.generate(PROMPTS, SamplingParams(max_tokens=5, seed=1))
    stream = fast.stream([1, 2], SamplingParams(max_tokens=30, seed=1))
    next(stream)
    stream.close()
    assert not any(fast.target.texts) and fast.drafter.slots.num_free == fast.drafter.model.max_num_seqs
    assert not fast.has_unfinished_requests


def test_abort_keeps_what_was_emitted():
    fast = engine()
    fast.add_request(Request("a", (1, 2), SamplingParams(max_tokens=30), seed=3))
    (first,) = fast.step()
    fast.abort_request("a")
    (last,) = fast.step()
    assert last.sample.finish_reason == "abort"
    assert last.sample.token_ids == first.token_ids
    assert fast.step() == []


class Broken(ModelDrafter):
    """Raises in the second round, for odd seeds only."""

    def propose(self, states, budgets):
        if any(s.request.seed % 2 and len(s.context) > 6 for s in states):
            raise RuntimeError("out of order")
        return super().propose(states, budgets)


def test_a_drafter_that_raises_is_switched_off_for_that_request_only():
    target = TableModel()
    fast = Engine.of(target, drafter=Broken(TableModel(seed=1)), depth=3, num_paths=2)
    params = [SamplingParams(temperature=0, max_tokens=20, seed=s) for s in (0, 1, 2)]
    with pytest.warns(DrafterWarning, match="out of order"):
        results = fast.generate(PROMPTS[:3], params)
    assert [r.token_ids for r in results] == [plain_greedy(target, p, 20) for p in PROMPTS[:3]]
    assert [r.stats.drafter_error is None for r in results] == [True, False, True]


class Interrupted(TableModel):
    """The third commit is interrupted, as by Ctrl-C."""

    commits = 0

    def commit(self, slots, outcome):
        self.commits += 1
        if self.commits == 3:
            raise KeyboardInterrupt
        super().commit(slots, outcome)


def test_an_interrupted_step_is_taken_up_again_from_the_committed_tokens():
    target = Interrupted()
    fast = Engine.of(target, drafter=ModelDrafter(TableModel(seed=1)), depth=3, num_paths=2)
    fast.add_request(Request("a", (1, 2), SamplingParams(temperature=0, max_tokens=15), seed=0))
    with pytest.raises(KeyboardInterrupt):
        while fast.has_unfinished_requests:
            fast.step()
    sample = None
    while fast.has_unfinished_requests:
        (output,) = fast.step()
        sample = output.sample
    assert sample.token_ids == plain_greedy(TableModel(), [1, 2], 15)


def test_samples_of_one_prompt_differ_and_repeat_with_the_seed():
    first, again = (
        engine().generate([[1, 2]], SamplingParams(n=3, max_tokens=12, seed=4))[0] for _ in range(2)
    )
    assert [s.token_ids for s in first.samples] == [s.token_ids for s in again.samples]
    assert len({tuple(s.token_ids) for s in first.samples}) == 3


def test_an_unseeded_request_records_the_seed_that_repeats_it():
    made = engine().generate([[1, 2]], SamplingParams(max_tokens=12))[0]
    again = engine().generate([[1, 2]], SamplingParams(max_tokens=12, seed=made.samples[0].seed))[0]
    assert made.token_ids == again.token_ids


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs_cover_every_emitted_token(mode):
    fast = engine()
    params = SamplingParams(temperature=0.5, max_tokens=10, seed=1, logprobs=2, logprobs_mode=mode)
    made = fast.generate([[1, 2]], params)[0]
    text = [1, 2]
    for token, entry in zip(made.token_ids, made.samples[0].logprobs, strict=True):
        row = log_softmax(fast.target.logits[text[-2], text[-1]] / (0.5 if mode == "processed" else 1))
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-6)
        assert list(entry.top) == (-row).argsort()[:2].tolist()
        text.append(token)


def test_stop_ids_end_inside_a_block_and_nothing_is_emitted_behind():
    free = plain_greedy(TableModel(), [1, 2], 20)
    stop = free[6]
    made = engine(depth=5).generate(
        [[1, 2]], SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop])
    )[0]
    assert made.token_ids == free[: free.index(stop) + 1]
    assert (made.finish_reason, made.samples[0].stop_reason) == ("stop", stop)


def test_min_tokens_keeps_the_end_away():
    fast = Engine.of(TableModel(), drafter="ngram", depth=4, eos_token_ids=[0, 1, 2, 3])
    made = fast.generate([[1, 2]], SamplingParams(min_tokens=8, max_tokens=20, seed=0))[0]
    assert not set(made.token_ids[:8]) & {0, 1, 2, 3}


def test_max_tokens_are_never_exceeded_and_statistics_add_up():
    made = engine(depth=5).generate([[1, 2]], SamplingParams(max_tokens=7, seed=2))[0]
    stats = made.stats
    assert made.finish_reason == "length"
    assert stats.generated_tokens == len(made.token_ids) == 7
    assert stats.generated_tokens + stats.discarded_tokens == stats.accepted_tokens + stats.steps
    assert stats.accepted_tokens == sum(stats.accepted_by_depth)


def test_context_limits_are_said_with_figures():
    fast = engine(max_model_len=16)
    with pytest.raises(CapacityError, match="at most 15"):
        fast.generate([[1] * 16])
    with pytest.raises(CapacityError, match="max_tokens <= 12"):
        fast.generate([[1] * 4], SamplingParams(max_tokens=13))
    assert len(fast.generate([[1] * 4], SamplingParams(seed=0))[0].token_ids) == 12


def test_an_output_without_max_tokens_ends_after_512_and_minus_one_fills_the_context():
    long = Engine.of(TableModel(max_model_len=600), drafter="ngram", depth=8)
    lengths = [
        len(long.generate([[1] * 4], SamplingParams(temperature=0, **limit))[0].token_ids)
        for limit in ({}, {"max_tokens": -1})
    ]
    assert lengths == [512, 596]


def test_mistakes_are_refused_with_advice():
    fast = engine()
    with pytest.raises(InvalidInputError, match="empty prompt"):
        fast.generate([[]])
    with pytest.raises(InvalidInputError, match="token id 99"):
        fast.generate([[1, 99]])
    with pytest.raises(InvalidInputError, match="tokenizer"):
        fast.generate(["text"])
    with pytest.raises(InvalidInputError, match="2 prompts and 1 params"):
        fast.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(UnknownNameError, match="did you mean 'block'"):
        engine(verifier="blok")
    with pytest.raises(IncompatibleError, match="recursive_wor"):
        engine("without_replacement", "block")
    with pytest.raises(InvalidInputError, match="depth=0"):
        engine(depth=0)


def test_results_are_shown_in_a_line():
    result = engine().generate([[1, 2]], SamplingParams(max_tokens=40, n=2, logprobs=2))[0]
    shown = repr(result)
    assert len(shown) < 500 and "\n" not in shown and "Origin" not in shown
    assert shown.count("finish_reason='length', tokens=40, tokens_per_step=") == 2
    assert len(repr(next(engine().stream([1, 2], SamplingParams(max_tokens=40))).sample)) < 200
