"""The comparison of verifiers: closed forms and bounds agree with it, and sampled drafts with enumerated ones."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from scipy.stats import chisquare

from polydraft.core import DraftSampling
from polydraft.errors import InvalidInputError, UnknownNameError
from polydraft.testing import Tables, by_position, enumerate_drafts
from polydraft.theory import acceptance, compare
from polydraft.theory.comparison import COMPARED, sampled_drafts

IID = DraftSampling.IID
TWO_PATHS = (-1, 0, 0, 1, 2)
CLOSED = {
    "recursive": acceptance.recursive,
    "kseq": lambda p, q, n: acceptance.kseq(p, q, n)[1],
    "transport": acceptance.transport,
    "match": acceptance.target_sample,
    "single_with_spares": acceptance.single_with_spares,
}


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_one_node_agrees_with_closed_forms(seed, n):
    tables = Tables(4, seed)
    p, q = tables.target(()), tables.draft(())
    compared = compare(p, q, n)
    for name, accepted in CLOSED.items():
        assert compared.of(name, IID).tokens == pytest.approx(1 + accepted(p, q, n), abs=1e-9), name
    distinct = compared.of("recursive_wor", DraftSampling.WITHOUT_REPLACEMENT).tokens
    assert distinct == pytest.approx(1 + acceptance.recursive_wor(p, q, n), abs=1e-9)


@pytest.mark.parametrize("tree", [1, 2, TWO_PATHS])
@pytest.mark.parametrize("seed", range(6))
def test_no_verifier_exceeds_its_bound_and_some_reach_it(seed, tree):
    tables = Tables(3, seed)
    compared = compare(tables.target, tables.draft, tree)
    missing = [row.missing for row in compared.rows if row.missing is not None]
    assert missing and min(missing) > -1e-9
    if tree == 1:
        assert min(missing) < 1e-9
    assert [row.tokens for row in compared.rows] == sorted((r.tokens for r in compared.rows), reverse=True)


def test_sampled_drafts_estimate_what_enumeration_gives(monkeypatch):
    tables = Tables(3, 0)
    whole = compare(tables.target, tables.draft, TWO_PATHS)
    monkeypatch.setattr("polydraft.theory.comparison.MOST_ENUMERATED", 0)
    sampled = compare(tables.target, tables.draft, TWO_PATHS, num_drafts=3000)
    for row in sampled.rows:
        exact = whole.of(row.verifier, row.sampling).tokens
        assert abs(row.tokens - exact) < 5 * row.standard_error + 1e-9, row


def p_value(tables, sampling, drawn_as):
    """Of drafts of two paths, against their enumerated probabilities."""
    counts = by_position(*TWO_PATHS)
    rng = np.random.default_rng(1)
    seen = Counter(tuple(d.tokens) for d in sampled_drafts(tables, drawn_as, counts, 2, 3000, rng))
    expected = defaultdict[tuple[int, ...], float](float)
    for draft in enumerate_drafts(tables, sampling, counts, 2):
        expected[tuple(draft.tokens)] += draft.probability * 3000
    if not set(seen) <= {draft for draft, count in expected.items() if count > 0}:
        return 0.0
    common = [draft for draft, count in expected.items() if count >= 5]
    observed = [seen[draft] for draft in common]
    wanted = [expected[draft] for draft in common]
    rest = 3000 - sum(observed), 3000 - sum(wanted)
    pairs = [*zip(observed, wanted, strict=True), *([rest] if rest[1] >= 5 else [])]
    if len(pairs) == 1:
        return 1.0
    observed, wanted = np.array(pairs, float).T
    return float(chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


@pytest.mark.parametrize("sampling", COMPARED)
def test_sampled_drafts_have_the_enumerated_distribution(sampling):
    for seed in (0, 3, 5):
        assert p_value(Tables(3, seed), sampling, sampling) > 1e-4, seed


def test_draws_of_another_kind_are_found():
    tables = Tables(3, 0)
    assert p_value(tables, DraftSampling.WITHOUT_REPLACEMENT, IID) < 1e-6
    assert p_value(tables, DraftSampling.SYSTEMATIC, IID) < 1e-6


def test_what_is_no_row_no_tree_and_no_verifier_is_refused():
    p = [0.5, 0.5]
    for given in ((p, [0.9, 0.2], 2), (p, p, 0), ([0.5, 0.3, 0.2], p, 2)):
        with pytest.raises(InvalidInputError):
            compare(*given)
    with pytest.raises(UnknownNameError):
        compare(p, p, 2, verifiers=["blok"])
    with pytest.raises(InvalidInputError, match="expected one of"):
        compare(p, p, 2, verifiers=["kseq"]).of("block", IID)


def test_the_plot_has_a_bar_for_each_row(tmp_path):
    pytest.importorskip("matplotlib")
    compared = compare([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 2)
    figure = compared.plot(tmp_path / "compared.svg")
    assert len(figure.axes[0].patches) == len(compared.rows) and (tmp_path / "compared.svg").exists()
