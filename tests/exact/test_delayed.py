"""A trunk, then K paths: the drafter draws what the checker enumerates, and every rule for paths keeps the law, over rounds too."""

import numpy as np
import pytest
import torch
from harness import by_depth, enumerate_drafts, measure
from runs import every_run
from tables import TableModel, law

from polydraft import Engine, FixedPlan, SamplingParams, registry
from polydraft.core import Budget, Request, SiblingLaw, TreeShape
from polydraft.drafters.model import ModelDrafter

IID, PATHS = SiblingLaw.IID, TreeShape.PATHS
NAMES = [
    name
    for name in registry.names("verifier")
    for info in [registry.verifier(name).info]
    if info.lossless and not info.shared_noise and IID in info.laws and PATHS in info.shapes
]
SHAPES = {(2, 3, 1): by_depth(1, 2, 1), (2, 3, 2): by_depth(1, 1, 2), (3, 2, 1): by_depth(1, 3)}
"""(paths, depth, trunk): children by depth."""


class TwoTables:
    """A target and a draft table as the checker's rows below a prompt."""

    def __init__(self, target, draft, prompt):
        self.V, self.prompt = target.vocab_size, prompt
        self.models = {"p": target, "q": draft}

    def row(self, which, path):
        text = [*self.prompt, *path]
        return self.models[which].logits[text[-2], text[-1]].softmax(-1).numpy()


@pytest.fixture
def pair():
    """Two tables of three tokens, and drafts in float64."""
    torch.set_default_dtype(torch.float64)
    yield TableModel(3, seed=0), TableModel(3, seed=1)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_the_drafters_draws_are_those_of_the_checker_and_every_rule_keeps_the_law(pair, size, monkeypatch):
    tables = TwoTables(*pair, [1, 2])
    drafter = ModelDrafter(pair[1])
    (state,) = drafter.start([Request("r", (1, 2), SamplingParams(), 0)])
    expected = {(*d.tokens[1:], *d.parents): d.probability for d in enumerate_drafts(tables, IID, SHAPES[size], size[1])}
    found = {}
    for probability, draft in every_run(lambda: drafter.propose([state], [Budget.of_paths(*size)]), monkeypatch):
        assert draft.shape is PATHS
        found[(*draft.tree.tokens[0, 1:].tolist(), *draft.tree.parents[0].tolist())] = probability
        for n in range(1, draft.tree.num_nodes):
            path, m = [], int(draft.tree.parents[0, n])
            while m > 0:
                path, m = [int(draft.tree.tokens[0, m]), *path], int(draft.tree.parents[0, m])
            assert np.abs(draft.probs[0, draft.rows[0, n]].numpy() - tables.row("q", path)).max() < 1e-12
    assert found == pytest.approx(expected, abs=1e-12)
    for name in NAMES:
        assert measure(registry.verifier(name), tables, IID, PATHS, SHAPES[size], size[1]).error < 1e-12, name


def emitted_law(engine, prompt, length, monkeypatch):
    """Probability of every text of this length, from every run of the engine."""
    found = torch.zeros((engine.target.vocab_size,) * length, dtype=torch.float64)
    params = SamplingParams(max_tokens=length, seed=0)
    for probability, (result,) in every_run(lambda: engine.generate([prompt], params), monkeypatch):
        found[tuple(result.token_ids)] += probability
    return found


@pytest.mark.parametrize("name", ["greedy_traversal", "traversal"])
def test_rounds_with_a_trunk_keep_the_law(pair, name, monkeypatch):
    engine = Engine.of(pair[0], draft_model=pair[1], verifier=name, plan=FixedPlan(2, 2, trunk=1))
    found = emitted_law(engine, [1, 2], 3, monkeypatch)
    assert (found - law(pair[0], [1, 2], 3)).abs().max() < 1e-12
