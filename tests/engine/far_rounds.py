"""Rounds of pairs on a device: what is generated is what the CPU generates, and the host reads two small tables a round.

Run by `test_device_rounds.py` in a process of its own: a device, once it is made known to torch, is there for everyone.
"""

import pytest

from polydraft.core import Request, SamplingParams
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine.api import Engine
from polydraft.models.static.llama import StaticLlama
from tests.far_device import FAR, transfers
from tests.models.tree_rounds import ARCHITECTURES, V, small_model

PROMPTS = [[1, 2, 3], [1, 2, 1, 2, 1]]
PARAMS = SamplingParams(max_tokens=12, seed=5, temperature=0.9, ignore_eos=True)


def engine(device, drafter, verifier, **options):
    """A target and a draft model on a device."""
    target, small = (
        StaticLlama(small_model(ARCHITECTURES["llama"], seed=seed).to(device), max_num_seqs=4, max_model_len=64)
        for seed in (0, 1)
    )
    source = None if drafter is None else ModelDrafter(small, drafter)
    return Engine.of(target, drafter=source, verifier=verifier, **options)


WAYS = [
    ("paths", "auto", {"depth": 3, "num_paths": 2}),
    ("chain", "block", {"depth": 3}),
    ("paths", "traversal", {"depth": 3, "num_paths": 2}),
    ("paths", "match", {"depth": 3, "num_paths": 2}),
    ("paths", "race", {"depth": 3, "num_paths": 2}),
    (None, "match", {}),
]


@pytest.mark.parametrize(("drafter", "verifier", "options"), WAYS)
def test_a_round_on_a_device_reads_two_small_tables_and_no_row(drafter, verifier, options):
    here, there = engine("cpu", drafter, verifier, **options), engine(FAR, drafter, verifier, **options)
    expected = [r.token_ids for r in here.generate(PROMPTS, PARAMS)]
    samples = [there.add_request(Request(str(i), tuple(p), PARAMS, 5, 65_536 * i)) for i, p in enumerate(PROMPTS)]
    rounds = 0
    while there.has_unfinished_requests:
        transfers.clear()
        there.step()
        rounds += 1
        if rounds > 1:  # the first one also reads whether the first laws of a drafter are laws
            assert len(transfers.read) <= (1 if drafter is None else 2), transfers.read
        assert max(transfers.read) <= len(PROMPTS) * 16, "a row of logits or of a law was read"
    assert [s.token_ids for s in samples] == expected
    assert rounds > 3


def test_the_adaptive_plan_reads_no_more():
    there = engine(FAR, "paths", "auto")
    there.add_request(Request("r", (1, 2, 3), PARAMS, 5, 0))
    for number in range(8):
        transfers.clear()
        there.step()
        assert len(transfers.read) <= 2 or number == 0
        assert max(transfers.read) < V


def test_a_rule_on_the_host_is_seen_to_read_rows():
    there = engine(FAR, "paths", "recursive", depth=3, num_paths=2)
    there.add_request(Request("r", (1, 2, 3), PARAMS, 5, 0))
    transfers.clear()
    there.step()
    assert max(transfers.read) >= 7 * V
