"""Drafts of one head pass: the distribution that is sampled is the one that is reported, whatever drafted tokens say, for every verifier that takes them.

Rows of a block head are a function of depth, of the token before with a Markov part, or of the path with an rnn: chains, paths, distinct children,
systematic draws and best-first trees all come from one pass, and the rows by a formula written down once more here.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from polydraft.core import Budget, DraftSampling, Request, SamplingParams, TokenTree, TreeShape
from polydraft.core import geometry as tree
from polydraft.heads.block import BlockDrafter
from polydraft.heads.foretold import DepthDistributions
from polydraft.heads.markov import KINDS, confidence_logits, markov, markov_shapes, place
from polydraft.methods import registry
from polydraft.sampling.categorical import choose_row
from polydraft.sampling.noise import Stream, uniform_at
from polydraft.testing import Tables, enumerate_drafts, measure
from tests.engine.tables import TableModel
from tests.exactness.harness import SHAPES, by_depth

V = 3
R = 2
H = 5
DEPTHS = 3
ROOT = 2
WOR = DraftSampling.WITHOUT_REPLACEMENT
SYSTEMATIC = DraftSampling.SYSTEMATIC
RULES = [
    (sampling, shape, name)
    for sampling in (DraftSampling.IID, WOR, SYSTEMATIC, DraftSampling.GREEDY_PLUS_ONE)
    for shape in (TreeShape.CHAIN, TreeShape.PATHS, TreeShape.PRODUCT)
    for name in registry.names("verifier")
    if (rule := registry.verifier(name)).info.lossless
    and not rule.info.shared_noise
    and sampling in rule.info.draft_sampling
    and shape in rule.info.shapes
]


class Known(DepthDistributions):
    """A head that knows random states of a block's places. in_place: the first of them drafts nothing."""

    def __init__(self, kind, in_place=True):
        rng = np.random.default_rng(KINDS.index(kind))
        shapes = markov_shapes(kind, R, H, V, V) | {
            "confidence_head.proj.weight": (1, H + R * (kind != "none")),
            "confidence_head.proj.bias": (1,),
        }
        self.tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        self.kind = kind
        self.in_place = in_place
        self.states = rng.normal(size=(DEPTHS + in_place, H)).astype(np.float32)
        self.base = rng.normal(size=(DEPTHS, V)).astype(np.float32)
        target = TableModel(V, seed=0)

        def bias(*sizes):
            return markov(self.tensors, kind, *sizes, sure_of_word=kind != "none")

        super().__init__(target, np.arange(V), DEPTHS, "known", bias)
        self.roots = np.zeros(target.max_num_seqs, np.int64)
        self.know([0], self.states)

    def know(self, slots, states):
        self.arrays.logits[slots, :, :V] = self.base
        place(
            self.arrays.markov,
            list(slots),
            self.states[None].repeat(len(slots), 0),
            np.full(len(slots), ROOT),
        )

    def inject(self, slot, begin, states, following):
        """What it knows is known."""

    def row(self, path):
        """The distribution behind a path, by the formulas alone."""
        return softmax(self.base[len(path)] + self.bias_of(path))

    def bias_of(self, path):
        if self.kind == "none":
            return 0
        w1, w2 = (
            self.tensors[f"markov_head.markov_{name}.weight"].astype(np.float64) for name in ("w1", "w2")
        )
        before = (ROOT, *path)
        if self.kind == "vanilla":
            return w2 @ w1[before[-1]]
        name = {"gated": "gate", "rnn": "joint"}[self.kind]
        matrix, shift = (
            self.tensors[f"markov_head.{name}_proj.{part}"].astype(np.float64) for part in ("weight", "bias")
        )
        places = self.states[self.in_place :]
        if self.kind == "gated":
            return w2 @ (sigmoid(matrix @ [*places[len(path)], *w1[before[-1]]] + shift) * w1[before[-1]])
        state = np.zeros(R)
        out = np.zeros(R)
        for token, h in zip(([ROOT] if self.in_place else []) + list(before), self.states, strict=False):
            gate, candidate, out = np.split(matrix @ [*state, *w1[token], *h] + shift, 3)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
        return w2 @ np.tanh(out)

    def sure(self, path):
        """How sure it is of the token behind a path."""
        word = (
            self.tensors["markov_head.markov_w1.weight"][(ROOT, *path)[-1]].tolist()
            if self.kind != "none"
            else []
        )
        h = self.states[self.in_place :][len(path)]
        return sigmoid(
            float(
                self.tensors["confidence_head.proj.weight"][0] @ [*h, *word]
                + self.tensors["confidence_head.proj.bias"][0]
            )
        )


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@cache
def known(kind, in_place=True):
    return Known(kind, in_place)


@cache
def sampled(kind, path):
    """The row behind a path that the head's own pass draws from."""
    rows = known(kind).score([0], TokenTree.chain(np.array([[ROOT, *path]]))).logits[0]
    return softmax(rows[-1].astype(np.float64))


class Rows(Tables):
    """The target's rows at random, the draft's from the head's pass. other: reported in the place of those behind a path."""

    def __init__(self, kind, seed, other=None):
        super().__init__(V, seed)
        self.kind = kind
        self.other = other

    def row(self, name, path):
        return (
            super().row(name, path)
            if name == "p"
            else sampled(self.kind, path if self.other is None else self.other(path))
        )


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_formula_on_every_path(kind, in_place):
    model = known(kind, in_place)
    for path in product(range(V), repeat=DEPTHS - 1):
        rows = model.score([0], TokenTree.chain(np.array([[ROOT, *path]]))).logits[0]
        expected = [model.row(path[:d]) for d in range(DEPTHS)]
        np.testing.assert_allclose([softmax(row) for row in rows], expected, atol=1e-6)
        sure = confidence_logits(
            model.arrays.markov, [0], np.array([[ROOT, *path]]), np.arange(-1, DEPTHS - 1)[None]
        )
        assert sure is not None
        np.testing.assert_allclose(
            sigmoid(sure[0, 1:]), [model.sure(path[:d]) for d in range(DEPTHS - 1)], atol=1e-6
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("sampling", "shape", "name"), RULES, ids=lambda x: x if isinstance(x, str) else x.name
)
def test_every_verifier_is_exact_on_drafts_of_one_pass(kind, sampling, shape, name):
    _, counts, depth = SHAPES[shape][0]
    for seed in (0, 4):
        found = measure(
            registry.verifier(name), Rows(kind, seed), sampling, shape, counts, min(depth, DEPTHS)
        )
        assert found.error < 1e-12


def drafts_of(kind, drawn, budget, seeds, **options) -> Iterator[tuple[Any, Any, Any]]:
    """Drafts of the drafter from this head, and what they are of."""
    model = Known(kind)
    drafter = BlockDrafter(model, (0,), drawn, **options)
    for seed in range(seeds):
        request = Request("r", (1, ROOT), SamplingParams(), seed)
        (state,) = drafter.start([request])
        scores = model.target.prefill([0], [[1]], hidden=(0,))
        model.target.release([0])
        (state,) = drafter.read([state], scores)
        yield model, request, drafter.propose([state], [budget])
        drafter.release([state])


def path_of(draft, n):
    tokens, parents, path = *(x[0] for x in draft.tree.lists), []
    while n > 0:
        path.append(tokens[n])
        n = parents[n]
    return tuple(path[::-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "drawn", ["chain", "paths", "without_replacement", "systematic", "coupled", "greedy_plus_one"]
)
def test_the_row_that_is_reported_is_the_one_of_the_nodes_own_path(kind, drawn):
    budget = Budget.fixed(tree.chain(3) if drawn == "chain" else tree.paths(3, 3))
    for model, request, draft in drafts_of(kind, drawn, budget, 8):
        for n in range(1, draft.tree.num_nodes):
            path = path_of(draft, n)
            row = draft.probs[0, int(draft.rows[0, n])]
            np.testing.assert_allclose(row, model.row(path[:-1]), atol=1e-6)
            if drawn in ("chain", "paths"):  # and the token is its draw
                assert path[-1] == choose_row(
                    row, uniform_at(request.seed, request.sample, 2, int(Stream.DRAFT), n)
                )


@pytest.mark.parametrize("kind", KINDS)
def test_a_best_first_tree_has_the_most_probable_paths(kind):
    ((model, _, draft),) = drafts_of(kind, "top_k", Budget.grown(9, 3, V), 1)
    paths = [path for d in range(1, 4) for path in product(range(V), repeat=d)]
    chance = {path: np.prod([model.row(path[:i])[token] for i, token in enumerate(path)]) for path in paths}
    assert {path_of(draft, n) for n in range(1, 10)} == set(sorted(paths, key=lambda path: -chance[path])[:9])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_row_of_another_path_is_caught(kind):
    """Reported as if the most probable token were before each, as a head that computed its bias once."""
    wrong = Rows(kind, 0, lambda path: tuple(int(sampled(kind, path[:i]).argmax()) for i in range(len(path))))
    for name, counts in (("speculative", by_depth(1, 1)), ("recursive", by_depth(2, 1))):
        shape = TreeShape.CHAIN if name == "speculative" else TreeShape.PATHS
        drafts = enumerate_drafts(Rows(kind, 0), DraftSampling.IID, counts, 2)
        found = measure(registry.verifier(name), wrong, DraftSampling.IID, shape, counts, 2, drafts)
        assert found.tv > 1e-3
        assert (
            measure(registry.verifier(name), Rows(kind, 0), DraftSampling.IID, shape, counts, 2, drafts).error
            < 1e-12
        )


@pytest.mark.parametrize("kind", KINDS)
def test_confidence_ends_paths_by_what_is_before_a_token_and_one_that_looks_at_it_is_caught(kind):
    """A path ends where the head is less sure than it is of half of all paths."""
    model = known(kind)
    counts = by_depth(2, 1)
    least = float(np.median([model.sure((token,)) for token in range(V)])) + 1e-9
    tables = Rows(kind, 0)

    def where_sure(d, n):
        return counts(d, n) if not n or model.sure(d.paths[n]) >= least else 0

    for sampling, shape, rule in RULES:
        if shape is TreeShape.PATHS:
            drafts = enumerate_drafts(tables, sampling, where_sure, 2)
            found = measure(registry.verifier(rule), tables, sampling, shape, counts, 2, drafts)
            assert found.error < 1e-12, (sampling, rule)
    drafts = enumerate_drafts(tables, DraftSampling.IID, by_depth(1), 1)
    for d in drafts:  # drops what it drew and is not sure of
        if sampled(kind, ())[d.tokens[1]] < 0.3:
            d.tokens = d.tokens[:1]
            d.parents = d.parents[:1]
            d.paths = d.paths[:1]
    found = measure(
        registry.verifier("speculative"), tables, DraftSampling.IID, TreeShape.CHAIN, by_depth(1), 1, drafts
    )
    assert found.tv > 1e-3


@pytest.mark.parametrize("drawn", ["paths", "without_replacement", "systematic"])
def test_the_drafters_confidence_keeps_or_drops_all_siblings(drawn):
    budget = Budget.fixed(tree.paths(3, 3))
    model = known("rnn")
    least = float(np.median([model.sure(path) for path in product(range(V), repeat=1)]))
    whole = [draft for *_, draft in drafts_of("rnn", drawn, budget, 8)]
    cut = [draft for *_, draft in drafts_of("rnn", drawn, budget, 8, min_confidence=least)]
    assert any(a.tree.num_nodes > b.tree.num_nodes for a, b in zip(whole, cut, strict=True))
    for a, b in zip(whole, cut, strict=True):

        def goes_on(path):
            return all(model.sure(path[:d]) >= least for d in range(len(path)))

        every = [path_of(a, n) for n in range(1, a.tree.num_nodes)]
        kept = [path_of(b, n) for n in range(1, b.tree.num_nodes) if b.tree.lists.parents[0][n] >= 0]
        assert kept == [path for path in every if goes_on(path)]
        for n in range(1, len(kept) + 1):
            np.testing.assert_allclose(
                b.probs[0, int(b.rows[0, n])], model.row(path_of(b, n)[:-1]), atol=1e-6
            )
