"""The study of contrastive decoding."""

import pytest
import torch

from polydraft.models import pair
from studies.contrastive import first_layers, main, on_rows, repetition


def test_without_mask_and_contrast_nothing_is_moved_and_as_much_is_accepted_as_of_the_expert():
    expert, amateur = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    p, q = expert.double().softmax(-1), amateur.double().softmax(-1)
    found = on_rows([(expert, amateur, expert.argmax(-1))], 0, 0)
    assert found == pytest.approx({"accepted": float(1 - (p - q).abs().sum(-1).mean() / 2), "moved": 0, "right": 1})
    assert on_rows([(expert, amateur, expert.argmax(-1))], 0.1, 0.5)["moved"] > 0.01
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)


@pytest.mark.slow
def test_it_runs(tmp_path):
    main(out=tmp_path, quick=True)
    assert (tmp_path / "contrastive.json").exists() and (tmp_path / "contrastive.png").exists()
    assert (first_layers(str(pair.target_folder()), 2, tmp_path / "small") / "config.json").exists()
