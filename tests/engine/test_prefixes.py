"""What a request read is kept in its slot for the next one that begins alike, and changes no token."""

import pytest

from polydraft.core import Request, SamplingParams
from polydraft.engine.api import Engine
from polydraft.models import load, pair
from polydraft.models.slot_pool import Slots

TEXT = pair.prompts()[0].text
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture
def model():
    return load.load_model(str(pair.draft_folder()), device="cpu", max_num_seqs=2, max_model_len=512)


def engine(model, **options):
    tokenizer = load.load_tokenizer(str(pair.draft_folder()))
    return Engine.of(
        model, tokenizer=tokenizer, **{"drafter": "ngram", "keep_prefixes": True, "depth": 3, **options}
    )


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_the_next_turn_reads_only_what_is_new_and_says_the_same(model, drafter):
    kept = engine(model, drafter=drafter)
    fresh = engine(model, drafter=drafter, keep_prefixes=False)
    first = kept.generate(TEXT, GREEDY)[0]
    more = [*first.prompt_token_ids, *first.token_ids, *kept.encode("\nimport os\n")]
    again = kept.generate([more], GREEDY)[0]
    alone = fresh.generate([more], GREEDY)[0]
    assert first.stats.cached_tokens == 0
    assert again.stats.cached_tokens in (n := len(first.prompt_token_ids) + len(first.token_ids), n - 1)
    assert (again.token_ids, alone.stats.cached_tokens) == (alone.token_ids, 0)
    assert again.stats.seconds["prefill"] > 0


def test_a_text_that_parts_early_keeps_what_is_common_and_one_that_was_ended_keeps_it_too(model):
    made = engine(model)
    ids = made.encode(TEXT)
    outputs = made.stream(ids, GREEDY)
    next(outputs)
    outputs.close()
    parted = [*ids[:20], *ids[30:50]]
    result = made.generate([parted], GREEDY)[0]
    assert result.stats.cached_tokens == 20
    assert made.generate([parted], GREEDY)[0].stats.cached_tokens == len(parted) - 1
    assert result.token_ids == engine(model, keep_prefixes=False).generate([parted], GREEDY)[0].token_ids


def test_samples_of_one_prompt_share_what_was_kept(model):
    made = engine(model)
    params = SamplingParams(n=2, max_tokens=6, seed=1)
    plain = engine(model, keep_prefixes=False).generate(TEXT, params)[0]
    for _ in range(2):
        again = made.generate(TEXT, params)[0]
        assert [s.token_ids for s in again.samples] == [s.token_ids for s in plain.samples]
    assert min(s.stats.cached_tokens for s in again.samples) > 40


def test_a_text_that_begins_as_one_that_runs_copies_what_that_has_read(model):
    made = engine(model)
    ids = engine(model).encode(TEXT)
    other = [*ids[:40], *ids[:20]]
    running = made.submit(ids, GREEDY.with_(max_tokens=60))
    made.step()
    joined = made.submit(other, GREEDY)
    while made.has_unfinished_requests:
        made.step()
    fresh = engine(model, keep_prefixes=False).generate([ids, other], [GREEDY.with_(max_tokens=60), GREEDY])
    assert [running.token_ids, joined.token_ids] == [r.token_ids for r in fresh]
    assert (running.stats.cached_tokens, joined.stats.cached_tokens) == (0, 40)


def test_nothing_is_kept_of_a_step_that_failed(model, monkeypatch):
    made = engine(model, drafter=None)
    ids = engine(model).encode(TEXT)
    made.add_request(Request("a", tuple(ids), GREEDY, 1, 0))
    made.step()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(model, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        made.step()
    made.discard(["a"])
    assert made.generate([ids], GREEDY)[0].stats.cached_tokens == 0


def test_what_another_engine_on_the_model_wrote_over_is_not_taken_for_what_was_kept(model):
    one = engine(model)
    other = engine(model)
    ids = one.encode(TEXT)
    prompts = [other.encode(p.text)[:40] for p in pair.prompts()[1:3]]
    first = one.generate([ids], GREEDY)[0]
    other.generate(prompts, GREEDY)
    again = one.generate([ids], GREEDY)[0]
    assert (again.token_ids, again.stats.cached_tokens < 10) == (first.token_ids, True)


def test_a_slot_that_kept_most_is_taken_and_then_an_empty_one(model):
    slots = Slots(model)
    first = slots.take()
    second = slots.take()
    model.prefill([first, second], [[5, 6, 7, 8], [5, 6, 1]])
    slots.give_back(first, [5, 6, 7, 8])
    slots.give_back(second, [5, 6, 1])
    taken = slots.take([5, 6, 7, 9])
    assert (taken, int(model.lengths[taken])) == (first, 3)
    other = slots.take([9, 9])
    assert (other, int(model.lengths[other])) == (second, 0)
    slots.give_back(other)
    slots.give_back(taken, [5, 6, 7])
    assert slots.take([9]) == other


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_the_next_turn_of_many_conversations_reads_only_what_is_new(model, drafter):
    kept = engine(model, drafter=drafter, prefix_cache_bytes=1 << 28)
    fresh = engine(model, drafter=drafter, keep_prefixes=False)
    turns = [
        kept.encode(
            f"class Number{number}:\n" + f"    def function_{number}(a, b):\n        return a\n\n" * 8
        )
        for number in range(20)
    ]
    answers = kept.generate(turns, GREEDY)
    nexts = [[*r.prompt_token_ids, *r.token_ids, *kept.encode("\nimport os\n")] for r in answers]
    again = kept.generate(nexts, GREEDY)
    block = model.block_tokens
    unread = [
        len(r.prompt_token_ids) + len(r.token_ids) - later.stats.cached_tokens
        for r, later in zip(answers, again, strict=True)
    ]
    assert max(unread) <= block
    assert [r.token_ids for r in again] == [r.token_ids for r in fresh.generate(nexts, GREEDY)]
    assert kept.prefix_cache is not None and kept.prefix_cache.hit_tokens > 18 * min(map(len, turns)) // 2


def test_texts_whose_slots_are_taken_are_forgotten_without_a_prefix_cache(model):
    made = engine(model)
    turns = [made.encode(f"def function_{number}(a, b):\n    return") for number in range(5)]
    first = made.generate(turns, GREEDY)
    assert (
        made.generate([[*first[0].prompt_token_ids, *first[0].token_ids]], GREEDY)[0].stats.cached_tokens
        < len(turns[0]) // 2
    )
