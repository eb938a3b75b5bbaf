"""Configuration and tokenizer of a folder are read without transformers, and are what transformers makes of them."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest
from transformers import AutoTokenizer, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from polydraft.models import pair
from polydraft.models.loading.config import CheckpointConfig
from polydraft.models.store.folder import FolderStore
from polydraft.models.tokens.folder_tokenizer import folder_tokenizer
from polydraft.models.tokens.tokenizer import ROLES, BackendTokenizer

TEXTS = [
    "def f(x):\n    return x<|endoftext|>",
    "Grüße, 世界 🙂 \u00a0\t\n\n  12345",
    "",
    "a  b   c\r\n",
    "<|endoftext|>x",
]


def of_json(config, folder):
    config.save_pretrained(folder)
    return CheckpointConfig.of_json(
        json.loads((folder / "config.json").read_text(encoding="utf-8")), "folder"
    )


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_a_configuration_is_what_transformers_reads(kind, tmp_path):
    config = kind(
        hidden_size=96, num_attention_heads=4, num_key_value_heads=2, eos_token_id=[3, 5], rms_norm_eps=1e-5
    )
    ours = of_json(config, tmp_path)
    theirs = kind.from_pretrained(tmp_path)
    special = {"name_or_path": "folder", "head_dim": getattr(theirs, "head_dim", None) or 24}
    names = {field.name for field in fields(ours)} - {"of_architecture"} | ours.of_architecture.keys()
    for name in names:
        assert getattr(ours, name) == special.get(name, getattr(theirs, name, None)), name


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True, "sliding_window": 8},
        {"rope_parameters": {"rope_type": "default"}},
        {"num_hidden_layers": None},
    ],
)
def test_a_configuration_that_says_more_or_less_is_left_to_transformers(change, tmp_path):
    Qwen2Config(num_hidden_layers=2).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert CheckpointConfig.of_json(settings, "folder") is not None
    assert CheckpointConfig.of_json(settings | change, "folder") is None


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_a_tokenizer_is_what_transformers_reads(template, tmp_path):
    theirs = AutoTokenizer.from_pretrained(str(pair.target_folder()))
    theirs.chat_template = template
    theirs.save_pretrained(tmp_path)
    ours = folder_tokenizer(FolderStore(tmp_path))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(ours, BackendTokenizer) and ours.chat_template == theirs.chat_template == template
    for text in TEXTS:
        ids = ours(text)["input_ids"]
        assert ids == theirs(text)["input_ids"]
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    assert ours.all_special_ids == theirs.all_special_ids
    assert [getattr(ours, f"{role}_id") for role in ROLES] == [
        getattr(theirs, f"{role}_id") for role in ROLES
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"add_bos_token": True},
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"pad_token": "<pad>"},
        {"clean_up_tokenization_spaces": True},
    ],
)
def test_a_tokenizer_that_says_more_is_left_to_transformers(change, tmp_path):
    folder = shutil.copytree(pair.target_folder(), tmp_path / "model")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | change), encoding="utf-8")
    assert not isinstance(folder_tokenizer(FolderStore(folder)), BackendTokenizer)


def test_a_folder_that_runs_compiled_needs_no_transformers():
    asked = (
        "import sys; from polydraft import Engine; Engine.embedded().generate('def f('); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=120
    )
    assert "polydraft.models.compiled.model" in done.stdout.split()
    assert not {"transformers", "gguf", "rich", "pydivsufsort"} & set(done.stdout.split())
