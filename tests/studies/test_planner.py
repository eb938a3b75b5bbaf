"""The planner's accuracy table, and every drafter against plain decoding."""

import numpy as np
import pytest

from polydraft import registry
from studies.planner.accuracy import Accuracy, accuracy, markdown, sizes_of
from studies.planner.every_drafter import AgainstPlain, against_plain
from studies.planner.every_drafter import markdown as drafters_markdown
from studies.planner.workloads import WORKLOADS, workload


def test_the_best_fixed_plan_is_chosen_by_total_speed_and_plain_decoding_is_one():
    found = Accuracy("w", {"plain": [(10, 1.0)] * 4, "adaptive": [(19, 1.0)] * 4, "1x4": [(20, 1.0)] * 4, "2x2": [(30, 2.0)] * 4})
    assert found.best_fixed == "1x4" and found.ratio == pytest.approx(0.95)
    assert found.interval == pytest.approx((0.95, 0.95))
    assert "| w | 10 | 19 |" in markdown([found])
    found.rounds["plain"] = [(40, 1.0)] * 4
    assert found.best_fixed == "plain"


def test_a_lucky_half_does_not_raise_the_bar():
    rng = np.random.default_rng(1)
    noisy = {f"1x{d}": [(10, float(rng.uniform(0.8, 1.2))) for _ in range(8)] for d in range(1, 30)}
    found = Accuracy("w", {"plain": [(5, 1.0)] * 8, "adaptive": [(10, 1.0)] * 8, **noisy})
    assert found.speed("adaptive") / found.speed(found.best_fixed) < 0.93
    assert 0.95 < found.ratio < 1.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["repeated edits", "mixed batch"])
def test_a_workload_runs_every_size_on_the_same_rounds(name, monkeypatch):
    monkeypatch.setattr("studies.planner.accuracy.DEPTHS", {1: (1, 4), 2: (2,)})
    found = accuracy(name, workload(name, 2, 8))
    width = 1 if name == "repeated edits" else 2
    assert set(found.rounds) == {"plain", "adaptive", *(f"{w}x{d}" for w, d in sizes_of(width))}
    assert {len(r) for r in found.rounds.values()} == {2}
    assert all(tokens > 0 and seconds > 0 for rounds in found.rounds.values() for tokens, seconds in rounds)
    assert name in WORKLOADS


def test_sizes_that_fall_behind_are_left_out_and_never_the_best(monkeypatch):
    monkeypatch.setattr("studies.planner.accuracy.DEPTHS", {1: (1, 4)})
    monkeypatch.setattr("studies.planner.accuracy.CLOSE", -9.0)  # all sizes are behind ten times the best
    found = accuracy("high temperature", workload("high temperature", 4, 8))
    assert {n: len(r) for n, r in found.rounds.items()} == {"plain": 4, "adaptive": 4, "1x1": 2, "1x4": 2}
    assert found.best_fixed == "plain" and found.interval[0] <= found.ratio <= found.interval[1]


def test_every_registered_drafter_meets_plain_decoding_on_the_same_prompts():
    rows = list(against_plain(drafters=["ngram", "lookahead"], count=2, max_tokens=12))
    assert [row.drafter for row in rows] == ["ngram", "lookahead"] and set(registry.names("drafter")) > {"ngram", "lookahead"}
    for row in rows:
        assert [tokens for tokens, _ in row.plain] == [tokens for tokens, _ in row.adaptive] == [12, 12] and row.calls >= 2
    even = AgainstPlain("x", [(10, 1.0)], [(30, 2.0)], drafted=6, calls=4)
    assert "| x | 10 | 15 | 1.50 | 1.500 |" in drafters_markdown([even])
