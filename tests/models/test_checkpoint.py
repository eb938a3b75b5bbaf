"""Weights read straight from files, one at a time, are those that transformers loads."""

import json
import re
import subprocess
import sys
from copy import deepcopy

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from polydraft.errors import ModelLoadError
from polydraft.models import pair
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.load import load_model
from polydraft.models.loading import checkpoint
from polydraft.models.networks.base import UncompiledError
from polydraft.models.rotary import rotary
from polydraft.models.torch.module import load_module
from polydraft.models.torch.module_weights import of_module
from tests.models.tree_rounds import ARCHITECTURES, small_model
from tests.support.tiny import GROUPED

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = {
    "llama": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3},
    "llama_tied": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "qwen2": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 160},
    "qwen3": {"rope_type": "default", "rope_theta": 1e6},
    "mistral": {"rope_type": "default", "rope_theta": 1e5},
}


def saved(folder, name, dtype=torch.bfloat16, **changed):
    config = deepcopy(ARCHITECTURES[name])
    for key, value in {"rope_parameters": ROPES.get(name), "eos_token_id": [2, 5], **changed}.items():
        setattr(config, key, value)
    small_model(config).to(dtype).save_pretrained(folder, max_shard_size="20KB")
    return str(folder)


def arrays(model):
    return {part: getattr(x, "data", x) for part, x in model.weights._asdict().items()}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in sorted(ROPES)), ("qwen2", torch.float16), ("qwen2", torch.float32)],
)
def test_a_folder_gives_the_same_bits_as_its_module(tmp_path, name, dtype):
    folder = saved(tmp_path, name, dtype)
    module = load_module(folder, device="cpu")
    files = checkpoint.of_folder(folder)
    ours, theirs = (CompiledModel(x, max_num_seqs=1, cache_dtype="float32") for x in (files, module))
    for part, array in arrays(theirs).items():
        assert np.array_equal(arrays(ours)[part], array), part
    told = (
        "name",
        "vocab_size",
        "max_model_len",
        "eos_token_ids",
        "bos_token_id",
        "weight_format",
        "quantization_error",
    )
    assert [getattr(ours, x) for x in told] == [getattr(theirs, x) for x in told]
    cos, sin = module.model.rotary_emb(torch.zeros(1), torch.arange(640)[None])
    for mine, whole in zip(rotary(module.config, 640), (cos, sin), strict=True):
        # a frequency may differ in its last bit
        assert np.abs(np.concatenate([mine, mine], 1) - whole[0].numpy()).max() < 640 * 2.0**-23


def test_a_folder_is_packed_from_views_of_its_file_which_are_given_back(monkeypatch):
    files = checkpoint.of_folder(str(pair.target_folder()))
    given_back = set()
    monkeypatch.setattr(files.weights, "forget", lambda names, rows: given_back.update(names))
    CompiledModel(files, max_num_seqs=1, cache_dtype="float32")
    assert not any(files.read(name).flags.owndata for name in files.outlines)
    assert given_back >= {name for name, outline in files.outlines.items() if outline.ndim == 2}


def without_a_norm(weights, config):
    del weights["model.norm.weight"]


def with_a_misshapen_norm(weights, config):
    weights["model.norm.weight"] = torch.ones(5)


def with_a_head_beside_the_embedding(weights, config):
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


def with_integers(weights, config):
    weights["model.norm.weight"] = torch.ones(32, dtype=torch.int64)


def with_rotary_settings_that_are_none(weights, config):
    config["rope_parameters"] = {"rope_type": "unheard_of"}


@pytest.mark.parametrize(
    ("edit", "reason", "loads"),
    [
        (without_a_norm, "it has no weight 'model.norm.weight'", False),
        (with_a_misshapen_norm, "its weight 'model.norm.weight' is of shape (5,)", False),
        (with_a_head_beside_the_embedding, "it has a weight 'lm_head.weight' more", True),
        (with_integers, "its weight 'model.norm.weight' is of type I64", True),
        (with_rotary_settings_that_are_none, "unheard_of", False),
    ],
)
def test_a_folder_that_is_out_of_the_ordinary_is_left_to_transformers_which_a_line_says(
    tmp_path, edit, reason, loads
):
    saved(tmp_path, "llama_tied", max_position_embeddings=64, rope_parameters=ROPES["qwen3"])
    checkpoint.of_folder(str(tmp_path))
    weights = {
        name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    config = json.loads((tmp_path / "config.json").read_text())
    for file in tmp_path.glob("model*"):
        file.unlink()
    edit(weights, config)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=re.escape(reason)):
        checkpoint.of_folder(str(tmp_path))
    if loads:
        with pytest.warns(
            UserWarning, match=f"read through transformers, with a second copy .*{re.escape(reason)}"
        ):
            load_model(str(tmp_path), device="cpu", max_num_seqs=1)
    else:
        with pytest.raises(ModelLoadError):
            load_model(str(tmp_path), device="cpu", max_num_seqs=1)


def test_a_fault_of_ours_is_no_reason_to_load_a_folder_through_transformers(tmp_path, monkeypatch):
    def failing(*arguments):
        raise KeyError("a bug")

    folder = saved(tmp_path, "llama")
    monkeypatch.setattr(checkpoint, "fitting_outlines", failing)
    with pytest.raises(KeyError, match="a bug"):
        load_model(folder, device="cpu", max_num_seqs=1)


@pytest.mark.parametrize("backend", ["compiled", "transformers"])
@pytest.mark.parametrize("edit", [lambda weights, config: None, with_a_head_beside_the_embedding])
def test_weights_that_are_no_numbers_are_refused_however_they_are_read(tmp_path, backend, edit):
    saved(tmp_path, "llama_tied", torch.float32)
    weights = {
        name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    for file in tmp_path.glob("model*"):
        file.unlink()
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
    edit(weights, None)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=r"NaN or infinity \(tensor 'model.layers.1.mlp.down_proj.weight'\)"
    ):
        load_model(str(tmp_path), device="cpu", max_num_seqs=1, backend=backend)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_weights_expected_of_a_folder_are_those_of_the_module(name):
    module = hf.AutoModelForCausalLM.from_config(deepcopy(ARCHITECTURES[name]))
    assert checkpoint.shapes_of(module.config) == {
        name: tuple(w.shape) for name, w in of_module(module).outlines.items()
    }


def test_biases_of_the_attention_are_left_to_transformers(tmp_path):
    with pytest.raises(UncompiledError, match="its products have biases"):
        checkpoint.of_folder(saved(tmp_path, "llama", attention_bias=True))
    with pytest.warns(UserWarning, match="runs through transformers, .* its products have biases"):
        assert not isinstance(load_model(str(tmp_path), device="cpu"), CompiledModel)


def test_loading_a_folder_imports_no_modelling_code():
    code = (
        "import sys; from polydraft.models import load, pair; load.load_model(str(pair.draft_folder()), device='cpu'); "
        "print(*(m for m in sys.modules if m.startswith('transformers.models.llama.modeling')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


SMALL_PHI3 = GROUPED | {"vocab_size": 64, "pad_token_id": 0}


def test_matrices_below_one_another_are_taken_apart_from_folders_and_modules(tmp_path):
    module = small_model(hf.Phi3Config(**SMALL_PHI3))
    module.save_pretrained(tmp_path)
    files = checkpoint.of_folder(tmp_path)
    with torch.no_grad():
        theirs = module(torch.arange(8)[None]).logits[0, -1]
    for model in (files, module):
        target = CompiledModel(model, max_num_seqs=1, max_model_len=16, cache_dtype="float32")
        assert np.allclose(
            target.prefill([0], [[*range(8)]]).logits[0, 0], theirs, atol=1e-4 * float(theirs.abs().max())
        )
