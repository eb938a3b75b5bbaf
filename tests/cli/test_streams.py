"""Outputs that cannot take a text, and streams that were closed, end in no traceback; clocks that are set change no time that is told."""

import json
import sys
import time

import pytest
from typer.testing import CliRunner

from polydraft.cli import waiting
from polydraft.cli.main import app

GENERATE = [
    "generate",
    "x = 'é🙂",
    "--model",
    "embedded",
    "--drafter",
    "ngram",
    "--max-tokens",
    "4",
    "--temperature",
    "0",
]


def test_what_the_encoding_of_the_output_lacks_is_a_question_mark():
    plain, utf8 = (CliRunner(charset=charset).invoke(app, GENERATE) for charset in ("ascii", "utf-8"))
    assert plain.exit_code == 0, plain.output
    assert not utf8.stdout.isascii() and plain.stdout == utf8.stdout.encode("ascii", "replace").decode()


def test_json_in_ascii_is_whole():
    asked = [*GENERATE, "--json"]
    plain, utf8 = (
        json.loads(CliRunner(charset=charset).invoke(app, asked).stdout) for charset in ("ascii", "utf-8")
    )
    assert plain["text"] == utf8["text"] and plain["samples"][0]["text"]


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_closed_stream_takes_nothing_and_gives_nothing(name, monkeypatch):
    monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as end:
        app(GENERATE if name != "stdin" else ["generate", "--model", "embedded"])
    assert end.value.code == (2 if name == "stdin" else 0)


@pytest.mark.parametrize("set_to", [-1e9, 1e9])
def test_the_age_of_a_process_does_not_follow_a_clock_that_is_set(set_to, monkeypatch):
    now = waiting.process_seconds()
    real = time.clock_gettime
    monkeypatch.setattr(time, "time", lambda: set_to)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + set_to)
    assert now <= waiting.process_seconds() < now + 60 and waiting._age() == 0
