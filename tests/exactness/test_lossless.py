"""Every registered lossless verifier keeps the target's distribution exactly, for every sibling distribution and shape that it declares."""

import numpy as np
import pytest

from polydraft import verify
from polydraft.core import DraftSampling, TreeShape
from polydraft.errors import IncompatibleError
from polydraft.methods import registry
from polydraft.testing import Tables, as_batch, enumerate_drafts, measure
from tests.exactness.harness import SHAPES

RULES = {name: registry.verifier(name) for name in registry.names("verifier")}
EXACT = {name: rule for name, rule in RULES.items() if rule.info.lossless and not rule.info.shared_noise}
PAIRS = [
    (distribution, shape, name)
    for distribution in DraftSampling
    for shape in TreeShape
    for name, rule in EXACT.items()
    if distribution in rule.info.draft_sampling
    and shape in rule.info.shapes
    and distribution is not DraftSampling.LISTED  # shared noise: test_race
]
CASES = [
    pytest.param(V, distribution, shape, name, marks=pytest.mark.slow if V == 5 else ())
    for V in (3, 4, 5)
    for distribution, shape, name in PAIRS
    if V == 3 or distribution is not DraftSampling.COUPLED
]
"""Coupled drafts are enumerated as draws without replacement, and the one rule that is enumerated for both does not read which they are."""
SEEDS = {3: 12, 4: 6, 5: 6}
"""Six kinds of tables: plain, zeros in p, zeros in q, equal rows and ties, sharp, flat."""


def words(x):
    return x if isinstance(x, str) else str(x) if isinstance(x, int) else x.name


@pytest.mark.parametrize(("V", "distribution", "shape", "name"), CASES, ids=words)
def test_verifier_keeps_the_target_distribution_exactly(V, distribution, shape, name):
    for label, counts, depth in SHAPES[shape]:
        for seed in range(SEEDS[V]):
            found = measure(RULES[name], Tables(V, seed), distribution, shape, counts, depth)
            assert found.error < 1e-12, f"{label}, seed {seed}: {found}"


@pytest.mark.parametrize(("distribution", "shape", "name"), PAIRS, ids=words)
def test_verdict_is_a_distribution_over_nodes_without_mass_on_padding_or_copies(distribution, shape, name):
    from polydraft.core import geometry as tree

    tables = Tables(3, 1)
    _, counts, depth = SHAPES[shape][0]
    draft, p = as_batch(tables, distribution, shape, enumerate_drafts(tables, distribution, counts, depth))
    stop = RULES[name](draft, p).stop
    first = tree.first_copies(draft.tree)
    assert np.allclose(stop.sum(1), np.ones(len(stop), np.float64), atol=1e-14)
    assert (stop[~draft.tree.is_node] == 0).all()
    assert (stop[first != np.arange(draft.tree.num_nodes)] == 0).all()


@pytest.mark.parametrize("name", sorted(RULES))
def test_undeclared_drafts_are_refused(name):
    tables = Tables(3, 0)
    info = RULES[name].info
    for distribution in set(DraftSampling) - {DraftSampling.LISTED}:
        for shape in TreeShape:
            if distribution in info.draft_sampling and shape in info.shapes:
                continue
            _, counts, depth = SHAPES[shape][0]
            draft, p = as_batch(
                tables, distribution, shape, enumerate_drafts(tables, distribution, counts, depth)[:1]
            )
            with pytest.raises(IncompatibleError, match=name):
                verify(name, draft, p)


@pytest.mark.parametrize("name", sorted(EXACT))
def test_empty_draft_emits_the_target_distribution(name):
    from polydraft.core import Draft

    p = np.array([[[0.2, 0.3, 0.5]]])
    verdict = RULES[name](Draft.bare(np.array([0])), p)
    assert verdict.stop.tolist() == [[1.0]]
    assert np.allclose(verdict.after(np.array([0])), p[:, 0].astype(np.float64))
