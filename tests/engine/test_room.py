"""A request may have the whole context though not all can at once: the KV cache grows, and what has outgrown it waits and loses no token."""

import os
import sys
from pathlib import Path

import pytest

from polydraft import Engine, Request, SamplingParams
from polydraft.models import load, memory, pair
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.slots import TREE_ROOM


def model(**options) -> CompiledModel:
    target = load.load_model(str(pair.draft_folder()), device="cpu", **options)
    assert isinstance(target, CompiledModel)
    return target


def test_a_slot_has_the_context_that_one_text_may_fill_and_all_share_the_memory(monkeypatch):
    whole = model(max_num_seqs=1)
    bytes_per_token = whole.bytes_per_token
    longest = whole.max_model_len
    monkeypatch.setattr(memory, "available_bytes", lambda device: 4 * longest * bytes_per_token)
    many = model(max_num_seqs=64)
    assert many.max_model_len == longest and longest < many.cache_tokens <= 2 * longest
    assert many.cache_bytes == many.cache_tokens * bytes_per_token


def small(tokens, **options):
    target = model(max_num_seqs=4, max_model_len=600)
    target.cache_tokens = tokens
    return target, Engine.of(target, drafter=None, **options)


def answered(engine, prompts):
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    samples = [
        engine.add_request(Request(str(i), tuple(prompt), params, 0)) for i, prompt in enumerate(prompts)
    ]
    most = 0
    while engine.has_unfinished_requests:
        engine.step()
        most = max(most, engine.num_running)
    return [sample.token_ids for sample in samples], most


@pytest.mark.parametrize("keep", [False, True])
def test_texts_that_outgrow_the_cache_wait_again_and_keep_their_tokens(keep):
    prompts = [[i + 5] * 100 for i in range(3)]
    expected, together = answered(small(4 * (600 + TREE_ROOM))[1], prompts)
    target, engine = small(2 * (100 + TREE_ROOM) + 100, keep_prefixes=keep)
    found, most = answered(engine, prompts)
    assert (together, most) == (3, 2) and found == expected
    assert target.written.sum() <= target.cache_tokens and engine.num_free == 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_trimmed_slot_held_goes_back_to_the_system():
    def resident():
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )

    target = model(max_num_seqs=48)
    target.prefill(range(48), [[5] * 900] * 48)
    full = resident()
    held = 48 * 900 * target.bytes_per_token
    for slot in range(1, 48):
        target.trim(slot)
    assert full - resident() > held / 2 and target.lengths.tolist() == [900] + [0] * 47
