"""A draft model over a part of its vocabulary, as it is shipped: every verifier keeps the target distribution, unless it is told of the whole vocabulary's.

Of 96 tokens four are allowed: two among the first ones that are drafted, one that the text holds and one that it does not. All drafts of two tokens are
enumerated with the distributions that the compiled proposal reports, and each proposal's tokens are drawn from these with the noise of its nodes.
"""

from itertools import product

import numpy as np
import pytest

from polydraft.core import Budget, DraftSampling, NoiseKey, SamplingParams, TreeShape
from polydraft.core import geometry as trees
from polydraft.methods import registry
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.matrices.vectors import PANEL
from polydraft.sampling import categorical, noise
from polydraft.sampling.softmax import softmax
from polydraft.testing import enumerate_drafts, measure
from tests.exactness.harness import SHAPES, by_depth
from tests.models.test_draft_vocabulary import VOCABULARY, model

ALLOWED = FIRST, SECOND, IN_TEXT, ELSEWHERE = 3, 5, 40, 70
TEXT = [7, IN_TEXT, 2]
PARAMS = SamplingParams(logit_bias={token: -100.0 for token in range(VOCABULARY) if token not in ALLOWED})
IID = DraftSampling.IID
CHAIN = TreeShape.CHAIN
EXACT = {
    name: rule
    for name in registry.names("verifier")
    if (rule := registry.verifier(name)).info.lossless and not rule.info.shared_noise
}
PAIRS = [
    (distribution, shape, name)
    for distribution in (IID, DraftSampling.WITHOUT_REPLACEMENT, DraftSampling.GREEDY_PLUS_ONE)
    for shape in (CHAIN, TreeShape.PATHS, TreeShape.PRODUCT)
    for name, rule in EXACT.items()
    if distribution in rule.info.draft_sampling and shape in rule.info.shapes
]


class Rows:
    """Of paths over the four tokens: p of the target, q as it is drawn from, and as it is reported."""

    V = len(ALLOWED)

    def __init__(self, p, q):
        self.rows = {"p": p, "q": q}

    def row(self, which, path):
        return self.rows[which][path]


def four(row):
    assert np.delete(row, ALLOWED).sum() < 1e-30
    return row[list(ALLOWED)].astype(np.float64) / row[list(ALLOWED)].sum(dtype=np.float64)


@pytest.fixture(scope="module")
def drafted():
    """By path, the rows that a compiled proposal reports and that its tokens were drawn from."""
    draft_model = CompiledModel(model(1), max_num_seqs=1, cache_dtype="float32")
    found = dict[tuple[int, ...], np.ndarray]()
    draft_model.draft_over(PANEL)
    draft_model.prefill([0], [TEXT[:-1]])
    for seed in range(400):
        draft_model.cut(0, len(TEXT) - 1)
        proposal = draft_model.propose_paths(
            [0], [TEXT[-1:]], ([seed], [0], [3]), [Budget.fixed((-1, 0, 1, 2))], [PARAMS]
        )
        tokens = proposal.tree.tokens[0].tolist()
        key = NoiseKey.of([seed], [0], [3])
        for n in (1, 2, 3):
            row = proposal.probs[0, proposal.rows[0, n]]
            u = noise.uniforms(key, noise.Stream.DRAFT, 4)[:, n]
            assert tokens[n] == categorical.choose(row[None], u).item()
            path = tuple(ALLOWED.index(token) for token in tokens[1:n])
            assert np.array_equal(found.setdefault(path, row), row)
    return {path: four(row) for path, row in found.items()}


def whole(seed):
    """By path, the distribution of all tokens."""
    rows = CompiledModel(model(seed), max_num_seqs=1, cache_dtype="float32")
    texts = product(range(len(ALLOWED)), repeat=2)
    rows.prefill([0], [TEXT[:-1]])
    found = {}
    for text in texts:
        chain = trees.TokenTree.chain(np.array([[TEXT[-1], *(ALLOWED[i] for i in text)]]))
        logits = rows.score([0], chain).logits[0].astype(np.float64)
        logits[:, [token for token in range(VOCABULARY) if token not in ALLOWED]] = -np.inf
        found |= {text[:depth]: four(softmax(logits[depth])) for depth in range(3)}
    return found


@pytest.mark.parametrize(
    ("distribution", "shape", "name"), PAIRS, ids=lambda x: x if isinstance(x, str) else x.name
)
def test_verifier_keeps_the_target_distribution_of_a_draft_vocabulary(distribution, shape, name, drafted):
    tables = Rows(whole(0), drafted)
    assert all(row[3] == 0 and (row[:3] > 0).all() for row in drafted.values())
    for _, counts, depth in SHAPES[shape]:
        assert measure(EXACT[name], tables, distribution, shape, counts, depth).error < 1e-12


def test_a_verifier_that_is_told_of_all_tokens_is_biased(drafted):
    """The wrong variant: drawn from a part of the vocabulary, reported as the distribution over the whole."""
    counts = by_depth(1, 1)
    drawn = Rows(whole(0), drafted)
    told = Rows(whole(0), whole(1))
    drafts = enumerate_drafts(drawn, IID, counts, 2)
    for name in ("speculative", "block", "traversal", "recursive"):
        assert measure(EXACT[name], drawn, IID, CHAIN, counts, 2, drafts).error < 1e-12
        assert measure(EXACT[name], told, IID, CHAIN, counts, 2, drafts).tv > 0.01
