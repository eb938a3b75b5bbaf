"""Fused walks decide as the readable rules do."""

from itertools import product

import numpy as np
import pytest

from polydraft.core import Draft, DraftSampling, NoiseKey, SamplingParams, TokenTree, TreeShape
from polydraft.methods import registry
from polydraft.sampling import processing as sampling
from polydraft.sampling.softmax import softmax
from polydraft.verifiers import greedy
from tests.fast_equals_slow.walk_rounds import DEGENERATE, DISTINCT, TREES, B, V, degenerate, rounds, same

DELAYED = [-1, 0, 1, 1, 2, 3, 4, 5]
SAMPLINGS = [
    DraftSampling[name]
    for name in (
        "IID",
        "SYSTEMATIC",
        "WITHOUT_REPLACEMENT",
        "LISTED",
        "POINT_MASS",
        "INDEPENDENT",
        "GREEDY_PLUS_ONE",
    )
]


def walks():
    """Every verifier with a walk, on all shapes and, on one shape, all ways of sampling that it is exact for."""
    for name in registry.names("verifier"):
        rule = registry.verifier(name)
        if hasattr(rule, "walk"):
            shapes = [shape for shape in reversed(TREES) if shape in rule.info.shapes]
            first, *others = [sampling for sampling in SAMPLINGS if sampling in rule.info.draft_sampling]
            yield from ((name, shape, first) for shape in shapes)
            yield from ((name, shapes[0], sampling) for sampling in others)


WALKS = [*walks()]
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.6, top_p=0.8),
    SamplingParams(top_k=5),
    SamplingParams(temperature=1.3, min_p=0.1),
    SamplingParams(temperature=0.9, top_k=9, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1e-30, top_p=0.5),
]
REPEATED = [case for case in WALKS if case[2] not in DISTINCT]
"""Those whose siblings may be equal."""


@pytest.mark.parametrize(("name", "shape", "distribution"), WALKS)
def test_a_walk_finds_what_the_verdict_samples(name, shape, distribution):
    rule = registry.verifier(name)
    depths = set[int]()
    for seed in range(5):
        draft, logits, key = rounds(shape, distribution, seed)
        slow = rule(draft, softmax(logits)).sample(key)
        fast = rule.walk(draft, logits, key)
        assert np.array_equal(slow.path, fast.path) and np.array_equal(slow.num_accepted, fast.num_accepted)
        assert np.array_equal(slow.token, fast.token)
        depths |= set(slow.num_accepted.tolist())
    assert depths >= {0, 1, 2}


@pytest.mark.parametrize(("name", "shape", "distribution"), REPEATED)
def test_a_walk_finds_what_the_verdict_samples_on_degenerate_rows(name, shape, distribution):
    rule = registry.verifier(name)
    for kind, vocab_size in product(DEGENERATE, (2, 5, 300)):
        draft, logits, key = degenerate(kind, vocab_size, shape, distribution)
        found = rule.walk(draft, logits, key)
        assert same(found, rule(draft, softmax(logits)).sample(key)), (kind, vocab_size)
        assert (logits[np.arange(len(logits)), _last(found), found.token] > -np.inf).all()


def _last(outcome):
    """The node that the extra token follows."""
    path = np.pad(outcome.path, ((0, 0), (1, 0)))
    return np.take_along_axis(path, outcome.num_accepted[:, None], 1)[:, 0]


@pytest.mark.parametrize("kind", DEGENERATE)
def test_the_greedy_walk_is_that_of_point_masses_on_degenerate_rows(kind):
    for vocab_size in (2, 5, 300):
        draft, logits, key = degenerate(kind, vocab_size, TreeShape.PRODUCT, DraftSampling.POINT_MASS)
        certain = sampling.soften(logits, [SamplingParams(temperature=0)] * len(logits))
        assert same(greedy.walk(draft, logits, key), registry.verifier("match")(draft, certain).sample(key))


@pytest.mark.parametrize(("name", "shape", "distribution"), REPEATED)
def test_the_greedy_walk_is_every_rule_at_temperature_zero(name, shape, distribution):
    draft, logits, key = rounds(shape, distribution, 3)
    params = [SamplingParams(temperature=0)] * B
    if draft.probs is not None:  # drafts are greedy as well
        best = draft.probs.argmax(-1)
        tokens = draft.tree.tokens.copy()
        for n in range(1, tokens.shape[1]):
            parent = draft.tree.parents[0, n]
            tokens[:, n] = np.take_along_axis(best, tokens[:, parent : parent + 1], 1)[:, 0]
        rows = np.where(
            draft.tree.parents >= 0, np.take_along_axis(tokens, draft.tree.parents.clip(min=0), 1), -1
        )
        one_hot = np.eye(V, dtype=np.float32)[best]
        draft = Draft(TokenTree(tokens, draft.tree.parents), distribution, shape, one_hot, rows, key)
        first = rounds(shape, distribution, 3)[1]
        logits = first + 3 * np.take_along_axis(one_hot, tokens[..., None], 1)
    slow = registry.verifier(name)(draft, sampling.soften(logits, params)).sample(key)
    fast = greedy.walk(draft, logits, key)
    assert np.array_equal(slow.path, fast.path) and np.array_equal(slow.token, fast.token)
    assert fast.num_accepted.max() > 0


@pytest.mark.parametrize(("name", "shape", "distribution"), WALKS)
def test_a_walk_samples_each_row_by_its_own_parameters(name, shape, distribution):
    rule = registry.verifier(name)
    draft, logits, key = rounds(shape, distribution, 5)
    params = [PARAMS[b % len(PARAMS)] for b in range(B)]
    fast = rule.walk(draft, logits, key, sampling.samplings_of(params))
    slow = rule(draft, sampling.distributions_of(logits, draft.tree, params)).sample(key)
    assert np.array_equal(slow.path, fast.path) and np.array_equal(slow.token, fast.token)
    assert not same(fast, rule.walk(draft, logits, key))


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_fault_is_seen_whatever_the_sampling_parameters(fault, params):
    draft, logits, key = rounds(TreeShape.CHAIN, DraftSampling.IID, 0)
    logits[7, 0, slice(None) if fault < 0 else 5] = fault
    assert registry.verifier("block").walk(draft, logits, key, sampling.samplings_of([params] * B)) is None


@pytest.mark.parametrize(("name", "shape", "distribution"), WALKS)
def test_rows_that_a_walk_does_not_visit_may_hold_anything(name, shape, distribution):
    """Where top-p removes what was drafted at the root, nothing below it can be accepted."""
    rule = registry.verifier(name)
    draft, logits, key = rounds(shape, distribution, 6)
    logits = logits.copy()
    samplings = sampling.samplings_of([SamplingParams(top_p=0.5)] * B)
    at_root = (draft.tree.parents == 0) & (np.arange(draft.tree.num_nodes) > 0)
    drafted = (np.eye(V)[draft.tree.tokens] * at_root[..., None]).sum(1)
    spare = drafted.argmin(1)
    logits[np.arange(B), 0, spare] = 50.0
    whole = rule.walk(draft, logits, key, samplings)
    logits[:, 1:] = np.nan
    assert same(whole, rule.walk(draft, logits, key, samplings))
    assert whole.num_accepted.max() == 0 and np.array_equal(whole.token, spare)


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["block", "match", "race", "flow"])
def test_faulty_logits_are_left_to_the_readable_path(name, fault):
    draft, logits, key = rounds(TreeShape.CHAIN, DraftSampling.IID, 0)
    logits[7, 0, 5] = fault
    assert registry.verifier(name).walk(draft, logits, key) is None
    assert greedy.walk(draft, logits, key) is None


def test_a_walk_never_emits_a_masked_token():
    draft, logits, key = rounds(TreeShape.CHAIN, DraftSampling.IID, 1)
    logits[..., ::2] = -np.inf
    done = registry.verifier("block").walk(draft, logits, key)
    emitted = [token for row in done.emitted(draft.tree) for token in row]
    assert len(emitted) > B and all(token % 2 for token in emitted)


def test_greedy_traversal_walks_a_trunk_and_then_paths():
    rule = registry.verifier("greedy_traversal")
    for seed in range(5):
        draft, logits, key = rounds(TreeShape.PATHS, DraftSampling.IID, seed, given=DELAYED)
        slow = rule(draft, softmax(logits)).sample(key)
        fast = rule.walk(draft, logits, key)
        assert np.array_equal(slow.path, fast.path) and np.array_equal(slow.token, fast.token)
        assert set(fast.num_accepted.tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("given", [[-1, 0, 0, 1, 3, 4], [-1, 0, 0, 1, 2, 3], [-1, 0, 0, 0, 1, 2, 4, 6]])
def test_greedy_traversal_walks_ragged_paths_as_traversal_does(given):
    rule = registry.verifier("greedy_traversal")
    for seed in range(5):
        draft, logits, key = rounds(TreeShape.RAGGED, DraftSampling.IID, seed, given=given)
        verdict = rule(draft, softmax(logits))
        assert np.allclose(
            verdict.stop, registry.verifier("traversal")(draft, softmax(logits)).stop, atol=1e-5
        )
        slow = verdict.sample(key)
        fast = rule.walk(draft, logits, key)
        assert np.array_equal(slow.path, fast.path) and np.array_equal(slow.token, fast.token)
        assert set(fast.num_accepted.tolist()) >= {0, 1, 2, 3}


def test_greedy_traversal_leaves_faulty_rows_to_the_readable_path():
    rule = registry.verifier("greedy_traversal")
    for node, fault in ((0, float("nan")), (1, float("inf"))):
        draft, logits, key = rounds(TreeShape.PATHS, DraftSampling.IID, 0)
        logits[7, node, 5] = fault
        logits[7, 2] = logits[7, node]  # whichever child is tried first
        assert rule.walk(draft, logits, key) is None
    draft, logits, key = rounds(TreeShape.PATHS, DraftSampling.IID, 0)
    draft.probs[3, draft.rows[3, 1], draft.tree.tokens[3, 1:3]] = 0.0
    assert rule.walk(draft, logits, key) is None


def test_greedy_traversal_does_not_look_beyond_the_end_of_its_walk():
    """What comes after it may hold anything: half of the walks end before the last leaf, whose row is faulty here."""
    rule = registry.verifier("greedy_traversal")
    draft, logits, key = rounds(TreeShape.PATHS, DraftSampling.IID, 0)
    whole = rule.walk(draft, logits, key)
    found = 0
    for b in range(100):
        one = Draft(
            *(
                TokenTree(draft.tree.tokens[b : b + 1], draft.tree.parents[b : b + 1]),
                draft.sampling,
                draft.shape,
            ),
            draft.probs[b : b + 1],
            draft.rows[b : b + 1],
        )
        spoilt = logits[b : b + 1].copy()
        noise = NoiseKey.of([b], [0], [11])
        path = whole.path[b].tolist()
        other = 5 if 6 in path or 4 in path or 2 in path else 6
        spoilt[:, other] = float("nan")
        fast = rule.walk(one, spoilt, noise)
        if fast is not None:
            found += 1
            assert (
                fast.path[0, : whole.path.shape[1]].tolist() == path[: fast.path.shape[1]]
                and fast.token[0] == whole.token[b]
            )
    assert 30 < found < 100


def test_other_noise_gives_other_outcomes():
    draft, logits, key = rounds(TreeShape.CHAIN, DraftSampling.IID, 2)
    other = NoiseKey(key.seed + 1000, key.sample, key.position)
    one, two = (registry.verifier("block").walk(draft, logits, k) for k in (key, other))
    assert not np.array_equal(one.token, two.token)


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_walk_that_comes_to_a_faulty_row_ends_without_an_outcome(fault):
    """Of a chain by `match`: half of the walks end at the root, the others come to node 1 and must not be sent back."""
    draft, logits, key = rounds(TreeShape.CHAIN, DraftSampling.IID, 0)
    rule = registry.verifier("match")
    sound = registry.verifier("match").walk(draft, logits, key)
    logits[:, 1] = fault
    for b in range(60):
        one = [
            Draft(
                TokenTree(draft.tree.tokens[b : b + 1], draft.tree.parents[b : b + 1]),
                draft.sampling,
                draft.shape,
                draft.probs[b : b + 1],
                draft.rows[b : b + 1],
            )
        ]
        outcome = rule.walk(
            *one,
            logits[b : b + 1],
            NoiseKey(key.seed[b : b + 1], key.sample[b : b + 1], key.position[b : b + 1]),
        )
        assert (outcome is None) == (int(sound.num_accepted[b]) > 0)
