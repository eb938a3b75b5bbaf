"""The process that compiles drafts beside the first answer, and when there is none."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polydraft import Engine
from polydraft.cli import compile_all, first_start
from polydraft.config import EngineConfig
from polydraft.numerics.compiled_code import WALKS


class Process:
    """Stands for a process that compiles and ends when it is waited for."""

    started: list[list[str]] = []  # noqa: RUF012
    stdin = None

    def __init__(self, command, **_) -> None:
        self.started.append(command)
        self.ended = False

    def wait(self) -> None:
        self.ended = True

    def poll(self) -> int | None:
        return 0 if self.ended else None


def begun(tmp_path, monkeypatch, room=0, **fields) -> list[str]:
    """The arguments of the process that this engine starts."""
    monkeypatch.setattr(
        "polydraft.numerics.compiled_code.mark", lambda what: tmp_path / what.replace(" ", "-")
    )
    monkeypatch.setattr(
        "polydraft.numerics.compiled_code.is_marked",
        lambda what: (tmp_path / what.replace(" ", "-")).exists(),
    )
    monkeypatch.setattr(first_start, "ROOM", room)
    monkeypatch.setattr(subprocess, "Popen", Process)
    Process.started.clear()
    Engine.from_config(EngineConfig(**fields), compile_drafts=first_start.compile_drafts)
    return [word for command in Process.started for word in command[1:]]


def test_drafts_of_a_model_are_compiled_by_another_process_once(tmp_path, monkeypatch):
    assert begun(tmp_path, monkeypatch) == ["-m", "polydraft.cli.first_start", "model", "traversal"]
    (tmp_path / "model-traversal").touch()
    assert begun(tmp_path, monkeypatch) == []


def test_tokens_without_drafts_are_compiled_by_another_process_that_is_waited_for(tmp_path, monkeypatch):
    begun(tmp_path, monkeypatch, drafter="none")
    waited = []
    monkeypatch.setattr(Process, "wait", lambda self: waited.append(self))
    engine = first_start.build(EngineConfig(drafter="none"))
    assert [command[3:] for command in Process.started] == [[]] and len(waited) == 1
    assert engine.target.lengths[0] == 0
    monkeypatch.undo()
    monkeypatch.setattr("polydraft.numerics.compiled_code.mark", lambda what: tmp_path / what)
    monkeypatch.setattr("polydraft.cli.compile_walks.mark", lambda what: tmp_path / what)
    first_start.main()
    assert (tmp_path / WALKS).exists()


BEGINS = """
import sys, time
from polydraft.cli import first_start
from polydraft.numerics import compiled_code
compiled_code._came_with_code = lambda: False  # whatever is compiled beside the sources
process = first_start._process("walks without drafts")
{before_the_end}
print(process.pid, flush=True)
time.sleep(60)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which processes run")
@pytest.mark.parametrize(
    ("before_the_end", "goes_on"), [("", False), ("first_start.let_finish()", True)], ids=["killed", "let"]
)
def test_what_compiles_ends_with_a_command_that_is_killed_and_goes_on_where_it_was_let(
    before_the_end, goes_on, tmp_path
):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    asked = [sys.executable, "-c", BEGINS.format(before_the_end=before_the_end)]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True, env=environment) as command:
        assert command.stdout is not None
        pid = int(command.stdout.readline())
        command.kill()
    end = time.monotonic() + (2 if goes_on else 20)
    while time.monotonic() < end and is_running(pid):
        time.sleep(0.1)
    if goes_on:
        assert is_running(pid) or any(tmp_path.rglob("compiled-*"))
        os.kill(pid, signal.SIGKILL)
    else:
        assert not is_running(pid)


def test_nothing_is_compiled_beside_where_it_could_not_be_kept(tmp_path, monkeypatch):
    assert begun(tmp_path, monkeypatch, room=1 << 60) == []


def test_nothing_is_compiled_beside_a_shape_that_was_asked_for_nor_for_text_or_no_drafts(
    tmp_path, monkeypatch
):
    for fields in ({"depth": 3}, {"drafter": "ngram"}, {"drafter": "none"}, {"backend": "transformers"}):
        assert begun(tmp_path, monkeypatch, **fields) == []


def test_the_process_compiles_what_the_policy_drafts_with_and_leaves_a_mark(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "polydraft.numerics.compiled_code.mark", lambda what: tmp_path / what.replace(" ", "-")
    )
    monkeypatch.setattr(compile_all, "mark", lambda what: tmp_path / what.replace(" ", "-"))
    monkeypatch.setattr(first_start.os, "nice", lambda _: 0)
    generated = []
    monkeypatch.setattr(
        Engine,
        "generate",
        lambda self, *_: generated.append((self.drafter.info.name, self.verifier.info.name)),
    )
    first_start.main("model", "traversal")
    assert set(generated) == {("model", "traversal")} and (tmp_path / "model-traversal").exists()
    monkeypatch.setattr(compile_all, "compile_first", lambda *_: sys.exit("once more"))
    first_start.main("model", "traversal")
