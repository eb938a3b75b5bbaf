"""Latent attention keeps one compressed row of each token, in every type of cache, behind cuts, copies and kept prefixes."""

import numpy as np
import pytest
import transformers as hf

from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.mixers.cache import whole
from polydraft.models.prefix_cache import PrefixCache
from tests.models.test_targets import FAMILY
from tests.models.tree_rounds import fresh, small_model
from tests.support.closeness import assert_close

TEXT = np.random.default_rng(0).integers(1, 61, 300).tolist()
WIDE = {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}


def wide_model():
    sizes = {name: size for name, size in FAMILY["glm4_moe_lite"].to_dict().items() if name != "model_type"}
    return small_model(hf.Glm4MoeLiteConfig(**sizes | WIDE))


def test_a_token_takes_its_compressed_row_alone():
    config = FAMILY["deepseek_v3"]
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        target = CompiledModel(small_model(config), max_num_seqs=1, cache_dtype=dtype)
        row = config.kv_lora_rank + config.qk_rope_head_dim
        assert target.bytes_per_token == config.num_hidden_layers * size * whole(row)


@pytest.mark.parametrize("kind", ["bfloat16", "q8_0"])
def test_rounded_rows_are_near_those_that_are_not(kind):
    module = wide_model()
    exact, rounded = (CompiledModel(module, max_num_seqs=1, cache_dtype=dtype) for dtype in ("float32", kind))
    logits = [model.prefill([0], [TEXT]).logits[0, 0] for model in (exact, rounded)]
    assert_close(logits[0], fresh(module, TEXT)[-1], 1e-4)
    assert 0 < np.abs(logits[0] - logits[1]).max() < 0.2 * np.abs(logits[0]).max()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q8_0"])
def test_a_text_behind_a_kept_prefix_a_copy_or_a_cut_is_the_same(kind):
    target = CompiledModel(wide_model(), max_num_seqs=3, cache_dtype=kind)
    expected = target.prefill([0], [TEXT]).logits[0, 0]
    cache = PrefixCache(target, 1 << 30)
    cache.store(0, TEXT)
    target.copy(0, 1, 200)
    target.cut(0, 130)
    cache.load(2, TEXT)
    for slot in range(3):
        length = int(target.lengths[slot])
        assert 0 < length < len(TEXT)
        assert np.array_equal(target.prefill([slot], [TEXT[length:]]).logits[0, 0], expected)


def test_greedy_texts_with_drafts_are_those_without():
    target = CompiledModel(wide_model(), max_num_seqs=2, max_model_len=200)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    prompts = [[5, 9, 5, 9, 5, 9, 2, 7, 5, 9, 5, 9], [7, 1, 3]]
    plain, *drafted = (
        [r.token_ids for r in Engine.of(target, **options).generate(prompts, params)]
        for options in (
            {"drafter": None},
            {"drafter": "ngram", "depth": 4},
            {"drafter": "ngram", "num_paths": 4, "depth": 3},
        )
    )
    assert all(texts == plain for texts in drafted)
