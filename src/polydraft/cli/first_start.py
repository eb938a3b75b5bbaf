"""The first start on a machine: another process compiles what drafts call, at low priority, while the first answer is generated without them.

It is a process and not a thread: numba compiles under one lock, which the first answer needs too.
"""

import os
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from polydraft.core import Target
    from polydraft.engine.speculation import Compiling, Speculation

__all__ = ["compile_drafts"]

PRIORITY = 10
"""Niceness of the process."""


def compile_drafts(target: "Target", chosen: "Speculation") -> "Compiling | None":
    """Begin to compile what these drafts call, unless that was done; see `Engine.of`. None, too, where the shape of drafts was asked for, or little is compiled."""
    from polydraft.compiled_code import mark
    from polydraft.drafters.base import ModelBased
    from polydraft.models.compiled.llama import CompiledLlama
    from polydraft.policy.adaptive import AdaptivePolicy

    drafter = chosen.drafter
    if drafter is None or not isinstance(target, CompiledLlama) or not isinstance(chosen.policy, AdaptivePolicy):
        return None
    if not (drafter.needs.hidden or isinstance(drafter, ModelBased)):
        return None
    done = mark(f"{drafter.info.name} {chosen.verifier.info.name}")
    if done.exists() or not os.access(done.parent, os.W_OK):
        return None
    names = [drafter.info.name, chosen.verifier.info.name]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen([sys.executable, "-m", "polydraft.cli.first_start", *names], **streams, start_new_session=True)
    typer.echo("drafts are compiled by another process, once, and join when they are ready", err=True)

    def compiling(wait: bool) -> bool:
        if wait:
            process.wait()
        return process.poll() is None

    return compiling


def main(drafter: str, verifier: str) -> None:
    """Compile, unless another process does so now or has done so."""
    with suppress(OSError, AttributeError):
        os.nice(PRIORITY)
    from filelock import FileLock

    from polydraft.cli.compile_all import compile_first
    from polydraft.compiled_code import mark

    done = mark(f"{drafter} {verifier}")
    with FileLock(f"{done}.lock"):
        if not done.exists():
            compile_first(drafter, verifier)
            done.touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
