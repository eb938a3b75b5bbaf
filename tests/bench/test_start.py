"""`polydraft bench start`: the seconds that processes said, in a table."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from polydraft.bench import start as starts
from polydraft.cli.main import app
from polydraft.models.store.catalogue import default_draft


def test_the_table_holds_what_the_process_said(monkeypatch):
    said = []

    def run(*given, **options):
        done = original(*given, **options)
        said.append(json.loads(done.stdout)["waited"])
        return done

    original = subprocess.run
    monkeypatch.setattr(starts.subprocess, "run", run)
    monkeypatch.setattr(starts, "prepare", lambda _: None)
    given = ["bench", "start", "--model", "embedded", "--row", "warm", "--repetitions", "1"]
    found = CliRunner().invoke(app, given)
    assert found.exit_code == 0, found.output
    row = next(line for line in found.stdout.splitlines() if line.startswith("| polydraft, warm"))
    moments = [f"{said[0][name]:.2f}" for name in ("load", "prefill", "first_token", "total", "compile")]
    assert [cell.split()[0] for cell in row.strip("| ").split(" | ")[2:]] == moments
    assert len(said) == 1 and "Not in the run: llama.cpp (" in found.stdout


def waited(seconds: float) -> dict[str, float | None]:
    return dict.fromkeys([*starts.MOMENTS, "compile"], seconds)


def test_starts_take_turns_and_the_table_has_the_smallest_and_the_median():
    order = []
    seconds = iter(range(1, 7))

    def start(row):
        order.append(row)
        return waited(next(seconds))

    measured = starts.measure({row: lambda row=row: start(row) for row in ("warm", "first")}, 3, {})
    assert order == ["warm", "first", "first", "warm", "warm", "first"]
    table = starts.markdown(starts.as_dict("m", measured, {}))
    assert median([1, 4, 5]) == 4 and f"| polydraft, warm | 3 |{' 1.00 (4.00) |' * 5}" in table


def test_an_interrupt_leaves_what_was_measured_and_a_failure_the_others():
    def fail():
        raise starts.StartError("no such model")

    def interrupt():
        raise KeyboardInterrupt

    absent = {}
    assert starts.measure({"cold": fail, "warm": lambda: waited(1), "first": interrupt}, 2, absent)[
        "warm"
    ] == [waited(1)]
    assert absent == {"cold": "no such model"}


def test_files_of_the_draft_model_that_is_listed_are_dropped_from_the_cache_too(monkeypatch):
    monkeypatch.setattr(starts, "_generate", lambda *_: waited(1))
    dropped = []
    monkeypatch.setattr(starts.os, "posix_fadvise", lambda *given: dropped.append(given), raising=False)
    monkeypatch.setattr(starts.os, "POSIX_FADV_DONTNEED", 4, raising=False)
    found, _ = starts.contenders("embedded", None, None)
    found["cold"]()
    assert (
        len(dropped)
        == len(starts._files("embedded")) + len(starts._files(str(default_draft("embedded"))))
        > 2
    )


def test_a_first_start_has_folders_of_its_own(monkeypatch):
    environments = []
    monkeypatch.setattr(
        starts, "_output", lambda _, environment=None: environments.append(environment) or '{"waited": {}}'
    )
    starts.contenders("embedded", None, None)[0]["first"]()
    assert environments[0]["POLYDRAFT_CACHE"] == environments[0]["NUMBA_CACHE_DIR"]


def program(folder: Path, line: str) -> Path:
    path = folder / "llama-server"
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.skipif(os.name == "nt", reason="a shell's script")
def test_a_server_that_speaks_as_llama_cpp_is_started_and_ended(tmp_path):
    ours = f'exec {sys.executable} -m polydraft serve --model embedded --port "${{12}}"'
    seconds = starts._llama_server(program(tmp_path, ours), Path("model.gguf"), 1)
    assert 0 < seconds["load"] < seconds["first_token"] <= seconds["total"]
    assert seconds["prefill"] is None and seconds["compile"] is None


@pytest.mark.skipif(os.name == "nt", reason="a shell's script")
def test_a_server_that_ends_at_once_is_told_with_its_status(tmp_path):
    with pytest.raises(starts.StartError, match="llama-server ended with status 3"):
        starts._llama_server(program(tmp_path, "exit 3"), Path("model.gguf"), 1)


def test_a_start_stores_bytecode_as_an_installed_package_has_it(monkeypatch, tmp_path):
    (tmp_path / "says.py").write_text("import sys; print(sys.dont_write_bytecode)", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert starts._output(["says"]) == "False\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["start", "--llama-server", "nowhere"], "--llama-server nowhere was given, which is no program."),
        (["start", "--row", "wram"], "unknown kind of start 'wram'; did you mean 'warm'?"),
        (["--quick", "start"], "--quick was given before 'start', to which it says nothing."),
        (["start", "--model", "a", "--model", "b"], "--model was given 2 times"),
        (["--model", "a", "--model", "b"], "--model was given 2 times"),
    ],
)
def test_what_is_measured_wrongly_is_refused(given, said):
    found = CliRunner().invoke(app, ["bench", *given])
    assert found.exit_code == 2 and said in found.output
