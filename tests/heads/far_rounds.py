"""Heads whose target computes on a device draft there what they draft on the host.

Run by `tests/engine/test_device_rounds.py` in a process of its own: a device, once it is made known to torch, is there for everyone.
"""

import numpy as np
import pytest
import torch

from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from tests.drafters.sessions import trained
from tests.engine.tables import TableModel
from tests.support.far_device import FAR

PROMPTS = [[1, 2, 3], [1, 2, 1, 2, 1]]
KINDS = ["eagle", "block", "medusa", "mtp"]


class Tables(TableModel):
    """A target of tables in float32 that says it computes on a device."""

    dtype = torch.float32

    def __init__(self, device):
        super().__init__(8, seed=0, dtype=np.float32)
        self.device = device


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_drafts_on_a_device_what_it_drafts_on_the_host(kind, tmp_path):
    options = trained(kind)(tmp_path, 8)
    results = {}
    for device in (torch.device("cpu"), FAR):
        engine = Engine.of(Tables(device), drafter=kind, drafter_options=options, depth=2, eos_token_ids=())
        assert next(engine.drafter.model.network.parameters()).device == device
        results[device] = engine.generate(PROMPTS, SamplingParams(max_tokens=12, seed=5))
    here, there = results.values()
    assert [(r.token_ids, r.stats.accepted_tokens) for r in here] == [
        (r.token_ids, r.stats.accepted_tokens) for r in there
    ]
    assert all(r.stats.drafted_tokens > 0 and r.stats.drafter_error is None for r in (*here, *there))
