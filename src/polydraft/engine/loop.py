"""Sequences join and leave between steps: a scheduler over slots, first come, first served.

`add_request`, `step` and `abort_request` are all that a server needs; `generate` and `stream` are faces on them.
The committed token ids are the one truth: after any interruption inside a step the sequences concerned are prefilled
again from them, so that no cache can hold a token that was not emitted.

Threads: all methods may be called from any thread at any time. `add_request` and `abort_request` only ask, in a queue that the
next step drains in order first; nothing else touches a sequence while a step runs. Steps run one at a time, a
second caller waits for the first. Every output is returned by one call of `step`.

Failures: a request whose parameters, logits or stop conditions fail at run time ends with `finish_reason="error"`, what it emitted
stays, and the others of its step get the very same tokens; a drafter that fails is dealt with in `drafter_state`. Where the target
itself fails, the step raises and what ran waits again; `isolate` then finds those that fail alone.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

from polydraft.core import Decoding, Drafter, Request, Target, Verifier
from polydraft.core.params import ConstraintSource, StructuredOutputs
from polydraft.engine.admission import Admission, Arrivals, Opening
from polydraft.engine.joining import Joining
from polydraft.engine.output import Outbox, StepOutput
from polydraft.engine.parts import check_decoding
from polydraft.engine.reader import Reader, StepTime
from polydraft.engine.roster import Leaving, Roster
from polydraft.engine.sample_text import sample_ids, sample_prompts
from polydraft.engine.seats import Seats
from polydraft.engine.sequence import Sample, Sequence, TokenLogprob, alike
from polydraft.engine.shared_step import Clocks, SharedStep
from polydraft.engine.speculation import PLAIN, Menu, Speculation
from polydraft.engine.step import Stepper
from polydraft.engine.texts import PIECE, Embedding, Likelihood, Mean, TextQueue, Unscored
from polydraft.engine.ties import check_margin
from polydraft.errors import IncompatibleError
from polydraft.models.prefix_cache import PrefixCache
from polydraft.numerics.compile_time import working
from polydraft.numerics.start_code import StartCode
from polydraft.policy.fixed import Policy
from polydraft.policy.measuring import Interrupted
from polydraft.policy.measuring import clock as pricing_clock
from polydraft.policy.rehearsal import Rehearsal, Rehearsed, can_rehearse, short_requests

MOMENT = 0.02
"""Seconds that a step waits for drafts to be compiled where nothing else is to do; requests that come meanwhile begin after it."""


class Loop:
    """Continuous batching over the target's slots.

    target, menu: the parts of a step, already checked against each other.
    tokenizer: None to work on token ids only.  eos_token_ids: ids that end a text.
    tie_margin: see `ties`; None = off.
    decoding: what is sampled, where it is not each request's sampling parameters alone; see `core.Decoding`.
    teaching: whether drafters learn from finished outputs; not where steps are only measured.
    keep_prefixes: whether what was read stays in slots for requests that begin with the same tokens, such as the next turn of a chat;
        not where prompts are measured.
    prefix_cache_bytes: most bytes of KV cache entries that stay, beside the slots, of texts whose slots were taken for others; 0: none.
    max_step: seconds of a step, to which the pieces of joining prompts are cut, as drafts are by the policy.
    clock: of the seconds that steps take, by default the wall's, and for what a policy learns that of `polydraft.policy.measuring`; it stands still while
        functions are compiled.
    """

    def __init__(
        self,
        target: Target,
        menu: Menu,
        *,
        tokenizer: Any = None,
        eos_token_ids: Seq[int] = (),
        tie_margin: float | None = None,
        decoding: Decoding | None = None,
        clock: Callable[[], float] | None = None,
        teaching: bool = True,
        keep_prefixes: bool = False,
        prefix_cache_bytes: int = 0,
        max_step: float = inf,
    ) -> None:
        _check_logits(target, tie_margin, decoding)
        self.tie_margin = tie_margin
        self.target = target
        self.menu = menu
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self._clocks = Clocks(working(clock or perf_counter), working(clock or pricing_clock(target)))
        self._seats = Seats(target, decoding, keep_prefixes, prefix_cache_bytes)
        self.decoding = decoding
        second = self._seats.second
        self._admission = Admission(target, tokenizer, self.eos_token_ids, menu, decoding, second)
        self._reader = Reader(target, self._clocks.steps, max_step, is_single=second is None)
        self._arrivals = Arrivals(self._clocks.steps)
        self._expected = 1
        self._roster = Roster()
        self._outbox = Outbox()
        self._opening = Opening(target, menu)
        self._leaving = Leaving(self._roster, self._seats, self._outbox, teaching)
        self._shared_step = SharedStep(
            self._stepper(), self._clocks, self._reader, self._roster, self._leaving, self._outbox
        )
        self._texts = TextQueue(target, self._seats)
        self._joining = Joining(self._roster, self._seats, self._opening, self._reader, self._texts)
        self._stepping = threading.Lock()
        self.start_code: StartCode | None = None

    def _stepper(self) -> Callable[..., Stepper]:
        """Makes the steps of a way to draft."""
        return partial(
            Stepper,
            self.target,
            stop_ids=frozenset(self.eos_token_ids),
            tie_margin=self.tie_margin,
            decoding=self.decoding,
            second=self._seats.second,
        )

    @property
    def drafter(self) -> Drafter | None:
        """Of the requests that name none."""
        return self.menu.default.drafter

    @property
    def verifier(self) -> Verifier:
        """Of the requests that name neither drafter nor verifier."""
        return self.menu.default.verifier

    @property
    def policy(self) -> Policy:
        """Of the requests that name neither drafter nor verifier; another one holds for those that come."""
        return self.menu.default.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.menu.decide_by(policy)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to do or to return."""
        return bool(self._roster or self._outbox or self._texts)

    @property
    def num_running(self) -> int:
        """Samples that have a slot."""
        return len(self._roster.running)

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return self._seats.slots.num_free

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """KV cache entries that outlive their slots; None where the target cannot copy them."""
        return self._seats.slots.prefix_cache

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a slot, or to be taken in."""
        return self._roster.num_waiting

    def add_request(self, request: Request) -> Sample:
        """Queue one sample of a request, from any thread; it joins at the next step.

        Returns:
            the sample, which fills as it runs.

        Raises:
            IncompatibleError: a budget that the drafter does not draw, or that the verifier is not exact for; such a verifier; a form of the
                output that cannot be had here.
            UnknownNameError: a drafter that the engine was not built with, or no verifier.
            InvalidInputError: ids outside the vocabulary, bans that leave no token, stop strings without a tokenizer, a wrong grammar.
            CapacityError: the prompt, or the prompt and `max_tokens`, does not fit the context.
            BusyError: as many samples wait as may, see `roster`.
        """
        self._roster.check_waiting(request.id)
        sequence = self._admission.sequence(request)
        self._roster.asked.append(sequence)
        return sequence.sample

    def compile_grammar(self, wanted: StructuredOutputs, *, store: bool = True) -> ConstraintSource:
        """A form, ready to be the `structured_outputs` of requests, which may take a second; from any thread. store: for those that ask for it again.

        Raises:
            InvalidInputError, IncompatibleError: a form that is wrong, or cannot be had here.
        """
        return self._admission.grammars().compiled(wanted, store=store)

    def prepare_grammars(self) -> None:
        """Make what all grammars need of the tokenizer: of a large vocabulary 2 s in which no other thread runs; call it while nobody waits.

        Where requests run, or no grammar can be followed here, it does nothing.
        """
        if not self.has_unfinished_requests:
            with suppress(IncompatibleError):
                self._admission.grammars()

    def embed(self, token_ids: Seq[int]) -> "Future[Embedding]":
        """Queue a text, from any thread; steps read it in pieces, and give the mean of the target's last states, after the final norm, of all tokens.

        Raises:
            IncompatibleError, InvalidInputError, CapacityError, BusyError: see `texts.TextQueue.add`.
        """
        return self._texts.add(Mean(token_ids))

    def likelihood(self, token_ids: Seq[int], top: int = 0) -> "Future[list[TokenLogprob | None]]":
        """Queue a text, from any thread; steps read it in pieces, and give the log-probability of each token behind those before it, None of the first.

        They are those of the target's own logits, whatever is sampled from. A request that begins with this text finds it read.
        top: most likely alternatives to give beside each.

        Raises:
            IncompatibleError, InvalidInputError, CapacityError, BusyError: see `texts.TextQueue.add`.

        Example:
            >>> from polydraft import Engine
            >>> engine = Engine.embedded()
            >>> future = engine.likelihood(engine.encode("import os"))
            >>> while not future.done():
            ...     _ = engine.step()
            >>> [x if x is None else round(x.logprob, 1) for x in future.result()]
            [None, -3.9]
        """
        return self._texts.add(Likelihood(token_ids, top))

    def hold(self, token_ids: Seq[int]) -> "Future[None]":
        """Queue a text, from any thread; steps read it in pieces, and a request that begins with it finds it read, where prefixes are kept.

        Raises:
            InvalidInputError, CapacityError, BusyError: see `texts.TextQueue.add`.
        """
        return self._texts.add(Unscored(token_ids))

    def abort_request(self, request_id: str) -> None:
        """End all samples of a request, from any thread, before the next step; what was emitted stays. Unknown ids are ignored.

        That step returns one last output for each sample that had not finished.
        """
        self._roster.asked.append(request_id)

    def abort_all(self) -> None:
        """The same for every request that was added before."""
        self._roster.abort_all()
        self._texts.cancel()

    def discard(self, request_ids: Iterable[str]) -> None:
        """Abort requests whose outputs nobody reads: their slots are free at once, unless a step is running: then before the next.

        It never waits: a generator that is collected may end inside a step of its own thread.
        """
        gone = set(request_ids)
        self._roster.asked.extend(gone)
        if self._stepping.acquire(blocking=False):
            try:
                self._roster.take_in(self._leaving.abort)
                self._outbox.drop(gone)
            finally:
                self._stepping.release()

    def measure(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Measure costs that are missing, for this engine and the next ones of these models; call it while nobody waits, such as after the last answer.

        It ends when a request comes, or when it is `stopped`, which is asked before each forward pass; the next call measures again.
        Where there is nothing to measure, or requests run, or drafts are being compiled, it does nothing.

        Example:
            >>> from polydraft import Engine
            >>> engine = Engine.embedded()
            >>> engine.measure()
            >>> engine.policy.profile.costs.rows(1) > 0
            True
        """
        with self._stepping:
            if self.has_unfinished_requests or self.menu.is_compiling:
                return
            with suppress(Interrupted):
                for speculation in self.menu.unmeasured:
                    self._measure(speculation, lambda: bool(self._roster.asked or self._texts) or stopped())

    def _measure(self, chosen: Speculation, stopped: Callable[[], bool] = lambda: False) -> None:
        """Costs of drafts, by an idle target whose code is compiled; see `costs.measured`."""
        if chosen.drafter is None or not chosen.unmeasured:
            return
        parts = self.target, chosen.drafter, chosen.verifier
        with self._seats.idle() as slots:
            speculation = chosen if self.decoding is None else PLAIN
            prompts = sample_prompts(self.tokenizer)
            rehearse = partial(rehearsed, self.target, speculation, prompts, stopped)
            chosen.policy.measure(*parts, rehearse, slots, stopped, sample_ids(self.tokenizer))

    def _step_running(self, riding: Mapping[Sequence, int]) -> list[StepTime]:
        """A step of all that is read, those that are drafted for alike together. riding: tokens of others that are read in the first."""
        took = list[StepTime]()
        for chosen, group in alike([s for s in self._roster.running if not s.filling]):
            beside = {} if took else riding
            took.append(self._shared_step(chosen, group, beside, self._expected))
        if took:
            self._reader.learn(took, sum(riding.values()))
            self._keep()
        return took

    def step(self) -> list[StepOutput]:
        """One step for everything that runs; an empty list when nothing is left to do."""
        with self._stepping:
            roster = self._roster
            roster.take_in(self._leaving.abort)
            try:
                self._leaving.preempt()
                self._expected = self._arrivals.expect(
                    len(roster.running) + min(len(roster.waiting), self.num_free)
                )
                for s in self._opening.resume(roster.running, self._expected):
                    self._reader.join(s)
                riding = self._joining.admit(self._expected, self._measure)
                took = self._step_running(riding)
                self._texts.step(self._reader.room() if took else PIECE)
                if not (took or roster.running or self._outbox) and any(
                    map(self._opening.awaits_drafts, roster.waiting)
                ):
                    self.menu.await_drafts(MOMENT)
            except BaseException:
                self._leaving.interrupt()
                raise
            return self._outbox.take()

    def _keep(self) -> None:
        """Where all answers are there, store what their steps have shown: of costs that were not measured, and of code that a start calls."""
        if self._roster:
            return
        default = self.menu.default
        if default.unmeasured and default.drafter is not None:
            default.policy.store_costs(self.target, default.drafter, default.verifier)
        if self.start_code is not None:
            self.start_code.note()

    def isolate(self) -> list[StepOutput]:
        """After a step that raised: each sequence that it interrupted takes one step alone; one that raises again ends with an error.

        The others wait, as they do after the failure, and get the very same tokens.
        """
        with self._stepping:
            for s in self._roster.suspects():
                try:
                    self._joining.admit(self._expected, self._measure)
                    while s.filling:
                        self._joining.admit(self._expected, self._measure)
                    self._shared_step(s.speculation, [s], {}, self._expected)
                except Exception as error:
                    self._leaving.interrupt()
                    self._leaving.fail(s, error)
                else:
                    self._leaving.interrupt()
            return self._outbox.take()


def rehearsed(
    target: Target, chosen: Speculation, prompts: Seq[Seq[int]], stopped: Callable[[], bool] = lambda: False
) -> Rehearsed:
    """What short answers of an idle target show, decoded plainly and with drafts; see `policy.rehearsal`.

    Raises:
        Interrupted: where it is `stopped`.
    """
    plain = Rehearsal(0)
    drafts = Rehearsal()
    drafted = chosen.drafter is not None and can_rehearse(chosen.drafter, chosen.verifier)
    for speculation in [replace(PLAIN, policy=plain), *([replace(chosen, policy=drafts)] if drafted else [])]:
        loop = Loop(target, Menu(target, speculation), clock=pricing_clock(target), teaching=False)
        for request in short_requests(prompts, target.max_model_len):
            loop.add_request(request)
            while loop.has_unfinished_requests:
                if stopped():
                    loop.abort_all()
                    loop.step()
                    raise Interrupted
                loop.step()
    return Rehearsed(plain.seconds, drafts.seconds, drafts.rates) if drafted else Rehearsed(plain.seconds)


def _check_logits(target: Target, tie_margin: float | None, decoding: Decoding | None) -> None:
    """Raise IncompatibleError where the target cannot serve these, or not both."""
    check_margin(target, tie_margin)
    if decoding is None:
        return
    check_decoding(target, decoding)
    if tie_margin is not None:
        raise IncompatibleError(
            "tie_margin was given beside a decoding method; it knows the target's own logits only. Leave one out."
        )
