"""Folders of models of text and pictures: their language models run compiled, and are those that transformers runs."""

import pytest
import torch
import transformers

from polydraft.models.compiled.llama import CompiledLlama
from polydraft.models.load import load_model

PICTURES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def gemma3():
    text = TEXT | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    ids = {"image_token_index": 93, "boi_token_index": 94, "eoi_token_index": 95}
    config = transformers.Gemma3Config(text_config=text, vision_config=PICTURES, mm_tokens_per_image=1, **ids)
    return transformers.Gemma3ForConditionalGeneration(config)


def qwen35():
    text = TEXT | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
    text |= {"linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    pictures = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
    ids = {"image_token_id": 92, "video_token_id": 93, "vision_start_token_id": 94, "vision_end_token_id": 95}
    return transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=text, vision_config=pictures, **ids)
    )


@pytest.mark.parametrize("make", [gemma3, qwen35])
@torch.inference_mode()
def test_the_language_model_of_a_composite_folder_runs_compiled_and_is_the_one_of_transformers(make, tmp_path):
    torch.manual_seed(0)
    model = make().float().eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
    model.tie_weights()
    model.save_pretrained(tmp_path)
    token_ids = torch.randint(1, 90, (1, 20))
    expected = model(input_ids=token_ids, use_cache=False).logits[0, -1]
    target = load_model(str(tmp_path), max_num_seqs=1, max_model_len=64)
    assert isinstance(target, CompiledLlama)
    logits = target.prefill([0], [token_ids[0].tolist()]).logits[0, 0]
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
