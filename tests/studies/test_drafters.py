"""The comparison of drafters: workloads, the replayed target, and what a run reports."""

import numpy as np
import torch

from polydraft import Engine, SamplingParams
from polydraft.core import TokenTree
from polydraft.drafters.text.ngram import NgramDrafter
from studies.drafters.comparison import Row
from studies.drafters.learning import by_window
from studies.drafters.scripted_target import ScriptedTarget


def test_a_replayed_text_comes_out_as_it_is_with_and_without_drafts():
    text = [5, 6, 7, 8] * 6
    for drafter, calls in ((None, 20), (NgramDrafter(), 20)):
        target = ScriptedTarget(9)
        target.text = text
        result = Engine.of(target, drafter=drafter, depth=4).generate(
            [text[:4]], SamplingParams(temperature=0, max_tokens=20)
        )[0]
        assert result.token_ids == text[4:]
        assert result.stats.steps == calls if drafter is None else result.stats.steps < calls


def test_off_the_text_the_replayed_target_is_uniform():
    target = ScriptedTarget(9)
    target.text = [1, 2, 3, 4]
    target.prefill([0], [[1]])
    tree = TokenTree(np.array([[2, 3, 8, 4]]), np.array([[-1, 0, 0, 2]]))
    logits = target.score([0], tree).logits[0]
    assert logits.argmax(-1)[:2].tolist() == [3, 4]
    assert np.array_equal(logits[2:], torch.zeros(2, 9))


def test_the_curve_counts_each_step_in_the_window_where_it_begins():
    row = Row("x", "python", "replayed", steps=[[3, 1, 1], [1, 1]])
    assert row.tokens_per_step == 7 / 5
    assert by_window(row, 3) == [5 / 3, 1.0]
