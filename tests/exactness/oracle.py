"""The numbers of the oracle file, and the five-token example that they are about."""

import json
import os
from pathlib import Path

import numpy as np

from polydraft.methods.registry import verifier
from polydraft.verifiers.lift.per_node import PerNode
from tests.exactness.harness import Markov

FILE = Path(os.environ.get("POLYDRAFT_ORACLE", Path(__file__).parent / "verification_cases.json"))
ORACLE = json.loads(FILE.read_text())
P = np.array([0.05, 0.35, 0.3, 0.2, 0.1])
Q = np.array([0.5, 0.1, 0.2, 0.15, 0.05])


def markov(case):
    return Markov(np.array(case["p"]), np.array(case["q"]), case["root_token"])


class Fixed:
    """One example of five tokens, the same row everywhere."""

    V = 5

    def row(self, which, path):
        return P if which == "p" else Q


def lifted(emitted):
    """A rule for one node as a rule for trees."""
    return PerNode(verifier("match").info, emitted)
