import pytest

from studies.ranks import ROWS, SHAPE, rank_costs

pytest.importorskip("accelerate")


@pytest.mark.slow
def test_every_way_is_measured_in_every_turn():
    found = rank_costs(SHAPE | {"num_hidden_layers": 1}, 64, 2, 2)
    assert len(found) == 3 and all(len(by_rows[rows]) == 2 for by_rows in found.values() for rows in ROWS)
