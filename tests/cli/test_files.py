"""Files that commands read and write: refused before the work, in one line."""

import os
import resource
import sys
from contextlib import contextmanager, redirect_stdout

import pytest
from typer.testing import CliRunner

from polydraft.cli.commands import EXIT_STATUS
from polydraft.cli.files import read_lines
from polydraft.cli.main import app
from polydraft.cli.serve import _keys
from polydraft.errors import InvalidInputError
from polydraft.integrations.ray.files import rows_of
from polydraft.train import conversations

MEASURING = (
    ("bench", "--report"),
    ("tune", "--save"),
    ("tune", "--report"),
    ("tune", "--picture"),
    ("index build CORPUS", "--out"),
)
DRAWING = (("tune", "--picture"), ("images", "--out"))


def line(*given):
    found = CliRunner().invoke(app, [str(x) for x in given])
    assert found.exit_code == EXIT_STATUS, found.output
    (said,) = [x for x in found.stderr.splitlines() if x.startswith("error: ")]
    return said


@pytest.mark.parametrize(("command", "option"), MEASURING)
def test_results_that_could_not_be_written_are_refused_before_the_work(command, option, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("x = 1\n" * 9, encoding="utf-8")
    given = command.replace("CORPUS", str(corpus)).split()
    said = line(*given, option, corpus / "below")  # a file is no folder, for any user
    assert f"{option} '{corpus / 'below'}' was given and cannot be written" in said
    assert "which is a folder; expected the name of a file" in line(*given, option, tmp_path)
    said = line(*given, option, tmp_path / "nowhere" / "x")
    assert f"cannot be written: there is no folder '{tmp_path / 'nowhere'}'. Make it first" in said
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.txt"]


@contextmanager
def room_of(num_bytes):
    """Files may have so many bytes, as if the disk were full behind them."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize(("command", "option"), MEASURING)
def test_a_full_disk_is_found_before_the_work(command, option, tmp_path):
    given = command.replace("CORPUS", str(tmp_path)).split()
    with room_of(1 << 19):
        said = line(*given, option, tmp_path / "result")
    assert (
        "cannot be written: File too large. Name a place that you may write to, with a megabyte of room."
        in said
    )


@pytest.mark.parametrize(("command", "option"), DRAWING)
def test_a_picture_that_nothing_can_draw_is_refused_before_the_work(command, option, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "matplotlib is not installed. Try: pip install matplotlib." in line(
        *command.split(), option, tmp_path / "result"
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
@pytest.mark.parametrize("given", [["methods"], ["--help"], ["--version"]], ids=" ".join)
def test_an_output_without_room_is_told_in_one_line(given, capsys):
    with open("/dev/full", "w", encoding="utf-8") as full, redirect_stdout(full):
        status = app(given, standalone_mode=False)
    assert status == EXIT_STATUS
    said = capsys.readouterr().err
    assert (
        said
        == "error: the output could not be written: No space left on device. Free some room, or name another place.\n"
    )


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.txt", b"\n \n", "holds no prompt; expected one a line"),
        ("p.txt", b"ok\n\xff", "0xff at offset 3, which is not UTF-8"),
        ("p.jsonl", b'{"prompt": "a"}\n{"text": "b"}', "line 2 holds no prompt: it has the names"),
        ("p.jsonl", b"a", "line 1 holds no prompt: it is damaged where JSON"),
        ("p.jsonl", b"[1]", "line 1 holds no prompt: it is \\[1\\]; expected an object"),
        ("p.jsonl", b'{"prompt": 3}', "holds no prompt: prompt is 3; expected text"),
        ("p.jsonl", b'{"prompt": ""}', "holds no prompt: prompt is ''; expected text"),
        ("p.jsonl", b'{"prompt": "\\ud800"}', "holds no prompt: prompt is '.ud800'; expected text"),
        ("p.jsonl", b"[" * 100_000, "line 1 holds no prompt: it is damaged where JSON"),
    ],
)
def test_a_file_of_prompts_that_holds_none_is_refused_with_its_line(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInputError, match=said):
        read_lines("--prompts", tmp_path / name)


def test_prompts_are_lines_of_text_or_of_json(tmp_path):
    (tmp_path / "p.txt").write_text("a b\n\nc\n", encoding="utf-8")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\\nb"}\n\n{"prompt": "c"}\n', encoding="utf-8")
    assert read_lines("--prompts", tmp_path / "p.txt") == ["a b", "c"]
    assert read_lines("--prompts", tmp_path / "p.jsonl") == ["a\nb", "c"]


@pytest.mark.parametrize("command", ["bench", "tune", "check"])
def test_a_file_of_prompts_that_is_not_there_is_refused(command, tmp_path):
    said = line(command, "--prompts", tmp_path / "nothing.txt")
    assert "nothing.txt' was given and cannot be read: No such file" in said


def test_byte_order_marks_are_no_text(tmp_path, monkeypatch):
    text = tmp_path / "a.txt"
    rows = tmp_path / "a.jsonl"
    keys = tmp_path / "keys"
    text.write_bytes(b"\xef\xbb\xbfdef f(\r\nx\n")
    rows.write_bytes(b'\xef\xbb\xbf{"prompt": "def f("}\n{"prompt": "x"}\n')
    keys.write_bytes(b"\xef\xbb\xbfsk-one\n")
    assert read_lines("--prompts", text) == read_lines("--prompts", rows) == ["def f(", "x"]
    assert conversations.read_text(text) == "def f(\r\nx\n"
    assert [row["prompt"] for _, row in rows_of(rows)] == ["def f(", "x"]
    monkeypatch.delenv("POLYDRAFT_API_KEY", raising=False)
    assert _keys(keys) == ("sk-one",)
    assert [row["prompt"] for row in conversations._said(rows)] == ["def f(", "x"]
