"""The processes that hold the parts of a sharded target: started here, told every call over pipes, joined in one process group.

    rank   one process of the group; 0 is the caller's
    call   (name of a method, arguments), pickled, to every other rank, which makes it on its own part

Forward passes meet in collectives (gloo on CPUs, NCCL on GPUs). A rank that dies closes its connections, which ends the collective of the others at
once; one that hangs is given up after `PATIENCE`. Half a forward pass would leave the ranks apart, so whatever interrupts one ends them all.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed

from polydraft.errors import IncompatibleError, PolydraftError, RankError, first_line

PATIENCE = timedelta(minutes=2)
"""That ranks wait for each other within a forward pass."""


def join_group(rank: int, num_ranks: int, meeting: Path, device_type: str) -> None:
    """Become one rank of the process group of a target. meeting: file where its ranks find each other."""
    backend = "gloo" if device_type == "cpu" else "nccl"
    distributed.init_process_group(
        backend, init_method=meeting.as_uri(), rank=rank, world_size=num_ranks, timeout=PATIENCE
    )


class Ranks:
    """The other ranks of a target, from rank 0's side.

    kind: class of the target; `kind.on_rank(**options)` makes each rank's part.
    num_ranks: all of them.  device_type: "cpu" or "cuda".  threads: of each rank.

    Raises:
        IncompatibleError: this process is in a process group already.
        RankError: a rank did not begin.
    """

    def __init__(
        self, kind: type, num_ranks: int, device_type: str, threads: int, options: Mapping[str, Any]
    ) -> None:
        if not distributed.is_available():
            raise IncompatibleError(
                "several ranks were asked for, and this torch is built without torch.distributed. Install another."
            )
        if distributed.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise IncompatibleError(
                "several ranks were asked for in a process that is one of a group already (torchrun, or another target of several ranks). "
                "polydraft starts its ranks itself: run it as one process, and close the other target first."
            )
        self.num_ranks = num_ranks
        self._before = torch.get_num_threads()
        self._ended = "it was closed"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Any] = []
        self._meeting = TemporaryDirectory(prefix="polydraft-ranks-")
        group: dict[str, Any] = {
            "num_ranks": num_ranks,
            "meeting": Path(self._meeting.name, "group"),
            "device_type": device_type,
        }
        try:
            for rank in range(1, num_ranks):
                self._start(rank, threads)
                self._pipes[-1].send_bytes(
                    pickle.dumps((kind, threads, {"rank": rank, **group}, dict(options)))
                )
            self.wait()
            torch.set_num_threads(threads)
            join_group(0, **group)
        except BaseException:
            self.end()
            raise

    def _start(self, rank: int, threads: int) -> None:
        ours, theirs = Pipe()
        shared = {
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"from polydraft.models.torch.ranks import follow; follow({theirs.fileno()})",
                ],
                env=os.environ | shared,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is rank 0's
            )
        self._processes.append(process)
        self._pipes.append(ours)

    def wait(self) -> None:
        """Until every rank has come as far as this one.

        Raises:
            RankError: one has not; says why.
        """
        for rank, pipe in enumerate(self._pipes, 1):
            try:
                reply = pipe.recv()
            except (EOFError, OSError):
                reply = "its process ended"
            if reply is not None:
                self.end()
                raise RankError(f"rank {rank} of {self.num_ranks} could not begin: {reply}.")

    @contextmanager
    def calling(self, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Iterator[None]:
        """The others make a call, which the body makes on rank 0. Ctrl-C waits for its end.

        Our own errors are raised before anything is computed, and alike on all ranks; after any other one the ranks are ended.

        Raises:
            RankError: a rank has died or hangs, or the call failed.
        """
        if not self._pipes:
            raise RankError(f"the ranks of this target have ended: {self._ended}. Build the engine anew.")
        with _uninterrupted():
            try:
                message = pickle.dumps((name, arguments, options))
                for pipe in self._pipes:
                    pipe.send_bytes(message)
                yield
            except PolydraftError:
                raise
            except BaseException as error:
                self._ended = f"`{name}` failed, as {self._why(error)}"
                self.end()
                if isinstance(error, Exception):
                    raise RankError(
                        f"the ranks of this target have ended: {self._ended}. Build the engine anew."
                    ) from error
                raise

    def _why(self, error: BaseException) -> str:
        for rank, pipe in enumerate(self._pipes, 1):
            try:
                if pipe.poll(1.0):
                    return f"rank {rank} says {pipe.recv()}"
            except (EOFError, OSError):
                return f"rank {rank} has died"
        return f"rank 0 says {first_line(error)}"

    def end(self) -> None:
        """End the other ranks and leave the group; a second time it does nothing."""
        if not self._processes:
            return
        self._meeting.cleanup()
        for pipe in self._pipes:
            pipe.close()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        for process in self._processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._pipes = []
        self._processes = []
        torch.set_num_threads(self._before)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C within comes at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if noted:
        signal.raise_signal(signal.SIGINT)


def follow(descriptor: int) -> None:
    """Be a rank other than 0: make every call that comes through the pipe, until it is closed."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with Connection(descriptor) as pipe:
        try:
            kind, threads, group, options = pickle.loads(pipe.recv_bytes())
            torch.set_num_threads(threads)
            pipe.send(None)
            join_group(**group)
            target = kind.on_rank(**options, begun=lambda: pipe.send(None))
            while True:
                try:
                    name, arguments, more = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    return
                with suppress(PolydraftError):
                    getattr(target, name)(*arguments, **more)
        except Exception as error:
            with suppress(OSError):
                pipe.send(f"{type(error).__name__}: {first_line(error)}")
            sys.exit(1)
