"""Model folders that are cut, flipped or forged: refused with our errors, or decoded from within the vocabulary; never a crash."""

import json
import logging
import shutil
import warnings
from random import Random

import pytest
import transformers

from polydraft import Engine, SamplingParams
from polydraft.errors import IncompatibleError, InvalidInputError, ModelLoadError
from polydraft.models.load import encode, load_model, load_tokenizer
from tests.models.test_load import tokenizer
from tests.models.tree_rounds import small_model
from tests.support.damage import cut, flipped, mutated_json, read_apart
from tests.support.tiny import llama_config

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of a small model with everything in it that is read."""
    folder = tmp_path_factory.mktemp("whole")
    config = llama_config(vocab_size=64)
    config.num_key_value_heads = 2
    config.max_position_embeddings = 64
    config.rope_parameters = ROPE | {"original_max_position_embeddings": 32}
    small_model(config).save_pretrained(folder)
    words = tokenizer()
    words.chat_template = TEMPLATE
    words.save_pretrained(folder)
    read(folder)
    return folder


def read(folder):
    """Load and generate, as a user would."""
    engine = Engine.from_pretrained(str(folder), max_num_seqs=1, drafter="ngram", depth=2)
    ids = engine.encode_chat([{"role": "user", "content": "a b a"}])
    (result,) = engine.generate([ids], SamplingParams(max_tokens=4, seed=1))
    assert all(0 <= token < 64 for token in result.token_ids)


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"],
)
def test_a_damaged_folder_is_refused_or_decoded_within_the_vocabulary(whole, name, tmp_path, monkeypatch):
    monkeypatch.setenv("RUST_BACKTRACE", "0")
    content = (whole / name).read_bytes()
    head = 8 + int.from_bytes(content[:8], "little")

    def cases():
        warnings.simplefilter("ignore")
        logging.disable()
        transformers.logging.disable_progress_bar()
        for seed in range(60):
            rng = Random(seed)
            ways = (
                (flipped, cut, lambda data, rng: flipped(data, rng, head))
                if name == "model.safetensors"
                else (mutated_json,)
            )
            shutil.copytree(whole, tmp_path / str(seed))
            (tmp_path / str(seed) / name).write_bytes(rng.choice(ways)(content, rng))
            yield f"seed {seed}", lambda seed=seed: read(tmp_path / str(seed))

    assert len(read_apart(cases())) >= 10


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"rope_parameters": ROPE | {"rope_type": "spiral"}},
            "rope_type 'spiral'; known are default, linear",
        ),
        ({"layer_types": ["full_attention", "spiral"]}, "layer_types 'spiral'; known are full_attention"),
    ],
)
def test_a_kind_of_rotation_or_layer_that_is_unknown_is_named(whole, settings, told, tmp_path):
    with pytest.raises(ModelLoadError, match=told):
        load_model(changed(whole, tmp_path / "folder", "config.json", **settings))


def changed(whole, folder, name, **values):
    """A copy with other values in a file of JSON."""
    shutil.copytree(whole, folder)
    said = json.loads((whole / name).read_text(encoding="utf-8"))
    (folder / name).write_text(json.dumps(said | values), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        (
            "config.json",
            {"num_hidden_layers": 0},
            "num_hidden_layers is 0; expected null or an integer from 1 to",
        ),
        ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ("config.json", {"vocab_size": 10**9}, "vocab_size is 1000000000"),
        ("config.json", {"max_position_embeddings": -5}, "max_position_embeddings is -5"),
        (
            "config.json",
            {"rope_parameters": ROPE | {"rope_theta": False}},
            "rope_parameters.rope_theta is False",
        ),
        (
            "generation_config.json",
            {"eos_token_id": [[]]},
            r"eos_token_id\[0\] is \[\]; expected an integer from -1",
        ),
        ("generation_config.json", {"eos_token_id": 10**30}, "eos_token_id is"),
    ],
)
def test_sizes_and_ids_that_cannot_be_are_refused_by_name(whole, tmp_path, name, values, said):
    with pytest.raises(ModelLoadError, match=f"{name}' cannot be: {said}"):
        load_model(changed(whole, tmp_path / "x", name, **values))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokenizer_config.json", {"tokenizer_class": 7}),
        ("tokenizer.json", {"pre_tokenizer": {"type": "FixedLength", "length": 0}}),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}}),
    ],
    ids=["type", "panic in use", "panic in loading"],
)
def test_a_tokenizer_that_fails_or_panics_is_refused_when_it_is_loaded(whole, tmp_path, name, values):
    with pytest.raises(ModelLoadError, match="no tokenizer could be loaded"):
        load_tokenizer(changed(whole, tmp_path / "x", name, **values))


def test_a_text_that_a_tokenizer_fails_on_is_refused(whole):
    with pytest.raises(
        InvalidInputError, match="a text of 3 characters was given that the tokenizer fails on"
    ):
        encode(load_tokenizer(str(whole)), "a \ud800")


def test_a_chat_template_that_fails_is_refused(whole):
    engine = Engine.from_pretrained(str(whole), max_num_seqs=1, drafter=None)
    engine.tokenizer.chat_template = "{{ messages[0]['content'] + 1 }}"
    with pytest.raises(IncompatibleError, match="refuses these messages"):
        engine.encode_chat([{"role": "user", "content": "a"}])
