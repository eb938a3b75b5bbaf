"""Trees that grow by what was drawn: which rules bear them, and growth that some or all of these rules would not bear."""

import pytest

from polydraft.core import DraftSampling, Method, TreeShape
from polydraft.errors import IncompatibleError
from polydraft.methods import registry
from polydraft.testing import Tables, measure
from polydraft.verifiers import pairing
from tests.exactness.harness import across, looks_back, stopped_inside

IID = DraftSampling.IID
INDEPENDENT = DraftSampling.INDEPENDENT
WOR = DraftSampling.WITHOUT_REPLACEMENT
GROWN = TreeShape.GROWN
COUNTING = [
    ("kseq", IID),
    ("max_ratio", IID),
    ("importance", IID),
    ("transport", IID),
    ("greedy_traversal", IID),
]


@pytest.mark.parametrize(("name", "distribution"), [*COUNTING, ("importance", INDEPENDENT)])
def test_rules_that_count_tries_are_biased_where_another_branch_decides_the_number_and_are_not_declared(
    name, distribution
):
    rule = registry.verifier(name)
    tables = Tables(3, 0)
    assert (
        measure(rule, tables, distribution, GROWN, looks_back, 2).error < 1e-12
    )  # the context's own path decides it
    assert measure(rule, tables, distribution, GROWN, across, 2).tv > 0.01
    assert GROWN not in rule.info.shapes


@pytest.mark.parametrize(("name", "_"), COUNTING)
def test_a_drafter_that_grows_by_its_draws_is_refused_them_and_told_what_fits(name, _):
    growing = Method("growing", "", "", 2024, "", frozenset({IID}), frozenset({TreeShape.PATHS, GROWN}))
    with pytest.raises(
        IncompatibleError,
        match=f"{name!r} was joined with drafter 'growing'.* GROWN.*Verifiers that fit: .*traversal",
    ):
        pairing.check_pair(growing, registry.verifier(name).info)
    assert pairing.best_for(growing) == "traversal"


@pytest.mark.parametrize(
    ("name", "distribution"), [*COUNTING, ("greedy_traversal_wor", WOR), ("greedy_plus_one", WOR)]
)
def test_a_number_of_draws_that_follows_from_the_first_of_them_is_caught(name, distribution):
    tables = Tables(4, 0)
    assert (
        measure(
            registry.verifier(name),
            tables,
            distribution,
            GROWN,
            across,
            1,
            stopped_inside(tables, distribution),
        ).tv
        > 0.07
    )


@pytest.mark.parametrize(
    ("name", "distribution"),
    [("traversal", IID), ("traversal", WOR), ("recursive", IID), ("recursive_wor", WOR), ("match", IID)],
)
def test_rules_that_try_in_the_order_of_the_draws_bear_even_that(name, distribution):
    for seed in range(6):
        tables = Tables(4, seed)
        assert (
            measure(
                registry.verifier(name),
                tables,
                distribution,
                GROWN,
                across,
                1,
                stopped_inside(tables, distribution),
            ).error
            < 1e-12
        )
