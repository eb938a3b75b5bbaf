"""Words on pictures."""

import re

import pytest

from polydraft.bench.ways import DEFAULT_WAYS
from studies.labels import label


@pytest.mark.parametrize("way", [*DEFAULT_WAYS, "plain", "eagle@1x3", "suffix+store"])
def test_a_label_has_no_spelling_of_options(way):
    assert not re.search(r"[@+:_]|\dx\d", label(way)) and label(way) != way


def test_a_label_says_drafter_shape_and_verifier():
    assert label("model:chain+block@1x4") == "draft model, chain of 4,\nblock verification"
    assert label("model+greedy_traversal@2x4") == "draft model, 2 paths of 4,\ngreedy traversal"
    assert label("suffix+store") == "suffix decoding with a store"


@pytest.mark.parametrize("way", ["llama.cpp speculative", "a folder@1x3", "vLLM"])
def test_what_has_no_words_of_ours_stays_as_it_is(way):
    assert label(way) == way
