"""The versions of constraints.txt install on every Python that the project names."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def pinned() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def installed(requirement: Requirement) -> SpecifierSet | None:
    """The Pythons of a pinned version, which its own metadata tells where just this version is installed."""
    try:
        found = distribution(requirement.name)
    except PackageNotFoundError:
        return None
    return (
        SpecifierSet(found.metadata.get("Requires-Python") or "")
        if found.version in requirement.specifier
        else None
    )


@pytest.mark.parametrize("python", PYTHONS)
def test_a_version_is_pinned_only_for_pythons_that_it_runs_on(python):
    whole = f"{python}.20"
    marker = {"python_version": python, "python_full_version": whole}
    known = [(wanted, pythons) for wanted in pinned() if (pythons := installed(wanted)) is not None]
    assert len(known) > 60
    applying = [
        (wanted, pythons)
        for wanted, pythons in known
        if wanted.marker is None or wanted.marker.evaluate(marker)
    ]
    assert [str(wanted) for wanted, pythons in applying if whole not in pythons] == []


@pytest.mark.slow
@pytest.mark.parametrize("extra", [(), ("--extra", "dev")], ids=["plain", "dev"])
@pytest.mark.parametrize("python", PYTHONS)
def test_the_install_resolves_to_wheels(python, extra):
    """Of the package index, with this Python's markers; pip evaluates those of the Python that it runs in."""
    if find_spec("uv") is None:
        pytest.skip("uv is not installed, which resolves for other Pythons")
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-build",
        "--python-version",
        python,
        *extra,
    ]
    done = subprocess.run(
        [*command, "-c", "constraints.txt", "pyproject.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "Failed to fetch" in done.stderr or "error sending request" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    assert "\ntorch==" in done.stdout
