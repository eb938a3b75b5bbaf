"""Compiled code reads blocks as the `gguf` package does, and rounds them to four bits as NumPy does, bit for bit."""

import gguf
import numpy as np
import pytest

from polydraft.models.compiled.weights import packed_weights
from polydraft.models.load import load_model
from polydraft.models.loading import checkpoint
from polydraft.models.loading.gguf import GgufWeights
from polydraft.models.matrices.dequantising import decoded, recode
from polydraft.models.matrices.formats import BLOCKS, pack, pack_blocks, panels_for, raw_blocks, unpack
from polydraft.models.matrices.vectors import LANES
from tests.models.gguf_files import write
from tests.models.test_gguf import small

OUTPUTS = 2 * LANES + 5
INPUTS = 512


def random_blocks(name, size=0.01):
    """Rows of a file with random codes and scales; the first ones are zeros, numbers that float16 has no place for, and its largest."""
    raw = raw_blocks(name)
    random = np.random.default_rng(7)
    rows = random.integers(0, 256, (OUTPUTS, INPUTS // BLOCKS[name].inputs, raw.itemsize), np.uint8)
    blocks = rows.reshape(OUTPUTS, -1).view(raw)
    for field in {"d", "m", "dmin"} & set(raw.names or ()):
        scales = random.standard_normal(blocks[field].shape) * size
        scales[:3] = [[0.0], [6e-8], [100.0]]
        blocks[field] = scales.astype(np.float16).view(np.uint16)
    if "exponent" in (raw.names or ()):
        exponents = random.integers(110, 130, blocks["exponent"].shape)
        exponents[:3] = [[0], [1], [134]]
        blocks["exponent"] = exponents
    return blocks.view(np.uint8).reshape(OUTPUTS, -1)


@pytest.mark.parametrize("name", BLOCKS)
def test_decoded_blocks_are_the_numbers_of_the_gguf_package(name):
    blocks = random_blocks(name)
    theirs = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert np.array_equal(decoded(name, blocks), theirs)
    assert np.array_equal(decoded(name, blocks[3:4]), theirs[3:4])


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("size", [0.01, 1e-6])
def test_recoded_blocks_are_the_bytes_that_numpy_makes_of_the_numbers(name, size):
    blocks = random_blocks(name, size)
    ours, theirs = (panels_for(OUTPUTS, INPUTS, "Q4_0") for _ in range(2))
    lost, whole = recode(name, blocks, ours)
    expected = pack(gguf.dequantize(blocks, gguf.GGMLQuantizationType[name]), theirs)
    assert ours.tobytes() == theirs.tobytes()
    assert (lost, whole) == pytest.approx(expected, rel=1e-3)


def test_a_matrix_of_blocks_that_stay_and_of_such_that_are_recoded_holds_both(tmp_path):
    kinds = {"attn_q": "Q4_0", "attn_k": "Q5_0", "attn_v": "Q8_0"}
    path = write(
        tmp_path / "m.gguf",
        small("llama"),
        lambda own: next((k for n, k in kinds.items() if n in own), "Q4_0"),
    )
    file = GgufWeights.of(path)
    packed = packed_weights(checkpoint.of_file(file), 64, "int4")
    rows = []
    for name in ("q_proj", "k_proj", "v_proj"):
        kind, blocks = file.blocks(f"model.layers.1.self_attn.{name}.weight")
        panels = panels_for(len(blocks), 256, "Q4_0")
        pack_blocks(
            np.ascontiguousarray(blocks).view(raw_blocks(kind)), panels
        ) if kind == "Q4_0" else recode(kind, blocks, panels)
        rows.append(unpack(panels, len(blocks), 256))
    assert np.array_equal(unpack(packed.weights.qkv.panels_of(1), 512, 256), np.concatenate(rows))
    assert packed.rounded == {"Q4_0": {"Q5_0", "Q8_0"}}


@pytest.mark.parametrize("backend", ["compiled", "transformers"])
def test_a_start_dequantises_nothing_with_numpy(tmp_path, monkeypatch, backend):
    path = write(tmp_path / "m.gguf", small("llama"), lambda own: "Q4_K" if "ffn" in own else "Q6_K")
    monkeypatch.setattr(gguf, "dequantize", None)
    target = load_model(path, backend=backend, max_num_seqs=1, as_draft=True, device="cpu")
    assert np.isfinite(target.prefill([0], [[1, 2, 3]]).logits).all()
