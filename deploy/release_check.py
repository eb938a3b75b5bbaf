"""Try what would be released: `python deploy/release_check.py [TAG]`, or `make release-check`.

Builds wheel and sdist into dist/, lets twine read them, installs the wheel into an empty environment outside of the checkout with what it
asks for itself, runs the first command of the README there and asks a server for a completion. A TAG has to name the version.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
MOST_INSTALLED = 350
"""Megabytes of the environment's packages, bytecode aside."""
MOST_WHEEL = 17
"""Megabytes: two thirds are the weights of the embedded pair, a third a head in eight bits."""
HEAVY = ("torch", "transformers")
"""Nothing that the base needs may bring them."""
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


def build() -> tuple[Path, Path]:
    """The wheel and the sdist in dist/, where nothing else of this package is left."""
    for old in (*DIST.glob("polydraft-*.whl"), *DIST.glob("polydraft-*.tar.gz")):
        old.unlink()
    subprocess.run([sys.executable, "-m", "build", "--outdir", DIST, ROOT], check=True)
    (wheel,) = DIST.glob("polydraft-*.whl")
    (sdist,) = DIST.glob("polydraft-*.tar.gz")
    return wheel, sdist


def first_command(readme: str) -> list[str]:
    """The first command of the README that runs this program.

    Example:
        >>> first_command("$ pip install .    # here\\n$ polydraft chat --model small  # talk\\n")
        ['polydraft', 'chat', '--model', 'small']
    """
    (found, *_) = re.findall(r"^\$ (polydraft .*)$", readme, re.MULTILINE)
    return shlex.split(found, comments=True)


def install(wheel: Path, folder: Path) -> Path:
    """A fresh environment with this wheel; the folder of its programs."""
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    pip = [programs / "python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-compile", wheel], check=True, cwd=folder)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "setuptools", "pip"], check=True, cwd=folder)
    return programs


def megabytes(folder: Path) -> float:
    """Of all files below a folder, without what is compiled at the first start."""
    kept = (file for file in folder.rglob("*") if "__pycache__" not in file.parts)
    return sum(file.lstat().st_size for file in kept) / 1e6


def refuse_heavy(programs: Path, folder: Path) -> None:
    code = f"import importlib.util as u; print(*[name for name in {HEAVY!r} if u.find_spec(name)])"
    found = subprocess.run(
        [programs / "python", "-c", code], capture_output=True, text=True, check=True, cwd=folder
    )
    if found.stdout.strip():
        raise SystemExit(f"error: the wheel brought {found.stdout.strip()}; expected neither of {HEAVY}.")


def ask_server(start: Sequence[str | Path], folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Start a server of the embedded pair on a free port, ask it for words of a grammar, end it; its answer.

    start: of the command line.
    """
    command = [*start, "serve", "--model", "embedded", "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment)
    assert server.stderr is not None
    try:
        address = next((found[0] for line in server.stderr if (found := ADDRESS.search(line))), None)
        if address is None:
            raise SystemExit(f"error: {shlex.join(map(str, command))} ended with status {server.wait()}.")
        body = {"model": "embedded", "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
        body["structured_outputs"] = {"regex": "( [a-z]+){3}"}
        request = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return json.load(urllib.request.urlopen(request, timeout=300))  # it waits until the model is loaded
    finally:
        server.terminate()
        server.wait(60)


def check_answer(answer: dict[str, Any]) -> None:
    """Refuse one that the grammar does not begin with.

    Example:
        >>> check_answer({"choices": [{"text": " one two"}]})
    """
    text = answer["choices"][0]["text"]
    if not re.fullmatch("( [a-z]+){1,3}", text):
        raise SystemExit(f"error: the server answered {text!r}; expected up to three words.")


def main(tag: str = "") -> None:
    wheel, sdist = build()
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], check=True)
    version = wheel.name.split("-")[1]
    if tag not in ("", f"v{version}"):
        raise SystemExit(f"error: the tag {tag} was given; expected v{version}, as the package says.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs = install(wheel, folder / "venv")
        refuse_heavy(programs, folder)
        sizes = {"wheel": (wheel.stat().st_size / 1e6, MOST_WHEEL)}
        sizes["installed"] = (megabytes(folder / "venv"), MOST_INSTALLED)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [*first_command((ROOT / "README.md").read_text(encoding="utf-8")), "--yes"]
        subprocess.run([programs / command[0], *command[1:]], check=True, cwd=folder, env=environment)
        check_answer(ask_server([programs / "polydraft"], folder, environment))
    for what, (size, most) in sizes.items():
        print(f"{what}: {size:.1f} MB, of at most {most}")
    if any(size > most for size, most in sizes.values()):
        raise SystemExit("error: too large.")


if __name__ == "__main__":
    main(*sys.argv[1:])
