"""The shipped pair loads as ordinary folders and has the figures that its card states."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polydraft.models import pair
from studies.embedded_pair.evaluate import pair_figures
from studies.embedded_pair.export import beginning, export_model
from studies.embedded_pair.models import llama, load_float32
from studies.embedded_pair.tokenizer import END_OF_TEXT_ID, MAX_CONTEXT, encode_documents, train_tokenizer

TINY = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
TEXT = "def f(x):\n    return x + 10\n\n\nclass A:\n    def g(self):\n        return f(1)\n"


def test_an_exported_model_loads_and_is_bfloat16(tmp_path):
    train_tokenizer([TEXT], 300, tmp_path / "tokenizer")
    model = llama(TINY, seed=0)
    export_model(model, tmp_path / "tokenizer", tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.bfloat16
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["bos_token_id"] == config["eos_token_id"] == END_OF_TEXT_ID


def test_the_tokenizer_is_lossless_on_any_text(tmp_path):
    train_tokenizer([TEXT], 300, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXT, "\t\r\n  x", "naïve 漢字 \x00", "    \n"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token_id == END_OF_TEXT_ID
    assert encode_documents([TEXT, TEXT], tmp_path).tolist().count(END_OF_TEXT_ID) == 3


def test_a_prompt_ends_at_a_line_end(tmp_path):
    train_tokenizer([TEXT], 300, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = beginning(TEXT, 30, tokenizer)
    assert TEXT.startswith(text)
    assert text.endswith("\n")
    assert len(tokenizer(text).input_ids) <= 30


@pytest.fixture(scope="module")
def models():
    return load_float32(pair.target_folder()), load_float32(pair.draft_folder())


def test_the_shipped_models_share_one_tokenizer(models):
    files = [
        (folder / "tokenizer.json").read_bytes() for folder in (pair.target_folder(), pair.draft_folder())
    ]
    assert files[0] == files[1]
    tokenizer = AutoTokenizer.from_pretrained(pair.target_folder())
    assert len(tokenizer) == 2048 == models[0].config.vocab_size == models[1].config.vocab_size
    assert tokenizer.model_max_length == 1024 == models[0].config.max_position_embeddings


def test_the_card_states_what_the_shipped_weights_do(models):
    tokens = encode_documents((p.text for p in pair.prompts()), pair.target_folder())
    stated = pair.card()["prompts"]
    measured = pair_figures(*models, tokens, context=MAX_CONTEXT, end_of_text_id=END_OF_TEXT_ID)
    assert measured["num_tokens"] == stated["num_tokens"]
    for name in ("target", "draft", "acceptance", "top1"):
        assert measured[name] == pytest.approx(stated[name], abs=5e-3), name


def test_the_target_is_a_target():
    held_out = pair.card()["held_out"]
    target = held_out["target_nats_per_token"]
    assert target <= 3.2
    assert target <= held_out["draft_nats_per_token"] - 0.2
    assert target <= held_out["trigram_nats_per_token"] - 0.2


def test_the_pair_fits_in_fourteen_megabytes():
    assert sum(f.stat().st_size for f in pair.embedded_folder().rglob("*") if f.is_file()) <= 14e6


def test_prompts_come_from_held_out_modules_with_their_licence():
    held_out = pair.card()["held_out_modules"]
    tokenizer = AutoTokenizer.from_pretrained(pair.target_folder())
    prompts = pair.prompts()
    assert len({p.name for p in prompts}) == len(prompts) >= 8
    for prompt in prompts:
        assert prompt.source.split(", ")[-1] in held_out
        assert prompt.licence
        assert 60 <= len(tokenizer(prompt.text).input_ids) <= (500 if prompt.name.endswith("-long") else 200)


def test_evaluation_scores_every_token_once():
    torch.manual_seed(0)
    model = llama(TINY, seed=0).eval()
    tokens = np.concatenate([[0], np.arange(1, 80), [0], np.arange(5, 9), [0]]).astype(np.uint16)
    whole, windowed = (pair_figures(model, model, tokens, context=c, end_of_text_id=0) for c in (1024, 16))
    assert whole["num_tokens"] == windowed["num_tokens"] == len(tokens) - 1
    assert whole["acceptance"] == pytest.approx(1, abs=1e-5)
    assert whole["top1"] == 1
