"""Muon's updates."""

import torch

from polydraft.train.loop import orthogonalise


def test_muon_updates_have_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((24, 40), (40, 24)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert 0.6 < values.min() < values.max() < 1.3
