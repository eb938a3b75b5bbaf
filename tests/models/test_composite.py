"""Models of pictures and text run by their text model: windows and layer types are those of its configuration."""

import numpy as np
import pytest
import torch
import transformers as hf

from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.errors import ModelLoadError
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.load import load_model
from polydraft.models.torch.hf import HFTarget
from tests.models.small_types import SIZES, small_config
from tests.models.test_types import PROMPTS, assert_equal_but_for_ties
from tests.models.tree_rounds import small_model
from tests.support.closeness import assert_close

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
ROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [1, 1, 2]}


def text(kind, **changed):
    sizes = small_config(kind).to_dict()
    return {**{name: sizes[name] for name in sizes if name != "model_type"}, **changed}


def small_text(kind, **changed):
    """Sizes alone, where a text model has no windows."""
    sizes = text(kind)
    return {name: sizes[name] for name in SIZES if name in sizes and "window" not in name} | changed


CONFIGS = {
    "gemma3": lambda: hf.Gemma3Config(
        text_config=text("gemma3_text"), vision_config=VISION, mm_tokens_per_image=4
    ),
    "mistral3": lambda: hf.Mistral3Config(
        text_config={**text("mistral"), "model_type": "mistral"},
        vision_config={**VISION, "model_type": "pixtral"},
    ),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config=small_text("qwen3", rope_parameters=ROPE),
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
        },
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_folder_of_pictures_and_text_has_the_texts_of_generate_with_drafts_beyond_the_window(
    tmp_path, kind
):
    config = CONFIGS[kind]()
    automatic = hf.AutoModelForCausalLM if kind == "gemma3" else hf.AutoModelForImageTextToText
    small_model(config, automatic=automatic).save_pretrained(tmp_path)
    target = load_model(str(tmp_path), backend="transformers", max_model_len=64, max_num_seqs=2)
    assert isinstance(target, HFTarget)
    engine = Engine.of(target, drafter="ngram", num_paths=4, depth=3, eos_token_ids=())
    results = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert_equal_but_for_ties(target.model, prompt, result.token_ids)


def test_sizes_by_layer_in_a_configuration_are_read(tmp_path):
    small_model(small_config("gemma3n_text")).save_pretrained(tmp_path)
    assert isinstance(load_model(str(tmp_path), max_model_len=64, max_num_seqs=1), HFTarget)


_PICTURES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def gemma3():
    text = _TEXT | {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    }
    ids = {"image_token_index": 93, "boi_token_index": 94, "eoi_token_index": 95}
    config = hf.Gemma3Config(text_config=text, vision_config=_PICTURES, mm_tokens_per_image=1, **ids)
    return hf.Gemma3ForConditionalGeneration(config)


def qwen35():
    text = _TEXT | {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
    }
    text |= {"linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    pictures = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
    }
    ids = {"image_token_id": 92, "video_token_id": 93, "vision_start_token_id": 94, "vision_end_token_id": 95}
    return hf.Qwen3_5ForConditionalGeneration(
        hf.Qwen3_5Config(text_config=text, vision_config=pictures, **ids)
    )


@pytest.mark.parametrize("make", [gemma3, qwen35])
@torch.inference_mode()
def test_the_language_model_of_a_composite_folder_runs_compiled_and_is_the_one_of_transformers(
    make, tmp_path
):
    torch.manual_seed(0)
    model = make().float().eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
    model.tie_weights()
    model.save_pretrained(tmp_path)
    token_ids = torch.randint(1, 90, (1, 20))
    expected = model(input_ids=token_ids, use_cache=False).logits[0, -1].detach().numpy()
    target = load_model(str(tmp_path), max_num_seqs=1, max_model_len=64, cache_dtype="float32")
    assert isinstance(target, CompiledModel)
    logits = target.prefill([0], [token_ids[0].tolist()]).logits[0, 0]
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_a_composite_folder_with_a_damaged_index_is_refused(tmp_path):
    gemma3().save_pretrained(tmp_path, max_shard_size="50KB")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelLoadError, match="does not say which file has which tensor"):
        load_model(str(tmp_path), max_num_seqs=1)


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_the_language_model_of_gemma_4_is_compiled_from_the_folder_of_all_of_it(tmp_path, kind):
    text_kind = f"{kind}_text"
    sizes = {**text(text_kind, num_kv_shared_layers=0), "model_type": text_kind}
    config = hf.AutoConfig.for_model(kind, text_config=sizes, vision_config=None, audio_config=None)
    model = small_model(config, automatic=hf.AutoModelForImageTextToText)
    model.save_pretrained(tmp_path)
    target = load_model(str(tmp_path), backend="compiled", max_model_len=64, cache_dtype="float32")
    prompt = PROMPTS[0] * 2
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    assert isinstance(target, CompiledModel)
    assert_close(target.prefill([0], [prompt]).logits[0, 0], expected, 1e-4)
