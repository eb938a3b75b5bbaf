"""The trigram baseline of the embedded pair is a distribution."""

import numpy as np
import pytest

from studies.embedded_pair.trigram import TrigramTable


def test_trigram_row_matches_kneser_ney_by_hand():
    """Stream 0 1 0 1 2: counts n(01.) = {0: 1, 2: 1}; continuation counts n(1.) = {0: 1, 2: 1}, n(.) = {0: 1, 1: 1, 2: 1}."""
    table = TrigramTable.count(np.array([0, 1, 0, 1, 2]), 4)
    D = [order.discounts[0] for order in table.orders]
    unigram = (1 - D[0] + 3 * D[0] / 4) / 3
    bigram = (1 - D[1] + 2 * D[1] * unigram) / 2
    trigram = (1 - D[2] + 2 * D[2] * bigram) / 2
    assert table.row(0, 1)[2] == pytest.approx(trigram)
