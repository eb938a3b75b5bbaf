"""The comparison of drafters: workloads, the replayed target, and what a run reports."""

import json
from itertools import product

import pytest
import torch

from polydraft import Engine, SamplingParams
from polydraft.core import TokenTree
from polydraft.drafters.text.ngram import NgramDrafter
from studies.drafters import tables
from studies.drafters.comparison import CONTENDERS, MIXED, WAYS, WORKLOADS, DrafterBench, Row, compare
from studies.drafters.learning import by_window, markdown
from studies.drafters.picture import pictures
from studies.drafters.scripted_target import ScriptedTarget


@pytest.fixture(scope="module")
def bench():
    return DrafterBench(num_tokens=16, num_requests=2, index_bytes=60_000)


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
    tree = TokenTree(torch.tensor([[2, 3, 8, 4]]), torch.tensor([[-1, 0, 0, 2]]))
    logits = target.score([0], tree).logits[0]
    assert logits.argmax(-1)[:2].tolist() == [3, 4]
    assert torch.equal(logits[2:], torch.zeros(2, 9))


def test_nothing_held_out_is_in_the_indexes(bench):
    index = bench.index
    for task in bench.tasks("python"):
        assert index.count(task.prompt[100:130]) == 0


def test_the_curve_counts_each_step_in_the_window_where_it_begins():
    row = Row("x", "python", "replayed", steps=[[3, 1, 1], [1, 1]])
    assert row.tokens_per_step == 7 / 5
    assert by_window(row, 3) == [5 / 3, 1.0]


def test_a_comparison_writes_tables_which_the_study_draws(bench, tmp_path):
    report = compare(bench, [c for c in CONTENDERS if c.name in ("suffix", "trigram")])
    tables.write(report, tmp_path / "d")
    report = json.loads((tmp_path / "d" / "drafters.json").read_text())
    assert [r["contender"] for r in report["rows"]] == ["suffix", "trigram"] * 9
    assert all(r["tokens_per_step"] >= 1 for r in report["rows"])
    assert {p.name for p in (tmp_path / "d").iterdir()} == {"drafters.json", "drafters.md"}
    curves = {"curve_window": 100, "curves": {"suffix": [1.0, 2.0]}}
    assert all(p.stat().st_size > 1000 for p in pictures(report | curves, tmp_path))


def test_the_mixture_is_compared_with_its_best_source_on_the_same_texts():
    rates = {name: [1.0, 2.0] for name in MIXED} | {"suffix": [2.0, 3.0], "mixture of all": [2.5, 3.5]}
    rows = [
        {"contender": name, "way": way, "workload": workload, "by_request": x, "tokens_per_step": sum(x) / 2}
        for (name, x), way, workload in product(rates.items(), WAYS, WORKLOADS)
    ]
    page = markdown({"rows": rows, "megabytes_per_million_tokens": {"suffix store": 54.4}})
    assert page.count("| suffix | +0.50 ± 0.00 |") == 6 and "| suffix store | 54 |" in page
