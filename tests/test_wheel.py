"""A wheel of this checkout, in a fresh environment, runs the first command; with the compiled code that it may carry."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from deploy import warm_wheel

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built as `make wheel WARM=1` does."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no wheel could be built here: {done.stderr.strip().splitlines()[-1]}")
    (built,) = folder.glob("*.whl")
    warm_wheel.add(built)
    return built


def test_a_wheel_is_whole_and_lists_what_it_carries(wheel):
    with zipfile.ZipFile(wheel) as opened:
        assert opened.testzip() is None
        names = opened.namelist()
        (record,) = [opened.read(name).decode() for name in names if name.endswith("RECORD")]
    assert len(names) == len(set(names)) and {line.partition(",")[0] for line in record.splitlines()} == set(
        names
    )
    assert {
        "polydraft/cli/main.py",
        "polydraft/py.typed",
        "polydraft/models/embedded/target/config.json",
    } <= set(names)


def test_the_first_command_runs_from_a_wheel_that_pip_installs_into_a_fresh_environment(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    here = {"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")}
    site = Path(sysconfig.get_path("purelib", "venv" if os.name != "nt" else "nt", here))
    python = tmp_path / "venv/bin/python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        f"--python={python}",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-index",
    ]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    (site / "dependencies.pth").write_text(
        sysconfig.get_path("purelib"), encoding="utf-8"
    )  # what it depends on is here already
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_CACHE_DIR")
    }
    file = "import polydraft; print(polydraft.__file__)"
    place = subprocess.run(
        [python, "-c", file], capture_output=True, text=True, env=environment, cwd=tmp_path, check=True
    )
    assert place.stdout.strip() == str(site / "polydraft" / "__init__.py")
    command = [tmp_path / "venv/bin/polydraft", "generate", "def add(a, b):", "--model", "embedded"]
    done = subprocess.run(
        [*command, "--drafter", "ngram", "--max-tokens", "8", "--temperature", "0"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "8 tokens" in done.stderr and done.stdout.strip()
