"""Configuration and tokenizer of a folder are read without transformers, and are what transformers makes of them."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields
from itertools import product

import pytest
from transformers import AutoConfig, AutoTokenizer

from polydraft.errors import IncompatibleError
from polydraft.models import pair
from polydraft.models.load import load_model
from polydraft.models.loading.config import CheckpointConfig
from polydraft.models.networks import COMPILED
from polydraft.models.networks.base import UncompiledError
from polydraft.models.store.folder import FolderStore
from polydraft.models.tokens import folder_tokenizer as folder_tokenizers
from polydraft.models.tokens.folder_tokenizer import folder_tokenizer
from polydraft.models.tokens.tokenizer import ROLES, BackendTokenizer

TEXTS = [
    "def f(x):\n    return x<|endoftext|>",
    "Grüße, 世界 🙂 \u00a0\t\n\n  12345",
    "",
    "a  b   c\r\n",
    "<|endoftext|>x",
]


SIZES = [
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
]
LONGER = {"factor": 4.0, "original_max_position_embeddings": 2048}
WAYS = {
    "all": {},
    "sizes": {},
    "windows": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "linear": {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "yarn": {"rope_theta": 5e4, "rope_scaling": {"rope_type": "yarn", **LONGER}},
    "nulls": {"layer_types": None, "bos_token_id": None},
}
"""What a config.json has beside what transformers writes, or beside its sizes."""


OTHERS = {
    *product(["gemma4_text", "gemma4_unified_text", "mellum", "phi3", "phimoe"], ["linear", "yarn"]),
    *product(["cwm", "falcon_h1", "mistral", "nemotron_h"], ["nulls"]),
}
"""What transformers refuses, or takes for another model."""


@pytest.mark.parametrize(("kind", "way"), [pair for pair in product(COMPILED, WAYS) if pair not in OTHERS])
def test_a_configuration_is_what_transformers_reads(kind, way, tmp_path):
    AutoConfig.for_model(kind, num_hidden_layers=4, eos_token_id=[3, 5]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    if way != "all":
        settings = {name: settings[name] for name in ["model_type", *SIZES] if name in settings}
    file.write_text(json.dumps(settings | WAYS[way]))
    theirs = AutoConfig.from_pretrained(tmp_path)
    theirs.allow_global_per_layer_attribute_access = True
    ours = CheckpointConfig.of_json(settings | WAYS[way], COMPILED[kind], str(tmp_path))
    names = {field.name for field in fields(ours)} - {"of_architecture"} | ours.of_architecture.keys()
    for name in names:
        mine = getattr(ours, name)
        other = getattr(theirs, name, mine)  # some that are read are no attributes there
        if name == "head_dim":
            other = other or theirs.hidden_size // theirs.num_attention_heads
        if name == "num_key_value_heads":
            other = other or theirs.num_attention_heads
        if name == "eos_token_id" and isinstance(other, int):
            other = [other]
        if name == "per_layer_config":
            other = {str(layer): own for layer, own in theirs.to_dict()[name].items()}
        if name != "layers_block_type":  # another name of layer_types
            assert (mine or None) == ((list(other) if isinstance(other, tuple) else other) or None), name


def test_kinds_of_layers_make_a_ministral_of_a_mistral():
    with pytest.raises(UncompiledError, match="Ministral"):
        CheckpointConfig.of_json(dict.fromkeys(SIZES, 8) | {"layer_types": None}, COMPILED["mistral"], "")


def test_a_setting_that_a_class_does_not_read_is_not_read():
    settings = {**dict.fromkeys(SIZES, 8), "sliding_window": 4, "attention_bias": True}
    llama, mistral = (CheckpointConfig.of_json(settings, COMPILED[kind], "") for kind in ("llama", "mistral"))
    assert not hasattr(llama, "sliding_window") and mistral.sliding_window == 4
    assert llama.attention_bias and not hasattr(mistral, "attention_bias")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": None}, "too little"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"hidden_size": "wide"}, "too little"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["spiral"] * 8}, "layer_types"),
    ],
)
def test_a_configuration_that_says_too_little_is_left_to_transformers(change, reason):
    settings = dict.fromkeys(SIZES, 8)
    with pytest.raises(UncompiledError, match=reason):
        CheckpointConfig.of_json(settings | change, COMPILED["qwen2"], "")


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


def test_without_transformers_a_tokenizer_is_what_its_own_file_says(monkeypatch, tmp_path):
    folder = shutil.copytree(pair.target_folder(), tmp_path / "model")
    file = folder / "tokenizer_config.json"
    said = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": "Qwen2Tokenizer"}
    file.write_text(json.dumps(said | {"eos_token": {"content": said["eos_token"]}}), encoding="utf-8")
    plain = folder_tokenizer(FolderStore(pair.target_folder()))
    monkeypatch.setattr(folder_tokenizers, "find_spec", lambda name: None)
    ours = folder_tokenizer(FolderStore(folder))
    assert isinstance(ours, BackendTokenizer) and ours.eos_token_id == plain.eos_token_id
    assert [ours(text) for text in TEXTS] == [plain(text) for text in TEXTS]
    (folder / "tokenizer.json").unlink()
    monkeypatch.setattr("polydraft.errors.find_spec", lambda name: None)
    with pytest.raises(IncompatibleError, match=r'needs transformers. pip install "polydraft\[torch\]"'):
        folder_tokenizer(FolderStore(folder))


@pytest.mark.parametrize(
    "options", [{"backend": "transformers"}, {"tensor_parallel": 2}, {"device": "cpu", "dtype": "float16"}]
)
def test_what_runs_through_torch_says_so_before_anything_is_loaded(options, monkeypatch):
    monkeypatch.setattr("polydraft.errors.find_spec", lambda name: None)
    monkeypatch.setattr("polydraft.models.plan.find_spec", lambda name: None)
    with pytest.raises(
        IncompatibleError, match=r'needs torch and transformers. pip install "polydraft\[torch\]" adds them'
    ):
        load_model(str(pair.target_folder()), **options)


def test_a_folder_that_runs_compiled_needs_no_transformers():
    asked = (
        "import sys; from polydraft import Engine; Engine.embedded().generate('def f('); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=120
    )
    assert "polydraft.models.compiled.model" in done.stdout.split()
    assert not {"transformers", "gguf", "rich", "pydivsufsort"} & set(done.stdout.split())
