"""A model's further layers in a GGUF file beside it, as llama.cpp's converter writes two files of one model."""

import shutil
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest

from polydraft.errors import ModelLoadError
from polydraft.heads.eagle.compiled import CompiledEagle
from polydraft.heads.mtp.checkpoint import MtpCheckpoint
from polydraft.models.load import load_model

WHOLE = Path(__file__).parent / "oracle_gguf" / "qwen35-mtp.gguf"
"""Of llama.cpp's converter, with the layer in it: blk.4 of five."""


def split(path, keeps, **settings):
    """Write the tensors that are kept, with other settings."""
    reader = gguf.GGUFReader(WHOLE)
    writer = gguf.GGUFWriter(path, "qwen35")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.contents()
        kind = field.types[0]
        name = field.name.removeprefix("qwen35.").replace(".", "__")
        value = settings.get(name, value)
        writer.add_key_value(
            field.name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        )
    for tensor in reader.tensors:
        if keeps(tensor.name):
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_two_files(folder, beside=lambda name: not name.startswith("blk.") or "blk.4." in name, **settings):
    """The model without its layer, and beside it the tensors of that file, with other settings."""
    layers = [True, True, True, False]
    split(folder / "tiny-F16.gguf", lambda name: "blk.4." not in name, block_count=4, nextn_predict_layers=0,
          attention__recurrent_layers=layers)  # fmt: skip
    split(folder / "mtp-tiny-F16.gguf", beside, **settings)


@pytest.fixture
def folder(tmp_path):
    write_two_files(tmp_path)
    return tmp_path


def opened(path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        target = load_model(str(path), backend="compiled", max_num_seqs=1, max_model_len=64)
    return target, [str(w.message) for w in caught if "draft head" in str(w.message)]


def drafted(target):
    """Logits of the further layer behind a text."""
    own = MtpCheckpoint.of_target(target)
    last = max(target.offers.hidden)
    text = [5, 9, 3, 7, 1, 8]
    states = target.prefill([0], [text], hidden=(last,)).hidden[last][0]
    assert own is not None
    model = CompiledEagle(own, target, quantization="float32")
    model.give(0, states[:-1])
    return model.prefill([0], [text[1:]]).logits[0, 0]


def test_the_layers_of_a_file_beside_a_model_draft_as_those_within_it_and_a_line_says_so(folder):
    target, (line,) = opened(folder / "tiny-F16.gguf")
    assert line.startswith(f"the draft head {str(folder / 'mtp-tiny-F16.gguf')!r} was found and drafts")
    whole, lines = opened(WHOLE)
    assert not lines
    np.testing.assert_allclose(drafted(target), drafted(whole), rtol=1.3e-6, atol=1e-5)
    assert opened(folder)[1] == [line], "a folder with both files is the model"


def test_a_file_with_the_further_layer_alone_drafts_with_the_embeddings_of_the_model(tmp_path):
    write_two_files(tmp_path, lambda name: "blk.4." in name)
    target, (line,) = opened(tmp_path / "tiny-F16.gguf")
    assert "was found and drafts" in line
    np.testing.assert_allclose(drafted(target), drafted(opened(WHOLE)[0]), rtol=1.3e-6, atol=1e-5)
    with pytest.raises(ModelLoadError, match="token_embd"):
        load_model(str(tmp_path / "mtp-tiny-F16.gguf"), backend="compiled")


def test_a_file_beside_a_model_that_is_for_another_one_is_not_used_and_the_line_says_why(folder):
    path = folder / "mtp-tiny-F16.gguf"
    tokens = gguf.GGUFReader(WHOLE).fields["tokenizer.ggml.tokens"].contents()
    other = {"tokenizer.ggml.tokens": ["?", *tokens[1:]]}
    for settings, reason in (
        ({"block_count": 7}, "it is for num_hidden_layers=6, the model has 4"),
        (
            {"tokenizer__ggml__tokens": other["tokenizer.ggml.tokens"]},
            "its tokens are others than the model's",
        ),
    ):
        write_two_files(folder, **settings)
        target, (line,) = opened(folder / "tiny-F16.gguf")
        assert f"{str(path)!r} was found and is not used: {reason}" in line
        assert target.checkpoint.predictor is None
    shutil.copy(WHOLE.with_name("glm4moe.gguf"), path)
    assert opened(folder / "tiny-F16.gguf")[1] == []
