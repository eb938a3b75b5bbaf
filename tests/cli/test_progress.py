"""What a command says before its first word stays on standard error, and on a terminal it leaves no trace."""

import sys

import numba
import pytest
from typer.testing import CliRunner

from polydraft.cli import progress
from polydraft.cli.main import app
from polydraft.cli.progress import Preparation, bars
from polydraft.models import load


def compile_one():
    assert numba.njit(lambda x: x + 1)(1) == 2


def test_compiling_is_told_of_in_two_lines_where_there_is_no_terminal(capsys):
    with Preparation("loading a model ..."):
        compile_one()
        compile_one()
    told = capsys.readouterr()
    assert told.out == ""
    begun, done = told.err.splitlines()
    assert begun == "compiling for this machine, once ..."
    assert done.startswith("compiled 2 functions in ")


def test_nothing_is_said_where_nothing_is_compiled(capsys):
    with Preparation("loading a model ..."):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_one_line_that_is_gone_afterwards(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Preparation("loading a model ...") as preparation:
        compile_one()
        preparation.say("a line that stays")
        preparation.close()
        compile_one()
    parts = [part for line in capsys.readouterr().err.split("\n") for part in line.split("\r\x1b[K")]
    assert parts.pop(5).startswith("compiled 1 function in ")
    compiling = "compiling for this machine, once: function 1, <lambda> ..."
    assert parts == ["", "loading a model ...", compiling, "a line that stays", "", ""]


@pytest.mark.parametrize("way", [["--stream"], ["--json"]])
def test_generate_tells_of_what_it_compiles_and_its_output_stays_clean(monkeypatch, way):
    run = [
        *(
            "generate",
            "def f(x):",
            "--max-tokens",
            "4",
            "--seed",
            "1",
            "--drafter",
            "none",
            "--model",
            "embedded",
        ),
        *way,
    ]
    quiet = CliRunner().invoke(app, run)
    find = load.load_tokenizer
    monkeypatch.setattr(
        load, "load_tokenizer", lambda name: compile_one() or find(name)
    )  # of target and draft
    told = CliRunner().invoke(app, run)
    assert (told.exit_code, told.stderr.count("compiled 2 functions in")) == (0, 1)
    assert "compiled 2" not in told.stdout
    if way == ["--stream"]:
        assert told.stdout == quiet.stdout
        assert "first token after" in told.stderr


def test_progress_without_a_terminal_is_a_line_every_ten_seconds(capsys, monkeypatch):
    clock = iter(range(0, 100, 4))
    monkeypatch.setattr(progress, "monotonic", lambda: next(clock))
    with bars("measuring") as step:
        for _ in range(6):
            step(6)
    assert capsys.readouterr() == ("", "measuring: 3 of 6\nmeasuring: 6 of 6\n")


def test_hidden_progress_says_nothing(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    with bars("measuring", hidden=True) as step:
        step(6)
    assert capsys.readouterr() == ("", "")
