"""What commands begin with: silence, threads, an engine."""

import os
import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from polydraft.errors import InvalidInputError
from polydraft.numerics.processor import usable_processors

if TYPE_CHECKING:
    from polydraft.config import EngineConfig
    from polydraft.core.params import SamplingParams
    from polydraft.engine.api import Engine
    from polydraft.engine.plan import Plan


def quiet() -> None:
    """No progress bars and no advice of transformers from now on; its errors still show, and warnings take a line each."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
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
    most = len(usable_processors())
    if number is not None and number > most:
        raise InvalidInputError(
            f"--threads {number} was given; expected 1 to {most}, the processors that this process may use. Lower it."
        )


def use_threads(number: int = 1) -> None:
    """So many threads for all that computes, torch included where it is imported, and quiet. Raises as `check_threads`."""
    check_threads(number)
    os.environ["OMP_NUM_THREADS"] = str(number)  # which torch reads when it is imported
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(number)
    quiet()


def check(config: "EngineConfig", params: "SamplingParams | None" = None) -> "Plan":
    """What names, headers and small files show, which is refused at once. params: of the request. Raises as `check_threads` and `engine.plan.Plan`."""
    check_threads(config.threads)
    from polydraft.engine.plan import Plan

    plan = Plan.of(config)
    if params is not None:
        plan.check_params(params)
    return plan


def build(config: "EngineConfig", *, answers: bool = False) -> "Engine":
    """An engine. answers: for requests, which begin while their drafts are compiled; measurements wait for them. Raises as `check_threads`."""
    check_threads(config.threads)
    from polydraft.cli import first_start
    from polydraft.engine.api import Engine

    quiet()
    return first_start.build(config) if answers else Engine.from_config(config, measured=True)


def leave_costs(engine: "Engine") -> None:
    """After the last answer: what is compiled for the next start is, and costs that are missing are measured for it; Ctrl-C ends it."""
    from polydraft.cli import first_start

    first_start.let_finish()
    sys.stdout.flush()
    with suppress(KeyboardInterrupt):
        engine.measure()


def loaded(engine: "Engine", name: str, *, verbose: bool = False) -> str:
    """What was built, in a line: what decides the distribution, and how it is drafted. verbose: limits and memory, too."""
    summary = engine.summary()
    drafts = (
        "no drafts"
        if summary["drafter"] is None
        else f"drafter {summary['drafter']}, verifier {summary['verifier']}"
    )
    lossy = "" if summary["lossless"] else " (not lossless)"
    distribution = (
        "" if summary["decoding"] == "the target distribution" else f", lossless to {summary['decoding']}"
    )
    line = f"{name}{weights(summary, verbose=verbose)}; {drafts}{lossy}{distribution}"
    if not verbose:
        return line
    size = "" if summary["cache_bytes"] is None else f", KV cache of {summary['cache_bytes'] / 1e6:.1f} MB"
    size += " when full, allocated as texts grow" if size and summary["cache_grows"] else ""
    return f"{line}; context of {summary['max_model_len']} tokens, batch of {summary['max_num_seqs']}{size}; {summary['target']}"


def weights(built: dict[str, Any], *, verbose: bool = True) -> str:
    """Formats of the weights, and with `verbose` of the activations, where the compiled path has them."""
    if built["weight_format"] is None:
        return ""
    again = "".join(
        f"; {to} made from {', '.join(formats)}: another model"
        for to, formats in built["rounded_again"].items()
    )
    rounded = (
        ", 8-bit activations (float32 with --exact)" if built["activations"] == "int8" and verbose else ""
    )
    return f" in {built['weight_format']}{rounded}{again}"
