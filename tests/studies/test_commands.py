"""Each study is one command, is described, and stays out of the package that is installed."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DESCRIBED = re.findall(
    r"^\| `python -m studies\.(\w+)",
    (ROOT / "studies" / "README.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_every_study_is_described():
    files = {path.stem for path in (ROOT / "studies").glob("*.py")} - {
        "__init__",
        "options",
        "labels",
        "processes",
        "question_files",
        "timing",
        "training",
    }
    folders = {path.parent.name for path in (ROOT / "studies").glob("*/__main__.py")}
    assert set(DESCRIBED) == files | folders and len(set(DESCRIBED)) == len(DESCRIBED)


def study_of(name: str) -> Any:
    """The module that `python -m studies.NAME` runs."""
    module = f"studies.{name}.__main__" if (ROOT / "studies" / name).is_dir() else f"studies.{name}"
    return importlib.import_module(module)


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_study_can_be_run_by_its_name(name):
    study = study_of(name)
    assert callable(getattr(study, "main", None) or study.app)


def test_studies_are_not_installed():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'packages = ["src/polydraft"]' in project
    assert not any(
        "studies" in line and "import" in line
        for path in (ROOT / "src").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
    )
