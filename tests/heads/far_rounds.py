"""Heads whose target's states are on a device draft there what they draft on the host.

Run by `tests/engine/test_device_rounds.py` in a process of its own: a device, once it is made known to torch, is there for everyone.
"""

from dataclasses import replace

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
    """A target of tables in float32 whose rows and states are on a device."""

    dtype = torch.float32

    def __init__(self, device):
        super().__init__(8, seed=0, dtype=torch.float32)
        self.device = device

    def _placed(self, scores):
        hidden = {layer: states.to(self.device) for layer, states in scores.hidden.items()}
        return replace(scores, logits=scores.logits.to(self.device), hidden=hidden)

    def prefill(self, *inputs, **options):
        return self._placed(super().prefill(*inputs, **options))

    def score(self, *inputs, **options):
        return self._placed(super().score(*inputs, **options))

    def embed(self, token_ids):
        return super().embed(token_ids.cpu()).to(self.device)

    def head(self, hidden):
        return super().head(hidden.to(self.device))


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
