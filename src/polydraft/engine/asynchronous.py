"""An engine in a thread of its own, for any number of coroutines: what a server is built on.

The thread steps while there is something to do and sleeps otherwise. Coroutines only ask, through the engine's queue: requests join and
leave between steps. Each stream has a mailbox of its own on its event loop, so nobody waits for a slow reader, and what it has
not read is at most what it asked for.

A step that raises is looked into: what it interrupted is run alone, the requests that fail alone end with `finish_reason="error"`, the
others go on (see `Loop.isolate`).
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, TypeVar

from polydraft.core.params import ConstraintSource, SamplingParams, StructuredOutputs
from polydraft.engine.api import Engine
from polydraft.engine.encoding import Prompt
from polydraft.engine.output import StepOutput
from polydraft.engine.prefixes import PrefixWriter
from polydraft.engine.sequence import Result, TokenLogprob
from polydraft.engine.texts import Embedding
from polydraft.errors import BusyError, ClosedError, InvalidInputError, PolydraftError

log = logging.getLogger("polydraft.engine")
T = TypeVar("T")
COMPILERS = 2
"""Threads that compile grammars; one grammar may take seconds, and another request's shall not wait for it."""
MOST_COMPILING = 64
"""Requests whose grammars are compiled or wait for that, at most."""
UNASKED_SECONDS = 1.0
"""Without a first request, behind which what grammars need is made: the first request of an agent has tools."""
CLOSED = "the engine takes no more requests: it was closed, or never entered. Use `async with`."


class _Mailbox(asyncio.Queue[StepOutput | None]):
    """Where the engine's thread puts what steps give one request, and None where it died; a loop that has ended wants nothing more."""

    def __init__(self) -> None:
        super().__init__()
        self._home = asyncio.get_running_loop()

    def append(self, output: StepOutput | None) -> None:
        with suppress(RuntimeError):
            self._home.call_soon_threadsafe(self.put_nowait, output)


class AsyncEngine:
    """Streams and results of an engine for coroutines; enter it to start its thread, leave it to end what runs.

    engine: nobody else may step it while this one is entered.
    max_waiting: samples that may wait for a slot, beyond which `BusyError` is raised.
    observe: told of every step, in the engine's thread: its outputs and the seconds that it took.

    Example:
        >>> async def main():
        ...     async with AsyncEngine(Engine.embedded()) as engine:
        ...         async for step in engine.stream("def add(a, b):\\n", SamplingParams(temperature=0, max_tokens=8)):
        ...             text = step.sample.text
        ...     return step.sample.finish_reason, len(step.sample.token_ids)
        >>> asyncio.run(main())
        ('length', 8)
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int = 256,
        observe: Callable[[Seq[StepOutput], float], None] | None = None,
    ) -> None:
        if max_waiting < 1:
            raise InvalidInputError(f"max_waiting={max_waiting} was given; expected at least 1.")
        self.engine = engine
        self.max_waiting = max_waiting
        self.observe = observe
        self._asked = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._prefixes = PrefixWriter(engine)
        self._mailboxes: set[_Mailbox] = set()
        self._compilers = ThreadPoolExecutor(COMPILERS, "polydraft-grammar")
        self._compiling = 0

    async def __aenter__(self) -> "AsyncEngine":
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="polydraft-engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def running(self) -> bool:
        """Whether requests are taken."""
        return self._thread is not None and self._thread.is_alive() and not self._closing

    async def close(self, seconds: float = 0) -> None:
        """Take no more requests, let those that are there finish for so long, abort the rest, and end the thread."""
        ended = self._closing
        self._closing = True
        until = perf_counter() + seconds
        while self.engine.has_unfinished_requests and perf_counter() < until:
            await asyncio.sleep(0.01)
        self.engine.abort_all()
        self._asked.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        if not ended:
            await asyncio.to_thread(self._prefixes.write)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        seconds: float | None = None,
        **asked: Any,
    ) -> AsyncGenerator[StepOutput, None]:
        """Yield what each step emits for one prompt; closing or cancelling it frees its slots before the next step.

        seconds: after which it ends with `finish_reason="abort"`.  asked: `budget`, `drafter`, `verifier` and `prediction`, see `core.Request`.
        A sample that fails ends with `finish_reason="error"` and `sample.error`.

        Raises:
            BusyError: as many samples wait as may.
            ClosedError: the engine is closed.
            InvalidInputError, CapacityError, IncompatibleError: as of `Engine.add_request`.
        """
        async with aclosing(self.stream_all([prompt], params, seconds=seconds, **asked)) as outputs:
            async for _, output in outputs:
                yield output

    async def stream_all(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        seconds: float | None = None,
        results: list[Result] | None = None,
        **asked: Any,
    ) -> AsyncGenerator[tuple[int, StepOutput], None]:
        """The same for several prompts, each output with the index of its own; they draw as the prompts of one `Engine.generate` do.

        results: gets that of each prompt once it waits, to look at before the first output.
        """
        async with aclosing(
            self._outputs(self.engine.numbered(prompts, params), seconds, asked, results)
        ) as outputs:
            async for result, output in outputs:
                yield result.index, output

    async def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        first_index: int = 0,
        seconds: float | None = None,
        **asked: Any,
    ) -> list[Result]:
        """The results that `Engine.generate` gives. A sample that fails ends with `finish_reason="error"`, the others go on.

        first_index: see `Engine.generate`.  seconds, asked, errors: see `stream`.
        """
        requests = self.engine.numbered(prompts, params, first_index)
        results = dict[int, Result]()
        async with aclosing(self._outputs(requests, seconds, asked)) as outputs:
            async for result, _ in outputs:
                results[result.index] = result
        return [results[index] for index, *_ in requests]

    async def embed(self, texts: Seq[Seq[int]]) -> list[Embedding]:
        """The mean of the last states of each text of token ids; see `Loop.embed`. Cancelling it leaves the rest unread."""
        return await self._read(texts, self.engine.embed)

    async def likelihoods(self, texts: Seq[Seq[int]], top: int = 0) -> list[list[TokenLogprob | None]]:
        """The log-probabilities of the tokens of each text; see `Loop.likelihood`. Cancelling it leaves the rest unread."""
        return await self._read(texts, partial(self.engine.likelihood, top=top))

    async def hold(self, texts: Seq[Seq[int]]) -> None:
        """Read texts for requests to come; see `Loop.hold`. Cancelling it leaves the rest unread."""
        await self._read(texts, self.engine.hold)

    async def _read(self, texts: Seq[Seq[int]], queue: Callable[[Seq[int]], "Future[T]"]) -> list[T]:
        if not self.running:
            raise ClosedError(CLOSED)
        waiting = list[Future[T]]()
        try:
            for ids in texts:
                waiting.append(queue(ids))
            self._asked.set()
            return [await asyncio.wrap_future(future) for future in waiting]
        except asyncio.CancelledError:
            if self._closing:
                raise ClosedError(CLOSED) from None
            raise
        finally:
            for future in waiting:
                future.cancel()
            self._asked.set()

    async def chat(
        self,
        messages: Seq[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        seconds: float | None = None,
        **asked: Any,
    ) -> Result:
        """The model's answer to a conversation, as `Engine.chat` gives it; seconds, asked, errors: see `stream`."""
        ids = await asyncio.to_thread(self.engine.encode_chat, messages)
        chat_params = self.engine.default_params(chat=True) if params is None else params
        return (await self.generate([ids], chat_params, seconds=seconds, **asked))[0]

    async def _outputs(
        self,
        requests: Seq[tuple[int, Prompt, SamplingParams]],
        seconds: float | None,
        asked: Mapping[str, Any],
        waiting: list[Result] | None = None,
    ) -> AsyncGenerator[tuple[Result, StepOutput], None]:
        """Of numbered prompts what steps give, each with the result that fills. waiting: gets the results once all of them are queued."""
        mailbox = _Mailbox()
        home = asyncio.get_running_loop()
        results = dict[str, Result]()
        unfinished = 0
        timer = None
        self._mailboxes.add(mailbox)
        try:
            compiled = await self._compiled(params for _, _, params in requests)
            self._check_waiting(sum(params.n for _, _, params in requests))
            for index, prompt, params in requests:
                result = self.engine.submit(prompt, compiled[id(params)], index, mailbox, **asked)
                results[result.id] = result
                unfinished += params.n
            if waiting is not None:
                waiting += results.values()
            self._asked.set()
            if seconds is not None:
                timer = home.call_later(seconds, self._abort, results)
            while unfinished:
                output = await mailbox.get()
                if output is None:
                    raise PolydraftError("the engine's thread has died; its log says why. Start it again.")
                unfinished -= output.finished
                yield results[output.request_id], output
        finally:
            self._mailboxes.discard(mailbox)
            if timer is not None:
                timer.cancel()
            for name in results:
                self.engine.forget(name)
            if unfinished:
                self._abort(results)

    async def _compiled(self, params: Iterable[SamplingParams]) -> dict[int, SamplingParams]:
        """By identity, with the forms of their outputs compiled."""
        compiled = dict[int, SamplingParams]()
        for request_params in params:
            if id(request_params) not in compiled:
                form = request_params.structured_outputs
                bound = form if not isinstance(form, StructuredOutputs) else await self.compile_grammar(form)
                compiled[id(request_params)] = (
                    request_params if bound is form else request_params.with_(structured_outputs=bound)
                )
        return compiled

    async def compile_grammar(self, wanted: StructuredOutputs) -> ConstraintSource:
        """A form, ready to be the `structured_outputs` of requests; see `compiling`.

        Raises:
            BusyError: as many forms wait as may.
            InvalidInputError, IncompatibleError: as of `Engine.compile_grammar`.
        """
        return await self.compiling(partial(self.engine.compile_grammar, wanted))

    async def compiling(self, work: Callable[[], T]) -> T:
        """What is returned by work on grammars, which a thread of a pool does; never what still waits when this is cancelled.

        Raises:
            BusyError: as much work waits as may.
        """
        if self._compiling >= MOST_COMPILING:
            raise BusyError(
                f"{self._compiling} grammars are being compiled, as many as may. Ask again later."
            )
        self._compiling += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._compilers, work)
        finally:
            self._compiling -= 1

    def _abort(self, names: Iterable[str]) -> None:
        for name in names:
            self.engine.abort_request(name)
        self._asked.set()

    def _check_waiting(self, wanted: int) -> None:
        if not self.running:
            raise ClosedError(CLOSED)
        waiting = self.engine.num_waiting
        if waiting + wanted > self.max_waiting + self.engine.num_free:
            raise BusyError(
                f"{wanted} samples were asked for while {waiting} wait and {self.engine.num_free} slots are free; {self.max_waiting} may wait. Ask again later."
            )

    def _run(self) -> None:
        answered = False
        try:
            self.engine.prepare_chats()
            while not self._closing or self.engine.has_unfinished_requests:
                self.engine.measure(lambda: self._closing)
                if not self._closing and (answered or not self._asked.wait(UNASKED_SECONDS)):
                    self.engine.prepare_grammars()
                self._asked.wait(None if self._closing else self._prefixes.write_if_due())
                self._asked.clear()
                while self.engine.has_unfinished_requests:
                    self._step()
                    answered = self._prefixes.changed = True
        finally:
            self._closing = True
            for mailbox in list(self._mailboxes):
                mailbox.append(None)

    def _step(self) -> None:
        start = perf_counter()
        try:
            outputs = self.engine.step()
        except Exception:
            log.exception("a step failed; what it interrupted is run alone")
            outputs = self.engine.isolate()
        for output in outputs:
            if output.sample.error:
                log.log(logging.INFO if output.sample.refused else logging.ERROR, "%s", output.sample.error)
        if self.observe is not None:
            self.observe(outputs, perf_counter() - start)
