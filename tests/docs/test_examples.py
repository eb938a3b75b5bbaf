"""Every example runs; where its output does not depend on the machine it is the one shown at its end."""

import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def run(path: Path) -> str:
    """In this process, whose libraries are loaded."""
    with redirect_stdout(StringIO()) as said:
        runpy.run_path(str(path), run_name="__main__")
    return said.getvalue()


def shown(path: Path) -> str:
    """The output in the comments at the end of the file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    start = max(i for i, line in enumerate(lines) if not line.startswith("#")) + 1
    return "".join(line.removeprefix("#").removeprefix(" ") + "\n" for line in lines[start:])


@pytest.mark.parametrize("path", EXAMPLES[1:], ids=lambda path: path.stem)
def test_example_runs_and_says_as_much_as_it_shows(path):
    assert len(run(path).splitlines()) == len(shown(path).splitlines()) > 0


def test_the_rule_example_prints_what_it_shows_in_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES[0])], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown(EXAMPLES[0])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 90
