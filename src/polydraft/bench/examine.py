"""What this machine offers, and which path the engine takes on it and why."""

from importlib.util import find_spec
from time import perf_counter
from typing import Any

import numpy as np

from polydraft.bench.record import machine, versions
from polydraft.core import TokenTree
from polydraft.models import load, pair
from polydraft.models.compiled import packed_file
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.loading import checkpoint
from polydraft.models.matrices.vectors import instruction_set


def _kernels() -> dict[str, Any]:
    """Which path scores the embedded target, why, and how long one forward pass over one token takes."""
    folder = pair.target_folder()
    reason = CompiledModel.why_unsupported(checkpoint.of_folder(folder))
    start = perf_counter()
    model = load.load_model(str(folder), max_num_seqs=1)
    root = TokenTree.roots(np.array([0]))
    model.score([0], root)
    ready = perf_counter() - start
    start = perf_counter()
    for _ in range(10):
        model.score([0], root)
    return {
        "path": type(model).__name__,
        "why": reason or "the Llama architecture is compiled for CPUs: one call per forward pass",
        "kernels": f"{instruction_set()} through numba, no compiler needed",
        "weights": model.weight_format or "as in the checkpoint",
        "seconds_to_load_and_compile": round(ready, 2),
        "milliseconds_per_forward_pass": round((perf_counter() - start) * 100, 3),
    }


def _gpu() -> dict[str, Any]:
    """Which path a GPU takes here, or why there is none."""
    if find_spec("torch") is None:
        return {"path": "none", "why": "torch is not installed; everything runs on the CPU"}
    import torch

    if not torch.cuda.is_available():
        built = (
            f"torch {torch.__version__} was built without CUDA"
            if torch.version.cuda is None
            else "torch finds no CUDA device"
        )
        return {"path": "none", "why": f"{built}; everything runs on the CPU"}
    return {
        "path": "HFTarget: models through transformers; verifiers on the host",
        "why": f"torch {torch.__version__} finds {torch.cuda.get_device_name()}",
    }


def _stored_weights() -> dict[str, Any]:
    """What the cache folder has of packed weights; files whose sums are wrong are deleted, and packed anew by the next start."""
    place = packed_file.folder()
    files = [] if place is None else sorted(place.glob(f"*{packed_file.SUFFIX}"))
    gigabytes = round(sum(path.stat().st_size for path in files) / 1e9, 2)
    deleted = list(packed_file.damaged())
    for path in deleted:
        path.unlink(missing_ok=True)
    names = ", ".join(path.name for path in deleted) or "none"
    return {"files": len(files), "gigabytes": gigabytes, "damaged_and_deleted": names}


def examine() -> dict[str, dict[str, Any]]:
    """Everything that the doctor measures, as plain data."""
    embedded = {
        "folder": str(pair.embedded_folder()),
        "prompts": len(pair.prompts()),
        **pair.card()["held_out"],
    }
    return {
        "versions": versions(),
        "machine": machine(),
        "gpu": _gpu(),
        "stored weights": _stored_weights(),
        "embedded target": _kernels(),
        "embedded pair": embedded,
    }
