"""Imports go only upward through the layers, and no two modules need each other."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import polydraft

SOURCE = Path(polydraft.__file__).parent
LAYERS = [
    ["compile_time", "errors", "exponential", "schema", "stale_code"],
    ["atomic"],
    ["params"],
    ["core"],
    ["tree", "noise", "sampling", "registry"],
    ["verifiers", "rules", "theory", "papers"],
    ["models"],
    ["drafters"],
    ["engine"],
    ["train"],
    ["bench"],
    ["cli", "server", "integrations", "__main__"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
LAZY_EXPORTS = polydraft._WHERE


def modules() -> dict[str, Path]:
    """Dotted name below `polydraft` -> file; the top-level `__init__` only re-exports and has no layer."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


def imported(source: str, known: set[str]) -> set[str]:
    """Modules of polydraft that a file imports anywhere: inside functions and under TYPE_CHECKING too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide their layer"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    inside = {name.removeprefix("polydraft.") for name in names if name.startswith("polydraft.")}
    return {module for name in inside if (module := resolve(LAZY_EXPORTS.get(name, name), known))}


def resolve(name: str, known: set[str]) -> str:
    """The longest beginning of a dotted name that is a module: the rest names something inside it."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def rank(module: str) -> int:
    return RANK[module.split(".")[0]]


def graph() -> dict[str, set[str]]:
    files = modules()
    return {name: imported(path.read_text(encoding="utf-8"), set(files)) - {name} for name, path in files.items()}


def downward(imports: dict[str, set[str]]) -> list[str]:
    return [f"{name} imports {other}" for name, others in imports.items() for other in others if rank(other) > rank(name)]


def test_every_module_has_a_layer():
    assert [name for name in modules() if name.split(".")[0] not in RANK] == []


def test_imports_go_only_upward():
    assert downward(graph()) == []


def test_modules_form_no_cycle():
    TopologicalSorter(graph()).prepare()


def test_an_import_downward_is_noticed_inside_a_function_and_under_type_checking():
    known = set(modules())
    hidden = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from polydraft import Engine\n"
    late = "def f():\n    from polydraft.cli.main import app\n"
    assert downward({"core": imported(hidden, known)}) == ["core imports engine.api"]
    assert downward({"tree": imported(late, known)}) == ["tree imports cli.main"]


def test_a_cycle_is_noticed():
    with pytest.raises(CycleError):
        TopologicalSorter({"tree": {"noise"}, "noise": {"tree"}}).prepare()
