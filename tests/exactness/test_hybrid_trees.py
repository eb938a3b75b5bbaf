"""Trees on layers that keep states: rows of one pass over a whole tree multiply to the model's distribution, and every verifier is exact on them.

The target is a gated delta net of published shape. Its rows come from one pass over the tree of all drafts, and again from a pass over each path alone. Drafts
are drawn from rows of a one-pass head, with a Markov part or without. Both are distributions of a request that allows three tokens.
"""

from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from polydraft.core import DraftSampling, TokenTree, TreeShape
from polydraft.methods import registry
from polydraft.models.load import load_model
from polydraft.testing import measure, target_text_probs
from tests.exactness.harness import by_depth
from tests.exactness.test_head_pass import known, softmax

FILES = Path(__file__).parents[1] / "models" / "oracle_gguf"
PROMPT = (5, 9, 100, 7)
IDS = (3, 40, 77)
"""Tokens that the request allows."""
DEPTH = 2
SAMPLINGS = (
    DraftSampling.IID,
    DraftSampling.WITHOUT_REPLACEMENT,
    DraftSampling.SYSTEMATIC,
    DraftSampling.GREEDY_PLUS_ONE,
)
RULES = [
    (sampling, name)
    for sampling in SAMPLINGS
    for name in registry.names("verifier")
    if (info := registry.verifier(name).info).lossless
    and not info.shared_noise
    and sampling in info.draft_sampling
    and TreeShape.PATHS in info.shapes
]


def every_path():
    return [path for depth in range(DEPTH + 2) for path in product(range(len(IDS)), repeat=depth)]


@cache
def target(name):
    model = load_model(str(FILES / f"{name}.gguf"), backend="compiled", max_num_seqs=2, max_model_len=64, cache_dtype="float32")  # fmt: skip
    model.prefill([0], [PROMPT[:-1]])
    return model


def tree_of(paths):
    """The prompt's last token and a node for each path, which stand behind their beginnings."""
    place = {path: n for n, path in enumerate(paths)}
    tokens = [PROMPT[-1], *(IDS[path[-1]] for path in paths[1:])]
    parents = [-1, *(place[path[:-1]] for path in paths[1:])]
    return TokenTree.of(np.array([tokens]), np.array([parents]))


@cache
def scored(name, temperature):
    """Path -> the target's distribution over the tokens that are left, of one pass over all paths."""
    paths = every_path()
    logits = target(name).score([0], tree_of(paths)).logits[0, :, list(IDS)].T
    return {
        path: softmax(row.astype(np.float64) / temperature) for path, row in zip(paths, logits, strict=True)
    }


class Rows:
    """The hybrid's rows and a one-pass head's. wrong: rows behind a second child are those of the first."""

    V = len(IDS)

    def __init__(self, name, kind, temperature, wrong=False):
        self.p = scored(name, temperature)
        self.kind = kind
        self.wrong = wrong

    def row(self, name, path):
        if name == "q":
            row = np.asarray(known(self.kind).row(path), np.float64)
            return row / row.sum()
        if self.wrong and path:
            return self.p[(0, *path[1:])]
        return self.p[path]


@pytest.mark.parametrize("name", ["qwen35", "qwen3next"])
def test_a_pass_over_the_tree_has_the_rows_of_each_path_alone(name):
    model = target(name)
    for path in every_path()[:: 1 + len(IDS)]:
        chain = TokenTree.chain(np.array([[PROMPT[-1], *(IDS[x] for x in path)]]))
        alone = model.score([0], chain).logits[0, -1, list(IDS)]
        np.testing.assert_array_equal(softmax(alone.astype(np.float64)), scored(name, 1.0)[path])


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize(("name", "kind"), [("qwen35", "none"), ("qwen3next", "rnn"), ("qwen35", "vanilla")])
@pytest.mark.parametrize(("drawn", "rule"), RULES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_every_verifier_is_exact_on_trees_of_hybrids(name, kind, drawn, rule, temperature):
    rows = Rows(name, kind, temperature)
    found = measure(registry.verifier(rule), rows, drawn, TreeShape.PATHS, by_depth(2, 1), DEPTH)
    assert found.error < 1e-12


def test_a_state_of_another_branch_is_caught():
    """Behind the second child rows of the first one's state, as of a pass that does not fork: the output is another distribution."""
    right, wrong = (Rows("qwen35", "none", 1.0, wrong=wrong) for wrong in (False, True))
    rule = registry.verifier("traversal")
    found = measure(rule, wrong, DraftSampling.IID, TreeShape.PATHS, by_depth(2, 1), DEPTH)
    assert found.error < 1e-12
    assert np.abs(found.probs - target_text_probs(right, DEPTH + 1)).sum() / 2 > 1e-3
