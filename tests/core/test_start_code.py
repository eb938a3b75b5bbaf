"""Code that the last start called is loaded ahead by the next one; a note that is missing or damaged changes nothing."""

import importlib
import json
import subprocess
import sys
from threading import Thread

import pytest

from polydraft.numerics import compiled_code, start_code
from polydraft.numerics.compiled_code import Place
from polydraft.numerics.start_code import StartCode

SOURCE = """from polydraft.numerics.compiled_code import njit


@njit(cache=True)
def double(x):
    return x + x


@njit(cache=True)
def halve(x):
    return x / 2
"""
DOUBLE = "doubling_and_halving double (int64,)"
START = """
from polydraft import Engine, SamplingParams
from polydraft.numerics import compiled_code

engine = Engine.embedded(verifier="traversal")  # no other test notes what such an engine calls
engine.start_code._thread.join()
ahead = len(compiled_code.used)
text = engine.generate("import os", SamplingParams(temperature=0, max_tokens=4))[0].text
print(ahead, len(compiled_code.used), engine.start_code.file.exists(), repr(text))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Imports a module of two compiled functions, as a new process would."""
    root = tmp_path / "code"
    root.mkdir()
    (root / "doubling_and_halving.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(compiled_code, "_ROOT", root)
    monkeypatch.setattr(compiled_code, "place", lambda: Place(tmp_path))
    monkeypatch.setattr(compiled_code, "used", [])
    monkeypatch.setattr(start_code, "PACKAGE", "doubling_and_halving")
    monkeypatch.syspath_prepend(root)

    def fresh():
        sys.modules.pop("doubling_and_halving", None)
        monkeypatch.setattr(StartCode, "num_made", 0)
        importlib.invalidate_caches()
        return importlib.import_module("doubling_and_halving")

    yield fresh
    sys.modules.pop("doubling_and_halving", None)


def noted(module) -> StartCode:
    """What a start notes that doubled a whole number."""
    functions = module()
    start = StartCode("a model")
    assert functions.double(2) == 4
    start.note()
    return start


def loaded(start: StartCode) -> list[str]:
    start.load().join()
    return start._found


def test_what_a_start_called_is_loaded_by_the_next_one_before_it_is_called(module):
    assert json.loads(noted(module).file.read_text()) == [DOUBLE]
    again = module()
    assert loaded(StartCode("a model")) == [DOUBLE]
    assert len(again.double.overloads) == 1 and not again.halve.overloads
    assert again.double(3) == 6
    assert sum(again.double.stats.cache_hits.values()) == 1


def test_where_engines_stand_beside_each_other_nothing_is_noted(module):
    functions = module()
    start = StartCode("a model")
    StartCode("another model")
    functions.double(3)
    start.note()
    assert not start.file.exists()


def test_a_start_of_another_kind_loads_nothing(module):
    noted(module)
    assert not loaded(StartCode("another model")) and not module().double.overloads


def test_what_is_called_later_is_noted_too_and_what_was_noted_stays(module):
    noted(module)
    functions = module()
    start = StartCode("a model")
    start.load()
    functions.halve(2.0)
    start.note()
    assert json.loads(start.file.read_text()) == [DOUBLE, "doubling_and_halving halve (float64,)"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "7",
        "[7]",
        '["double"]',
        '["doubling_and_halving triple (int64,)"]',
        '["doubling_and_halving double (complex128,)"]',
        '["doubling_and_halving.not_there double (int64,)"]',
        '["os getcwd ()"]',
        "\0\xff" * 9,
    ],
)
def test_a_damaged_note_is_ignored_and_written_anew(module, text):
    noted(module).file.write_text(text, encoding="latin-1")
    functions = module()
    start = StartCode("a model")
    assert not loaded(start) and not functions.double.overloads
    assert functions.double(3) == 6
    start.note()
    assert json.loads(start.file.read_text()) == [DOUBLE]


def test_code_that_is_noted_and_no_longer_stored_is_not_compiled_ahead(module, tmp_path):
    noted(module)
    for code in tmp_path.rglob("*.nbc"):
        code.write_bytes(b"other code")
    functions = module()
    assert not loaded(StartCode("a model")) and not functions.double.overloads
    assert functions.double(3) == 6


def test_code_that_cannot_be_noted_is_done_without(module, tmp_path):
    functions = module()
    start = StartCode("a model")
    start.file = tmp_path / "no folder" / "start.json"
    functions.double(2)
    start.note()
    assert not start.file.exists()


def test_threads_that_load_and_call_at_once_load_each_code_once(module):
    noted(module)
    functions = module()
    results = []
    threads = [
        *(Thread(target=StartCode("a model")._load) for _ in range(4)),
        *(Thread(target=lambda: results.append(functions.double(3))) for _ in range(4)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [6] * 4
    assert sum(functions.double.stats.cache_hits.values()) == 1
    assert not functions.double.stats.cache_misses


def test_the_second_start_of_an_engine_loads_its_code_before_the_first_step():
    def start() -> list[str]:
        command = [sys.executable, "-c", START]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.split(" ", 3)

    *_, text = start()
    ahead, after, is_noted, text_again = start()
    assert is_noted == "True"
    assert int(ahead) == int(after) > 20
    assert text_again == text
