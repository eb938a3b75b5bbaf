"""Rounds with rows on a device: what is generated is what the CPU generates.

Run by `test_device_rounds.py` in a process of its own: a device, once it is made known to torch, is there for everyone.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from polydraft.core import DraftSampling, SamplingParams
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine.api import Engine
from polydraft.sampling.categorical import choose_systematic
from polydraft.verifiers import flow
from polydraft.verifiers.lift.contexts import Contexts
from tests.engine.tables import TableModel
from tests.support.far_device import FAR, transfers

PROMPTS = [[1, 2, 3], [1, 2, 1, 2, 1]]


class FarTables(TableModel):
    """A target of tables whose rows are on the device."""

    def score(self, *given, **options):
        scores = super().score(*given, **options)
        return replace(scores, logits=scores.logits.float().to(FAR))


class NearTables(TableModel):
    """The same on the host."""

    def score(self, *given, **options):
        scores = super().score(*given, **options)
        return replace(scores, logits=scores.logits.float())


def engine(target, drafter, verifier, **options):
    """A target, and a draft model that is near it."""
    model = target(8, seed=0)
    small = TableModel(8, seed=1)
    source = None if drafter is None else ModelDrafter(small, drafter)
    return Engine.of(model, drafter=source, verifier=verifier, **options)


WAYS = [
    ("paths", "auto", {"depth": 3, "num_paths": 2}),
    ("chain", "block", {"depth": 3}),
    ("paths", "traversal", {"depth": 3, "num_paths": 2}),
    ("paths", "match", {"depth": 3, "num_paths": 2}),
    ("paths", "race", {"depth": 3, "num_paths": 2}),
    (None, "match", {}),
]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("drafter", "verifier", "options"), WAYS)
def test_a_device_writes_what_the_host_writes(drafter, verifier, options, temperature):
    params = SamplingParams(max_tokens=12, seed=5, temperature=temperature, ignore_eos=True)
    here, there = (
        engine(kind, drafter, verifier, **options).generate(PROMPTS, params)
        for kind in (NearTables, FarTables)
    )
    assert [r.token_ids for r in there] == [r.token_ids for r in here]
    assert transfers.read


def test_flow_decides_where_its_rows_are_what_it_decides_on_the_host():
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(50, 6, generator=g, dtype=torch.float64).softmax(-1) for _ in range(2))
    tokens = torch.stack([at_equal_steps(row, torch.rand(1, generator=g).item()) for row in q])
    tokens[::3, 1:] = -1
    tokens[1::3, 2:] = -1  # draws at equal steps of other numbers than these: any draws will do
    parts = torch.rand(50, generator=g).double(), p, q, tokens
    here, there = (
        flow.tries(
            Contexts(
                *(x.to(device) for x in parts), DraftSampling.SYSTEMATIC, torch.zeros_like(tokens).to(device)
            )
        )
        for device in (torch.device("cpu"), FAR)
    )
    for one, other in zip(here, there, strict=True):
        assert other.device.type == FAR.type
        assert torch.equal(one, other.cpu())


def at_equal_steps(row: torch.Tensor, u: float) -> torch.Tensor:
    """Three draws at equal steps."""
    drawn = np.zeros(3, np.int64)
    choose_systematic(row.numpy(), u, drawn)
    return torch.from_numpy(drawn)
