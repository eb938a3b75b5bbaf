"""Rows of a large vocabulary have the same bits on one thread and on several, whoever does which piece."""

import os
from collections.abc import Callable

import numpy as np
import pytest

from polydraft.core import Draft, DraftSampling, NoiseKey, SamplingParams, TokenTree, TreeShape
from polydraft.methods import registry
from polydraft.numerics import threads
from polydraft.numerics.threads import PIECE, Pool, sync
from polydraft.sampling import processing as sampling
from polydraft.sampling.softmax import softmax
from polydraft.sampling.truncation import largest, soften
from polydraft.verifiers.walks import greedy_traversal, greedy_traversal_wor
from tests.support.draws import multinomial

pytestmark = pytest.mark.skipif(os.name != "posix", reason="helpers need POSIX threads")
V = 4 * PIECE + 777


def on_both(call: Callable[[], list[np.ndarray]]) -> None:
    """The same call with helpers, and while another caller has them all."""
    with Pool(3):
        sync[threads._AT.until] = 0
        phases = sync[threads._AT.phase]
        shared = call()
        assert sync[threads._AT.phase] > phases, "the work was shared"
        phases = sync[threads._AT.phase]
        sync[threads._AT.owner] = 1
        try:
            alone = call()
        finally:
            sync[threads._AT.owner] = 0
        assert sync[threads._AT.phase] == phases
    for one, other in zip(shared, alone, strict=True):
        assert one.tobytes() == other.tobytes()


def logits_of(rows: int, seed: int = 0) -> np.ndarray:
    return 4 * np.random.default_rng(seed).standard_normal((rows, V)).astype(np.float32)


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_p=0.9, min_p=0.001),
    SamplingParams(top_k=1000, top_p=0.9),
    SamplingParams(top_k=V - 1),
]


def softened(x: np.ndarray, params: SamplingParams) -> tuple[float, np.ndarray]:
    """Sum and masses."""
    out = np.empty(V, np.float32)
    return soften(sync, x, sampling.samplings_of([params])[0], out, np.empty(V, np.int32)), out


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_distribution_of_a_row_has_the_same_bits(params):
    on_both(lambda: [np.array(x) for x in softened(logits_of(1)[0], params)])


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_distribution_of_a_row_is_that_of_sorting(params):
    x = logits_of(1)[0]
    x[5::7] = x[4]  # equals
    mass, masses = softened(x, params)
    rows = x[None, None]
    if not params.greedy:
        rows = sampling._sorted_out(rows[0] / np.float32(params.temperature), params)[None]
    p = sampling.soften(rows, [params])[0, 0]
    assert (
        np.abs(masses / mass - p).sum() < 1e-5
    )  # sums of 66,000 numbers round differently at the border of top-p


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("place", [0, PIECE, V - 1])
def test_a_fault_in_any_piece_is_seen(place, params):
    x = logits_of(1)[0]
    x[place] = np.nan
    with Pool(3):
        assert np.isnan(softened(x, params)[0])


def test_the_largest_logit_is_the_first_of_them():
    x = logits_of(1)[0]
    x[[PIECE + 7, PIECE + 900, V - 1]] = x.max() + 1
    on_both(lambda: [np.array(largest(sync, x))])
    assert largest(sync, x) == PIECE + 7


def test_orders_and_selections_have_the_same_bits():
    def call() -> list[np.ndarray]:
        p, q = softmax(logits_of(2))
        buckets, ratio, first, higher = np.empty(V, np.int32), *np.empty((3, V), np.float32)
        greedy_traversal.order_by_ratio(sync, p, q, 2, buckets, ratio)
        greedy_traversal._first_of_highest(sync, q, 2, buckets, first)
        greedy_traversal_wor._higher(sync, q, buckets, higher)
        assert buckets.max() > buckets.min()
        return [buckets, first, higher]

    on_both(call)


def test_truncated_rows_have_the_same_bits():
    params = [SamplingParams(temperature=0.7, top_p=0.9, top_k=1000, min_p=0.001)]
    tree = TokenTree.chain(np.zeros((1, 7), np.int64))
    on_both(lambda: [sampling.process(logits_of(7)[None], tree, [[0]], [1], params)])


@pytest.mark.parametrize(
    "name", [name for name in registry.names("verifier") if hasattr(registry.verifier(name), "walk")]
)
def test_a_walk_finds_the_same(name):
    rule = registry.verifier(name)
    distribution = max(
        rule.info.draft_sampling - {DraftSampling.POINT_MASS},
        key=lambda distribution: distribution is DraftSampling.IID,
    )
    shape, parents = (
        (TreeShape.CHAIN, [-1, 0, 1])
        if TreeShape.PATHS not in rule.info.shapes
        else (TreeShape.PATHS, [-1, 0, 0, 1, 2])
    )
    target = logits_of(len(parents))
    q = softmax(target + logits_of(len(parents), 1) / 4)
    for seed in range(10):
        key = NoiseKey.of([seed], [0], [9])
        tokens = [0]
        rows = [-1, *parents[1:]]
        for parent in parents[1:]:
            rng = np.random.default_rng(97 * seed + len(tokens))
            tokens.append(int(multinomial(q[parent, None], rng)[0]))
        draft = Draft(
            TokenTree(np.array([tokens]), np.array([parents])),
            distribution,
            shape,
            q[None],
            np.array([rows]),
            key,
        )

        def call(draft: Draft = draft, key: NoiseKey = key) -> list[np.ndarray]:
            outcome = rule.walk(draft, target[None], key)
            return [outcome.path, outcome.num_accepted, outcome.token]

        on_both(call)
