"""Files of true sizes are models that run."""

import re
from pathlib import Path

import numpy as np
import pytest

from polydraft.core.geometry import pad
from polydraft.models.load import load_model, load_tokenizer
from polydraft.models.loading.gguf import GgufWeights
from studies.shapes import SHAPES, write_shape

ORACLES = Path(__file__).parents[1] / "models" / "oracle_gguf"


def test_a_random_model_of_a_shape_runs_and_has_weights_of_mean_0(tmp_path):
    file = write_shape(SHAPES["tiny"].cut(2), tmp_path / "tiny.gguf")
    assert load_tokenizer(str(file)).decode(load_tokenizer(str(file))("a babé")["input_ids"]) == "a babé"
    target = load_model(str(file), max_num_seqs=1, max_model_len=64)
    target.prefill([0], [[300, 301]])
    logits = target.score([0], pad([([302, 303, 304], [-1, 0, 1])])).logits[0]
    assert np.isfinite(logits).all() and len({*logits.argmax(-1).tolist()}) > 1
    weight = GgufWeights.of(file).read("model.layers.1.mlp.experts.3.up_proj.weight")
    assert abs(weight.mean()) < 0.1 * weight.std() < 0.02


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_tensors_of_a_converted_file(name):
    shape = SHAPES[name].cut(5)
    converted = {
        re.sub(r"blk.\d+", "blk", tensor)
        for tensor in GgufWeights.of(ORACLES / f"{shape.architecture}.gguf").store.tensors
    }
    ours = {re.sub(r"blk.\d+", "blk", tensor) for tensor, _, _ in shape.tensors()}
    assert ours - {"output.weight"} == converted - {"output.weight"}


@pytest.mark.parametrize("name", SHAPES)
def test_a_cut_shape_has_its_share_of_the_vocabulary(name):
    whole = SHAPES[name]
    cut = SHAPES[name].cut(1)
    assert cut.vocabulary == max(whole.vocabulary // whole.layers // 256 * 256, 512)
    assert len({tensor for tensor, _, _ in cut.tensors()}) == len(list(cut.tensors()))
    assert all(np.prod(shape) > 0 for _, shape, _ in cut.tensors())
