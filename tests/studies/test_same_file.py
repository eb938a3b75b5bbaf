"""A GGUF file in both engines, each in a process of its own."""

import csv
import io
import json
from contextlib import contextmanager

import numpy as np
import pytest

from polydraft.bench.llama_cpp import write_gguf
from polydraft.errors import InvalidInputError
from polydraft.models import pair
from polydraft.models.load import load_tokenizer
from polydraft.models.torch.module import load_module
from studies.question_files import Question
from studies.same_file import comparison
from studies.same_file.comparison import FileComparison
from studies.same_file.engines import openvino
from studies.same_file.page import ALL, Interval, Speeds, fastest_peer, page, rows
from studies.same_file.records import Continuation, Job

ASKED = [Question("code", "def f(x):"), Question("text", "import os")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = str(pair.draft_folder())
    file = tmp_path_factory.mktemp("files") / "draft.gguf"
    write_gguf(load_module(folder, device="cpu"), load_tokenizer(folder), file, "Q8_0")
    return str(file)


def test_a_cut_off_run_goes_on_and_the_page_has_all_prompts_and_the_table_each_kind(
    model, tmp_path, monkeypatch
):
    pytest.importorskip("xllamacpp")
    monkeypatch.setattr(FileComparison, "_workers", instant)
    results = tmp_path / "file.jsonl"
    FileComparison(model, model, num_tokens=8, results=results).run(ASKED[:1], temperatures=(0.0,))
    again = FileComparison(model, model, num_tokens=8, results=results)
    again.run(ASKED, temperatures=(0.0,))
    assert [json.loads(line)["prompt"] for line in results.read_text().splitlines() if "mode" in line] == [
        0
    ] * 6 + [1] * 6
    short, table = page(again, tmp_path / "file.md").values()
    assert (
        all(f"| {mode} |" in short for mode in again.modes)
        and "| 1 | 0 | 7 | 7 |" in short
        and "[Every kind of prompt](file.csv)" in short
    )
    assert [row["prompts"] for row in csv.DictReader(io.StringIO(table))] == ["code", "text", "all"] * 6
    with pytest.raises(InvalidInputError, match="expected those of"):
        FileComparison(model, model, num_tokens=9, results=results)


@contextmanager
def instant(comparison, threads):
    """In place of processes with engines: the first token comes after half a second, seven others in another one."""
    yield {mode: lambda job: (0.5, 1.0, 1) for mode in comparison.modes}


def test_every_peer_answers_in_its_modes_and_the_fastest_of_all_is_what_the_default_is_compared_with(
    model, tmp_path, monkeypatch
):
    pytest.importorskip("xllamacpp")
    monkeypatch.setattr(comparison, "find_spec", lambda name: name)
    monkeypatch.setattr(FileComparison, "_workers", instant)
    options = {"num_tokens": 8, "ik_server": tmp_path / "llama-server", "openvino": True}
    compared = FileComparison(model, model, peer_modes=("plain", "draft"), **options)
    peers = [mode for mode in compared.modes if not mode.startswith("polydraft")]
    assert peers == [
        *("llama.cpp, plain", "llama.cpp, draft", "ik_llama.cpp, plain", "ik_llama.cpp, draft"),
        *("OpenVINO, plain", "OpenVINO, draft", "OpenVINO, lookup"),
    ]
    fast = _continuations([30.0] * 2, "OpenVINO, lookup")
    slow = [c for mode in peers[:-1] for c in _continuations([10.0] * 2, mode)]
    assert fastest_peer(Speeds([*slow, *fast, *_continuations([40.0] * 2)], 1, 0.0)) == "OpenVINO, lookup"


def test_openvino_continues_a_file_and_tells_when_tokens_came(model):
    pytest.importorskip("openvino_genai")
    generate = openvino(model, 1, None, "plain")
    first, seconds, count = generate(Job("plain", [5, 6, 7], 8, 0.0, 0))
    assert first > 0 and seconds > 0 and count == 1


def _continuations(speeds, mode="polydraft, auto"):
    return [
        Continuation(mode, 1, 0.0, "code" if i % 2 else "chat", i, 0, 0.5, 60 / speed, 4, 64)
        for i, speed in enumerate(speeds)
    ]


def test_speed_leaves_out_what_came_with_the_first_step_and_adds_up_over_prompts():
    speeds = Speeds(_continuations([10.0, 30.0]), 1, 0.0)
    assert speeds.speed("polydraft, auto", [0]) == pytest.approx(10.0)
    assert speeds.speed("polydraft, auto", [0, 1]) == pytest.approx(15.0)
    assert speeds.categories == {"chat": [0], "code": [1]} and speeds.first_token("polydraft, auto") == 0.5


def test_a_ratio_between_modes_is_told_more_exactly_than_either_as_prompts_are_resampled_alike():
    rng = np.random.default_rng(2)
    base = rng.uniform(10.0, 40.0, 16)
    speeds = Speeds([*_continuations(base), *_continuations(base / 2, "llama.cpp, plain")], 1, 0.0)
    low, high = speeds.interval("polydraft, auto", speeds.prompts, "llama.cpp, plain")
    assert low == pytest.approx(2.0) == high
    alone = speeds.interval("polydraft, auto", speeds.prompts)
    assert alone[1] / alone[0] > 1.2


def test_a_row_has_the_speed_of_its_prompts_over_plain_decoding_and_over_the_fastest_mode_of_llama_cpp():
    modes = {
        "polydraft, plain": 20.0,
        "polydraft, auto": 40.0,
        "llama.cpp, plain": 16.0,
        "llama.cpp, ngram_simple": 10.0,
    }
    continuations = [c for mode, speed in modes.items() for c in _continuations([speed] * 4, mode)]
    table = {(row.mode, row.category): row for row in rows(continuations)}
    assert table["polydraft, auto", ALL].over_plain == pytest.approx((2.0, 2.0, 2.0))
    assert table["polydraft, auto", "chat"].over_peer == pytest.approx((2.5, 2.5, 2.5))
    assert (
        table["llama.cpp, plain", ALL].over_peer is None
        and table["polydraft, plain", "code"].over_plain is None
    )
    assert Interval(2.0, 1.5, 2.5).shown("x") == "2x [1.5, 2.5]"
