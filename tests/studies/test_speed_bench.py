"""What llama.cpp's own client reads of answers is what the server counted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from studies.speed_bench.__main__ import HUB, Asked, differences, read_and_counted
from studies.speed_bench.hub import datasets
from tests.server.conftest import serving, small_engine

ROOT = Path(__file__).parents[2]
WHERE = "tools/server/bench/speed-bench/speed_bench.py"
QUESTIONS = """\
{"question_id": 81, "category": "writing", "turns": ["def f(x):", "def g(x):"]}
{"question_id": "b", "category": "code", "turns": ["for x in range(3):"]}
{"question_id": 83, "category": "code", "turns": ["import os"]}
"""


def client() -> Path:
    """In llama.cpp's source: of the variable, or where `python -m studies.peers` puts it."""
    named = os.environ.get("POLYDRAFT_LLAMA_CPP")
    folders = [Path(named)] if named else (ROOT / "build" / "llama.cpp").glob("*/vendor/llama.cpp")
    found = [folder / WHERE for folder in folders if (folder / WHERE).exists()]
    if not found:
        pytest.skip("no source of llama.cpp: python -m studies.peers, or POLYDRAFT_LLAMA_CPP=FOLDER")
    pytest.importorskip("requests", reason="pip install requests")
    pytest.importorskip("tqdm", reason="pip install tqdm")
    return found[-1]


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text(QUESTIONS)
    return file


def test_the_client_reads_what_the_server_counted(questions, tmp_path):
    program = client()
    asked = Asked(questions, limit=2, max_tokens=24, temperature=0.0, concurrency=2)
    with serving(small_engine()) as served:
        results, counts = read_and_counted(program, served.url, asked, tmp_path / "results.json")
    assert not differences(results, counts)
    assert counts["completion_tokens"] == 4 * 24 and counts["draft_n"] >= counts["draft_n_accepted"] > 0
    for result in results:
        milliseconds = result["prompt_ms"] + result["predicted_ms"]
        assert 0 < milliseconds <= 1000 * result["latency_s"]  # both by the wall, whoever ran beside
        assert result["predicted_per_second"] > 0 < result["prompt_per_second"]


def test_a_client_that_sums_other_figures_is_told():
    results = [{"draft_n": 3, "draft_n_accepted": 1}] * 2
    assert differences(results, {"draft_n": 6, "draft_n_accepted": 3}) == {"draft_n_accepted": (2, 3)}


def test_the_file_stands_in_for_a_data_set_of_the_hub(questions, monkeypatch):
    monkeypatch.setenv(datasets.FILE, str(questions))
    (name,) = datasets.get_dataset_config_names("nvidia/SPEED-Bench")
    rows = datasets.load_dataset("nvidia/SPEED-Bench", name=name, split="test")
    assert name == "questions" and rows["category"] == ["writing", "code", "code"]
    assert [row["question_id"] for row in rows] == ["81", "b", "83"]


def test_a_client_elsewhere_finds_the_stand_in(questions):
    program = "import datasets; print(len(datasets.load_dataset('any', name='questions', split='test')))"
    environment = {**os.environ, datasets.FILE: str(questions), "PYTHONPATH": str(HUB)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "3\n"
