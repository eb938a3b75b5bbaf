"""The trigram baseline of the embedded pair is a distribution."""

import numpy as np
import pytest

from studies.embedded_pair.trigram import TrigramTable
from tests.studies.test_training import V, stream


def test_trigram_rows_sum_to_one():
    table = TrigramTable.count(stream(), V)
    for a, b in ((1, 5), (0, 0), (V - 1, 3)):
        row = table.row(a, b)
        assert row.min() > 0
        assert row.sum() == pytest.approx(1, abs=1e-12)


def test_trigram_row_matches_kneser_ney_by_hand():
    """Stream 0 1 0 1 2: counts n(01.) = {0: 1, 2: 1}; continuation counts n(1.) = {0: 1, 2: 1}, n(.) = {0: 1, 1: 1, 2: 1}."""
    table = TrigramTable.count(np.array([0, 1, 0, 1, 2]), 4)
    D = [order.discounts[0] for order in table.orders]
    unigram = (1 - D[0] + 3 * D[0] / 4) / 3
    bigram = (1 - D[1] + 2 * D[1] * unigram) / 2
    trigram = (1 - D[2] + 2 * D[2] * bigram) / 2
    assert table.row(0, 1)[2] == pytest.approx(trigram)


def test_trigram_beats_unigram_on_fresh_text():
    tokens = stream(4000)
    seen, fresh = tokens[:3000], tokens[3000:]
    frequencies = (np.bincount(seen, minlength=V) + 1) / (len(seen) + V)
    unigram = -np.log(frequencies[fresh[1:]]).mean()
    table = TrigramTable.count(seen, V)
    assert table.nats(fresh).mean() < unigram - 1
    assert table.tuned(fresh).nats(fresh).mean() <= table.nats(fresh).mean()
