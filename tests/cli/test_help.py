import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer import Context
from typer.testing import CliRunner

from polydraft import __version__
from polydraft.cli.help import FIRST_OPTIONS
from polydraft.cli.launch import AGENT_MODEL
from polydraft.cli.main import app
from polydraft.cli.options import DEFAULT_MODEL
from tests.support.commands import commands


def python(*given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *given], capture_output=True, text=True, check=True, timeout=60)


def test_help_imports_nothing_heavy():
    loaded = python("-c", "import sys, polydraft.cli.main; print(*sys.modules)").stdout.split()
    assert not {"torch", "transformers", "numba", "numpy"} & set(loaded)


def test_help_of_every_command_imports_nothing_heavy():
    asked = (
        "import sys; from typer.testing import CliRunner; from polydraft.cli.main import app; from tests.support.commands import commands; "
        "names = list(commands()); "
        "assert all(CliRunner().invoke(app, [*n.split(), '--help']).exit_code == 0 for n in names); print(*names, '|', *sys.modules)"
    )
    names, _, loaded = python("-c", asked).stdout.partition(" | ")
    assert {"generate", "doctor", "bench", "images"} <= set(names.split())
    assert not {"torch", "transformers", "numba", "numpy"} & set(loaded.split())


def listed(*given: str) -> list[str]:
    """The options that a help lists, by their last name."""
    shown = CliRunner().invoke(app, [*given])
    assert shown.exit_code == 0
    return re.findall(r"^  (?:-\w, )?(--[a-z-]+)", shown.stdout, re.MULTILINE)


@pytest.mark.parametrize("command", FIRST_OPTIONS)
def test_help_has_the_ten_options_that_people_use_first_and_help_all_has_all(command):
    first = FIRST_OPTIONS[command]
    assert len(first) == 10 and listed(command, "--help") == [*first, "--help-all", "--help"]
    every = {
        max(option.opts, key=len)
        for option in commands()[command].params
        if option.param_type_name == "option"
    }
    assert set(listed(command, "--help-all")) == every | {"--help"}
    lines = CliRunner().invoke(app, [command, "--help"]).stdout.splitlines()
    assert len(lines) < 40 and re.fullmatch(
        rf"{len(every) - 11} more options: \w+ {command} --help-all", lines[-1]
    )


QUICK = (
    ["--version"],
    ["models", "list"],
    ["models", "rm", "x"],
    ["generate", "--temprature", "1"],
    ["generate", "x", "--depth", "0"],
)


@pytest.mark.parametrize("given", QUICK, ids=" ".join)
def test_what_needs_no_model_imports_nothing_heavy(given):
    asked = "import atexit, sys; from polydraft.cli.main import app; atexit.register(lambda: print('|', *sys.modules)); app(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", asked, *given], capture_output=True, text=True, timeout=60, check=False
    )
    loaded = set(done.stdout.partition("|")[2].split())
    assert "polydraft.cli.main" in loaded
    assert not {"torch", "transformers", "numba", "numpy", "rich"} & loaded


def test_the_engine_is_imported_without_torch_and_scipy():
    loaded = python("-c", "import sys; from polydraft import Engine; print(*sys.modules)").stdout.split()
    assert not {"torch", "transformers", "scipy.optimize", "safetensors", "matplotlib"} & set(loaded)


def test_the_package_is_imported_without_torch_and_numba():
    loaded = python("-c", "import sys, polydraft; print(*sys.modules)").stdout.split()
    assert not {"torch", "transformers", "numba", "numpy", "typer"} & set(loaded)


def test_version_is_the_package_version():
    assert CliRunner().invoke(app, ["--version"]).output == f"polydraft {__version__}\n"


def test_without_a_command_five_examples_are_shown_that_are_commands():
    shown = CliRunner().invoke(app, [])
    assert shown.exit_code == 0
    examples = [line.split()[1] for line in shown.stdout.splitlines() if line.startswith("  polydraft ")]
    assert examples == ["demo", "generate", "chat", "serve", "tune"]
    assert {*examples} <= {c.name or c.callback.__name__ for c in app.registered_commands}


@pytest.mark.parametrize("given", [[], ["--version"], ["--json"], ["methods", "--temprature"]], ids=" ".join)
def test_the_module_is_the_command_line(given):
    program = [str(Path(sys.executable).with_name("polydraft"))]
    module = [sys.executable, "-m", "polydraft"]
    ways = [
        subprocess.run([*way, *given], capture_output=True, text=True, timeout=60)
        for way in (program, module)
    ]
    assert [(way.returncode, way.stdout, way.stderr) for way in ways[:1]] == [
        (ways[1].returncode, ways[1].stdout, ways[1].stderr)
    ]


def test_every_command_has_the_same_default_model():
    texts = {
        name: command.get_help(Context(command)) for name, command in commands().items() if name != "images"
    }
    of_models = {name: " ".join(text.split()) for name, text in texts.items() if "--model <" in text}
    assert {
        "generate",
        "chat",
        "serve",
        "batch",
        "bench",
        "bench start",
        "check",
        "tune",
        "train",
        "launch",
        "index build",
    } <= of_models.keys()
    for name, text in of_models.items():
        (default,) = re.findall(r"efault: ([\w.-]+)", text.partition("--model <")[2].partition(" --")[0])
        assert default.rstrip(".") == (AGENT_MODEL if name == "launch" else DEFAULT_MODEL)


def test_demo_says_what_will_happen_before_it_imports_torch():
    slow_torch = (
        "import sys, io; sys.modules['torch'] = None; from polydraft.__main__ import app; app(['demo'])"
    )
    stopped = subprocess.run(
        [sys.executable, "-c", slow_torch],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=dict(os.environ),
    )
    assert "It takes about" in stopped.stdout
    assert "torch" in stopped.stderr
