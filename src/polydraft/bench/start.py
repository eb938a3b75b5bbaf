"""Seconds from the start of a process to its first token: with a cold file cache, warm, with nothing compiled, and llama.cpp's on the same file.

Every start is a process of its own, as a shell would begin it. `python -m polydraft.bench.start FILE PROMPT NUM_TOKENS THREADS` is llama.cpp's, from
its wheel; a `llama-server` that was built for this processor is started itself.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from polydraft.bench.record import command_line, markdown_table
from polydraft.errors import PolydraftError
from polydraft.numerics.processor import processor, usable_processors

PROMPT = "def quicksort(values):"
NUM_TOKENS = 64
ROWS = {
    "warm": "polydraft, warm",
    "cold": "polydraft, cold file cache",
    "first": "polydraft, first start",
    "llama.cpp": "llama.cpp, warm",
    "llama.cpp-cold": "llama.cpp, cold file cache",
}
"""Warm: files in memory, everything compiled. First start: nothing compiled, no costs known, files in memory."""
MOMENTS = {
    "load": "loaded",
    "prefill": "prompt read",
    "first_token": "first token",
    "total": f"{NUM_TOKENS} tokens",
}
Start = Callable[[], dict[str, float | None]]
"""Begins a process; seconds from then on to each of `MOMENTS`, and those that went into compiling, None where it does not say."""


class StartError(PolydraftError):
    """A process ended with an error, its last line."""


def _missing_for_llama_cpp(file: Path, server: Path | None) -> str:
    """Why llama.cpp cannot be started on a file; empty where it can. server: as of `contenders`."""
    from polydraft.models.store.gguf_parts import is_gguf

    if server is None and find_spec("xllamacpp") is None:
        return "xllamacpp is not installed"
    return "" if is_gguf(file) else "it reads GGUF files only"


def contenders(
    model: str, draft_model: str | None, threads: int | None, llama_server: Path | None = None
) -> tuple[dict[str, Start], dict[str, str]]:
    """What can be started here, by row, and why others cannot. llama_server: the program, in place of the wheel."""
    from polydraft.models.store.catalogue import default_draft

    options = [f"--model={model}", *([f"--draft-model={draft_model}"] if draft_model else [])]
    options += [f"--threads={threads}"] if threads else []
    target = _files(model)
    draft = _files(draft_model or default_draft(model))
    warm = partial(_generate, options)
    starts: dict[str, Start] = {
        "warm": warm,
        "cold": partial(_cold, target + draft, warm),
        "first": partial(_first, options),
    }
    absent: dict[str, str] = {}
    if missing := _missing_for_llama_cpp(target[0], llama_server):
        absent["llama.cpp"] = missing
    else:
        program = _llama_cpp if llama_server is None else partial(_llama_server, llama_server)
        starts["llama.cpp"] = partial(program, target[0], threads)
        starts["llama.cpp-cold"] = partial(_cold, target, starts["llama.cpp"])
    if not hasattr(os, "posix_fadvise"):
        absent["cold"] = "this system does not let a program drop files from its cache"
        starts = {row: start for row, start in starts.items() if "cold" not in row}
    return starts, absent


def measure(
    starts: dict[str, Start],
    repetitions: int,
    absent: dict[str, str],
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, list[dict[str, float | None]]]:
    """Seconds of each start, by row. All by turns, each turn begun by another; an interrupt ends it and leaves what was measured.

    absent: is told why a row fails, which is then left out.  progress: called with the number of starts that there will be, after each.
    """
    rows = list(starts)
    measured = {row: [] for row in starts}
    with suppress(KeyboardInterrupt):
        for turn in range(repetitions):
            for row in rows[turn % len(rows) :] + rows[: turn % len(rows)]:
                if row not in absent:
                    try:
                        measured[row].append(starts[row]())
                    except StartError as error:
                        absent[row] = str(error)
                progress(len(rows) * repetitions)
    return measured


def as_dict(
    model: str, measured: dict[str, list[dict[str, float | None]]], absent: dict[str, str]
) -> dict[str, Any]:
    """The measurement as plain data, with what it was made on and how busy that was."""
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    machine = {"processor": processor(), "cores": len(usable_processors()), "load": load}
    return {**machine, "command": command_line(), "model": model, "starts": measured, "absent": absent}


def markdown(report: dict[str, Any]) -> str:
    """The table: of each row the smallest and the median."""
    head = ["start", "runs", *MOMENTS.values(), "of it compiling"]
    rows = [
        [ROWS[row], len(runs), *(_cell(runs, name) for name in (*MOMENTS, "compile"))]
        for row, runs in report["starts"].items()
        if runs
    ]
    absent = "".join(f"\nNot in the run: {row} ({reason})." for row, reason in report["absent"].items())
    return (
        f"{report['model']}; {report['processor']}, {report['cores']} cores, load average {report['load']} at the end.\n`{report['command']}`\n"
        f"Seconds from the start of the process: the smallest of all runs, and their median.\n\n{markdown_table(head, rows)}\n{absent}"
    )


def _cell(runs: Sequence[dict[str, float | None]], name: str) -> str:
    seconds = [value for run in runs if (value := run[name]) is not None]
    return f"{min(seconds):.2f} ({median(seconds):.2f})" if seconds else "-"


def prepare(start: Start) -> None:
    """Start once, unmeasured: what was never compiled is, and files are in memory. Raises `StartError`."""
    from polydraft.numerics.compiled_code import WALKS, mark

    start()
    _await_compilers(mark(WALKS).parent)


def _generate(options: Sequence[str], environment: dict[str, str] | None = None) -> dict[str, float | None]:
    arguments = [
        "polydraft",
        "generate",
        PROMPT,
        "--json",
        f"--max-tokens={NUM_TOKENS}",
        "--ignore-eos",
        *options,
    ]
    return json.loads(_output(arguments, environment))["waited"]


def _output(arguments: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """What a module of Python prints. Its bytecode is stored for the next start, as that of an installed package is."""
    environment = dict(os.environ if environment is None else environment)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise StartError(
            done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
            or f"it ended with status {done.returncode}"
        )
    return done.stdout


def _cold(files: Sequence[Path], start: Start) -> dict[str, float | None]:
    """After these files were dropped from memory; what another process has mapped stays."""
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return start()


def _first(options: Sequence[str]) -> dict[str, float | None]:
    """With folders of its own for compiled code and costs; ends when no process compiles there any more."""
    from polydraft.models.store.catalogue import models_folder

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "models").symlink_to(models_folder().absolute(), target_is_directory=True)
        waited = _generate(options, {**os.environ, "POLYDRAFT_CACHE": name, "NUMBA_CACHE_DIR": name})
        _await_compilers(folder)
    return waited


def _await_compilers(folder: Path) -> None:
    """Wait for processes that a first start left behind, which compile drafts for the next one."""
    from filelock import FileLock

    for file in folder.rglob("compiled-*.lock") if os.access(folder, os.W_OK) else ():
        with FileLock(file):
            pass


def _files(model: str | None) -> list[Path]:
    """All files of a model that is here."""
    from polydraft.models.store import hub
    from polydraft.models.store.gguf_parts import parts_of

    place = None if model is None else hub.local(model)
    return [] if place is None else sorted(place.glob("*.*")) if place.is_dir() else parts_of(place)


def _llama_cpp(file: Path, threads: int | None) -> dict[str, float | None]:
    began = time.time()
    output = _output(
        ["polydraft.bench.start", str(file), PROMPT, str(NUM_TOKENS), str(threads or os.cpu_count())]
    )
    moments = json.loads(output.splitlines()[-1])
    return {name: None if (at := moments.get(name)) is None else at - began for name in MOMENTS} | {
        "compile": None
    }


def _llama_server(program: Path, file: Path, threads: int | None) -> dict[str, float | None]:
    began = time.time()
    with _running(program, file, threads or len(usable_processors())) as port:
        loaded = time.time()
        body = {"prompt": PROMPT, "n_predict": NUM_TOKENS, "ignore_eos": True, "stream": True}
        with closing(HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            pieces = (line for line in connection.getresponse() if line.startswith(b"data: "))
            next(pieces, None)
            first = time.time()
            for _ in pieces:
                pass
        total = time.time()
    seconds = {"load": loaded - began, "first_token": first - began, "total": total - began}
    return {**dict.fromkeys([*MOMENTS, "compile"]), **seconds}


@contextmanager
def _running(program: Path, file: Path, threads: int) -> Iterator[int]:
    """A server of llama.cpp, until it is left; the port at which it answers.

    Raises:
        StartError: it ended before.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    options = ["-m", file, "-t", threads, "-ngl", 0, "-np", 1, "--host", "127.0.0.1", "--port", port]
    nowhere = subprocess.DEVNULL
    with subprocess.Popen([program, *map(str, options)], stdout=nowhere, stderr=nowhere) as server:
        try:
            while not _is_healthy(port):
                if server.poll() is not None:
                    raise StartError(f"{program.name} ended with status {server.returncode}")
                time.sleep(0.01)
            yield port
        finally:
            server.kill()


def _is_healthy(port: int) -> bool:
    with closing(HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


def _run_llama_cpp(file: str, prompt: str, num_tokens: str, threads: str) -> None:
    """Print when it was loaded, gave a token, and the last one, in seconds of the system's clock."""
    import xllamacpp as engine

    xllamacpp: Any = engine
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.verbosity = -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    server = xllamacpp.Server(params)
    moments = {"load": time.time()}
    body = {"prompt": prompt, "n_predict": int(num_tokens), "ignore_eos": True, "stream": True}

    def arrive(_: Any) -> None:  # what is returned would end the stream
        moments.setdefault("first_token", time.time())

    server.handle_completions(body, arrive)
    print(json.dumps(moments | {"total": time.time()}))


if __name__ == "__main__":
    _run_llama_cpp(*sys.argv[1:])
