"""The first start on a machine: other processes compile beside this one, which compiles the forward pass.

One compiles how tokens are drawn from logits, which the first token needs, while the weights are loaded. Another compiles what drafts call, at low priority,
while the first answer is generated without them. They are processes and no threads: numba compiles under one lock, which the first answer needs too.
A command that ends as it should lets them finish; they end with one that is killed, whose end of a pipe closes without a word.
"""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from polydraft.config import EngineConfig
    from polydraft.core import Target
    from polydraft.engine.api import Engine
    from polydraft.engine.speculation import Compiling, Speculation


_begun: "list[subprocess.Popen[bytes]]" = []
ROOM = 64 << 20
"""Bytes that must be free where code is stored: what another process compiles is lost otherwise, and compiled once more by this one."""


def build(config: "EngineConfig") -> "Engine":
    """An engine for requests, whose code is compiled by several processes where that was never done."""
    from polydraft.numerics.compiled_code import WALKS

    walks = _process(WALKS)
    from polydraft.engine.api import Engine
    from polydraft.models.compiled.model import CompiledModel

    engine = Engine.from_config(config, compile_drafts=compile_drafts)
    if walks is not None:
        if isinstance(engine.target, CompiledModel):  # compiles its forward pass meanwhile
            engine.target.prefill([0], [[0]])
            engine.target.release([0])
        walks.wait()
    return engine


def _process(what: str, *names: str) -> "subprocess.Popen[bytes] | None":
    """A process that compiles something and marks it; None where that was done, or could not be stored."""
    from polydraft.numerics.compiled_code import is_marked, mark

    folder = mark(what).parent
    if is_marked(what) or not os.access(folder, os.W_OK) or shutil.disk_usage(folder).free < ROOM:
        return None
    command = [sys.executable, "-m", "polydraft.cli.first_start", *names]
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(
        command, bufsize=0, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
    )
    _begun.append(process)
    return process


def let_finish() -> None:
    """Let processes that this one has begun go on when it ends."""
    while _begun:
        if (pipe := _begun.pop().stdin) is not None:
            with suppress(OSError):
                pipe.write(b"\n")


def _end_with_parent() -> None:
    if not os.read(0, 1):
        os._exit(1)


def compile_drafts(target: "Target", chosen: "Speculation") -> "Compiling | None":
    """Begin to compile what these drafts call, unless that was done; see `Engine.of`. None, too, where the shape of drafts was asked for, or little is compiled."""
    from polydraft.models.compiled.model import CompiledModel
    from polydraft.policy.adaptive import AdaptivePolicy

    drafter = chosen.drafter
    if (
        drafter is None
        or not isinstance(target, CompiledModel)
        or not isinstance(chosen.policy, AdaptivePolicy)
    ):
        return None
    if not (drafter.needs.hidden or drafter.offers.model is not None):
        return None
    names = drafter.info.name, chosen.verifier.info.name
    process = _process(" ".join(names), *names)
    if process is None:
        return None
    typer.echo("drafts are compiled by another process, once, and join when they are ready", err=True)

    def compiling(seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.poll() is None

    return compiling


def main(*names: str) -> None:
    """Compile what drafts of this drafter and verifier call, or what is called without drafts, unless another process does so now or has done so."""
    from filelock import FileLock

    from polydraft.numerics.compiled_code import WALKS, mark

    if names:
        with suppress(OSError, AttributeError):
            os.nice(10)
    done = mark(" ".join(names) or WALKS)
    with FileLock(f"{done}.lock"):
        if done.exists():
            return
        if names:
            from polydraft.cli.compile_all import compile_first

            compile_first(*names)
        else:
            from polydraft.cli.compile_walks import compile_walks

            compile_walks()


if __name__ == "__main__":
    Thread(target=_end_with_parent, daemon=True).start()
    main(*sys.argv[1:])
