"""Rounds whose verification runs in torch operations give what compiled rounds give; what stays on a device is never read."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.backend_registration

from polydraft import sampling
from polydraft.core import SamplingParams, TokenTree
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.engine.api import Engine
from polydraft.models.compiled.llama import CompiledLlama
from polydraft.models.static.llama import StaticLlama
from polydraft.tree import dedup, pad
from polydraft.verifiers import greedy
from polydraft.verifiers.block import Block
from polydraft.verifiers.fast import device
from polydraft.verifiers.fast.device_tree import GreedyTraversalRule, TraversalRule
from polydraft.verifiers.greedy_traversal import GreedyTraversal
from polydraft.verifiers.match import Match
from polydraft.verifiers.race import Race
from polydraft.verifiers.traversal import Traversal
from tests.models.tree_rounds import ARCHITECTURES, V, small_model
from tests.other_device import OneDevice

WALKS = {
    Block: ("block", lambda self: device.block),
    Race: ("race", lambda self: device.race(self.active)),
    Match: ("match", lambda self: device.match),
    GreedyTraversal: ("greedy_traversal", lambda self: GreedyTraversalRule()),
    Traversal: ("traversal", lambda self: TraversalRule(self.merged)),
}


@pytest.fixture
def torch_walks(monkeypatch):
    """As on a GPU: every walk in torch operations; returns the names of the rules that walked."""
    used = []
    for kind, (name, rule) in WALKS.items():

        def walk(self, draft, logits, key, name=name, rule=rule):
            used.append(name)
            return device.walk(rule(self), draft, logits, draft.noise if name == "race" else key)

        monkeypatch.setattr(kind, "walk", walk)
    monkeypatch.setattr(greedy, "walk", lambda *given: used.append("greedy") or device.walk(device.greedy, *given))
    return used


def texts(target, drafter, verifier, params, path=CompiledLlama, **options):
    if isinstance(drafter, str) and drafter.startswith("model"):
        small = small_model(ARCHITECTURES["llama"], seed=1)
        drafter = ModelDrafter(path(small, max_num_seqs=4), drafter.partition(":")[2] or "paths")
    engine = Engine.of(target, drafter=drafter, verifier=verifier, depth=3, **options)
    return [r.token_ids for r in engine.generate([[1, 2, 3], [4, 5], [1, 2, 1, 2, 1]], params)]


CASES = [
    ("model:chain", "block", {}),
    ("model", "greedy_traversal", {"num_paths": 1}),
    ("model", "greedy_traversal", {"num_paths": 3}),
    ("model", "traversal", {"num_paths": 2}),
    ("model:without_replacement", "traversal", {"num_paths": 2}),
    ("model:listed", "list_race", {"num_paths": 2}),
    ("model", "match", {"num_paths": 2}),
    ("model:coupled", "race", {"num_paths": 2}),
    ("ngram", "match", {}),
    (None, "match", {}),
]


@pytest.mark.parametrize(("drafter", "verifier", "options"), CASES)
def test_generation_with_torch_walks_is_that_of_the_compiled_ones(drafter, verifier, options, request):
    model = small_model(ARCHITECTURES["llama"])
    params = SamplingParams(max_tokens=24, seed=5, temperature=0.9, ignore_eos=True)
    expected = texts(StaticLlama(model, max_num_seqs=4), drafter, verifier, params, **options)
    used = request.getfixturevalue("torch_walks")
    assert texts(StaticLlama(model, max_num_seqs=4), drafter, verifier, params, **options) == expected
    rule = "race" if verifier == "list_race" else verifier
    assert {rule} <= set(used) <= {rule, "match"}, "a last token is drawn without a draft"


@pytest.mark.parametrize(("width", "verifier"), [(1, "greedy_traversal"), (2, "greedy_traversal"), (2, "match")])
def test_a_pair_on_the_static_path_writes_what_a_compiled_draft_writes(width, verifier):
    model = small_model(ARCHITECTURES["llama"])
    params = SamplingParams(max_tokens=24, seed=5, temperature=0.9, ignore_eos=True)
    given = ("model", verifier, params)
    expected = texts(StaticLlama(model, max_num_seqs=4), *given, num_paths=width)
    assert texts(StaticLlama(model, max_num_seqs=4), *given, StaticLlama, num_paths=width) == expected


def test_greedy_text_of_the_static_path_is_that_of_the_compiled_one(torch_walks):
    model = small_model(ARCHITECTURES["llama"])
    params = SamplingParams(max_tokens=24, temperature=0)
    plain = texts(CompiledLlama(model, max_num_seqs=4), None, "match", params)
    assert texts(StaticLlama(model, max_num_seqs=4), "model:chain", "block", params) == plain
    assert set(torch_walks) == {"greedy"}


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
        x = sampling.process(torch.empty(2, 3, V, device="meta"), tree, [LONG] * 2, [3] * 2, both, checked=False)
        assert sampling.soften(x, both).shape == (2, 3, V)


def test_rows_of_copies_are_fetched_where_they_are():
    unique = dedup(pad([([5, 7, 7, 9, 9], [-1, 0, 0, 1, 2])]))
    with OneDevice():
        assert unique.expand(torch.empty(1, 3, V, device="meta")).shape == (1, 5, V)


def test_whole_rounds_on_a_device_read_two_small_tables():
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
        str(Path(__file__).with_name("far_rounds.py")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
