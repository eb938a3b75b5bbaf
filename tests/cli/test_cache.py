"""`polydraft cache`: what is kept can be seen and deleted, and models stay."""

import json

import pytest
from typer.testing import CliRunner

from polydraft.cli.main import app
from polydraft.cli.options import _keep_nothing
from polydraft.files.cache_folder import NO_CACHE, enabled_cache_folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder with something of each kind."""
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path))
    files = {
        "packed/1.weights": json.dumps({"about": {"files": [["/models/small.gguf", 1, 2]]}})
        + "\n"
        + "x" * 2_000_000,
        f"{24 * 'a'}.json": "{}",
        "compiled/polydraft-1/forward.nbc": "code",
        "models/small.gguf": "model",
        "mine.json": "{}",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def invoke(*options):
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    return done


def left(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_is_kept_is_listed_by_kind_and_model(folder):
    listed = invoke("cache", "list").stdout
    assert str(folder) in listed and "small.gguf  2 MB" in listed
    rows = json.loads(invoke("cache", "list", "--json").stdout)
    assert {row["kind"] for row in rows} == {"packed", "costs", "compiled"} and len(rows) == 3


def test_all_of_it_or_one_kind_is_deleted_and_models_stay(folder):
    invoke("cache", "clear", "costs")
    assert f"{24 * 'a'}.json" not in left(folder) and len(left(folder)) == 4
    assert "2 MB deleted" in invoke("cache", "clear").stdout
    assert left(folder) == ["mine.json", "models/small.gguf"]


def test_a_folder_that_is_not_there_is_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYDRAFT_CACHE", str(tmp_path / "none"))
    assert "0 MB" in invoke("cache", "list").stdout
    assert "0 MB deleted" in invoke("cache", "clear").stdout


def test_nothing_is_kept_where_that_was_asked_for(monkeypatch):
    monkeypatch.setenv("POLYDRAFT_CACHE", "somewhere")
    monkeypatch.setenv(NO_CACHE, "")
    assert enabled_cache_folder() is not None
    _keep_nothing(True)
    assert enabled_cache_folder() is None
    assert all(
        "--no-cache" in invoke(command, "--help-all").stdout for command in ("generate", "chat", "serve")
    )
