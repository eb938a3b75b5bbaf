"""Drafters of one model on one yardstick."""

import json

import pytest

from polydraft.errors import UnknownNameError
from polydraft.models import pair
from polydraft.train.run import untrained
from studies.question_files import Question
from studies.yardstick import Yardstick, markdown, picture


def test_every_way_is_measured_on_the_same_questions_and_greedy_texts_are_compared(tmp_path):
    made = Yardstick(str(pair.target_folder()), [], ["ngram"], max_model_len=256)
    head = untrained("medusa", made.plain.target, tmp_path / "heads")
    (head / "card.json").write_text(json.dumps({"parameters": 7, "training_seconds": 3}))
    made = Yardstick(
        str(pair.target_folder()),
        [head, pair.draft_folder()],
        ["heads@1x2", f"{pair.draft_folder().name}@1x2"],
        max_model_len=256,
    )
    asked = [Question("a", "def f(x):"), Question("b", "import os")]
    report = made.run(asked, [0.0, 1.0], max_tokens=12)
    rows = {(r["way"], r["temperature"]): r for r in report["rows"]}
    assert len(rows) == 6
    assert all(r["equal"] for r in rows.values() if r["temperature"] == 0)
    trained = rows["heads@1x2", 0.0]
    assert (trained["drafter"], trained["parameters"], trained["training_seconds"]) == ("medusa", 7, 3)
    assert set(trained["by_category"]) == {"a", "b"}
    assert rows[f"{pair.draft_folder().name}@1x2", 0.0]["tokens_per_step"] > 1
    assert rows["plain", 1.0]["over_plain"] == 1
    assert markdown(report).count("heads@1x2") == 2
    picture(report, tmp_path / "yardstick.png")
    assert (tmp_path / "yardstick.png").stat().st_size > 5000


def test_a_way_that_there_is_not_is_refused():
    with pytest.raises(UnknownNameError, match="ngram"):
        Yardstick(str(pair.target_folder()), [], ["ngrm"], max_model_len=64)
