"""Prompts of files by category."""

import gzip
import json

import pytest

from polydraft.errors import InvalidInputError, UnknownNameError
from studies.question_files import questions


@pytest.fixture
def files(tmp_path):
    lines = [{"category": c, "turns": [f"{c}{i}", "more"]} for c in "ab" for i in range(3)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "functions.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "def f(x):"}'))
    return [tmp_path / "q.jsonl", tmp_path / "functions.jsonl.gz"]


def test_questions_are_taken_evenly_from_all_categories_and_files(files):
    assert [q.text for q in questions(files, 2)] == ["a0", "b0", "def f(x):", "a1", "b1"]
    assert [q.category for q in questions(files, 1)] == ["a", "b", "functions"]


def test_only_the_categories_that_were_named_are_taken(files):
    assert [q.text for q in questions(files, 2, ["b", "functions"])] == ["b0", "def f(x):", "b1"]
    with pytest.raises(UnknownNameError, match="functions"):
        questions(files, 1, ["function"])


def test_a_line_without_a_question_is_refused_by_its_number(files):
    files[0].write_text('{"prompt": "p"}\n{"turns": []}')
    with pytest.raises(InvalidInputError, match="line 2"):
        questions(files, 1)
    files[0].write_text("")
    with pytest.raises(InvalidInputError, match="no question"):
        questions(files[:1], 1)
