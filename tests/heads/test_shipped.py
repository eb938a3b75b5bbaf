"""Heads that come with the package are for one target each; what they are looked up for is not refused."""

from pathlib import Path

from polydraft.heads.checkpoint import shipped
from polydraft.models import load

GRANITE = Path(__file__).parents[1] / "models" / "oracle_gguf" / "granite.gguf"


def test_a_target_that_no_shipped_head_fits_has_none():
    assert shipped(load.load_model(str(GRANITE), max_num_seqs=1)) is None
