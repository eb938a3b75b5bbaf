"""Compiled functions are forgotten when something that they call has changed, and only then."""

import importlib
import pkgutil
import shutil
import sys
from pathlib import Path

import pytest
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

import polydraft
from polydraft.numerics import stale_code

INNER = "from numba import njit\n\n\n@njit\ndef inner(x):\n    return x + {}\n"
OUTER = "from numba import njit\nfrom {}.inner import inner\n\n\n@njit(cache=True)\ndef outer(x):\n    return inner(x)\n"
OTHER = "from numba import njit\n\n\n@njit(cache=True)\ndef other(x):\n    return x\n"
ALL = ["__init__.py", "inner.py", "other.py", "outer.py"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose `outer` is kept by numba and calls `inner`."""
    root = tmp_path / f"kept_{tmp_path.name.replace('-', '_')}"
    root.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in {
        "__init__": "",
        "inner": INNER.format(1),
        "outer": OUTER.format(root.name),
        "other": OTHER,
    }.items():
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
    assert stale_code.drop(package) == ALL
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


def test_what_a_decorator_of_another_name_compiles_is_dropped_too(package):
    named = "import numba\n\ndef njit(**options):\n    return numba.njit(**options)\n\nown = njit(error_model='numpy')\n"
    (package / "naming.py").write_text(named, encoding="utf-8")
    inner = INNER.replace("from numba import njit", f"from {package.name}.naming import own").replace(
        "@njit", "@own"
    )
    for value in (1, 20):
        (package / "inner.py").write_text(inner.format(value), encoding="utf-8")
        assert "outer.py" in stale_code.drop(package)
        assert fresh(package) == value
    (package / "naming.py").write_text(named.replace("='numpy'", "='python'"), encoding="utf-8")
    assert stale_code.drop(package) == ["inner.py", "naming.py", "outer.py"]


@pytest.mark.parametrize("change", ["TABLE = 4", "def TABLE(): ...", "TABLE = 3\nprint(TABLE)"])
def test_a_constant_that_a_function_reaches_by_others_is_part_of_its_stamp(package, change):
    (package / "tables.py").write_text("TABLE = 3\nOTHER = 5\n", encoding="utf-8")
    inner = INNER.format("SIZE").replace(
        "\n\n\n", f"\nfrom {package.name} import tables\nSIZE = tables.TABLE\n\n", 1
    )
    (package / "inner.py").write_text(inner, encoding="utf-8")
    stale_code.drop(package)
    (package / "tables.py").write_text(f"{change}\nOTHER = 5\n", encoding="utf-8")
    assert stale_code.drop(package) == ["inner.py", "outer.py", "tables.py"]


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
    assert stale_code.drop(package) == ALL


ROOT = Path(polydraft.__file__).parent
FOLDERS = ("models.compiled", "models.matrices", "models.mixers", "verifiers", "drafters", "heads", "policy")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The sources of the package, stamped, with nothing compiled."""
    root = tmp_path_factory.mktemp("copy") / "polydraft"
    shutil.copytree(
        ROOT, root, ignore=lambda _, names: {name for name in names if name in ("__pycache__", "embedded")}
    )
    stale_code.drop(root)
    return root


def dispatchers():
    """Of all functions that numba compiles, the module and whether it keeps their code in files."""
    for folder in FOLDERS:
        above = importlib.import_module(f"polydraft.{folder}")
        for module in pkgutil.walk_packages(above.__path__, f"{above.__name__}."):
            importlib.import_module(module.name)
    modules = [module for name, module in sys.modules.items() if name.startswith("polydraft.")]
    for value in [
        value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)
    ]:
        function = value.py_func
        yield function.__module__, not isinstance(value._cache, NullCache)


def test_every_file_that_numba_compiles_is_reached_from_one_whose_code_it_keeps():
    sources = stale_code.Sources(ROOT)
    modules = dict[str, bool]()
    for module, is_kept in dispatchers():
        modules[module] = modules.get(module, False) or is_kept
    kept = [module for module, is_kept in modules.items() if is_kept]
    kept.append("polydraft.models.matrices.products")  # no dispatchers
    assert not modules.keys() - set().union(*map(sources.made_from, kept))
    assert len(modules) > 40


CHANGES = {
    "models/growing/rows.py": ("share = 1.0 /", "share = 1.5 /", "models/growing/drawn.py"),
    "models/matrices/formats.py": ("_IQ4 = (-127,", "_IQ4 = (-126,", "models/matrices/products.py"),
    "heads/eagle/compiled.py": ("num_logits = zero", "num_logits = zero + 1", "models/growing/drawn.py"),
    "numerics/compile_time.py": (
        "no_cpython_wrapper=True",
        "no_cpython_wrapper=False",
        "numerics/threads.py",
    ),
}


@pytest.mark.parametrize("file", CHANGES)
def test_a_change_drops_the_functions_whose_code_holds_it(copy, file):
    before, after, dropped = CHANGES[file]
    text = (copy / file).read_text(encoding="utf-8")
    assert text.count(before) == 1
    (copy / file).write_text(text.replace(before, after), encoding="utf-8")
    assert dropped in stale_code.drop(copy)
