"""A GGUF file is the model of its dequantised weights, and what is no such file is refused with what was found."""

import logging
import math
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from random import Random

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging as hf_logging

from polydraft import Engine, SamplingParams
from polydraft.bench.llama_cpp import number_of, write_gguf
from polydraft.errors import IncompatibleError, ModelLoadError
from polydraft.models import pair
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.load import load_model, load_tokenizer
from polydraft.models.loading import checkpoint
from polydraft.models.loading.config import CheckpointConfig
from polydraft.models.loading.gguf import ARCHITECTURES, GgufWeights
from polydraft.models.networks import COMPILED
from polydraft.models.store import catalogue
from polydraft.models.store.catalogue import HubModel, Wheel
from polydraft.models.store.gguf import GgufStore
from polydraft.models.store.gguf_folders import TRANSFORMERS_TYPES
from polydraft.models.store.gguf_header import LAYOUTS, TYPES, GgufHeader
from polydraft.models.supported import ENCODER_DECODERS
from polydraft.models.torch.module import config_of_file, load_module, module_of_file
from tests.models.gguf_files import logits, read_by_transformers, write
from tests.support.closeness import assert_close
from tests.support.damage import cut, flipped, read_apart
from tests.support.tiny import BLOCKED

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
SIZES = BLOCKED | {"max_position_embeddings": 128}
WIDE = {
    **SIZES,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "tie_word_embeddings": True,
}
FAMILIES = {
    "llama": hf.LlamaConfig(**SIZES, attention_bias=False),
    "llama_tied": hf.LlamaConfig(**{**SIZES, "tie_word_embeddings": True}),
    "mistral": hf.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": hf.Qwen2Config(**SIZES),
    "qwen3": hf.Qwen3Config(**SIZES, head_dim=128),
    "gemma2": hf.Gemma2Config(**WIDE, sliding_window=16, query_pre_attn_scalar=256),
    "gemma3": hf.Gemma3TextConfig(**WIDE, sliding_window=16, query_pre_attn_scalar=256),
}

HYBRIDS = {"falcon-h1", "gemma4", "granitehybrid", "lfm2", "qwen35"}
"""Whose files are llama.cpp's alone, see `test_oracle_gguf`."""


def small(name, **changed):
    config = FAMILIES[name].__class__(**{**FAMILIES[name].to_dict(), **changed})
    torch.manual_seed(0)
    return filled(hf.AutoModelForCausalLM.from_config(config).eval())


def filled(module):
    """The module with weights that matter."""
    for weight in module.parameters():
        torch.nn.init.normal_(weight, 0.0, 0.08) if weight.ndim > 1 else torch.nn.init.normal_(
            weight, 1.0, 0.1
        )
    return module


def row(target):
    target.release([0])
    return target.prefill([0], [IDS]).logits[0, 0]


@pytest.mark.parametrize("kind", TYPES)
def test_a_file_of_every_type_has_the_logits_of_its_dequantised_weights(tmp_path, kind):
    path = write(tmp_path / "m.gguf", small("llama"), kind)
    target = load_model(path, device="cpu", max_num_seqs=1, activations="float32", cache_dtype="float32")
    assert isinstance(target, CompiledModel)
    theirs = read_by_transformers(path)
    assert_close(row(target), logits(theirs, IDS))
    ours = module_of_file(GgufWeights.of(path)).state_dict()
    assert all(np.array_equal(weight, ours[name]) for name, weight in theirs.state_dict().items())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_of_every_family_is_the_model_that_was_written(tmp_path, name):
    module = small(name)
    path = write(tmp_path / "m.gguf", module)
    target = load_model(path, device="cpu", max_num_seqs=1, cache_dtype="float32")
    assert isinstance(target, CompiledModel)
    for judge in (module, read_by_transformers(path)):
        assert_close(row(target), logits(judge, IDS))
    through = load_model(path, device="cpu", max_num_seqs=1, backend="transformers", max_model_len=16)
    assert_close(row(through), logits(module, IDS))


def test_a_file_of_the_first_gemma_is_the_model_that_was_written(tmp_path):
    FAMILIES["gemma"] = hf.GemmaConfig(**WIDE)
    module = small("gemma")
    target = load_model(
        write(tmp_path / "m.gguf", module, "Q8_0"), device="cpu", max_num_seqs=1, cache_dtype="float32"
    )
    exact = load_model(
        write(tmp_path / "f.gguf", module), device="cpu", max_num_seqs=1, cache_dtype="float32"
    )
    assert_close(row(exact), logits(module, IDS))
    assert_close(row(target), logits(module, IDS), share=0.05)  # eight bits a weight


PHI3 = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FUSED_OR_UNROTATED = {
    "phi3": hf.Phi3Config(**SIZES, **PHI3),
    "phi3 whose window holds all": hf.Phi3Config(**SIZES, **PHI3, sliding_window=128),
    "phi3 of partial rotation": hf.Phi3Config(
        **SIZES, **PHI3, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.75}
    ),
    "smollm3": hf.SmolLM3Config(**{**SIZES, **PHI3, "num_hidden_layers": 5}),
    "granite": hf.GraniteConfig(
        **SIZES,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.3,
        logits_scaling=2.0,
    ),
}


@pytest.mark.parametrize("name", FUSED_OR_UNROTATED)
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
def test_files_of_phi_and_smollm3_are_the_models_that_were_written(tmp_path, name, kind):
    torch.manual_seed(0)
    module = filled(hf.AutoModelForCausalLM.from_config(FUSED_OR_UNROTATED[name]).eval())
    path = write(tmp_path / "m.gguf", module, kind)
    target = load_model(path, device="cpu", max_num_seqs=1, activations="float32", cache_dtype="float32")
    read = module_of_file(GgufWeights.of(path))
    assert isinstance(target, CompiledModel)
    if kind == "F32":
        assert_close(logits(read, IDS), logits(module, IDS))
    assert_close(row(target), logits(read, IDS))


def test_factors_of_long_and_short_contexts_in_a_file_are_those_of_phi3(tmp_path):
    short, long = ([1.0 + i / scale for i in range(32)] for scale in (64, 4))
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long}
    config = hf.Phi3Config(**SIZES, **PHI3, original_max_position_embeddings=32, rope_parameters=rope)
    module = filled(hf.AutoModelForCausalLM.from_config(config).eval())
    more = [
        (f"rope_factors_{name}.weight", np.array(x, np.float32))
        for name, x in (("short", short), ("long", long))
    ]
    path = write(tmp_path / "m.gguf", module, more=more, rope__scaling__original_context_length=32)
    read = module_of_file(GgufWeights.of(path))
    for ids in (IDS, IDS * 8):
        assert_close(logits(read, ids), logits(module, ids))
    with pytest.warns(
        UserWarning, match=r"rotary frequencies .* depend on the length.*Give max_model_len=32 or less"
    ):
        target = load_model(path, device="cpu", max_num_seqs=1, cache_dtype="float32")
    longest = (IDS * 64)[: target.max_model_len]
    assert_close(target.prefill([0], [longest]).logits[0, 0], logits(module, longest))
    assert_close(
        row(load_model(path, device="cpu", max_num_seqs=1, max_model_len=32, cache_dtype="float32")),
        logits(module, IDS),
    )


def test_an_output_that_is_not_the_embedding_and_biases_of_a_llama_are_read(tmp_path):
    module = small("llama", attention_bias=True)
    target = load_model(write(tmp_path / "m.gguf", module), device="cpu", max_num_seqs=1)
    assert not isinstance(target, CompiledModel)
    assert_close(row(target), logits(module, IDS))


def test_the_factors_of_rotary_frequencies_in_a_file_are_those_of_llama_3(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    module = small("llama", rope_parameters=rope | {"original_max_position_embeddings": 32})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](module.config, torch.device("cpu"))
    plain = 1 / 5e4 ** (torch.arange(0, 64, 2) / 64)
    path = write(tmp_path / "m.gguf", module, rope_factors=(plain / scaled).numpy())
    assert_close(
        row(load_model(path, device="cpu", max_num_seqs=1, cache_dtype="float32")), logits(module, IDS)
    )
    assert_close(logits(load_module(path, device="cpu"), IDS), logits(module, IDS))
    unscaled = write(tmp_path / "n.gguf", module)
    assert row(load_model(unscaled, device="cpu", max_num_seqs=1)) != pytest.approx(
        logits(module, IDS).numpy(), abs=1e-3
    )


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
IN_FILES_OF_YARN = {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 32}
SCALINGS = {
    "linear": (LINEAR, {"scaling__type": "linear", "scaling__factor": 4.0}),
    "a factor without a type": (LINEAR, {"scaling__factor": 4.0}),
    "the key of older files": (LINEAR, {"scale_linear": 4.0}),
    "a factor of 0": ({"rope_type": "default"}, {"scaling__factor": 0.0}),
    "yarn": (YARN, IN_FILES_OF_YARN),
    "yarn of other turns": (
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        IN_FILES_OF_YARN | {"scaling__yarn_beta_fast": 16.0, "scaling__yarn_beta_slow": 2.0},
    ),
    "yarn of another growth": (
        {**YARN, "attention_factor": 1.5 * (1 + 0.1 * math.log(4))},
        IN_FILES_OF_YARN | {"scaling__attn_factor": 1.5},
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_the_scaling_of_positions_is_read_as_llama_cpp_does(tmp_path, name):
    rope, said = SCALINGS[name]
    module = small("qwen2", rope_parameters={**rope, "rope_theta": 1e4})
    path = write(tmp_path / "m.gguf", module, **{f"rope__{key}": value for key, value in said.items()})
    assert_close(
        row(load_model(path, device="cpu", max_num_seqs=1, cache_dtype="float32")), logits(module, IDS)
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_settings_are_those_that_transformers_reads_of_them(tmp_path, name):
    file = GgufWeights.of(write(tmp_path / "m.gguf", small(name)))
    of_architecture = file.config.of_architecture
    transformers_config = config_of_file(file)
    *common, last = (field.name for field in fields(CheckpointConfig))
    assert last == "of_architecture"
    for setting in [*common, *of_architecture]:
        theirs = getattr(transformers_config, setting, None)
        mine = getattr(file.config, setting)
        if setting == "rope_parameters":
            theirs = {key: theirs[key] for key in mine}
        assert mine == theirs, setting


DENSE = {name for network in COMPILED.values() if network.experts.takes(0) for name in network.gguf_names}
WRITTEN = DENSE & {*FAMILIES, *FUSED_OR_UNROTATED, "gemma"}
"""Architectures that are written here; files of the others, which the converter wrote, are read in `test_oracle_gguf`."""


@pytest.mark.parametrize("architecture", sorted(WRITTEN))
def test_names_of_weights_are_those_of_the_gguf_package(tmp_path, architecture):
    configs = {"gemma": hf.GemmaConfig(**WIDE), **FUSED_OR_UNROTATED}
    module = (
        hf.AutoModelForCausalLM.from_config(configs[architecture])
        if architecture in configs
        else small(architecture)
    )
    file = GgufWeights.of(write(tmp_path / "m.gguf", module))
    theirs = gguf.get_tensor_name_map(number_of(architecture), file.config.num_hidden_layers)
    for name in module.state_dict():
        if name != "lm_head.weight" or "output.weight" in file.store.tensors:
            assert file.own_name(name) == theirs.get_name(name, try_suffixes=(".weight", ".bias"))


def test_sizes_of_blocks_are_those_of_the_gguf_package():
    for number, layout in LAYOUTS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (layout.type, (layout.block, layout.num_bytes)) == (kind.name, gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_are_those_of_the_file_in_the_order_of_the_rows(tmp_path, kind):
    file = GgufWeights.of(write(tmp_path / "m.gguf", small("llama"), kind))
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        name = f"model.layers.1.self_attn.{name}.weight"
        told, blocks = file.blocks(name)
        assert (told, blocks.dtype) == (kind, np.uint8)
        whole = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(whole, file.read(name))
    taken = checkpoint.of_file(file)
    assert (
        taken.weights.blocks("model.layers.0.mlp.up_proj.weight")[1].tobytes() in file.store.path.read_bytes()
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The embedded draft with its tokenizer as a file."""
    path = tmp_path_factory.mktemp("gguf") / "draft.gguf"
    words = load_tokenizer(str(pair.draft_folder()))
    write_gguf(load_module(str(pair.draft_folder()), device="cpu"), words, path)
    return path


def test_an_engine_on_a_file_says_what_it_says_on_the_folder(written):
    words = load_tokenizer(
        str(pair.draft_folder())
    )  # how it splits text before it merges is what no file can say
    prompt = words(pair.prompts()[0].text)["input_ids"]
    greedy = SamplingParams(temperature=0, max_tokens=24)
    engines = [
        Engine.from_pretrained(str(place), device="cpu", drafter="ngram", max_num_seqs=1)
        for place in (written, pair.draft_folder())
    ]
    (ours,), (theirs,) = (engine.generate(prompt, greedy) for engine in engines)
    assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
    assert engines[0].eos_token_ids == engines[1].eos_token_ids
    assert engines[0].target.weight_format == "bfloat16"  # what a float32 file loses nothing by


def test_the_command_runs_a_file_without_importing_transformers(written):
    program = (
        "import sys; from polydraft.cli.main import app\n"
        f"app(['generate', 'def add(', '--model', {str(written)!r}, '--max-tokens', '4', '--max-model-len', '64'], standalone_mode=False)\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'transformers'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "4 tokens, " in done.stderr
    assert done.stdout.endswith("[]\n")


def words_with_a_template(writer):
    """Ten letters and their like, two tokens that end a text, and a template."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*"abcdefghi", "ab", "<end>", "<turn>", *(f"<{i}>" for i in range(52))])
    writer.add_token_types([1] * 10 + [3] * 54)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(10)
    writer.add_eot_token_id(11)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}<turn>{% endfor %}")


def test_template_and_ends_of_text_are_those_of_the_file(tmp_path):
    path = write(tmp_path / "m.gguf", small("llama"), tokenizer=words_with_a_template)
    engine = Engine.from_pretrained(path, device="cpu", drafter=None, max_num_seqs=1)
    assert engine.eos_token_ids == (10, 11)
    assert engine.encode_chat([{"role": "user", "content": "abc"}]) == [9, 2, 11]


def test_a_target_of_the_table_is_drafted_by_the_model_that_the_table_has_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    (tmp_path / "models").mkdir()
    for name, draft in (("large", "little"), ("little", None)):
        path = write(tmp_path / "models" / f"{name}.gguf", small("llama"), tokenizer=words_with_a_template)
        listed = HubModel(
            name, "", "MIT", Path(path).stat().st_size, "", (Wheel("none==1", "none"),), 1 << 20, draft=draft
        )
        monkeypatch.setitem(catalogue.MODELS, name, listed)
    options = {"device": "cpu", "max_num_seqs": 1}
    drafted = Engine.from_pretrained("large", depth=2, **options)
    assert (drafted.summary()["drafter"], drafted.drafter.model.name) == (
        "model",
        str(tmp_path / "models" / "little.gguf"),
    )
    assert (
        drafted.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=8))[0].stats.drafted_tokens > 0
    )
    for drafter, expected in (("ngram", "ngram"), (None, None), ("none", None)):
        assert Engine.from_pretrained("large", drafter=drafter, **options).summary()["drafter"] == expected
    assert Engine.from_pretrained("little", **options).summary()["drafter"] == "ngram"


def test_a_draft_file_of_another_vocabulary_is_refused_with_the_first_token_that_differs(tmp_path):
    def other_words(writer):
        words_with_a_template(Renamed(writer))

    target = write(tmp_path / "m.gguf", small("llama"), tokenizer=words_with_a_template)
    draft = write(tmp_path / "d.gguf", small("llama"), tokenizer=other_words)
    with pytest.raises(
        IncompatibleError,
        match=r"2 tokens differ, the first is 'c', id 2 in the target and None in the draft",
    ):
        Engine.from_pretrained(target, draft_model=draft, device="cpu", max_num_seqs=1)


def test_files_of_a_pair_whose_padding_differs_draft_and_print_no_padding(tmp_path):
    def padded(writer, num_rows):
        words_with_a_template(Filled(writer, num_rows))

    paths = {}
    for name, num_rows in (("target", 96), ("draft", 80)):
        module = small("llama", vocab_size=num_rows)
        paths[name] = write(
            tmp_path / f"{name}.gguf", module, tokenizer=lambda writer, rows=num_rows: padded(writer, rows)
        )
    engine = Engine.from_pretrained(paths["target"], draft_model=paths["draft"], device="cpu", depth=3)
    assert engine.target.vocab_size == 64
    results = engine.generate(
        ["abcab", "ab"], SamplingParams(temperature=1.5, max_tokens=40, ignore_eos=True, n=4)
    )
    for sample in (sample for result in results for sample in result.samples):
        assert max(sample.token_ids) < 64
        assert sample.stats.drafted_tokens > 0


class Filled:
    """A writer that fills the vocabulary up to the rows of a model, as llama.cpp's converter does."""

    def __init__(self, writer, num_rows):
        self._writer = writer
        self._num_rows = num_rows

    def add_token_list(self, tokens):
        self._writer.add_token_list([*tokens, *(f"[PAD{i}]" for i in range(len(tokens), self._num_rows))])

    def add_token_types(self, types):
        self._writer.add_token_types([*types, *[5] * (self._num_rows - len(types))])

    def __getattr__(self, name):
        return getattr(self._writer, name)


class Renamed:
    """A writer that spells the third token otherwise."""

    def __init__(self, writer):
        self._writer = writer

    def add_token_list(self, tokens):
        self._writer.add_token_list([*tokens[:2], "z", *tokens[3:]])

    def __getattr__(self, name):
        return getattr(self._writer, name)


def test_files_that_hold_the_same_tokenizer_share_its_backend_and_keep_their_templates(tmp_path):
    def other_template(writer):
        words_with_a_template(Retold(writer))

    def other_words(writer):
        words_with_a_template(Renamed(writer))

    tellers = words_with_a_template, other_template, other_words
    paths = [write(tmp_path / f"{k}.gguf", small("llama"), tokenizer=tell) for k, tell in enumerate(tellers)]
    first, second, third = (load_tokenizer(path) for path in paths)
    assert first.backend_tokenizer is second.backend_tokenizer is not third.backend_tokenizer
    assert (second.chat_template, first.chat_template == second.chat_template) == ("{{ 1 }}", False)
    assert third.get_vocab() != first.get_vocab() == second.get_vocab()


class Retold:
    """A writer of another template."""

    def __init__(self, writer):
        self._writer = writer

    def add_chat_template(self, template):
        self._writer.add_chat_template("{{ 1 }}")

    def __getattr__(self, name):
        return getattr(self._writer, name)


def refused(path, *words):
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(path), device="cpu", max_num_seqs=1)
    assert all(word in str(caught.value) for word in (str(path), *words)), caught.value


def test_transformers_loads_without_bars_and_reports(tmp_path, capsys):
    source = pair.draft_folder()
    folder = tmp_path / "m"
    said = list[str]()
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    weights = load_file(source / "model.safetensors")
    save_file(weights | {"stray.weight": torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})
    heard = logging.Handler()
    heard.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("transformers").addHandler(heard)
    hf_logging.set_verbosity_warning()
    hf_logging.enable_progress_bar()
    with suppress(ModelLoadError):
        load_module(str(folder), device="cpu")
    logging.getLogger("transformers").removeHandler(heard)
    assert capsys.readouterr().err == "" and said == []
    assert (
        hf_logging.is_progress_bar_enabled() and hf_logging.get_verbosity() == logging.WARNING
    )  # what was set stays


def test_a_file_that_is_empty_foreign_cut_off_or_too_long_is_refused_with_what_was_found(tmp_path, written):
    data = written.read_bytes()
    path = tmp_path / "m.gguf"
    wrong = {
        "it is empty": b"",
        "begins with b'PK": b"PK\3\4" + bytes(40),
        "header is damaged or cut off": data[:100],
        "is cut off": data[:-100],
        "too long": data + bytes(64) + b"x",
        "version 1": data[:4] + (1).to_bytes(4, "little") + data[8:],
        "big-endian; expected little-endian": data[:4] + (3).to_bytes(4, "big") + data[8:],
    }
    for said, content in wrong.items():
        path.write_bytes(content)
        refused(path, said)
    refused(tmp_path / "none.gguf", "does not exist")


def test_zeros_behind_the_data_and_names_that_are_no_utf_8_are_read_as_llama_cpp_reads_them(
    tmp_path, written
):
    data = written.read_bytes()
    path = tmp_path / "m.gguf"
    key = b"general.name"
    at = data.index(key) + len(key) + 4 + 8
    assert data[at : at + 5] == b"draft"
    path.write_bytes(data[:at] + b"dr\xe9ft" + data[at + 5 :] + bytes(100_000))
    read = GgufHeader(path)
    whole = GgufHeader(written)
    assert read.metadata["general.name"] == "dr\\xe9ft" and read.tensors == whole.tensors


def test_an_architecture_and_a_type_that_are_not_read_are_named(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(path, "'mamba'", "llama, ", "qwen2, ", "qwen3, ")
    module = small("llama")
    odd = gguf.GGMLQuantizationType.Q1_0
    data = Path(write(path, module, "Q4_K")).read_bytes()
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 16
    path.write_bytes(data[:at] + int(odd).to_bytes(4, "little") + data[at + 4 :])
    refused(path, "blk.0.attn_q.weight", "Q1_0", "Q4_K, Q5_K, Q6_K")
    path.write_bytes(data[:at] + (999).to_bytes(4, "little") + data[at + 4 :])
    refused(path, "number 999")


def test_a_folder_is_advised_where_transformers_has_the_architecture_and_nowhere_else(tmp_path):
    known = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
        | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
        | {*ENCODER_DECODERS}
    )
    assert set(TRANSFORMERS_TYPES.values()) <= known
    assert TRANSFORMERS_TYPES.keys() <= set(gguf.MODEL_ARCH_NAMES.values())
    squeezed = {name.replace("_", "").removesuffix("text") for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {
        "bert"
    }
    named = {name for name in gguf.MODEL_ARCH_NAMES.values() if re.sub("[-_.]", "", name) in squeezed}
    renamed = {"glm-dsa", "hunyuan-dense", "hunyuan-moe", "mimo2", "qwen2vl", "qwen3vl", "qwen3vlmoe", "t5"}
    assert named | renamed <= TRANSFORMERS_TYPES.keys() | ARCHITECTURES


ADVISED = {
    "gptj": hf.GPTJConfig(vocab_size=64, n_embd=32, n_head=4, n_layer=2, rotary_dim=4),
    "mamba": hf.MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2),
}


@pytest.mark.parametrize("architecture", ADVISED)
def test_the_folder_that_a_refused_file_advises_runs(tmp_path, architecture):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(path, f"'{architecture}'", "Give its safetensors folder, which runs through transformers")
    filled(hf.AutoModelForCausalLM.from_config(ADVISED[architecture])).save_pretrained(tmp_path / "folder")
    target = load_model(str(tmp_path / "folder"), device="cpu", max_num_seqs=1, max_model_len=64)
    assert np.isfinite(row(target)).all()


def test_missing_and_unknown_tensors_experts_and_settings_that_cannot_be_are_named(tmp_path):
    path = tmp_path / "m.gguf"
    module = small("llama")
    refused(write(path, module, without=["model.layers.1.mlp.up_proj.weight"]), "blk.1.ffn_up.weight")
    refused(
        write(path, module, more=[("blk.0.extra.weight", np.ones((256, 256), np.float32))]),
        "blk.0.extra.weight",
    )
    refused(write(path, module, expert_count=8, expert_used_count=9), "it chooses 9 of 8 experts")
    refused(write(path, module, expert_count=8, expert_used_count=2), "no tensor 'blk.0.ffn_gate_inp.weight'")
    refused(write(path, small("qwen2"), expert_count=8), "8 experts")
    refused(write(path, module, rope__scaling__type="longrope", rope__scaling__factor=2.0), "'longrope'")
    refused(
        write(path, module, rope__scaling__alpha=1000.0),
        "llama.rope.scaling.alpha is 1000.0, which is not read",
    )
    refused(write(path, module, rope__scaling__attn_factor=1.5), "attention times 1.5")
    config = module.config
    config.num_attention_heads = 0
    refused(
        write(path, module, without=[n for n in module.state_dict() if "_proj" in n]),
        "attention.head_count is 0",
    )


def test_a_file_without_a_tokenizer_is_told(tmp_path):
    path = write(tmp_path / "m.gguf", small("llama"))
    with pytest.raises(ModelLoadError, match=r"no tokenizer \(tokenizer\.ggml\.tokens\)"):
        Engine.from_pretrained(path, device="cpu")


def test_of_a_folder_with_both_formats_the_safetensors_are_taken_and_of_two_files_none(tmp_path):
    file = write(tmp_path / "a.gguf", small("llama"))
    alone = load_model(str(tmp_path), device="cpu", max_num_seqs=1)
    assert alone.name == file
    write(tmp_path / "b.gguf", small("llama"))
    with pytest.raises(ModelLoadError, match=r"2 GGUF files \(a\.gguf, b\.gguf"):
        load_model(str(tmp_path), device="cpu")
    small("qwen2").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"safetensors and the GGUF file a\.gguf: the safetensors are taken"):
        assert load_model(str(tmp_path), device="cpu", max_num_seqs=1).name == str(tmp_path)


def test_a_damaged_file_is_refused_or_decoded_within_the_vocabulary(tmp_path, written):
    data = written.read_bytes()

    def cases():
        for seed in range(60):
            rng = Random(seed)
            path = tmp_path / "m.gguf"
            way = flipped(data, rng, rng.choice((200, 3000, len(data)))) if seed % 3 else cut(data, rng)

            def case(way=way, path=path):
                path.write_bytes(way)
                target = load_model(str(path), device="cpu", max_num_seqs=1, max_model_len=32)
                target.prefill([0], [[1, 2, 3]])
                load_tokenizer(str(path))

            yield f"seed {seed}", case

    assert len(read_apart(cases(), 100)) >= 20


def test_a_file_whose_weights_are_no_numbers_is_refused_by_name(tmp_path, written):
    path = tmp_path / "m.gguf"
    data = bytearray(written.read_bytes())
    entry = GgufStore(written).tensors["blk.0.ffn_down.weight"]
    data[entry.start : entry.start + 4] = np.array([np.nan], np.float32).tobytes()
    path.write_bytes(data)
    with pytest.raises(
        ModelLoadError, match=r"NaN or infinity \(tensor 'model\.layers\.0\.mlp\.down_proj\.weight'\)"
    ):
        load_model(str(path))


def test_adapters_and_quantised_folders_are_refused_by_name(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match="LoRA adapter"):
        load_model(str(tmp_path), device="cpu")
