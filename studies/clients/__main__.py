"""Runs clients of others against the server, in a network namespace without a way out, and writes the table of docs/serve/clients.md.

    python -m studies.clients --tools FOLDER

FOLDER has node_modules (`npm install @anthropic-ai/claude-code @openai/codex @qwen-code/qwen-code opencode-ai`), and environments of Python: py
(`pip install llm langchain-openai litellm openai-agents "pydantic-ai-slim[openai]" instructor openai anthropic ollama`) and aider. Each client
is asked what a note says, and reads it by a tool of its own or of its program; the model says what a script has, so only the client and the server
are tried. `--record FILE` keeps the requests.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from polydraft.bench.record import markdown_table
from polydraft.cli.agents import AGENTS, Endpoint
from studies.clients.programs import PROGRAMS
from studies.clients.recorded import Recorded, serving

PAGE = Path(__file__).parents[2] / "docs" / "serve" / "clients.md"
BEGIN = "<!-- python -m studies.clients writes this -->\n"
END = "<!-- end -->\n"
INSIDE = "POLYDRAFT_STUDY_INSIDE"
WORD = "plum-47"
QUESTION = "Read note.txt in this folder and tell me what the note says."
HOW = {"claude": ("Claude Code", "/v1/messages"), "codex": ("Codex", "/v1/responses"), "qwen": ("qwen-code", "/v1/chat/completions"), "opencode": ("opencode", "/v1/chat/completions"), "aider": ("aider", "/v1/chat/completions")}  # fmt: skip
ONCE: Mapping[str, Sequence[str]] = {
    "claude": ["-p", QUESTION, "--allowedTools", "Bash", "Read"],
    "codex": ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", QUESTION],
    "qwen": ["-p", QUESTION, "--yolo"],
    "opencode": ["run", QUESTION],
    "aider": ["--message", "Write the note anew, with plum-48.", "--no-git", "--yes-always", "--edit-format", "whole", "--no-check-update", "note.txt"],
}  # fmt: skip
"""Arguments of one question without a terminal."""
PACKAGES = {
    "openai_agents": "openai-agents",
    "pydantic_ai": "pydantic-ai-slim",
    "langchain": "langchain-openai",
}


@dataclass
class Run:
    """What a client did. closed: whether its answer has what only the tool could tell it."""

    name: str
    version: str
    path: str
    requests: Sequence[Recorded]
    closed: bool
    output: str

    @property
    def first(self) -> Recorded | None:
        """Its first request that a model answers."""
        return next((request for request in self.requests if request.path == self.path), None)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m studies.clients")
    parser.add_argument("--tools", type=Path, required=True)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    if INSIDE not in os.environ:
        inside = 'ip link set lo up && exec "$@"'
        command = [
            "unshare",
            "--net",
            "--map-root-user",
            "sh",
            "-c",
            inside,
            "sh",
            sys.executable,
            "-m",
            "studies.clients",
            *sys.argv[1:],
        ]
        sys.exit(subprocess.run(command, env={**os.environ, INSIDE: "1"}, check=False).returncode)
    names = [name for name in (*AGENTS, *PROGRAMS) if not given.only or name in given.only]
    runs = [run_one(name, given.tools.resolve()) for name in names]
    for run in runs:
        print(
            f"{run.name} {run.version}: {'closed' if run.closed else 'NOT CLOSED'}",
            [(r.path, r.status) for r in run.requests],
        )
        if not run.closed:
            print(run.output[-3000:], *(r.answer[:600] for r in run.requests if r.status >= 400), sep="\n")
    if given.record:
        lines = [
            json.dumps({"client": run.name, "path": r.path, "status": r.status, "body": r.body})
            for run in runs
            for r in run.requests
        ]
        given.record.write_text("\n".join(lines) + "\n")
    if not given.only:
        page = given.page.read_text()
        before, rest = page.split(BEGIN)
        given.page.write_text(
            before + BEGIN + f"\nRun on {date.today()}.\n\n" + table(runs) + "\n" + END + rest.split(END)[1]
        )


def run_one(name: str, tools: Path) -> Run:
    """Run a client in a folder of its own, with a server of its own."""
    with tempfile.TemporaryDirectory() as folder, serving() as (url, recording):
        note = Path(folder) / "note.txt"
        note.write_text(f"The word is {WORD}.\n")
        more = {
            "HOME": folder,
            "PWD": folder,
            "XDG_CONFIG_HOME": f"{folder}/.config",
            "CODEX_HOME": f"{folder}/.codex",
            "NO_COLOR": "1",
            "CI": "1",
        }
        Path(folder, ".codex").mkdir()
        if name in AGENTS:
            agent = AGENTS[name]
            program = tools / ("aider/bin/aider" if name == "aider" else f"node_modules/.bin/{agent.program}")
            to = Endpoint(url, "small")
            command = [str(program), *agent.arguments(to), *ONCE[name]]
            environment = {**os.environ, **more, **agent.variables(to)}
            version = _said([str(program), "--version"], environment, folder).split("\n")[0]
            version = next((word for word in version.split() if word[:1].isdigit()), version)
            name, path = HOW[name]
        else:
            python = str(tools / "py/bin/python")
            environment = {**os.environ, **more}
            command = [python, str(Path(__file__).with_name("programs.py")), name, url, "small"]
            package = PACKAGES.get(name, name)
            version = _said(
                [python, "-c", f"from importlib.metadata import version; print(version({package!r}))"],
                environment,
                folder,
            )
            name, path = (
                package,
                {"anthropic": "/v1/messages", "ollama": "/api/chat"}.get(name, "/v1/chat/completions"),
            )
        output = _said(command, environment, folder)
        closed = "plum-48" in note.read_text() if name == "aider" else f"The note says {WORD}" in output
        return Run(name, version.strip(), path, recording.requests, closed, output)


def _said(command: Sequence[str], environment: Mapping[str, str], folder: str) -> str:
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            cwd=folder,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=150,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return f"{(late.stdout or b'').decode()}{(late.stderr or b'').decode()} (it did not end)"
    return (done.stdout + done.stderr).decode(errors="replace")


def table(runs: Sequence[Run]) -> str:
    """One line a client."""
    cells = list[tuple[str, ...]]()
    for run in runs:
        first = (
            "none"
            if run.first is None
            else "answered"
            if run.first.status == 200
            else f"status {run.first.status}"
        )
        closed = "closed" if run.closed else "not closed"
        cells.append((run.name, run.version, f"`{run.path}`", first, closed))
    return markdown_table(["client", "version", "path", "first request", "tool loop"], cells) + "\n"


if __name__ == "__main__":
    main()
