"""What a measurement is told with: the machine, versions, commit and command; tables in markdown; files that are written whole."""

import csv
import io
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from polydraft.files.atomic import replacing
from polydraft.numerics.processor import processor, usable_processors

PACKAGES = (
    "polydraft",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "numba",
    "xllamacpp",
    "gguf",
    "vllm",
)


def versions() -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    versions_by_name = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions_by_name[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions_by_name


def machine() -> dict[str, Any]:
    """Processor, cores, instructions, threads and memory bandwidth; of torch, where it is installed, threads, BLAS and GPU."""
    from polydraft.models.matrices.vectors import instruction_set

    return {
        "processor": processor(),
        "cores": len(usable_processors()),
        "instructions": instruction_set(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        **(_machine_of_torch() if find_spec("torch") else {}),
        "copy_bandwidth_gb_per_s": round(_bandwidth() / 1e9, 1),
    }


def _machine_of_torch() -> dict[str, Any]:
    import torch

    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return {
        "torch_threads": torch.get_num_threads(),
        "blas": blas.group(1) if blas else "unknown",
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _bandwidth(num_bytes: int = 64 << 20, repetitions: int = 5) -> float:
    """Bytes read and written per second by one thread that copies memory larger than the caches; best of several."""
    import numpy as np

    source = np.ones(num_bytes, np.uint8)
    target = np.empty_like(source)
    best = float("inf")
    for _ in range(repetitions):
        start = perf_counter()
        np.copyto(target, source)
        best = min(best, perf_counter() - start)
    return 2 * num_bytes / best


def _commit() -> str | None:
    """Of the working copy that this package lies in, or None."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def command_line(program: str = "polydraft") -> str:
    """How this run was called."""
    return " ".join([program, *sys.argv[1:]])


def provenance(program: str = "polydraft") -> dict[str, Any]:
    """What a report begins with: hardware, versions, commit and command."""
    return {
        "hardware": machine(),
        "versions": versions(),
        "commit": _commit(),
        "command": command_line(program),
    }


def markdown_table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Lines of a table.

    Example:
        >>> print(markdown_table(["a", "b"], [(1, "x")]))
        | a | b |
        |---|---|
        | 1 | x |
    """
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def csv_table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """The same as comma-separated values; None is an empty cell.

    Example:
        >>> print(csv_table(["a", "b"], [(1, "x, y"), (2, None)]), end="")
        a,b
        1,"x, y"
        2,
    """
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([head, *rows])
    return out.getvalue()


def write_texts(texts: Mapping[Path, str]) -> list[Path]:
    """Write each file, whose old text stays until the new one is complete; returns their paths."""
    for file, content in texts.items():
        with replacing(file) as out:
            out.write(content.encode())
    return list(texts)
