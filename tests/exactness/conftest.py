"""What several of the exact tests start from."""

import pytest

from tests.engine.tables import TableModel


@pytest.fixture
def pair():
    """Two tables of three tokens, in float64."""
    return TableModel(3, seed=0), TableModel(3, seed=1)
