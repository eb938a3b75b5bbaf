"""What commands begin with: silence, threads, an engine."""

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from polydraft.errors import InvalidInputError

if TYPE_CHECKING:
    from polydraft.config import EngineConfig
    from polydraft.engine.api import Engine
    from polydraft.params import SamplingParams


def quiet() -> None:
    """No progress bars and no advice of transformers from now on; its errors still show, and warnings take a line each."""
    os.environ["TRANSFORMERS_VERBOSITY"], os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "error", "1"
    if "transformers" in sys.modules:  # it takes a second to import, and reads these only then
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
    warn_in_one_line()


def warn_in_one_line() -> None:
    """A warning is one line from now on, without the place in the source."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"


def check_threads(number: int | None) -> None:
    """Refuse more threads than processors, each of which would wait for others.

    Raises:
        InvalidInputError: more than the process may use.
    """
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if number is not None and number > most:
        raise InvalidInputError(
            f"--threads {number} was given; expected 1 to {most}, the processors that this process may use. Lower it."
        )


def use_threads(number: int = 1) -> None:
    """So many threads for all that computes, and quiet; torch is imported here. Raises as `check_threads`."""
    check_threads(number)
    os.environ["OMP_NUM_THREADS"] = str(number)
    import torch

    torch.set_num_threads(number)
    quiet()


def check(config: "EngineConfig", params: "SamplingParams | None" = None) -> None:
    """Refuse at once what names, headers and small files show. params: of the request. Raises as `check_threads` and `engine.checks.check`."""
    check_threads(config.threads)
    from polydraft.engine import checks

    checks.check(config, params)


def build(config: "EngineConfig", *, answers: bool = False) -> "Engine":
    """An engine. answers: for requests, which begin while their drafts are compiled; measurements wait for them. Raises as `check_threads`."""
    check_threads(config.threads)
    from polydraft.cli.first_start import compile_drafts
    from polydraft.engine.api import Engine

    quiet()
    return Engine.from_config(config, compile_drafts=compile_drafts if answers else None)


def weights(built: dict[str, Any]) -> str:
    """Formats of the weights and of the activations, where the compiled path has them."""
    if built["weight_format"] is None:
        return ""
    again = "".join(f"; {to} made from {', '.join(formats)}: another model" for to, formats in built["rounded_again"].items())
    rounded = ", 8-bit activations (float32 with --exact)" if built["activations"] == "int8" else ""
    return f" in {built['weight_format']}{rounded}{again}"
