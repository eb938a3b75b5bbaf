"""A file keeps prefix caches across restarts: what comes back is what a prefill makes, and what is damaged or of another model is not used."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from polydraft import AsyncEngine, Engine, SamplingParams
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine import prefixes
from polydraft.errors import InvalidInputError, PrefixWarning
from polydraft.models import load, pair
from polydraft.models.prefix_cache import PrefixCache
from polydraft.models.prefix_file import load_prefixes, prefix_contents, save_prefixes
from polydraft.models.slot_pool import Slots
from polydraft.models.torch.hf import HFTarget
from tests.models.test_prefix_cache import ENDS, SHARED, stored
from tests.models.test_slots import after, made
from tests.models.test_targets import FAMILY
from tests.models.tree_rounds import ARCHITECTURES, small_model
from tests.support.reading import read_counts
from tests.support.tiny import compiled

TEXTS = [[*SHARED, *end] for end in ENDS]


def kept(model, capacity=1 << 30):
    slots = Slots(model)
    cache = PrefixCache(model, capacity)
    return {"target": (slots, cache)}, cache


def written(path, model):
    caches, cache = kept(model)
    for text in TEXTS:
        stored(model, cache, text)
    return save_prefixes(path, prefix_contents(caches))


@pytest.mark.parametrize(("kind", "name"), [(HFTarget, "llama"), (compiled, "llama"), (compiled, "lfm2")])
def test_entries_come_back_as_a_prefill_makes_them(tmp_path, kind, name):
    inner = small_model(FAMILY[name])
    path = tmp_path / "prefixes"
    num_tokens = written(path, kind(inner, max_num_seqs=3))
    model = kind(inner, max_num_seqs=3)
    caches, cache = kept(model)
    assert load_prefixes(path, caches) == (num_tokens, None)
    size = model.block_tokens
    assert [cache.length(text) for text in TEXTS] == [len(text) // size * size for text in TEXTS]
    cache.load(0, TEXTS[1])
    model.prefill([1], [TEXTS[1][: int(model.lengths[0])]])
    assert np.array_equal(after(model, 0, 3), after(model, 1, 3))


def test_the_most_recent_come_back_where_there_is_less_room(tmp_path):
    model = made(compiled)[1]
    path = tmp_path / "prefixes"
    written(path, model)
    size = model.block_tokens
    caches, cache = kept(model, len(TEXTS[2]) // size * size * model.bytes_per_token)
    assert load_prefixes(path, caches)[0] == cache.length(TEXTS[2]) == len(TEXTS[2]) // size * size
    assert cache.num_bytes <= cache.capacity_bytes and model.lengths.tolist() == [0, 0, 0]


def test_what_is_damaged_cut_off_or_of_other_weights_is_not_used(tmp_path):
    model = made(compiled)[1]
    path = tmp_path / "prefixes"
    written(path, model)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in [20, 60, *rng.integers(300, len(whole), 20)]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        caches, cache = kept(model)
        tokens, reason = load_prefixes(path, caches)
        assert (tokens, cache.num_bytes) == (0, 0) and reason, at
    for length in (8, 16, 40, 400, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert load_prefixes(path, kept(model)[0])[0] == 0
    path.write_bytes(whole)
    torch.manual_seed(5)
    other = compiled(small_model(ARCHITECTURES["llama"], seed=7), max_num_seqs=3)
    assert load_prefixes(path, kept(other)[0]) == (0, "target model: these weights compute other entries")
    rounded = compiled(made(compiled)[0], max_num_seqs=3, quantization="int8")
    assert "another model" in str(load_prefixes(path, kept(rounded)[0])[1])


def test_a_file_of_another_kind_is_refused_and_stays(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    for place in (path, tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(InvalidInputError, match="prefix_cache_file"):
            Engine.embedded(prefix_cache_file=place)
    assert path.read_text() == "mine"


PROMPTS = [
    "def add(a, b):\n" + "    # a line that says little\n" * 20 + f"    return {end}"
    for end in ("a + b", "b", "a")
]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def test_target_and_draft_model_go_on_with_prompts_of_another_process(tmp_path, monkeypatch):
    path = tmp_path / "prefixes"
    options = {"max_num_seqs": 2, "depth": 3, "drafter": "model"}
    first = Engine.embedded(**options)
    expected = [result.text for result in first.generate(PROMPTS, GREEDY)]
    assert first.save_prefixes(path) > 300
    second = Engine.embedded(**options, prefix_cache_file=path)
    assert second.draft_slots is not None and second.prefix_caches.keys() == {"target", "draft"}
    assert isinstance(second.drafter, ModelDrafter)
    read = {
        "target": read_counts(second.target, monkeypatch),
        "draft": read_counts(second.drafter.model, monkeypatch),
    }
    results = second.generate(PROMPTS, GREEDY)
    assert [result.text for result in results] == expected
    assert all(result.stats.cached_tokens > 100 for result in results)
    assert all(sum(counts) < 40 * len(PROMPTS) for counts in read.values()), read


def test_a_draft_model_that_takes_blocks_drafts_the_tokens_of_their_text():
    folder = str(pair.draft_folder())
    model: Any = load.load_model(folder, device="cpu", max_num_seqs=3, max_model_len=512)
    text = [5, 1999, 7, 1500] * 40
    model.draft_over(512)
    cache = PrefixCache(model, 1 << 30)
    stored(model, cache, text)
    cache.load(0, text)
    model.prefill([1], [text[: int(model.lengths[0])]])
    ids = model.output_tokens
    assert ids is not None
    assert np.array_equal(ids.in_text[0], ids.in_text[1]) and ids.in_text[0].any()


def test_a_file_that_is_not_used_is_told(tmp_path):
    path = tmp_path / "prefixes"
    written(path, made(compiled)[1])
    with pytest.warns(PrefixWarning, match="another model|other"):
        Engine.embedded(prefix_cache_file=path, drafter=None)


def test_an_engine_that_ends_keeps_its_prompts_for_the_next(tmp_path):
    path = tmp_path / "prefixes"

    async def answered():
        async with AsyncEngine(Engine.embedded(prefix_cache_file=path)) as engine:
            return (await engine.generate(PROMPTS[0], GREEDY))[0]

    first = asyncio.run(answered())
    second = asyncio.run(answered())
    assert (first.stats.cached_tokens, second.text) == (0, first.text) and second.stats.cached_tokens > 100


def test_a_process_that_is_killed_leaves_the_prompts_that_it_had_read(tmp_path, monkeypatch):
    monkeypatch.setattr(prefixes, "WRITE_SECONDS", 0.0)
    path = tmp_path / "prefixes"

    async def main():
        async with AsyncEngine(
            Engine.embedded(max_num_seqs=2, drafter="none", prefix_cache_file=path)
        ) as engine:
            await engine.generate(PROMPTS[0], GREEDY)
            for _ in range(1000):
                if path.exists():
                    break
                await asyncio.sleep(0.01)
            return path.read_bytes()  # what a kill would leave

    kept = asyncio.run(main())
    path.write_bytes(kept)
    assert Engine.embedded(max_num_seqs=2, drafter="none").load_prefixes(path) > 100
