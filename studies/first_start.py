"""What a first start compiles: signatures and CPU seconds by function, in an empty cache folder.

    python -m studies.first_start --model NAME

The command is `polydraft generate` with a chat; seconds are those of the process that answers, callees apart from their callers. What other
processes compile meanwhile is counted by what lies in the folder when they have ended.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from time import thread_time

import numpy as np
from numba.core.event import Event, Listener, register

from polydraft.bench.record import markdown_table
from polydraft.numerics.processor import processor

ROWS = 3
"""Functions that have a line of their own."""
PROMPT = "Write a Python function that merges two sorted lists."


class Counter(Listener):
    """Signatures and seconds of what is compiled, by function."""

    def __init__(self) -> None:
        self.open: list[list[float]] = []
        self.functions: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])

    def on_start(self, event: Event) -> None:
        self.open.append([thread_time(), 0.0])

    def on_end(self, event: Event) -> None:
        began, of_callees = self.open.pop()
        seconds = thread_time() - began
        if self.open:
            self.open[-1][1] += seconds
        assert event.data is not None
        function = event.data["dispatcher"].py_func
        counted = self.functions[f"{function.__module__}.{function.__qualname__}"]
        counted[0] += 1
        counted[1] += seconds - of_callees


def answer(model: str) -> None:
    """In the process that is measured: the command, then its figures on standard output's last line."""
    counter = Counter()
    register("numba:compile", counter)
    from polydraft.cli.main import app

    app(["generate", "--chat", PROMPT, "--model", model, "--max-tokens", "16"], standalone_mode=False)
    print("\n" + json.dumps(counter.functions))


def measure(model: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Functions of a first start and of the next, each with its number of signatures and seconds."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # another process may still write
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        command = [sys.executable, "-m", "studies.first_start", "--answer", model]
        runs = [
            subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
            for _ in range(2)
        ]
    return tuple(json.loads(run.rstrip().rpartition("\n")[2]) for run in runs)  # pyright: ignore[reportReturnType]


def table(model: str, first: dict[str, list[float]], second: dict[str, list[float]]) -> str:
    """Markdown of both."""
    lines = [
        f"First start of {model} with a chat, {processor()}; `python -m studies.first_start --model {model}`. CPU seconds of the process that answers,",
        "callees apart from their callers; what draws tokens and what drafts call is compiled by two processes beside it.",
        "",
    ]
    ours = {
        name.removeprefix("polydraft."): figures
        for name, figures in first.items()
        if name.startswith("polydraft.")
    }
    largest = sorted(ours.items(), key=lambda item: -item[1][1])
    cells = [(f"`{name}`", f"{count:.0f}", f"{seconds:.2f}") for name, (count, seconds) in largest[:ROWS]]
    rest = [figures for _, figures in largest[ROWS:]]
    of_numba = [figures for name, figures in first.items() if not name.startswith("polydraft.")]
    for title, group in (
        (f"{len(rest)} others", rest),
        ("numba's own", of_numba),
        ("**all**", list(first.values())),
        ("all, at the next start", list(second.values())),
    ):
        count, seconds = np.sum(group, 0) if group else (0, 0)
        cells.append((title, f"{count:.0f}", f"{seconds:.2f}"))
    return "\n".join([*lines, markdown_table(["function", "signatures", "CPU seconds"], cells)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="name of `polydraft models list`, or FILE.gguf"
    )
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer(options.answer)
        return
    print(table(options.model, *measure(options.model)))


if __name__ == "__main__":
    main()
