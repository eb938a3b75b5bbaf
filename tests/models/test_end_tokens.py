"""All tokens that end a text end it: of a GGUF file as llama.cpp has them, of a folder as `generate` does, and never none where there are some."""

import json
from pathlib import Path

import gguf
import pytest
from transformers import PreTrainedTokenizerFast

from polydraft import Engine, SamplingParams, StructuredOutputs
from polydraft.models.load import load_model
from polydraft.models.store.gguf_header import GgufHeader
from polydraft.models.store.gguf_roles import end_ids, special_id
from tests.models.tree_rounds import small_model
from tests.support.byte_tokenizers import byte_level
from tests.support.tiny import llama_config

ORACLE = Path(__file__).parent / "oracle_gguf"
NORMAL = 1
CONTROL = 3
DEFINED = 4
QWEN = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|fim_prefix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
]
CASES = [
    (QWEN, {"eos": 4}, [4, 2, 6, 7, 8]),
    ([*QWEN, "</s>"], {"eos": 2}, [2, 4, 6, 7, 8, 9]),
    (
        ["<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|python_tag|>"],
        {"eos": 5},
        [5, 3, 4],
    ),
    (["<|return|>", "<|call|>", "<|end|>", "<|endoftext|>"], {"eos": 2}, [2, 3, 5]),
    (["<|user|>", "<|end|>", "<|endoftext|>"], {"eos": 4}, [4, 3]),
    (
        ["<EOT>", "_<EOT>", "<PAD>", "<reponame>", "x", "y", "z"],
        {"eos": 6, "eot": 7, "eom": 8, "fim_pad": 1},
        [6, 7, 8, 2, 3, 1, 5],
    ),
    (["<eos>", "<end_of_turn>", "<turn|>", "<|tool_response>", "</s>"], {"eos": 2, "eot": 99}, [2, 3, 4, 5]),
]
"""Names of tokens, which are 2, 3, ..., keys of the file, and ids that llama.cpp's `llama_vocab_is_eog` of October 2026 tells of them."""


def vocabulary(path, names, keys, kind="gpt2", types=None):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(["a", "b", *names])
    writer.add_token_types(types or [NORMAL, NORMAL, *[CONTROL] * len(names)])
    for role, token_id in keys.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufHeader(path)


@pytest.mark.parametrize(("names", "keys", "ends"), CASES)
def test_the_ends_of_a_file_are_those_of_llama_cpp(tmp_path, names, keys, ends):
    assert sorted(end_ids(vocabulary(tmp_path / "v.gguf", names, keys))) == sorted(ends)


@pytest.mark.parametrize("path", sorted(ORACLE.glob("*.gguf")), ids=lambda path: path.stem)
def test_the_ends_of_files_of_the_converter_are_those_of_llama_cpp(path):
    header = GgufHeader(path)
    names = header.strings("tokenizer.ggml.tokens")
    told = {header.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot")} - {None}
    of_chats = {names.index(name) for name in ("<|endoftext|>", "<|im_end|>") if name in names}
    assert sorted(end_ids(header)) == sorted(told | of_chats)


def test_a_tag_of_html_ends_no_text(tmp_path):
    for kind in (NORMAL, DEFINED):
        file = vocabulary(
            tmp_path / "v.gguf", ["</s>", "<|im_end|>"], {"eos": 3}, types=[NORMAL, NORMAL, kind, NORMAL]
        )
        assert end_ids(file) == [3]


def test_a_sentencepiece_file_without_keys_has_the_roles_of_its_first_ids(tmp_path):
    file = vocabulary(tmp_path / "v.gguf", ["</s>"], {}, kind="llama")
    assert [special_id(file, role) for role in ("unknown", "bos", "eos", "padding")] == [0, 1, 2, None]
    file = vocabulary(tmp_path / "w.gguf", ["</s>", "<s>"], {"bos": 3, "eos": 77}, kind="llama")
    assert [special_id(file, role) for role in ("bos", "eos")] == [3, 2]
    assert special_id(vocabulary(tmp_path / "x.gguf", ["</s>"], {}), "bos") is None


def tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer, eos_token="<|end|>")


@pytest.fixture
def folder(tmp_path):
    config = llama_config(
        vocab_size=len(tokenizer()), eos_token_id=7, bos_token_id=1, max_position_embeddings=64
    )
    small_model(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_whose_generation_settings_name_no_end_has_that_of_its_configuration(folder):
    for text, ends in (
        ('{"eos_token_id": [3, 4]}', (3, 4)),
        ('{"bos_token_id": 5}', (7,)),
        ("{}", (7,)),
        ('{"eos_token_id": []}', (7,)),
    ):
        (folder / "generation_config.json").write_text(text)
        for backend in ("compiled", "transformers"):
            assert tuple(load_model(str(folder), backend=backend, device="cpu").eos_token_ids) == ends, text


def test_a_folder_whose_configuration_names_no_end_has_that_of_its_tokenizer(folder):
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "eos_token_id": None}))
    (folder / "generation_config.json").write_text("{}")
    engine = Engine.from_pretrained(str(folder), device="cpu", drafter=None)
    assert engine.eos_token_ids == (tokenizer().eos_token_id,)
    choice = SamplingParams(structured_outputs=StructuredOutputs(choice=["yes"]), max_tokens=9)
    assert (made := engine.generate("x", choice)[0].samples[0]).text == "yes" and made.finish_reason == "stop"
    assert engine.generate("x", SamplingParams(logit_bias={tokenizer().eos_token_id: 100.0}))[0].samples[
        0
    ].token_ids == [tokenizer().eos_token_id]
