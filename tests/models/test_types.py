"""Drafts change no text, whatever the type of a model: windows are crossed, states of recurrent layers rolled back."""

import numpy as np
import pytest
import torch
import transformers as hf

from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.errors import CapacityError, ModelLoadError
from polydraft.models.load import in_transformers
from polydraft.models.torch import own_cache
from polydraft.models.torch.hf import HFTarget
from polydraft.models.torch.own_cache import OwnCacheTarget
from tests.models.small_types import small_config
from tests.models.tree_rounds import Play, fresh, small_model
from tests.support.closeness import assert_close
from tests.support.tiny import SIZES

MASKED = [
    "afmoe",
    "apertus",
    "arcee",
    "beam",
    "bitnet",
    "cohere",
    "cohere2",
    "cwm",
    "dots1",
    "ernie4_5",
    "exaone4",
    "falcon",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_oss",
    "granite",
    "granitemoe",
    "hunyuan_v1_dense",
    "llama4_text",
    "mellum",
    "mimo_v2_flash",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
]
"""Types that run in a cache of ours."""
OWN = [
    "bamba",
    "bloom",
    "falcon_h1",
    "gpt_neo",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "mamba2",
    "mpt",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
]
"""Types whose cache is copied for each pass over drafts."""
PLAIN = ["falcon_mamba", "jamba", "mamba", "minimax", "rwkv"]
"""Types that transformers computes wrongly over several tokens behind a state."""
PROMPTS = [[5, 9, 5, 9, 5, 9, 2, 7, 5, 9, 5, 9], [7, 1, 3]]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def generated(model, prompt):
    """The text of `generate`."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def assert_equal_but_for_ties(model, prompt, ids):
    expected = generated(model, prompt)
    at = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=True)) if a != b), None)
    if at is not None:
        logits = fresh(model, prompt + expected[:at])[-1]
        assert abs(logits[expected[at]] - logits[ids[at]]) < 1e-4 * np.abs(logits).max(), (at, ids, expected)


@pytest.mark.parametrize("kind", [*MASKED, *OWN])
def test_texts_with_drafts_are_those_of_generate(kind):
    model = small_model(small_config(kind))
    target = in_transformers(model, max_model_len=64, max_num_seqs=2)
    assert type(target) is (HFTarget if kind in MASKED else OwnCacheTarget)
    assert target.plain_reason is None
    for options in ({"num_paths": 4, "depth": 3}, {"depth": 2}):
        engine = Engine.of(target, drafter="ngram", eos_token_ids=(), **options)
        for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
            assert result.stats.drafter_error is None
            assert_equal_but_for_ties(model, prompt, result.token_ids)


@pytest.mark.parametrize(
    "kind", ["cohere2", "gemma4_text", "gpt_oss", "llama4_text", "mistral", "bamba", "lfm2", "qwen3_5_text"]
)
def test_logits_equal_a_fresh_pass_over_rounds_of_random_trees_beyond_the_window(kind):
    model = small_model(small_config(kind))
    game = Play(model, in_transformers(model, max_model_len=200, max_num_seqs=3))
    game.join(0, 1, 2)
    errors = [game.round(("some", "all", "none")[step % 3]) for step in range(9)]
    assert max(*errors, game.next_error([2, 0, 1])) < 1e-4 * np.abs(fresh(model, game.texts[0])).max()


@pytest.mark.parametrize("kind", PLAIN)
def test_types_that_take_no_drafts_are_decoded_plainly_and_say_so(kind):
    model = small_model(small_config(kind))
    target = in_transformers(model, max_model_len=64, max_num_seqs=2)
    with pytest.warns(UserWarning, match=r"decoded plainly, without drafts: .*which is faster"):
        engine = Engine.of(target, eos_token_ids=())
    for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        assert_equal_but_for_ties(model, prompt, result.token_ids)


DECODER = SIZES | {"is_decoder": True, "max_position_embeddings": 130}
KIN = {
    "roberta": hf.RobertaConfig,
    "camembert": hf.CamembertConfig,
    "xlm-roberta-xl": hf.XLMRobertaXLConfig,
    "roberta-prelayernorm": hf.RobertaPreLayerNormConfig,
    "data2vec-text": hf.Data2VecTextConfig,
}


@pytest.mark.parametrize("kind", KIN)
def test_models_that_count_positions_from_behind_padding_are_given_those(kind, monkeypatch):
    """Logits of a forward pass to which no positions are given; they were trained so."""
    model = small_model(KIN[kind](**DECODER))
    target = in_transformers(model, max_num_seqs=3)
    assert type(target) is HFTarget and target.max_model_len == 130 - 2
    game = Play(model, target)
    monkeypatch.setattr(
        game, "token", lambda: game.random.randrange(2, 61)
    )  # padding within a text is counted, too
    game.join(0, 1, 2)
    errors = [game.round(("some", "all", "none")[step % 3]) for step in range(6)]
    assert max(*errors, game.next_error([2, 0, 1])) < 1e-4 * np.abs(fresh(model, game.texts[0])).max()
    with pytest.raises(
        CapacityError,
        match="max_model_len=129 was given; the model's context holds 128, as positions begin at 2",
    ):
        in_transformers(model, max_model_len=129)


def test_a_model_that_counts_its_own_positions_in_its_own_cache_is_given_them(monkeypatch):
    monkeypatch.setattr(own_cache, "position_behind_padding", lambda config: None)
    model = small_model(hf.RobertaConfig(**DECODER))
    target = OwnCacheTarget(model, max_model_len=64)
    assert_close(target.prefill([0], [PROMPTS[0]]).logits[0, 0], fresh(model, PROMPTS[0])[-1])


def test_a_model_whose_cache_is_of_another_model_reads_its_text_again():
    config = hf.CpmAntConfig(
        vocab_size=61, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=48, num_hidden_layers=2, prompt_length=3,
        prompt_types=4, segment_types=4, position_bias_num_buckets=32,
    )  # fmt: skip
    model = small_model(config)
    with pytest.warns(UserWarning, match="reads its whole text again"):
        target = in_transformers(model, max_model_len=64)
    assert_close(target.prefill([0], [PROMPTS[0]]).logits[0, 0], fresh(model, PROMPTS[0])[-1])


@pytest.mark.parametrize("kind", [hf.XLNetConfig, hf.XLMConfig])
def test_models_whose_rows_are_of_other_tokens_are_refused_by_name(kind):
    with pytest.raises(ModelLoadError, match="its forward pass does not predict the next token of a text"):
        in_transformers(
            small_model(
                kind(vocab_size=61, d_model=32, emb_dim=32, n_layer=1, n_layers=1, n_head=4, n_heads=4)
            )
        )


def test_errors_of_transformers_in_the_proof_say_which_model_they_are_of():
    config = small_config("qwen3")
    config.layer_types = ["sliding_attention"] * 4
    config.sliding_window = None
    with pytest.raises(
        ModelLoadError, match=r"Qwen3ForCausalLM does not run in transformers \(ValueError: .*sliding_window"
    ):
        in_transformers(small_model(config), max_model_len=64)


def test_a_model_that_takes_positions_from_the_length_of_a_cache_is_found_out():
    """Llama 4 scales queries by it: in a cache of ours, logits beyond 8,192 tokens would be wrong."""
    config = small_config("llama4_text")
    config.attn_temperature_tuning = True
    assert type(in_transformers(small_model(config), max_model_len=64)) is OwnCacheTarget
