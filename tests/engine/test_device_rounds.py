"""Heads on a device draft what they draft on the host, and rules decide there what they decide on the host."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.backend_registration

from polydraft.core.geometry import dedup, pad
from tests.models.tree_rounds import V
from tests.support.other_device import OneDevice


def test_rows_of_copies_are_fetched_where_they_are():
    unique = dedup(pad([([5, 7, 7, 9, 9], [-1, 0, 0, 1, 2])]))
    with OneDevice():
        assert unique.expand(torch.empty(1, 3, V, device="meta")).shape == (1, 5, V)


def test_rules_and_heads_on_a_device_do_what_they_do_on_the_host():
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
