"""Imports go only upward through the layers, no two modules need each other, and no package reaches into another's own files.

An import counts wherever it stands: at the top, inside a function, under TYPE_CHECKING, or as a name in a string that is loaded later.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import polydraft
from polydraft.methods.registry import DECODINGS, DRAFTERS, VERIFIERS

SOURCE = Path(polydraft.__file__).parent
ROOT = Path(__file__).parents[1]
LAYERS = [
    "errors",
    "files",
    "numerics",
    "core",
    "config sampling methods",
    "verifiers testing",
    "models",
    "drafters heads decoding",
    "policy theory conformance",
    "engine",
    "train",
    "tune check bench",
    "cli server integrations __main__",
    "papers",
]
RANK = {name: rank for rank, line in enumerate(LAYERS) for name in line.split()}
LOADED_BY_NAME = {"methods.registry"}
"""Holds the names of methods and where each is, as strings, and loads one when it is asked for: a method is then one file and one
line, and `import polydraft` loads none of them. (The package's own `__init__`, which does the same with what it offers, is no
module of a layer.)"""
BESIDE = ("studies", "examples", "docs", "tests")
"""Folders that are not installed: they import what they like of polydraft, and polydraft nothing of them."""
NAME_OF_A_MODULE = re.compile(r"polydraft(?:\.\w+)+(?::\w+)?")


def modules() -> dict[str, Path]:
    """Dotted name below `polydraft` -> file; the top-level `__init__` only re-exports and has no layer."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


def names_in(source: str, by_name: bool) -> set[str]:
    """Dotted names that a file imports anywhere; with `by_name` also those that it holds as strings."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide their layer"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif by_name and isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {node.value.replace(":", ".")} if NAME_OF_A_MODULE.fullmatch(node.value) else set()
    return names


def imported(source: str, known: set[str], by_name: bool = True) -> set[str]:
    """Modules of polydraft that a file imports."""
    offered = polydraft._WHERE
    inside = {
        name.removeprefix("polydraft.") for name in names_in(source, by_name) if name.startswith("polydraft.")
    }
    return {module for name in inside if (module := resolve(offered.get(name, name), known))}


def resolve(name: str, known: set[str]) -> str:
    """The longest beginning of a dotted name that is a module: the rest names something inside it."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def rank(module: str) -> int:
    return RANK[module.split(".")[0]]


def graph() -> dict[str, set[str]]:
    files = modules()
    known = set(files)
    return {
        name: imported(path.read_text(encoding="utf-8"), known, name not in LOADED_BY_NAME) - {name}
        for name, path in files.items()
    }


def downward(imports: dict[str, set[str]]) -> list[str]:
    return [
        f"{name} imports {other}"
        for name, others in imports.items()
        for other in others
        if rank(other) > rank(name)
    ]


def intrusions(name: str, others: Iterable[str]) -> list[str]:
    """Imports of a module with a leading underscore by one that is not in its package."""
    found = []
    for other in others:
        package = re.split(r"(?:^|\.)_(?!_)", other)[0]
        outside = package != other and not f"{name}.".startswith(f"{package}." if package else "")
        found += [f"{name} imports {other}"] if outside else []
    return found


def test_every_module_has_a_layer():
    assert [name for name in modules() if name.split(".")[0] not in RANK] == []


def test_imports_go_only_upward():
    assert downward(graph()) == []


def test_nothing_else_imports_the_wing_of_papers():
    known = set(modules())
    files = {
        name: path.read_text(encoding="utf-8")
        for name, path in modules().items()
        if not name.startswith("papers")
    }
    assert [
        name
        for name, source in files.items()
        for other in imported(source, known)
        if other.startswith("papers")
    ] == []
    assert imported('TABLE = "polydraft.papers.nest.spans:SpanDrafter"', known) == {"papers.nest.spans"}


METHODS = {
    place.partition(":")[0].removeprefix("polydraft.")
    for table in (VERIFIERS, DRAFTERS, DECODINGS)
    for place in table.values()
}
METHODS |= {"verifiers.greedy", "policy.adaptive"}
COMPILED = tuple(f"models.{folder}" for folder in ("compiled", "matrices", "mixers", "networks"))


def of_methods(source: str, known: set[str]) -> list[str]:
    """Modules of one method, or of compiled models, that a file imports."""
    return [
        name
        for name in imported(source, known, by_name=False)
        if name in METHODS or name.startswith(COMPILED)
    ]


def test_the_engine_imports_no_method():
    known = set(modules())
    engine = {
        name: path.read_text(encoding="utf-8")
        for name, path in modules().items()
        if name.split(".")[0] == "engine"
    }
    assert {name: methods for name, source in engine.items() if (methods := of_methods(source, known))} == {}
    assert of_methods("def f():\n    from polydraft.verifiers.match import match\n", known) == [
        "verifiers.match"
    ]


OF_TORCH = re.compile(
    r"models\.torch(\..+)?|train\..+|integrations\..+|conformance\.torch_draws"
    r"|heads\.(network|losses|recipe|\w+\.(network|module|training|dspark|gemma))"
    r"|bench\.(peers|suite)|cli\.compile_all|papers\.(lantern|mask_query)(\..+)?|papers\.(early_exit|hidden_transfer)\.network"
)
"""Modules that are written in torch: models of transformers and what is measured beside them, training, the trained forms of heads, faces of torch
programs, and papers that need it."""
ON_DEMAND = {
    "bench.examine", "bench.record", "cli.start", "core.arrays",
    "heads.checkpoint", "models.memory", "models.plan", "papers.amusd.drafter", "papers.amusd.worker",
}  # fmt: skip
"""Those that import it inside a function: for tensors that somebody hands in, devices, and files of torch."""


def torch_imports(source: str, anywhere: bool) -> list[str]:
    """What a file imports of torch, at its top or anywhere."""
    tree = ast.parse(source)
    body = ast.walk(tree) if anywhere else tree.body
    names = [
        name
        for node in body
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    return [name for name in names if name.split(".")[0] in ("torch", "transformers")]


def test_the_house_imports_no_torch_but_in_functions_that_are_given_some():
    house = {
        name: path.read_text(encoding="utf-8")
        for name, path in modules().items()
        if not OF_TORCH.fullmatch(name)
    }
    assert [name for name, source in house.items() if torch_imports(source, anywhere=False)] == []
    lazy = {
        name
        for name, source in house.items()
        if any(each.startswith("torch") for each in torch_imports(source, anywhere=True))
    }
    assert lazy <= ON_DEMAND, sorted(lazy - ON_DEMAND)
    assert torch_imports("def f():\n    import torch.nn\n", anywhere=True) == ["torch.nn"]


WITHOUT_TORCH = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Refused())
from polydraft import Engine, SamplingParams

engine = Engine.embedded(max_num_seqs=2)
for params in (SamplingParams(temperature=0, max_tokens=24), SamplingParams(seed=1, max_tokens=24, logprobs=2)):
    (result,) = engine.generate("import os\\n", params)
    assert result.stats.drafter_error is None and len(result.token_ids) == 24
"""


def test_the_embedded_pair_generates_where_torch_cannot_be_imported():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_modules_form_no_cycle():
    TopologicalSorter(graph()).prepare()


def neighbours(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """Folders, and files beside them, at every depth -> those beside them in the same folder that they import."""
    edges: dict[str, set[str]] = {}
    for name, others in imports.items():
        here = name.split(".")
        for other in others:
            there = other.split(".")
            depth = next((d for d, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), None)
            if depth is not None:
                edges.setdefault(".".join(here[: depth + 1]), set()).add(".".join(there[: depth + 1]))
    return edges


def test_neighbours_at_every_depth_form_no_cycle():
    TopologicalSorter(neighbours(graph())).prepare()


def test_no_package_reaches_into_the_own_files_of_another():
    known = set(modules())
    beside = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): imported(
            path.read_text(encoding="utf-8"), known
        )
        for folder in BESIDE
        for path in (ROOT / folder).rglob("*.py")
    }
    assert [found for name, others in (graph() | beside).items() for found in intrusions(name, others)] == []


def test_what_is_installed_needs_nothing_that_is_not():
    for name, path in modules().items():
        roots = {
            imported.split(".")[0] for imported in names_in(path.read_text(encoding="utf-8"), by_name=False)
        }
        assert not roots & set(BESIDE), f"{name} imports {roots & set(BESIDE)}"


def test_an_import_downward_is_noticed_wherever_it_stands():
    known = set(modules())
    hidden = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from polydraft import Engine\n"
    late = "def f():\n    from polydraft.cli.main import app\n"
    by_name = "def f():\n    return import_module('polydraft.engine.api')\n"
    assert downward({"core": imported(hidden, known)}) == ["core imports engine.api"]
    assert downward({"sampling.noise": imported(late, known)}) == ["sampling.noise imports cli.main"]
    assert downward({"drafters.base": imported(by_name, known)}) == ["drafters.base imports engine.api"]


def test_a_circle_deep_within_a_folder_is_noticed():
    imports = {
        "models.store.gguf": {"models.networks.base"},
        "models.networks.llama": {"models.store.header"},
    }
    with pytest.raises(CycleError):
        TopologicalSorter(neighbours(imports)).prepare()
    within = {"models.store.gguf": {"models.store.header"}, "models.store": {"models.store.gguf"}}
    TopologicalSorter(neighbours(within)).prepare()


def test_a_cycle_is_noticed():
    with pytest.raises(CycleError):
        TopologicalSorter({"tree": {"noise"}, "noise": {"tree"}}).prepare()


def test_an_intrusion_is_noticed():
    assert intrusions("models.hf", {"verifiers._rows", "plan"}) == ["models.hf imports verifiers._rows"]
    assert intrusions("verifiers.walks.visits", {"verifiers._rows", "verifiers.walks._inner"}) == []
    assert intrusions("tests.engine.test_plan", {"plan._inner.table"}) == [
        "tests.engine.test_plan imports plan._inner.table"
    ]
