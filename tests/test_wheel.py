"""A wheel of this checkout, in a fresh environment, runs the first command; with the compiled code that it may carry."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from deploy import warm_wheel
from deploy.release_check import MOST_WHEEL

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An sdist, and the wheel that is built of it, as `make release-check` makes them."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no wheel could be built here: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def wheel(built, tmp_path_factory):
    """With compiled code, as `make wheel WARM=1` makes it."""
    warm = tmp_path_factory.mktemp("warm") / built[1].name
    shutil.copy(built[1], warm)
    warm_wheel.add(warm)
    return warm


def test_twine_accepts_what_is_built(built):
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_twine_refuses_a_wheel_without_a_description(built, tmp_path):
    """So that the test above can fail."""
    bare = tmp_path / built[1].name
    with zipfile.ZipFile(built[1]) as opened, zipfile.ZipFile(bare, "w") as written:
        for name in opened.namelist():
            data = opened.read(name)
            if name.endswith(".dist-info/METADATA"):
                data = data.partition(b"\n\n")[0].replace(b"Name: polydraft\n", b"") + b"\n"
            written.writestr(name, data)
    command = [sys.executable, "-m", "twine", "check", "--strict", str(bare)]
    assert subprocess.run(command, capture_output=True).returncode != 0


def test_a_wheel_is_small_enough(built):
    assert built[1].stat().st_size < 1e6 * MOST_WHEEL


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
