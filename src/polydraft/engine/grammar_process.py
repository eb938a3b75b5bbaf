"""The process that tries grammars before the engine compiles them: `python -m polydraft.engine.grammar_process`; see `grammar_trial`.

Each trial is a fork of it, with limits of time and memory, which may crash as it likes. Where a platform has no `fork` it tries them itself, one
after another. Messages are pickles behind their length, on standard input and output: vocabularies, which stay, and trials.
"""

import io
import json
import os
import pickle
import selectors
import signal
import struct
import sys
from contextlib import suppress
from time import process_time
from typing import IO, Any

from polydraft.engine.grammar_compile import Followed, deep, matcher_of, walk, written
from polydraft.engine.grammar_tokenizer import LongestTokens
from polydraft.errors import InvalidInputError, first_line

SECONDS = 2.0
"""Of CPU time of a trial."""
MEGABYTES = 256
"""Of memory beyond what this process has."""
STEP_SECONDS = 0.1
"""Of CPU time of a step, as in the engine."""
STACK_BYTES = 8 << 20
"""Of a trial's compiling, half of what the engine has for it."""
STEP_STACK_BYTES = 1 << 20
"""Of a trial's steps; threads of an engine have twice that at least."""
TOO_SLOW = f"it takes more than {SECONDS:g} seconds to compile"
TOO_LARGE = f"it takes more than {MEGABYTES} MB"


def send(stream: IO[bytes], message: Any) -> None:
    """Write a message."""
    packed = pickle.dumps(message)
    unsent = memoryview(struct.pack("<Q", len(packed)) + packed)
    while unsent:
        unsent = unsent[stream.write(unsent) :]
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message.

    Raises:
        EOFError: the other side has ended.
    """
    (length,) = struct.unpack("<Q", _read(stream, 8))
    return pickle.loads(_read(stream, length))


def _read(stream: IO[bytes], length: int) -> bytes:
    pieces = list[bytes]()
    while length:
        piece = stream.read(length)
        if not piece:
            raise EOFError
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)


def tried(followed: Followed, kind: str, value: Any, limits: Any) -> dict[str, Any]:
    """What comes of a form: its `text` as llguidance takes it, or its `refusal`."""
    before = _memory()
    began = process_time()
    try:
        text = written(kind, value)
        matcher = deep(lambda: matcher_of(followed, kind, text, limits), STACK_BYTES)
        seconds = process_time() - began
        step = deep(lambda: walk(followed, matcher), STEP_STACK_BYTES)
    except InvalidInputError as error:
        return {"refusal": str(error)}
    except MemoryError:
        return {"failure": TOO_LARGE}
    if step > STEP_SECONDS:
        return {"failure": f"a step takes {1000 * step:.0f} ms, of {1000 * STEP_SECONDS:.0f} that it may"}
    return {"text": text, "bytes": _memory() - before, "seconds": seconds}


def _memory() -> int:
    """Bytes that this process has had at most; 0 where that is not known."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _limit() -> None:
    """Limits of a fork: CPU time by a timer, memory where the system keeps to it, and no file of a crash."""
    import resource

    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    limits = {"RLIMIT_CPU": int(SECONDS) + 1, "RLIMIT_CORE": 1}
    if (space := _address_space()) is not None:
        limits["RLIMIT_AS"] = space + (MEGABYTES << 20)
    for name, limit in limits.items():
        with suppress(OSError, ValueError, AttributeError):
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (least, least))


def _address_space() -> int | None:
    """Bytes of it that this process has; None on a system without /proc, such as macOS, where memory is not limited."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + 2 * STACK_BYTES
    except OSError:
        return None


class _Trials:
    """The loop of this process, with a fork for each trial."""

    def __init__(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        self._requests = requests
        self._answers = answers
        self._vocabularies = dict[str, Followed]()
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        self._selector.register(self._requests, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._take()
                else:
                    self._gather(key.fileobj, *key.data)

    def _take(self) -> None:
        message = receive(self._requests)
        if message["what"] == "vocabulary":
            self._vocabularies[message["name"]] = _followed(message)
        elif message["what"] == "forget":
            self._vocabularies.pop(message["name"], None)
        else:
            self._fork(message)

    def _fork(self, message: dict[str, Any]) -> None:
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            _trial(self._vocabularies[message["vocabulary"]], message, writing)
        os.close(writing)
        self._selector.register(reading, selectors.EVENT_READ, (message["number"], process, io.BytesIO()))

    def _gather(self, reading: Any, number: int, process: int, heard: io.BytesIO) -> None:
        """What a fork has written; at its end, its answer or how it died."""
        if piece := os.read(reading, 1 << 16):
            heard.write(piece)
            return
        self._selector.unregister(reading)
        os.close(reading)
        _, status = os.waitpid(process, 0)
        answer = _answer(heard.getvalue(), os.waitstatus_to_exitcode(status))
        send(self._answers, answer | {"number": number})


def _trial(followed: Followed, message: dict[str, Any], writing: int) -> None:
    """In a fork: try a form, write what comes of it, and end."""
    try:
        for stream in (1, 2):
            os.dup2(writing, stream)
        _limit()
        outcome = tried(followed, message["kind"], message["value"], message["limits"])
        packed = b"\0" + json.dumps(outcome).encode()
        while packed:
            packed = packed[os.write(writing, packed) :]
        os._exit(0)
    except BaseException as error:
        os.write(writing, first_line(error).encode(errors="replace"))
    finally:
        os._exit(1)


def _answer(heard: bytes, code: int) -> dict[str, Any]:
    """Of a fork that has ended. code: as of `subprocess`."""
    if code == 0:
        return json.loads(heard.rpartition(b"\0")[2])
    if b"memory allocation" in heard or code == -signal.SIGKILL:
        return {"failure": TOO_LARGE}
    if code in (-signal.SIGPROF, -signal.SIGXCPU):
        return {"failure": TOO_SLOW}
    how = (
        signal.Signals(-code).name
        if code < 0
        else first_line(Exception(heard.decode(errors="replace")))[:100]
    )
    return {"failure": f"it crashes the compiler of grammars ({how})"}


def _followed(message: dict[str, Any]) -> Followed:
    from llguidance import LLTokenizer

    vocabulary: Any = LongestTokens(message["tokens"], message["special_ids"], message["stop_ids"])
    tokenizer = LLTokenizer(vocabulary, eos_token=message["stop_ids"])
    return Followed(tokenizer, len(message["tokens"]), tuple(message["stop_ids"]))


def _one_by_one(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Without forks; whoever waits ends this process where it takes too long or dies."""
    vocabularies = dict[str, Followed]()
    while True:
        message = receive(requests)
        if message["what"] == "vocabulary":
            vocabularies[message["name"]] = _followed(message)
        elif message["what"] == "forget":
            vocabularies.pop(message["name"], None)
        else:
            outcome = tried(
                vocabularies[message["vocabulary"]], message["kind"], message["value"], message["limits"]
            )
            send(answers, outcome | {"number": message["number"]})


def main() -> None:
    """Answer until standard input ends."""
    requests = io.FileIO(0)
    answers = io.FileIO(os.dup(1), "wb")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    forks = hasattr(os, "fork")
    if hasattr(os, "nice"):
        os.nice(5)  # steps go first
    send(answers, {"forks": forks})
    with suppress(EOFError, BrokenPipeError):
        if forks:
            _Trials(requests, answers).run()
        else:
            _one_by_one(requests, answers)


if __name__ == "__main__":
    main()
