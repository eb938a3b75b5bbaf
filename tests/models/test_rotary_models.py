"""Every kind of rotary scaling turns queries and keys as transformers' own modules do, from folders and GGUF files, at positions up to 20,000."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from polydraft.models.compiled.weights import packed_weights
from polydraft.models.loading.checkpoint import of_file, of_folder
from polydraft.models.loading.gguf import GgufWeights
from polydraft.models.rotary import frequencies, head_width
from tests.models.gguf_files import write

LENGTH = 20_001
POSITIONS = torch.tensor([0, 1, 2, 31, 511, 2_047, 4_096, 8_191, 12_345, 20_000])
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
LONG: dict[str, Any] = SIZES | {"max_position_embeddings": 32_768}
SCALED: dict[str, Any] = {"factor": 8.0, "original_max_position_embeddings": 4096}
PARTS: dict[str, Any] = {
    "short_factor": [1.0 + i / 8 for i in range(16)],
    "long_factor": [1.0 + i for i in range(16)],
}


def llama(**rope):
    return hf.LlamaConfig(**LONG, num_key_value_heads=1, rope_parameters={"rope_theta": 5e5} | rope)


def gemma3(**full):
    local = {"rope_type": "default", "rope_theta": 1e4}
    ropes = {"full_attention": {"rope_theta": 1e6} | full, "sliding_attention": local}
    return hf.Gemma3TextConfig(
        **LONG, num_key_value_heads=1, head_dim=32, rope_parameters=ropes, layer_types=[*ropes]
    )


def phi3(**rope):
    original: dict[str, Any] = {"original_max_position_embeddings": 4096}
    return hf.Phi3Config(
        **LONG, num_key_value_heads=1, pad_token_id=0, rope_parameters={"rope_theta": 1e4} | rope, **original
    )


MODELS = {
    "default": llama(rope_type="default"),
    "linear": llama(rope_type="linear", factor=8.0),
    "dynamic": hf.LlamaConfig(
        **SIZES,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
    ),
    "llama3": llama(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, **SCALED),
    "yarn": llama(rope_type="yarn", **SCALED),
    "yarn, other turns": llama(
        rope_type="yarn", beta_fast=16.0, beta_slow=2.0, attention_factor=1.2, **SCALED
    ),
    "longrope": phi3(rope_type="longrope", **PARTS),
    "partial": phi3(rope_type="default", partial_rotary_factor=0.5),
    "two bases": gemma3(rope_type="default"),
    "two bases, linear": gemma3(rope_type="linear", factor=8.0),
    "two bases, llama3": gemma3(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0, **SCALED),
}


def turned(states, cos, sin):
    """Rows [P, D] of queries or keys at positions; cos, sin: [P, half of what is turned]."""
    half = cos.shape[1]
    first = states[:, :half]
    second = states[:, half : 2 * half]
    rest = states[:, 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], 1)


def scores(cos, sin, width):
    """Logits of attention among all sampled positions, in float64."""
    random = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(2, len(cos), width, generator=random, dtype=torch.float64)
    cos = cos.double()
    sin = sin.double()
    return turned(queries, cos, sin) @ turned(keys, cos, sin).T


def theirs(module, kind, positions):
    """What transformers' module turns by at these positions, in a text that the last of them ends."""
    text = torch.arange(int(positions[-1]) + 1)[None]
    cos, sin = module.model.rotary_emb(torch.zeros(1), text, *([] if kind is None else [kind]))
    return [table[0, positions, : table.shape[-1] // 2] for table in (cos, sin)]


def check(files, module):
    """The layers of a compiled model turn as those of the module do."""
    config = module.config
    length = min(LENGTH, config.max_position_embeddings)
    positions = torch.cat([POSITIONS[length > POSITIONS], torch.tensor([length - 1])])
    weights = packed_weights(files, length, None, length=length).weights
    kinds = config.layer_types if config.model_type == "gemma3_text" else [None] * config.num_hidden_layers
    for layer, kind in enumerate(kinds):
        tables = (
            torch.from_numpy(table[weights.rotaries[layer]])[positions]
            for table in (weights.cos, weights.sin)
        )
        ours, expected = (scores(*x, head_width(config)) for x in (tables, theirs(module, kind, positions)))
        assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_folders_turn_as_transformers_does(tmp_path, name):
    module = hf.AutoModelForCausalLM.from_config(MODELS[name])
    module.save_pretrained(tmp_path)
    check(of_folder(tmp_path), module)


GROWN = 1.2 / (0.1 * math.log(8) + 1)
"""Files have the growth of cosines and sines over that of yarn."""
YARN: dict[str, Any] = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 8.0,
    "rope__scaling__original_context_length": 4096,
}
TURNS: dict[str, Any] = {
    "rope__scaling__yarn_beta_fast": 16.0,
    "rope__scaling__yarn_beta_slow": 2.0,
    "rope__scaling__attn_factor": GROWN,
}
IN_FILES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0},
    "llama3": {},
    "yarn": YARN,
    "yarn, other turns": YARN | TURNS,
    "longrope": {
        "rope__scaling__original_context_length": 4096,
        "rope__scaling__attn_factor": math.sqrt(1 + math.log(8) / math.log(4096)),
    },
    "partial": {},
    "two bases": {"rope__freq_base_swa": 1e4},
    "two bases, linear": {
        "rope__freq_base_swa": 1e4,
        "rope__scaling__type": "linear",
        "rope__scaling__factor": 8.0,
    },
}
"""What llama.cpp's converter writes of them; it knows neither bases that grow, nor two of them with divisors."""


@pytest.mark.parametrize("name", IN_FILES)
def test_files_turn_as_transformers_does(tmp_path, name):
    module = hf.AutoModelForCausalLM.from_config(MODELS[name])
    if "two" in name:
        module.config.layer_types = module.model.config.layer_types = [
            "sliding_attention"
        ] * 2  # what two layers of a file are
    plain = frequencies(llama(rope_type="default"))[0]
    scaled = frequencies(MODELS["llama3"])[0]
    divisors = {"rope_factors": plain / scaled} if name == "llama3" else {}
    parts = [
        (f"rope_factors_{kind}.weight", np.array(PARTS[f"{kind}_factor"], np.float32))
        for kind in ("short", "long")
    ]
    path = write(
        tmp_path / "m.gguf", module, more=parts if name == "longrope" else [], **divisors, **IN_FILES[name]
    )
    check(of_file(GgufWeights.of(path)), module)


@pytest.mark.parametrize("length", [None, 4096, LENGTH])
def test_bases_that_grow_with_the_length_are_those_of_transformers(length):
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](MODELS["dynamic"], torch.device("cpu"), seq_len=length)
    ours, growth = frequencies(MODELS["dynamic"], length=length)
    assert np.allclose(ours, theirs.numpy(), rtol=1e-6, atol=0) and growth == 1.0
