"""Compiled functions are forgotten when something that they call has changed, and only then."""

import importlib
import sys

import pytest

from polydraft import stale_code

INNER = "from numba import njit\n\n\n@njit\ndef inner(x):\n    return x + {}\n"
OUTER = "from numba import njit\nfrom {}.inner import inner\n\n\n@njit(cache=True)\ndef outer(x):\n    return inner(x)\n"
OTHER = "from numba import njit\n\n\n@njit(cache=True)\ndef other(x):\n    return x\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose `outer` is kept by numba and calls `inner`."""
    root = tmp_path / f"kept_{tmp_path.name.replace('-', '_')}"
    root.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in {"__init__": "", "inner": INNER.format(1), "outer": OUTER.format(root.name), "other": OTHER}.items():
        (root / f"{name}.py").write_text(text, encoding="utf-8")
    return root


def fresh(root):
    """outer(0), as a new process would find it."""
    for name in [name for name in sys.modules if name.startswith(root.name)]:
        del sys.modules[name]
    importlib.invalidate_caches()
    importlib.import_module(f"{root.name}.other").other(0)
    return importlib.import_module(f"{root.name}.outer").outer(0)


def test_numba_alone_keeps_the_code_of_a_callee_that_changed(package):
    assert fresh(package) == 1
    (package / "inner.py").write_text(INNER.format(20), encoding="utf-8")
    assert fresh(package) == 1
    assert stale_code.drop(package) == ["inner.py", "other.py", "outer.py"]
    assert fresh(package) == 20


def test_only_what_depends_on_a_change_is_dropped(package):
    stale_code.drop(package)
    fresh(package)
    (package / "inner.py").write_text(INNER.format(300), encoding="utf-8")
    assert stale_code.drop(package) == ["inner.py", "outer.py"]
    assert list((package / "__pycache__").glob("other.other*.nbi"))
    assert not list((package / "__pycache__").glob("outer.*.nbi"))
    assert fresh(package) == 300
    assert stale_code.drop(package) == []


def test_what_calls_a_function_that_another_file_fills_in_is_dropped_with_that_file(package):
    filling = "from numba.extending import overload\nfrom {}.inner import inner\n\n\n@overload(inner)\ndef _(x):\n    return {}\n\n\n@njit\ndef f(): ..."
    for value in (1, 2):
        (package / "filling.py").write_text(filling.format(package.name, value), encoding="utf-8")
        dropped = stale_code.drop(package)
    assert dropped == ["filling.py", "inner.py", "outer.py"]


@pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 100_000])
def test_a_damaged_stamp_drops_everything(package, text):
    stale_code.drop(package)
    (package / "__pycache__" / "compiled_sources.json").write_text(text, encoding="utf-8")
    assert stale_code.drop(package) == ["inner.py", "other.py", "outer.py"]
