"""Grammars are tried in a process of their own first: one that crashes the compiler of grammars, or takes too long or too much, ends that process alone.

It starts once for all engines of this process, when grammars are first prepared, with llguidance alone, and starts anew when it has died.
Where it cannot be started grammars are compiled untried, which the log says once.
"""

import atexit
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent import futures
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from itertools import count
from typing import Any

from polydraft.engine.grammar_process import TOO_SLOW, receive, send
from polydraft.engine.grammar_tokenizer import Vocabulary

log = logging.getLogger("polydraft.engine")
COMMAND = [sys.executable, "-m", "polydraft.engine.grammar_process"]
WAITING_SECONDS = 30.0
"""For an answer, on a machine that does much else; a trial has two seconds of CPU time."""
ATTEMPTS = 3
MOST_VOCABULARIES = 4
"""That the process holds; 150,000 tokens take 70 MB there."""


class _Process:
    """One process, until it dies. answers: by number of a trial; one that it died of gets None."""

    def __init__(self) -> None:
        shared = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "MALLOC_ARENA_MAX": "1",
        }  # arenas of threads count as memory
        self.process = subprocess.Popen(
            COMMAND,
            env=os.environ | shared,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is ours
        )
        self.known = OrderedDict[str, None]()
        self.waiting = dict[int, Future[dict[str, Any] | None]]()
        self.begun = threading.Event()
        self.forks: bool | None = None
        self.ended = False
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="polydraft-grammar-trial", daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with suppress(EOFError, OSError, ValueError, pickle.UnpicklingError):
            self.forks = receive(self.process.stdout)["forks"]
            self.begun.set()
            while True:
                answer = receive(self.process.stdout)
                with self._lock:
                    future = self.waiting.pop(answer["number"], None)
                if future is not None:
                    future.set_result(answer)
        with self._lock:
            self.ended = True
            unanswered = list(self.waiting.values())
            self.waiting.clear()
        self.begun.set()
        for future in unanswered:
            future.set_result(None)

    def ask(
        self, vocabulary: Vocabulary, number: int, message: dict[str, Any]
    ) -> "Future[dict[str, Any] | None]":
        """Of a trial; from one thread at a time."""
        future = Future[dict[str, Any] | None]()
        with self._lock:
            if not self.ended:
                self.waiting[number] = future
        if self.ended:
            future.set_result(None)
            return future
        with suppress(OSError, ValueError):  # it has died, which `_listen` learns
            self.learn(vocabulary)
            self._send({"what": "trial", "vocabulary": vocabulary.name, "number": number, **message})
        return future

    def learn(self, vocabulary: Vocabulary) -> None:
        """Give it a vocabulary that it has not."""
        if vocabulary.name not in self.known:
            parts = {
                "tokens": vocabulary.tokens,
                "special_ids": vocabulary.special_ids,
                "stop_ids": vocabulary.stop_ids,
            }
            self._send({"what": "vocabulary", "name": vocabulary.name, **parts})
        self.known[vocabulary.name] = None
        self.known.move_to_end(vocabulary.name)
        while len(self.known) > MOST_VOCABULARIES:
            self._send({"what": "forget", "name": self.known.popitem(last=False)[0]})

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        send(self.process.stdin, message)

    def end(self) -> None:
        """It and its forks."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1 if self.ended else 0)
        with suppress(OSError, ProcessLookupError):
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                stream.close() if stream is not None else None


class Trial:
    """Tries forms; from any thread.

    Example:
        >>> vocabulary = Vocabulary.of([bytes([byte]) for byte in range(256)] + [b"<end>"], [256], [256])
        >>> shared_trial().outcome(vocabulary, "regex", "a|b", {})["text"]
        '{"grammars":[{"name":"regex","json_schema":null,"lark_grammar":"start: /a|b/"}],"max_tokens":null}'
        >>> shared_trial().outcome(vocabulary, "regex", "(", {})["refusal"][:60]
        'structured_outputs.regex was given, which cannot be followed'
    """

    def __init__(self) -> None:
        self._process: _Process | None = None
        self._lock = threading.Lock()
        self._numbers = count()
        self._one_at_a_time = threading.Lock()
        self._is_missing = False

    def begin(self, vocabulary: Vocabulary) -> None:
        """Start the process, which learns a vocabulary meanwhile; nobody waits for that."""
        threading.Thread(
            target=self._begin, args=(vocabulary,), name="polydraft-grammar-begin", daemon=True
        ).start()

    def _begin(self, vocabulary: Vocabulary) -> None:
        with self._lock:
            process = self._running()
            if process is not None:
                with suppress(OSError, ValueError):
                    process.learn(vocabulary)

    def _running(self) -> _Process | None:
        if self._process is not None and self._process.ended:
            self._process.end()
            if self._process.forks is None:
                self._miss(f"it ended with {self._process.process.returncode}")
            self._process = None
        if self._process is None and not self._is_missing:
            try:
                self._process = _Process()
            except (OSError, ValueError) as error:
                self._miss(str(error))
        return self._process

    def _miss(self, reason: str) -> None:
        self._is_missing = True
        log.warning(
            "the process that tries grammars cannot be started, so they are compiled untried: %s", reason
        )

    def outcome(self, vocabulary: Vocabulary, kind: str, value: Any, limits: Any) -> dict[str, Any] | None:
        """What comes of a form: its "text" with "bytes" and "seconds" of compiling it, its "refusal", or the "failure" of the trial.

        None where there is no process.
        """
        message = {"kind": kind, "value": value, "limits": limits}
        for _ in range(ATTEMPTS):
            with self._lock:
                process = self._running()
            if process is None:
                return None
            process.begun.wait(WAITING_SECONDS)
            with nullcontext() if process.forks else self._one_at_a_time:
                answer = self._answer(process, vocabulary, message)
            if answer is not None:
                return answer
            if process.forks is False:
                return {"failure": "it crashes the compiler of grammars"}
        return {
            "failure": "the process that tries it was ended each time"
        }  # by another: with forks it compiles nothing itself

    def _answer(
        self, process: _Process, vocabulary: Vocabulary, message: dict[str, Any]
    ) -> dict[str, Any] | None:
        """None where the process has died of it."""
        with self._lock:
            future = process.ask(vocabulary, next(self._numbers), message)
        try:
            return future.result(WAITING_SECONDS)
        except futures.TimeoutError:
            process.end()
            return {"failure": TOO_SLOW}

    def end(self) -> None:
        """The process, if it runs."""
        with self._lock:
            if self._process is not None:
                self._process.end()
                self._process = None


_shared = Trial()


def shared_trial() -> Trial:
    """Of all engines of this process."""
    return _shared


def _renew() -> None:
    """In a fork: the other process answers the parent."""
    global _shared
    _shared = Trial()


def _end() -> None:
    _shared.end()


atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
