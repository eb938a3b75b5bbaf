"""Blocks of KV cache entries outlive their slots: bit for bit, shared where texts begin alike, the least recently used dropped first."""

import numpy as np
import pytest

from polydraft.errors import InvalidInputError
from polydraft.models.prefix_cache import PrefixCache
from polydraft.models.slot_pool import Slots
from polydraft.models.torch.hf import HFTarget
from tests.models.test_slots import after, made
from tests.support.tiny import compiled

CONFIGURATIONS = [(HFTarget, {}), (compiled, {}), (compiled, {"cache_dtype": "bfloat16"})]
EVERY = pytest.mark.parametrize(("kind", "options"), CONFIGURATIONS)
SHARED = [5, 9, 2, 7] * 20
ENDS = ([7, 1] * 20, [3, 8] * 20, [4, 6] * 20)


@pytest.fixture
def model():
    return made(compiled)[1]


def stored(model, cache, text):
    slots = Slots(model)
    slot = slots.take()
    model.prefill([slot], [text])
    cache.store(slot, text)
    slots.give_back(slot)


@EVERY
def test_entries_that_come_back_give_the_logits_of_a_fresh_prefill(kind, options):
    inner = made(kind)[0]
    model = kind(inner, max_num_seqs=3, **options)
    size = model.block_tokens
    text = [*SHARED, *ENDS[0]]
    cache = PrefixCache(model, 1 << 30)
    stored(model, cache, text)
    stored(model, cache, [9] * len(text))  # over what the slot held
    model.prefill([0], [text[: size + 3]])  # a part of it is there, and no whole block
    length = cache.length([*text, 1])
    cache.load(0, text)
    assert (length, int(model.lengths[0]), cache.hit_tokens) == (
        len(text) // size * size,
        length,
        length - size,
    )
    model.prefill([1], [text[:length]])
    assert np.array_equal(after(model, 0, 3), after(model, 1, 3))


def test_a_beginning_that_texts_share_is_stored_once(model):
    cache = PrefixCache(model, 1 << 30)
    size = model.block_tokens
    texts = [[*SHARED, *end] for end in ENDS]
    for text in texts:
        stored(model, cache, text)
    shared = len(SHARED) // size
    assert cache.num_bytes == cache.block_bytes * (shared + sum(len(text) // size - shared for text in texts))
    assert [cache.length(text) for text in texts] == [len(text) // size * size for text in texts]
    assert (cache.length([*SHARED, 1]), cache.length([1, *SHARED])) == (shared * size, 0)


def test_the_least_recently_used_goes_first_and_the_capacity_holds(model):
    size = model.block_tokens
    texts = [[token] * 3 * size for token in (3, 4, 5)]
    cache = PrefixCache(model, 6 * size * model.bytes_per_token)
    for text in texts[:2]:
        stored(model, cache, text)
    cache.load(0, texts[0])
    stored(model, cache, texts[2])
    assert [cache.length(text) for text in texts] == [3 * size, 0, 3 * size]
    assert (cache.evicted_tokens, cache.num_bytes) == (3 * size, cache.capacity_bytes)


def test_of_a_text_that_is_too_long_the_beginning_stays(model):
    size = model.block_tokens
    cache = PrefixCache(model, 2 * size * model.bytes_per_token)
    stored(model, cache, [7] * 5 * size)
    assert (cache.length([7] * 5 * size), cache.evicted_tokens) == (2 * size, 0)
    nothing = PrefixCache(model, 0)
    stored(model, nothing, [7] * 5 * size)
    assert (nothing.num_bytes, nothing.length([7] * 5 * size)) == (0, 0)
    with pytest.raises(InvalidInputError, match="prefix_cache_bytes=-1"):
        PrefixCache(model, -1)
