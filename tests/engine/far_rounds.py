"""Tensors on a device: what passes the door, and a rule that decides there.

Run by `test_device_rounds.py` in a process of its own: a device, once it is made known to torch, is there for everyone.
"""

import numpy as np
import torch

from polydraft.core import DraftSampling
from polydraft.models.torch.door import inward, outward
from polydraft.sampling.categorical import choose_systematic
from polydraft.verifiers import flow
from polydraft.verifiers.lift.contexts import Contexts
from tests.support.far_device import FAR, transfers


def test_what_passes_the_door_from_a_device_is_an_array_of_the_host():
    x = torch.arange(6.0).reshape(2, 3)
    transfers.clear()
    assert np.array_equal(outward(x.bfloat16().to(FAR)), x.numpy())
    assert transfers.read == [6]


def test_an_array_comes_to_the_device_in_the_format_that_is_asked_for():
    there = inward(np.ones((2, 3)), torch.zeros(1).to(FAR), torch.float32)
    assert (there.device.type, there.dtype) == (FAR.type, torch.float32)
    assert transfers.sent


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
