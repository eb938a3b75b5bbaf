"""Flow verification against the numbers of an independent program: the mass of every child at one node, and tokens per step of whole trees."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from polydraft.core import DraftSampling, TreeShape
from polydraft.testing import measure
from polydraft.verifiers.flow import flow, transport
from polydraft.verifiers.lift.leaf_to_root import reweight
from polydraft.verifiers.residual import normalise
from tests.exactness.harness import by_depth

FILE = Path(os.environ.get("POLYDRAFT_FLOW_ORACLE", Path(__file__).parent / "flow_cases.json"))
ORACLE = json.loads(FILE.read_text())
CLOSE = 1e-9


@pytest.mark.parametrize("case", ORACLE["node"], ids=lambda c: f"{c['k']} of {c['V']}, w {c['w']}")
def test_the_mass_of_every_child_and_what_the_node_emits_are_those_of_the_oracle(case):
    p, q, w = (np.array([case[name]], dtype=np.float64) for name in ("p", "q", "w"))
    draws = np.array([case["draws"]])
    found = transport(w, normalise(p), normalise(q), draws)
    visited = found.turns[0] >= 0
    tokens = draws[0, found.order[0]][visited].tolist()
    mass = found.mass[0][visited].tolist()
    assert dict(zip(tokens, mass, strict=True)) == pytest.approx(
        {int(x): m for x, m in case["mass"].items()}, abs=CLOSE
    )
    own = (1 - found.mass.sum(1)) * reweight(w, found.rest.sum(1))
    assert own.item() == pytest.approx(case["own"], abs=CLOSE)
    if case["own"] > CLOSE:
        assert normalise(found.rest)[0].tolist() == pytest.approx(case["law"], abs=CLOSE)


class Rows:
    """Rows by path, as the oracle has them."""

    def __init__(self, case):
        self.V = case["V"]
        self.rows = {"p": case["target"], "q": case["draft"]}

    def row(self, which, path):
        x = np.array(self.rows[which][",".join(map(str, path))])
        return x / x.sum()


@pytest.mark.parametrize("case", ORACLE["tree"], ids=lambda c: f"{c['K']} paths of {c['L']}")
def test_tokens_per_step_of_whole_trees_are_those_of_the_oracle(case):
    counts = by_depth(case["K"], *[1] * (case["L"] - 1))
    found = measure(flow, Rows(case), DraftSampling.SYSTEMATIC, TreeShape.PATHS, counts, case["L"])
    assert found.error < 1e-12
    assert found.block_efficiency == pytest.approx(case["tokens_per_step"], abs=CLOSE)
