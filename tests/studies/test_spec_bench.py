"""Spec-Bench by kind: rows come back from the file, and speeds are of all answers to the same questions."""

import pytest

from studies.options import append_rows, read_rows
from studies.spec_bench import Row, asked, default_table, drafters_table, kinds, tables

QUESTIONS = "".join(
    f'{{"question_id": {n}, "category": "{kind}", "turns": ["question {n}", "second"]}}\n'
    for n, kind in enumerate(["writing"] * 3 + ["qa"] * 3)
)


def row(way, seconds, *, kind="qa", question=0, temperature=0.0, tokens=11, steps=11, model="small"):
    counts = {"later_tokens": tokens - 1, "tokens": tokens, "steps": steps}
    spent = {"first": 0.1, "seconds": seconds, "wall": 2 * seconds if way == "plain" else seconds}
    return Row(
        model, temperature, kind, question, way, 5, drafted=6, accepted=tokens - steps, **counts, **spent
    )


def test_kinds_come_by_turns_and_single_drafters_answer_a_part(tmp_path):
    file = tmp_path / "question.jsonl"
    file.write_text(QUESTIONS)
    found = asked(file, 2, 1)
    assert [(each.kind, each.text, each.in_part) for each in found] == [
        ("writing", "question 0", True),
        ("qa", "question 3", True),
        ("writing", "question 1", False),
        ("qa", "question 4", False),
    ]


def test_rows_come_back_from_the_file_which_goes_on(tmp_path):
    file = tmp_path / "rows.csv"
    rows = [row("plain", 2.0), row("default", 1.0, temperature=1.0)]
    assert read_rows(Row, file) == []
    append_rows(rows[:1], file)
    append_rows(rows[1:], file)
    assert read_rows(Row, file) == rows


def test_a_speed_is_of_a_token_as_answers_at_a_temperature_differ_in_length():
    rows = [
        row("plain", 2.0, temperature=1.0),
        row("default", 2.0, temperature=1.0, tokens=21, steps=14),
    ]
    assert default_table(rows).splitlines()[-1] == "| all | 1 | 2.00, 1.50 |"


def test_single_drafters_stand_beside_the_default_on_the_questions_that_they_answered():
    rows = [row("plain", 2.0), row("default", 1.0), row("ngram", 4.0), row("plain", 9.0, question=1)]
    rows += [row("default", 1.0, question=1)]
    rows += [
        row(way, 2.0, kind=kind) for kind in ("writing", "math") for way in ("plain", "default", "ngram")
    ]
    lines = drafters_table(rows, 0.0).splitlines()
    assert lines[2:4] == [
        "| qa | 1 | 2.00, 1.00 | 0.50, 1.00 |",
        "| multi-turn | 1 | 1.00, 1.00 | 1.00, 1.00 |",
    ]


@pytest.mark.parametrize("kind", ["math_reasoning", "rag"])
def test_other_tasks_are_not_counted_as_conversations(kind):
    rows = [row(way, 2.0, kind=kind) for way in ("plain", "default", "ngram")]
    assert "multi-turn" not in drafters_table(rows, 0.0)


def test_models_of_one_file_have_tables_of_their_own():
    rows = [
        row(way, seconds, model=model)
        for model, seconds in (("small", 1.0), ("large", 3.0))
        for way in ("plain", "default", "ngram")
    ]
    page = tables(rows)
    assert [line for line in page.splitlines() if line.startswith("#")] == ["### small", "### large"]
    assert page.splitlines().count("| all | 1 | 1.00, 1.00 |") == 2


def test_each_kind_is_told_by_both_clocks_with_the_questions_that_are_slower_than_plain():
    rows = [row("plain", 2.0), row("default", 1.0), row("plain", 2.0, question=1)]
    rows += [row("default", 2.5, question=1)]
    qa, whole = kinds(rows)
    assert (qa.kind, whole.kind) == ("qa", "all")
    assert (qa.questions, qa.speed, qa.wall, qa.least, qa.below) == (
        2,
        1.143,
        2.286,
        0.8,
        1,
    )
