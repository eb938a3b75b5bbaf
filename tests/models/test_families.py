"""Compiled families of which the other tests have no other model: rounds of random trees, cuts and copies equal fresh passes of transformers."""

import pytest

from polydraft.models.compiled.model import CompiledModel
from polydraft.models.loading import checkpoint
from polydraft.models.networks import COMPILED, LLAMA_FAMILY
from tests.models.small_types import small_config
from tests.models.tree_rounds import Play, fresh, small_model
from tests.support.closeness import assert_close

HYBRIDS = {
    "falcon_h1",
    "granitemoehybrid",
    "lfm2",
    "lfm2_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
}
"""Of `test_hybrids`."""
FAMILIES = sorted(COMPILED.keys() - HYBRIDS - LLAMA_FAMILY)
SETTINGS = {
    "cohere": {"use_qk_norm": True},
    "falcon": {"bias": True},
    "ministral3": {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "stablelm": {"use_parallel_residual": True, "use_qkv_bias": True},
    "starcoder2": {"sliding_window": 8},
    "gpt_neox": {"use_parallel_residual": False},
}
"""What the defaults of a class leave out."""


def config_of(kind):
    config = small_config(kind)
    for name, value in SETTINGS.get(kind, {}).items():
        if kind == "ministral3":
            config.rope_parameters[name] = value
        else:
            setattr(config, name, value)
    return config


@pytest.mark.parametrize("kind", FAMILIES)
def test_rounds_of_random_trees_cuts_and_copies_equal_fresh_passes(kind, tmp_path):
    module = small_model(config_of(kind))
    module.save_pretrained(tmp_path)
    target = CompiledModel(
        checkpoint.of_folder(tmp_path), max_num_seqs=4, max_model_len=200, cache_dtype="float32"
    )
    game = Play(module, target)
    game.join(0, 1, 2)
    size = abs(fresh(module, game.texts[0])).max()
    errors = [game.round(("some", "all", "none")[step % 3]) for step in range(6)]
    assert max(*errors, game.next_error([2, 0, 1])) < 1e-4 * size
    text = game.texts[0][:-1]
    target.copy(0, 3, len(text) // 2)
    logits = target.prefill([3], [text[len(text) // 2 :]]).logits[0, 0]
    assert_close(logits, fresh(module, text)[-1], 1e-4)
    target.cut(0, 3)
    assert_close(target.prefill([0], [[5, 9]]).logits[0, 0], fresh(module, [*text[:3], 5, 9])[-1], 1e-4)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
        ("falcon", {"parallel_attn": False, "multi_query": False}),
        ("stablelm", {"use_parallel_residual": False}),
        ("gpt_neox", {"attention_bias": False}),
        ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
        ("ernie4_5", {"use_bias": True}),
        ("nemotron", {"attention_bias": True, "mlp_bias": True}),
        ("jais2", {"attention_bias": False, "mlp_bias": False}),
        (
            "hunyuan_v1_dense",
            {"rope_parameters": {"rope_type": "dynamic", "alpha": 9.0, "rope_theta": 1e4, "factor": 1.0}},
        ),
        ("olmo2", {"attention_bias": False, "num_key_value_heads": 4}),
    ],
)
def test_what_a_family_may_have_beside_its_defaults_is_computed(kind, more):
    config = small_config(kind)
    for name, value in more.items():
        setattr(config, name, value)
    module = small_model(config)
    target = CompiledModel(module, max_num_seqs=1, max_model_len=64, cache_dtype="float32")
    text = [5, 9, 4, 9, 5, 7, 2, 7, 5, 1, 5, 3, 11, 8]
    assert_close(target.prefill([0], [text]).logits[0, 0], fresh(module, text)[-1], 1e-4)


@pytest.mark.parametrize(
    ("kind", "more", "reason"),
    [
        ("falcon", {"alibi": True}, "linear biases"),
        ("olmo", {"clip_qkv": 8.0}, "limited to 8.0"),
        ("phi", {"qk_layernorm": True}, "norms of queries and keys"),
        ("stablelm", {"qk_layernorm": True}, "norms of its own"),
        ("llama", {"mlp_bias": True}, "without biases"),
    ],
)
def test_what_is_not_computed_of_a_family_is_named(kind, more, reason):
    config = small_config(kind)
    for name, value in more.items():
        setattr(config, name, value)
    assert reason in CompiledModel.why_unsupported(small_model(config))
