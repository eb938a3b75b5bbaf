"""A head of random weights has the published form, and passes of all its forms are timed."""

from polydraft.heads.block.checkpoint import BlockCheckpoint
from polydraft.models import pair
from polydraft.models.load import load_model
from studies.head_pass import BLOCK, measured, written_head


def test_a_pass_of_a_random_head_is_timed_in_torch_and_compiled_beside_its_target(tmp_path):
    target = load_model(str(pair.target_folder()), backend="compiled", max_num_seqs=1, max_model_len=512)
    head = BlockCheckpoint.load(written_head(target, 1, tmp_path))
    assert head.compiles and head.depths == BLOCK and head.bias_kind == "vanilla"
    found = measured(target, head, 1)
    assert {"head in torch", "head compiled, int8", "head compiled, int4", "target, 1 rows"} < found.keys()
    assert all(milliseconds > 0 for milliseconds in found.values())
