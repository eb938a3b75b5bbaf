"""Weights of a file in panels: as they are, mixed from tensor to tensor, rounded again only where that was asked for."""

import numpy as np
import pytest
import torch
import transformers as hf

from polydraft.core import TokenTree
from polydraft.errors import CapacityError
from polydraft.files.progress import reported_to
from polydraft.models import memory, pair
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.compiled.weights import packed_weights
from polydraft.models.load import load_model
from polydraft.models.loading import checkpoint
from polydraft.models.loading.gguf import GgufWeights
from polydraft.models.matrices.formats import SAMPLED, pack, panels_for, unpack
from polydraft.models.matrices.vectors import LANES
from tests.models.gguf_files import logits, read_by_transformers, write
from tests.support.closeness import assert_close
from tests.support.tiny import BLOCKED

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
MIXED = {
    "attn_v": "Q6_K",
    "attn_k": "Q5_0",
    "ffn_down": "Q3_K",
    "ffn_up": "F16",
    "token_embd": "Q5_K",
    "output": "Q8_0",
}


def mixed_file(path, **changed):
    """A file whose tensors have different formats, by layer, too."""
    torch.manual_seed(0)
    config = hf.Qwen2Config(**BLOCKED | {"vocab_size": 96, "max_position_embeddings": 64} | changed)
    module = hf.AutoModelForCausalLM.from_config(config).eval()
    for weight in module.parameters():
        torch.nn.init.normal_(weight, 0.0, 0.08) if weight.ndim > 1 else torch.nn.init.normal_(
            weight, 1.0, 0.1
        )

    def kind(name):
        part = name.removeprefix("blk.").removesuffix(".weight").split(".")[-1]
        return (
            "Q4_K"
            if name.startswith("blk.1.") and part in ("attn_v", "ffn_down")
            else MIXED.get(part, "Q4_K")
        )

    return write(path, module, kind)


def logits_of(model):
    model.release([0])
    return model.prefill([0], [IDS]).logits[0, 0]


def test_formats_that_differ_from_tensor_to_tensor_are_kept(tmp_path):
    path = mixed_file(tmp_path / "m.gguf")
    model = CompiledModel(
        checkpoint.of_file(GgufWeights.of(path)), max_num_seqs=1, activations="float32", cache_dtype="float32"
    )
    file = GgufWeights.of(path)
    assert model.weights.down.formats == {"Q3_K", "Q4_K"}
    assert {"Q4_K", "Q5_0", "Q6_K"} <= model.weights.qkv.formats
    for layer in range(2):
        parts = [file.read(f"model.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        assert np.array_equal(model.weights.qkv.matrix(layer, 512, 256), np.concatenate(parts))
    assert np.array_equal(model.embed(np.arange(96)), file.read("model.embed_tokens.weight"))
    assert_close(logits_of(model), logits(read_by_transformers(path), IDS))


def test_formats_that_differ_within_a_panel_are_widened_without_loss(tmp_path):
    path = mixed_file(tmp_path / "m.gguf", num_attention_heads=32, num_key_value_heads=2, head_dim=8)
    model = CompiledModel(checkpoint.of_file(GgufWeights.of(path)), max_num_seqs=1, cache_dtype="float32")
    file = GgufWeights.of(path)
    parts = [file.read(f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv"]
    assert np.array_equal(model.weights.qkv.matrix(0, 288, 256), np.concatenate(parts))


def test_rounded_activations_are_near_the_exact_ones_and_said(tmp_path):
    path = mixed_file(tmp_path / "m.gguf")
    exact, rounded = (
        CompiledModel(
            checkpoint.of_file(GgufWeights.of(path)), max_num_seqs=1, activations=kind, cache_dtype="float32"
        )
        for kind in ("float32", None)
    )
    assert (exact.activations, rounded.activations) == ("float32", "int8")
    assert not np.array_equal(logits_of(exact), logits_of(rounded))
    assert_close(logits_of(rounded), logits_of(exact), share=0.05)


def test_a_row_of_mixed_formats_has_the_same_bits_alone_and_among_others(tmp_path):
    model = CompiledModel(
        checkpoint.of_file(GgufWeights.of(mixed_file(tmp_path / "m.gguf"))),
        max_num_seqs=2,
        cache_dtype="float32",
    )
    whole = model.score([0], TokenTree.chain(np.array([IDS]))).logits[0]
    for n, token in enumerate(IDS):
        assert np.array_equal(model.prefill([1], [[token]]).logits[0, 0], whole[n])


def test_only_blocks_of_more_bits_are_rounded_again_and_said(tmp_path):
    files = checkpoint.of_file(GgufWeights.of(mixed_file(tmp_path / "m.gguf")))
    model = CompiledModel(files, max_num_seqs=1, quantization="int4", cache_dtype="float32")
    assert model.rounded_again == {"Q4_0": {"Q5_0", "Q6_K", "Q8_0"}}
    assert model.weights.out.formats == {"Q4_K"} and model.weights.head.formats == {"Q4_0"}
    assert model.quantization_error > 0
    kept = CompiledModel(files, max_num_seqs=1, quantization="int8", cache_dtype="float32")
    assert (kept.rounded_again, kept.weights.head.formats) == ({}, {"Q8_0"})


def test_a_draft_models_blocks_are_rounded_to_four_bits_unless_they_are_to_stay(tmp_path):
    path = str(mixed_file(tmp_path / "m.gguf"))
    folder = str(pair.draft_folder())
    options = {"max_num_seqs": 1, "device": "cpu"}
    formats = {
        (draft, given): load_model(draft, as_draft=True, quantization=given, **options).weight_format
        for draft, given in ((path, None), (path, "int8"), (folder, None))
    }
    assert formats == {(path, None): "int4", (path, "int8"): "int8", (folder, None): "bfloat16"}
    assert load_model(path, **options).weight_format == "Q3_K, Q4_K, Q5_0, Q6_K, Q8_0, float32"


def test_of_a_large_matrix_the_loss_is_estimated_from_a_sample_of_its_rows():
    weight = np.random.default_rng(0).standard_normal((3 * SAMPLED * LANES // 2, 32), np.float32)
    panels = panels_for(*weight.shape, "Q4_0")
    lost, total = pack(weight, panels)
    assert lost == pytest.approx(np.square(weight - unpack(panels, *weight.shape)).sum(), rel=0.05)
    assert total == pytest.approx(np.square(weight).sum(), rel=0.05)


def test_loading_reports_its_progress_in_bytes(tmp_path):
    reports = []
    with reported_to(lambda *report: reports.append(report)):
        CompiledModel(
            checkpoint.of_file(GgufWeights.of(mixed_file(tmp_path / "m.gguf"))),
            max_num_seqs=1,
            cache_dtype="float32",
        )
    names, done, totals = zip(*reports, strict=True)
    assert set(names) == {str(tmp_path / "m.gguf")} and len(set(totals)) == 1
    assert list(done) == sorted(done) and done[-1] == totals[0]


def test_weights_that_memory_does_not_hold_are_refused_with_both_numbers(tmp_path, monkeypatch):
    files = checkpoint.of_file(GgufWeights.of(mixed_file(tmp_path / "m.gguf")))
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**18)
    with pytest.raises(CapacityError, match=r"take 0\.00 GiB in its own format, and 0\.00 GiB"):
        packed_weights(files, 64, None)


def test_read_weights_are_given_back_to_the_system(tmp_path):
    file = GgufWeights.of(mixed_file(tmp_path / "m.gguf"))
    name = "model.layers.0.mlp.gate_proj.weight"
    before = file.read(name)
    file.forget([name])
    assert np.array_equal(file.read(name), before)
