"""CONTRIBUTING's own recipes are followed as they stand: a throwaway verifier in a copy of the source, and a throwaway plug-in that pip installs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import polydraft

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SHOWN = dict(re.findall(r"`(?P<name>[\w./]+)`[^`]*:\n\n```\w+\n(?P<text>.*?)```", PAGE, re.DOTALL))
"""By the file that a sentence names before its block, what the file holds or gets."""
EXACT = """
from polydraft.methods import registry
from polydraft.testing import Tables, enumerate_outputs

tables, rule = Tables(3, seed=0), registry.verifier("halved")
assert enumerate_outputs(rule, tables.target, tables.draft, parents=(-1, 0, 1)).error < 1e-12
print(rule.emitted_probs.__module__)
"""
IN_ENGINE = """
from polydraft import Engine, SamplingParams

engine = Engine.embedded(drafter="model:chain", verifier="halved", depth=2, max_num_seqs=1)
(result,) = engine.generate("import os", SamplingParams(seed=1, max_tokens=8))
print(result.stats.generated_tokens)
"""


def run(program: str, *folders: Path) -> list[str]:
    """What a program prints that has these folders first on its path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def linked(source: Path, copy: Path, *changed: str) -> None:
    """A copy of a folder made of links, but for the folders on the way to what will change."""
    copy.mkdir(parents=True)
    for path in source.iterdir():
        below = [name.partition("/")[2] for name in changed if name.partition("/")[0] == path.name]
        if path.is_dir() and below:
            linked(path, copy / path.name, *below)
        elif path.name != "__pycache__":
            (copy / path.name).symlink_to(path)


def test_the_recipe_of_a_verifier_makes_one_that_is_exact(tmp_path):
    file = SHOWN["src/polydraft/verifiers/halved.py"]
    line = SHOWN["src/polydraft/methods/registry.py"]
    package = tmp_path / "polydraft"
    registry = tmp_path / "polydraft" / "methods" / "registry.py"
    linked(Path(polydraft.__file__).parent, package, "verifiers/halved.py", "methods/registry.py")
    source = registry.read_text(encoding="utf-8")
    registry.unlink()
    registry.write_text(
        source.replace("VERIFIERS: dict[str, str] = {\n", "VERIFIERS: dict[str, str] = {\n" + line),
        encoding="utf-8",
    )
    (package / "verifiers" / "halved.py").write_text(file, encoding="utf-8")
    assert run(EXACT, tmp_path) == ["polydraft.verifiers.halved"]


def test_the_recipe_of_a_plug_in_makes_one_that_pip_installs(tmp_path):
    project = tmp_path / "project"
    site = tmp_path / "site"
    project.mkdir()
    (project / "pyproject.toml").write_text(SHOWN["pyproject.toml"], encoding="utf-8")
    (project / "halved.py").write_text(SHOWN["src/polydraft/verifiers/halved.py"], encoding="utf-8")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    ]
    done = subprocess.run(
        [*pip, "--no-build-isolation", "--target", site, project], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert run(EXACT + IN_ENGINE, Path(polydraft.__file__).parents[1], site) == ["halved", "8"]


def test_the_files_that_recipes_list_exist():
    files = {
        file
        for file in re.findall(r"^- `([^`]+)`", PAGE, re.MULTILINE)
        if not re.search("NAME|KIND|FAMILY", file)
    }
    folders = (
        ROOT,
        ROOT / "src" / "polydraft" / "heads" / "medusa",
    )  # the folder of a kind, whose files are named alone
    assert len(files) > 12
    assert [file for file in files if not any((folder / file).exists() for folder in folders)] == []
