import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from polydraft import __version__
from polydraft.__main__ import arguments
from polydraft.cli.main import app


def python(*given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *given], capture_output=True, text=True, check=True, timeout=60)


def test_help_imports_nothing_heavy():
    loaded = python("-c", "import sys, polydraft.cli.main; print(*sys.modules)").stdout.split()
    assert not {"torch", "transformers", "numba", "numpy"} & set(loaded)


def test_version_is_the_package_version():
    assert CliRunner().invoke(app, ["--version"]).output == f"polydraft {__version__}\n"


def test_the_module_without_a_command_is_the_demo():
    assert arguments([]) == ["demo"]
    assert arguments(["--json"]) == ["demo", "--json"]


@pytest.mark.parametrize("given", [["generate", "x"], ["--help"], ["--version"]])
def test_the_module_with_a_command_is_the_command_line(given):
    assert arguments(given) == given


def test_demo_says_what_will_happen_before_it_imports_torch():
    slow_torch = "import sys, io; sys.modules['torch'] = None; from polydraft.__main__ import app; app(['demo'])"
    stopped = subprocess.run(
        [sys.executable, "-c", slow_torch], capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ)
    )
    assert "It takes about" in stopped.stdout
    assert "torch" in stopped.stderr
