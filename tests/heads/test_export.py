"""Models and heads as folders that other engines read."""

import json

import numpy as np
import pytest

from polydraft.errors import InvalidInputError
from polydraft.heads.eagle.checkpoint import EagleCheckpoint
from polydraft.heads.export import export_head, export_model
from polydraft.models import pair
from polydraft.models.load import load_model
from polydraft.train.run import untrained


def test_a_model_and_its_head_are_read_again(tmp_path):
    target = load_model(str(pair.target_folder()), max_num_seqs=1)
    trained = untrained("eagle", target, tmp_path / "trained")
    module = export_model(str(pair.target_folder()), tmp_path / "out")
    head = EagleCheckpoint.load(export_head(trained, module, tmp_path / "out" / "head"))
    again = load_model(str(tmp_path / "out"), max_num_seqs=1)
    assert np.array_equal(again.prefill([0], [[5, 6, 7]]).logits, target.prefill([0], [[5, 6, 7]]).logits)
    head.check(again)
    before = EagleCheckpoint.load(trained)
    np.testing.assert_allclose(head.output(again), before.output(target), atol=1e-2, rtol=1e-2)
    assert (
        "target_probe" not in head.tensors
        and np.flatnonzero(head.tensors["t2d"]).tolist() == before.ids.tolist()
    )
    said = json.loads((tmp_path / "out" / "head" / "config.json").read_text())
    assert said["architectures"] == ["LlamaForCausalLMEagle3"]
    assert said.get("norm_final_state", False) == (max(before.layers) == module.config.num_hidden_layers)


def test_a_folder_that_has_something_in_it_is_refused(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(InvalidInputError, match="not empty"):
        export_model(str(pair.target_folder()), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]
