"""Rounds of models on a device write what they write on the host; the processing of logits never waits for the device."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.backend_registration

from polydraft.core import SamplingParams, TokenTree
from polydraft.core.geometry import dedup, pad
from polydraft.sampling import processing as sampling
from tests.models.tree_rounds import V
from tests.support.other_device import OneDevice

LONG = [1, 2, 3, 4, 1, 2]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=5, top_p=0.8, min_p=0.1),
        SamplingParams(logit_bias={3: 1.0}),
    ],
    ids=["plain", "temperature", "truncation", "bias"],
)
def test_processing_never_waits_for_the_host_nor_mixes_devices(params):
    tree = TokenTree.chain(torch.tensor([[2, 5, 6]] * 2))
    with OneDevice():
        both = [params, SamplingParams(temperature=0)]
        x = sampling.process(
            torch.empty(2, 3, V, device="meta"), tree, [LONG] * 2, [3] * 2, both, checked=False
        )
        assert sampling.soften(x, both).shape == (2, 3, V)


def test_rows_of_copies_are_fetched_where_they_are():
    unique = dedup(pad([([5, 7, 7, 9, 9], [-1, 0, 0, 1, 2])]))
    with OneDevice():
        assert unique.expand(torch.empty(1, 3, V, device="meta")).shape == (1, 5, V)


def test_steps_and_heads_on_a_device_write_what_the_host_writes():
    """In a process of its own: a device, once it is made known to torch, is there for everyone."""
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices made in Python")
    collected = "addopts=--strict-markers --import-mode=importlib"  # without what keeps the device out of other processes
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-o",
        collected,
        *(str(Path(__file__).parents[1] / folder / "far_rounds.py") for folder in ("engine", "heads")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
