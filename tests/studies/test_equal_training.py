"""Heads trained at equal CPU time: hidden questions end where answers begin, and a chain's figures give those of shorter ones."""

import csv
import json

import pytest
from typer import BadParameter

from polydraft import Engine
from polydraft.train.run import untrained
from studies.equal_training import CSV, DEPTH, main, measure, page


def test_the_first_drafts_of_a_chain_give_shorter_chains_and_the_table_holds_every_head(tmp_path):
    engine = Engine.embedded(draft_model=None, drafter=None, max_num_seqs=4, max_model_len=128)
    head = untrained("eagle", engine.target, tmp_path / "head")
    card = {"training_seconds": 60, "tokens_seen": 5, "parameters": 1_000_000, "acceptance": [0.25], "agreement": [0.5]}
    (head / "card.json").write_text(json.dumps(card))
    rows = measure(engine, "eagle", head, [[1, 5, 9], [1, 7]], 12)
    assert [row.temperature for row in rows] == [0, 1] and [row.held_out for row in rows] == [0.5, 0.25]
    for row in rows:
        chains = [1.0, row.tokens_1, row.tokens_2, row.tokens_3, row.tokens_4]
        assert row.tokens_1 == pytest.approx(1 + row.first, abs=2e-3) and chains == sorted(chains) and chains[DEPTH] <= 1 + DEPTH
    table = page(rows, tmp_path, "Settings.")
    assert table.splitlines()[-1].startswith("| eagle | 60 | 1.0 | ")
    assert len(list(csv.DictReader((tmp_path / CSV).open()))) == 2


def test_a_contender_that_is_none_is_refused_by_name_before_anything_is_loaded(tmp_path):
    with pytest.raises(BadParameter, match="--contender 'dspark-9' is none of shipped, eagle-1-kl"):
        main(out=tmp_path / "out", contender=["dspark-9"])
    assert not (tmp_path / "out").exists()
