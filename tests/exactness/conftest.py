"""What several of the exact tests start from."""

import pytest
import torch

from tests.engine.tables import TableModel


@pytest.fixture
def pair():
    """Two tables of three tokens, and drafts in float64."""
    torch.set_default_dtype(torch.float64)
    yield TableModel(3, seed=0), TableModel(3, seed=1)
    torch.set_default_dtype(torch.float32)
