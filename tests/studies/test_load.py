"""`python -m studies.load` counts what its own clients were streamed."""

import asyncio
import csv
import json

import pytest
from typer.testing import CliRunner

from polydraft.errors import PolydraftError
from studies.load.__main__ import app, csv_of, page, questions
from studies.load.measurement import Load, load, stretches
from tests.server.conftest import serving as in_process
from tests.server.conftest import small_engine


def test_all_streams_are_timed_and_counted_and_a_refusal_is_told():
    with in_process(small_engine()) as served:
        found = asyncio.run(load("ours", served.url, questions((), 5), streams=3, max_tokens=7, chat=False))
        assert found.tokens == 35 and len(found.first) == 5 and min(found.first) > 0
        assert 0 < len(found.between) <= 30 and found.seconds > max(found.first)
        assert not found.stretch  # an answer has no eight tokens behind its first
        with pytest.raises(PolydraftError, match="400"):
            asyncio.run(load("ours", served.url, ["x"], streams=1, max_tokens=-2, chat=False))


def test_steps_of_several_tokens_are_waited_for_as_those_of_single_ones_that_come_as_fast():
    """Gaps between events are four times as long; a reader waits for the next tokens as long."""
    plain = stretches([float(n) for n in range(41)], [1.0] * 41)
    drafted = stretches([4.0 * n for n in range(11)], [4.0] * 11)
    assert set(plain) == set(drafted) == {1.0}
    assert max(stretches([0.0, 4.0, 14.0, 18.0], [4.0] * 4)) == 14 / 8  # one step took ten seconds more


def test_the_page_has_some_numbers_of_streams_and_the_table_beside_it_all():
    loads = {"m": [Load("ours", n, [0.1], [0.02], [0.01], tokens=8, seconds=2.0) for n in (1, 4, 16, 64)]}
    text = page(loads, "load.csv", "command", 2)
    assert [line.split(" ")[1] for line in text.splitlines() if "| ours |" in line] == [
        "1",
        "16",
    ] and "(load.csv)" in text
    assert [row["streams"] for row in csv.DictReader(csv_of(loads).splitlines())] == ["1", "4", "16", "64"]


@pytest.mark.slow
def test_the_command_writes_its_figures_and_its_page(tmp_path):
    figures = tmp_path / "load.json"
    out = tmp_path / "load.md"
    options = [
        "--model",
        "embedded",
        "--streams",
        "2",
        "--max-tokens",
        "4",
        "--rounds",
        "1",
        "--threads",
        "1",
    ]
    result = CliRunner().invoke(app, [*options, "--json", str(figures), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert {row["server"] for row in json.loads(figures.read_text())["embedded"]} == {
        "polydraft, plain",
        "polydraft",
        "llama.cpp",
    }
    assert out.read_text().count("\n| 2 | ") == 3 == len(out.with_suffix(".csv").read_text().splitlines()) - 1
