"""Gemma 4's folders: what they may hold more, what they may leave out, and what is refused by name."""

import json

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from polydraft.models.compiled.model import CompiledModel
from polydraft.models.load import load_model
from polydraft.models.loading import checkpoint
from tests.models.test_targets import FAMILY
from tests.models.tree_rounds import fresh, small_model
from tests.support.closeness import assert_close

SHARING = FAMILY["gemma4 whose last layers share keys and values"]
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
TEXT = [5, 9, 4, 9, 5, 7, 2, 7, 5, 1, 5, 3, 11, 8]


def folder_of(config, place):
    module = small_model(config)
    module.save_pretrained(place)
    return module


def test_products_of_keys_and_values_that_no_layer_reads_may_lie_in_a_folder(tmp_path):
    module = folder_of(SHARING, tmp_path)
    file = tmp_path / "model.safetensors"
    more = {
        f"model.layers.{layer}.self_attn.{part}": torch.ones(16 * width // 8, 32)
        if "proj" in part
        else torch.ones(width)
        for layer, width in ((2, 8), (3, 16))
        for part in ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    }
    save_file({**load_file(file), **more}, file, {"format": "pt"})
    target = load_model(str(tmp_path), backend="compiled", max_num_seqs=1, cache_dtype="float32")
    assert_close(target.prefill([0], [TEXT]).logits[0, 0], fresh(module, TEXT)[-1], 1e-4)


def test_layers_that_share_keys_and_values_take_no_memory_for_them():
    sizes = {**SHARING.to_dict(), "hidden_size_per_layer_input": 0}
    sizes.pop("model_type")
    own, shared = (
        CompiledModel(
            small_model(hf.Gemma4TextConfig(**sizes | {"num_kv_shared_layers": count})), max_num_seqs=1
        )
        for count in (0, 2)
    )
    assert own.bytes_per_token == 2 * shared.bytes_per_token


def test_a_folder_says_widths_of_heads_as_its_authors_do(tmp_path):
    folder_of(SHARING, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    ours = checkpoint.of_folder(tmp_path)
    wide = settings.pop("per_layer_config")["1"]
    settings |= {"global_head_dim": wide["head_dim"], "num_global_key_value_heads": None}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    again = checkpoint.of_folder(tmp_path)
    assert again.spec == ours.spec and again.spec.wide.width == wide["head_dim"]


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("not causal", {"use_bidirectional_attention": "all"}),
        ("several widths", {"per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 8}}}),
        (
            "not proportional",
            {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}},
        ),
    ],
)
def test_what_is_not_compiled_is_refused_by_name(tmp_path, said, change):
    folder_of(SHARING, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(checkpoint.UncompiledError, match=said):
        checkpoint.of_folder(tmp_path)


@pytest.mark.parametrize("kind", ["bfloat16", "q8_0"])
def test_keys_and_values_of_both_widths_are_rounded(kind):
    sizes = {
        name: size
        for name, size in FAMILY["gemma4 whose values are its keys"].to_dict().items()
        if name != "model_type"
    }
    wide = {
        "head_dim": 32,
        "per_layer_config": {
            1: {"head_dim": 64, "num_key_value_heads": 1},
            3: {"head_dim": 64, "num_key_value_heads": 1},
        },
    }
    module = small_model(hf.Gemma4TextConfig(**sizes | wide))
    exact, rounded = (CompiledModel(module, max_num_seqs=1, cache_dtype=dtype) for dtype in ("float32", kind))
    logits = [model.prefill([0], [TEXT * 4]).logits[0, 0] for model in (exact, rounded)]
    assert rounded.bytes_per_token < 0.6 * exact.bytes_per_token
    assert 0 < np.abs(logits[0] - logits[1]).max() < 0.2 * np.abs(logits[0]).max()
