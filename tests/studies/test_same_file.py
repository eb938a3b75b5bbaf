"""A GGUF file in both engines, each in a process of its own."""

import json

import numpy as np
import pytest

from polydraft.bench.gguf_file import write_gguf
from polydraft.errors import InvalidInputError
from polydraft.models import pair
from polydraft.models.load import load_tokenizer
from polydraft.models.loading.folder import load_module
from studies.question_files import Question
from studies.same_file import Continuation, FileComparison, Speeds, markdown

ASKED = [Question("code", "def f(x):"), Question("text", "import os")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder, file = str(pair.draft_folder()), tmp_path_factory.mktemp("files") / "draft.gguf"
    write_gguf(load_module(folder, device="cpu"), load_tokenizer(folder), file, "Q8_0")
    return str(file)


def test_every_mode_continues_every_prompt_and_a_cut_off_run_goes_on(model, tmp_path):
    pytest.importorskip("xllamacpp")
    results, said = tmp_path / "file.jsonl", list[str]()
    first = FileComparison(model, model, num_tokens=8, results=results)
    first.run(ASKED[:1], temperatures=(0.0,), say=said.append)
    assert len(first.modes) == len(first.continuations) == 6
    assert "6 continuations of 8 tokens: about 1 minutes" in said[0]
    assert "polydraft, chain of 3" in first.modes and "llama.cpp, draft" in first.modes
    again = FileComparison(model, model, num_tokens=8, results=results)
    again.run(ASKED, temperatures=(0.0,), say=said.append)
    assert said[1].startswith("6 continuations") and len(again.continuations) == 12
    assert [json.loads(line)["prompt"] for line in results.read_text().splitlines() if "mode" in line] == [0] * 6 + [1] * 6
    table = markdown(again)
    assert all(f"| {mode}" in table for mode in again.modes)
    assert "| code (1) | text (1) | all (2) |" in table and table.count("peak memory") == 1
    with pytest.raises(InvalidInputError, match="expected those of"):
        FileComparison(model, model, num_tokens=9, results=results)


def test_transformers_runs_beside_plain_and_assisted(model):
    pytest.importorskip("xllamacpp")
    comparison = FileComparison(model, model, peer_modes=["plain"], transformers=True, num_tokens=8)
    assert comparison.modes[-2:] == ["transformers, plain", "transformers, assisted"]
    comparison.run(ASKED[:1], temperatures=(0.0, 1.0))
    plain, assisted = (
        [c for c in comparison.continuations if c.mode == f"transformers, {mode}"] for mode in ("plain", "assisted")
    )
    assert [c.first_tokens for c in plain] == [1, 1] and all(c.seconds > 0 for c in plain)
    assert assisted[0].first_tokens > 1  # greedy drafts of the model itself are accepted
    assert "| transformers, assisted |" in markdown(comparison)


def test_without_a_draft_model_there_are_no_chains(model):
    pytest.importorskip("xllamacpp")
    modes = FileComparison(model, None).modes
    assert modes == ["polydraft, plain", "polydraft, auto", "llama.cpp, plain", "llama.cpp, ngram_simple"]


def _continuations(speeds, mode="polydraft, auto"):
    return [
        Continuation(mode, 1, 0.0, "code" if i % 2 else "chat", i, 0, 0.5, 60 / speed, 4, 64) for i, speed in enumerate(speeds)
    ]


def test_speed_leaves_out_what_came_with_the_first_step_and_adds_up_over_prompts():
    speeds = Speeds(_continuations([10.0, 30.0]), 1, 0.0)
    assert speeds.speed("polydraft, auto", [0]) == pytest.approx(10.0)
    assert speeds.speed("polydraft, auto", [0, 1]) == pytest.approx(15.0)
    assert speeds.categories == {"chat": [0], "code": [1]} and speeds.first_token("polydraft, auto") == 0.5


def test_intervals_hold_the_true_speed_about_as_often_as_they_say():
    rng, covered = np.random.default_rng(1), 0
    for _ in range(200):
        speeds = Speeds(_continuations(60 / rng.uniform(2.0, 4.0, 24)), 1, 0.0)
        low, high = speeds.interval("polydraft, auto", speeds.prompts)
        covered += low <= 20.0 <= high
    assert 178 <= covered <= 199


def test_a_ratio_between_modes_is_told_more_exactly_than_either_as_prompts_are_resampled_alike():
    rng = np.random.default_rng(2)
    base = rng.uniform(10.0, 40.0, 16)
    speeds = Speeds([*_continuations(base), *_continuations(base / 2, "llama.cpp, plain")], 1, 0.0)
    low, high = speeds.interval("polydraft, auto", speeds.prompts, "llama.cpp, plain")
    assert low == pytest.approx(2.0) == high
    alone = speeds.interval("polydraft, auto", speeds.prompts)
    assert alone[1] / alone[0] > 1.2


def test_prompts_that_a_mode_lacks_are_left_out_of_all():
    speeds = Speeds([*_continuations([10.0, 30.0]), *_continuations([5.0], "llama.cpp, plain")], 1, 0.0)
    assert speeds.prompts == [0]
