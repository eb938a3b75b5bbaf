"""Sequences join and leave between steps: a scheduler over slots, first come, first served.

`add_request`, `step` and `abort_request` are all that a server needs; `generate` and `stream` are faces on them.
The committed token ids are the one truth: after any interruption inside a step the sequences concerned are prefilled
again from them, so that no cache can hold a token that was not emitted.

Threads: all methods may be called from any thread at any time. `add_request` and `abort_request` only ask, in a queue that the
next step drains in order before its round; nothing else touches a sequence while a step runs. Steps run one at a time, a
second caller waits for the first. Every output is returned by one call of `step`.

Failures: a request whose parameters, logits or stop rule fail at run time ends with `finish_reason="error"`, what it emitted
stays, and the others of its round keep their very tokens; a drafter that fails is dealt with in `drafting`. Where the target
itself fails, the step raises and what ran waits again; `isolate` then finds those that fail alone.
"""

import threading
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from math import inf
from time import perf_counter
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from polydraft.core import BlockCopying, Decoding, Drafter, EncoderDecoder, Request, SecondSequenceDecoding, Target, Verifier
from polydraft.core.params import ConstraintSource, SamplingParams, StructuredOutputs
from polydraft.engine import drafting
from polydraft.engine.admission import Admission
from polydraft.engine.arrivals import Arrivals
from polydraft.engine.embedding import PIECE, Embedding, Embeddings
from polydraft.engine.filling import Filling, RoundTime
from polydraft.engine.output import StepOutput, emit
from polydraft.engine.parts import check_decoding
from polydraft.engine.room import Room
from polydraft.engine.sample_text import sample_ids
from polydraft.engine.second import Second
from polydraft.engine.sequence import Sample, Sequence
from polydraft.engine.speculation import PLAIN, Menu, Speculation
from polydraft.engine.stats import Stopwatch
from polydraft.engine.step import Stepper
from polydraft.engine.ties import check_margin
from polydraft.errors import BusyError, GrammarError, IncompatibleError, PolydraftError, RequestWarning
from polydraft.models.prefix_cache import PrefixCache
from polydraft.models.slots import Slots
from polydraft.numerics.clock import clock as pricing_clock
from polydraft.numerics.compile_time import working
from polydraft.policy.costs import Interrupted
from polydraft.policy.fixed import Policy

MOST_WAITING = 65_536
"""Samples that may wait for a slot; `add_request` refuses more."""
MOMENT = 0.02
"""Seconds that a step waits for drafts to be compiled where nothing else is to do; requests that come meanwhile begin after it."""


class Inbox(Protocol):
    """Where the outputs of a request go, as steps give them."""

    def append(self, output: StepOutput, /) -> None: ...


class Loop:
    """Continuous batching over the target's slots.

    target, menu: the parts of a step, already checked against each other.
    tokenizer: None to work on token ids only.  eos_token_ids: ids that end a text.
    tie_margin: see `ties`; None = off.
    decoding: what is sampled, where it is not each request's sampling parameters alone; see `core.Decoding`.
    teaching: whether drafters learn from finished outputs; not where rounds are only measured.
    keep_prefixes: whether slots keep what was read for requests that begin with the same tokens, such as the next turn of a chat;
        not where prompts are measured.
    prefix_cache_bytes: most bytes of KV cache entries that stay, beside the slots, of texts whose slots were taken for others; 0: none.
    max_step: seconds of a step, to which the pieces of joining prompts are cut, as drafts are by the policy.
    clock: of the seconds that steps take, by default the wall's, and for what a policy learns that of `polydraft.numerics.clock`; it stands still while
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
        check_margin(target, tie_margin)
        if decoding is not None:
            check_decoding(target, decoding)
            if tie_margin is not None:
                raise IncompatibleError(
                    "tie_margin was given beside a decoding method; it knows the target's own logits only. Leave one out."
                )
        self.tie_margin = tie_margin
        self.target, self.menu = target, menu
        self.tokenizer, self.eos_token_ids = tokenizer, tuple(eos_token_ids)
        self._clock, self._pricing = working(clock or perf_counter), working(clock or pricing_clock(target))
        self._slots, self._teaching, self.decoding = Slots(target), teaching, decoding
        self._second = Second(decoding, target, self._slots) if isinstance(decoding, SecondSequenceDecoding) else None
        self._admission = Admission(target, tokenizer, self.eos_token_ids, self.menu, decoding, self._second)
        self._filling, self._arrivals, self._expected = Filling(target, self._clock, max_step), Arrivals(self._clock), 1
        shared = self._second is not None and self._second.model is target
        self._room = Room(target, self._slots, 2 if shared else 1)
        self._keeps = keep_prefixes and self._second is None and target.rolls_back and not isinstance(target, EncoderDecoder)
        if self._keeps and isinstance(target, BlockCopying):
            self._slots.prefix_cache = PrefixCache(target, prefix_cache_bytes)
        self._asked: deque[Sequence | str] = deque()
        """Sequences to add and ids of requests to abort, in the order of the calls."""
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._running: list[Sequence] = []
        self._steppers: WeakKeyDictionary[Speculation, Stepper] = WeakKeyDictionary()
        self._unfinished: dict[str, dict[Sequence, None]] = {}
        self._outputs: list[StepOutput] = []
        """Those that no call of `step` has returned yet."""
        self._interrupted: list[Sequence] = []
        """What ran in the last step that raised."""
        self._streams: dict[str, Inbox] = {}
        self._embeddings = Embeddings(target, self._slots)
        self._stepping = threading.Lock()

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
        """Of the requests that name neither drafter nor rule; another one holds for those that come."""
        return self.menu.default.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.menu.decide_by(policy)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a step has something to do or to return."""
        return bool(self._asked or self._outputs or self._waiting or self._running or self._embeddings)

    @property
    def num_running(self) -> int:
        """Samples that have a slot."""
        return len(self._running)

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return self._slots.num_free

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """KV cache entries that outlive their slots; None where the target cannot copy them."""
        return self._slots.prefix_cache

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a slot, or to be taken in."""
        return len(self._waiting) + sum(isinstance(entry, Sequence) for entry in list(self._asked))

    def add_request(self, request: Request) -> Sample:
        """Queue one sample of a request, from any thread; it joins at the next step.

        Returns:
            the sample, which fills as it runs.

        Raises:
            IncompatibleError: a budget that the drafter does not draw, or that the rule is not exact for; such a rule; a form of the
                output that cannot be had here.
            UnknownNameError: a drafter that the engine was not built with, or no rule.
            InvalidInputError: ids outside the vocabulary, bans that leave no token, stop strings without a tokenizer, a wrong grammar.
            CapacityError: the prompt, or the prompt and `max_tokens`, does not fit the context.
            BusyError: MOST_WAITING samples wait already.
        """
        if len(self._asked) + len(self._waiting) >= MOST_WAITING:
            raise BusyError(
                f"request {request.id!r} was given while {MOST_WAITING} samples wait, as many as may. "
                "Run some steps first, or split the call or its n."
            )
        sequence = self._admission.sequence(request)
        self._asked.append(sequence)
        return sequence.sample

    def compile_grammar(self, wanted: StructuredOutputs, *, keep: bool = True) -> ConstraintSource:
        """A form, ready to be the `structured_outputs` of requests, which may take a second; from any thread. keep: for those that ask for it again.

        Raises:
            InvalidInputError, IncompatibleError: a form that is wrong, or cannot be had here.
        """
        return self._admission.grammars().compiled(wanted, keep=keep)

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
            IncompatibleError, InvalidInputError, CapacityError, BusyError: see `embedding.Embeddings.add`.
        """
        return self._embeddings.add(token_ids)

    def abort_request(self, request_id: str) -> None:
        """End all samples of a request, from any thread, before the next step's round; what was emitted stays. Unknown ids are ignored.

        That step returns one last output for each sample that had not finished.
        """
        self._asked.append(request_id)

    def abort_all(self) -> None:
        """The same for every request that was added before."""
        ids = [a.request.id for a in list(self._asked) if isinstance(a, Sequence)]
        self._asked.extend({*ids, *list(self._unfinished)})
        self._embeddings.cancel()

    def discard(self, request_ids: Iterable[str]) -> None:
        """Abort requests whose outputs nobody reads: their slots are free at once, unless a step is running: then before the next.

        It never waits: a generator that is collected may end inside a step of its own thread.
        """
        gone = set(request_ids)
        self._asked.extend(gone)
        if self._stepping.acquire(blocking=False):
            try:
                self._take_in()
                self._outputs = [o for o in self._outputs if o.request_id not in gone]
            finally:
                self._stepping.release()

    def _take_in(self) -> None:
        """Do what was asked since the last step."""
        while self._asked:
            entry = self._asked[0]
            if isinstance(entry, Sequence):
                self._waiting[entry] = None
                self._unfinished.setdefault(entry.request.id, {})[entry] = None
            else:
                for s in list(self._unfinished.get(entry, ())):
                    self._end(s, "abort")
            self._asked.popleft()

    def _end(self, s: Sequence, finish_reason: str) -> None:
        """End a sequence from outside."""
        s.stopper.end(finish_reason)
        s.sample.text, s.sample.finish_reason = s.stopper.text, finish_reason
        self._give(StepOutput(s.request.id, [], [], s.stopper.take(), s.sample, True))
        self._leave(s, keep=finish_reason == "abort")

    def _fail(self, s: Sequence, error: Exception) -> None:
        s.sample.error = f"request {s.request.id!r}, sample {s.sample.index} failed: {error if isinstance(error, PolydraftError) else repr(error)}"
        s.sample.refused = isinstance(error, GrammarError)
        self._end(s, "error")
        warnings.warn(s.sample.error, RequestWarning, stacklevel=2)

    def _give(self, output: StepOutput) -> None:
        self._outputs.append(output)
        if (inbox := self._streams.get(output.request_id)) is not None:
            inbox.append(output)

    def _leave(self, s: Sequence, *, keep: bool = False) -> None:
        """A finished sequence gives back what it holds and is forgotten; one that was interrupted on its way may leave again.

        keep: its slot holds its tokens and nothing else, and may go on holding them.
        """
        self._evict(s, keep=keep)
        siblings = self._unfinished.get(s.request.id, {})
        siblings.pop(s, None)
        if not siblings:
            self._unfinished.pop(s.request.id, None)
        self._waiting.pop(s, None)
        if s in self._running:
            self._running.remove(s)
        if s.speculation.drafter is not None and self._teaching:
            drafting.teach(s.speculation.drafter, s)

    def _evict(self, s: Sequence, *, keep: bool = False) -> None:
        """Take a sequence off its slot; what it emitted stays with it."""
        s.filling = False
        if s.speculation.drafter is not None:
            drafting.release(s.speculation.drafter, [s])
        if s.slot is not None:
            slot, s.slot = s.slot, None
            held = s.token_ids[: int(self.target.lengths[slot])] if keep and self._keeps else ()
            self._slots.give_back(slot, held)
        if self._second is not None:
            self._second.leave(s)

    def _admit(self) -> dict[Sequence, int]:
        """Move waiting sequences into free slots and fill their caches with all committed tokens but the last, in pieces while others run.

        Returns how many tokens of which are left to the pass of this step's first round.
        """
        running, joining = any(not s.filling for s in self._running), list[Sequence]()
        while self._waiting and self._slots.num_free and (self._second is None or self._second.has_room):
            s = next((s for s in self._waiting if not self._awaits_drafts(s)), None)
            if s is None or not self._room.admits(s, self._running):
                break
            if self._follows_costs(s):
                if self._running or self._embeddings:
                    break
                self._measure(s.speculation)
            s.slot = self._slots.take(s.token_ids[:-1] if self._keeps else ())
            s.filling = True
            self._running.append(s)
            del self._waiting[s]
            joining.append(s)
            if s.sample.stats.seconds_waiting is None:
                s.sample.stats.seconds_waiting = perf_counter() - s.sample.stats.arrival
            if self._keeps:
                self._slots.holds(s.slot, s.token_ids)
            self._postpone(s)
            drafting.join(self.target, s.speculation.drafter, s)
            s.sample.stats.cached_tokens = int(self.target.lengths[s.slot]) if self._keeps else 0
            if self._second is not None:
                self._second.take(s)
            self._filling.join(s)
        if joining and isinstance(self.target, EncoderDecoder):
            watch = Stopwatch(self._clock)
            with watch.phase("prefill"):
                self.target.encode([s.slot for s in joining if s.slot is not None], [s.request.source_token_ids for s in joining])
            _share(joining, watch.stop())
        new = [s for s in self._running if s.filling]
        riding, all_new = dict[Sequence, int](), new
        if new and self._second is None:
            new, riding = self._filling.pieces(new) if running else (self._filling.piece(new), {})
        for s in all_new:
            s.sample.stats.read_tokens = int(self.target.lengths[s.slot])
        if not new:
            return riding
        watch = Stopwatch(self._clock)
        with watch.phase("prefill"):
            for chosen, group in _alike(new):
                drafting.fill(self.target, chosen.drafter, group)
            if self._second is not None:
                self._second.fill(new)
        _share(new, watch.stop())
        for s in new:
            s.filling = False
            s.sample.stats.read_tokens = s.sample.stats.prompt_tokens
        return riding

    def _follows_costs(self, s: Sequence) -> bool:
        """Whether the text of a request depends on costs that are missing: it is first in line, and waits until nothing runs and they are measured."""
        params, rule = s.request.params, s.speculation.verifier.info
        seeded = params.seed is not None and not params.greedy and s.request.budget is None and not rule.shared_noise
        return seeded and s.speculation.unmeasured

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
                    self._measure(speculation, lambda: bool(self._asked or self._embeddings) or stopped())

    def _measure(self, chosen: Speculation, stopped: Callable[[], bool] = lambda: False) -> None:
        """Costs of drafts, by an idle target whose code is compiled; see `costs.measured`."""
        if chosen.drafter is None or not chosen.unmeasured:
            return
        with ExitStack() as stack:
            slot = self._slots.take()
            stack.callback(self._slots.give_back, slot)
            second = slot
            if self._second is not None:
                second = self._second.slots.take()
                stack.callback(self._second.slots.give_back, second)
            parts = self.target, chosen.drafter, chosen.verifier
            chosen.policy.measure(
                *parts, lambda: step_overhead(self.target, stopped), (slot, second), stopped, sample_ids(self.tokenizer)
            )

    def _postpone(self, s: Sequence) -> None:
        """Join without drafts where those would not pay in the batch that is expected, so that no drafter reads the prompt for nothing."""
        drafter, policy = s.speculation.drafter, s.speculation.policy
        if s.postponed or s.held:
            s.drafting, s.postponed, s.held = True, 0, False
        if s.drafting and self._compiling(s):
            s.drafting, s.held = False, True
            return
        if drafter is not None and drafter.needs.hidden and s.drafting:
            s.drafting = policy.opens(s, self._expected)
            s.postponed = 0 if s.drafting else self._expected

    def _compiling(self, s: Sequence) -> bool:
        """Whether a request is to begin without drafts, whose code is being compiled."""
        return s.speculation is self.menu.default and self.menu.is_compiling

    def _awaits_drafts(self, s: Sequence) -> bool:
        """Whether a request waits while drafts are compiled, as its text depends on them or on their costs; those behind it do not."""
        params = s.request.params
        depends = s.request.budget is not None or (params.seed is not None and not params.greedy)
        return depends and (self._compiling(s) or (self._follows_costs(s) and self.menu.is_compiling))

    def _resume(self) -> None:
        """Draft for what began before its drafts were compiled, and for what joined a batch twice as large, where it pays to read it once more."""
        for s in [s for s in self._running if s.held and not s.filling and not self._compiling(s)]:
            reads_states = s.speculation.drafter is not None and s.speculation.drafter.needs.hidden
            s.drafting, s.held, s.postponed = not reads_states, False, 2 * self._expected if reads_states else 0
        for s in [s for s in self._running if s.postponed >= 2 * max(self._expected, 1) and not s.filling]:
            policy, s.postponed = s.speculation.policy, self._expected
            if policy.opens(s, self._expected, again=True):
                drafting.resume(self.target, s)

    def step(self) -> list[StepOutput]:
        """One round for everything that runs; an empty list when nothing is left to do."""
        with self._stepping:
            self._take_in()
            try:
                self._preempt()
                self._expected = self._arrivals.expect(len(self._running) + min(len(self._waiting), self._slots.num_free))
                self._resume()
                riding, took = self._admit(), list[RoundTime]()
                for chosen, group in _alike([s for s in self._running if not s.filling]):
                    took.append(self._round(chosen, group, {} if took else riding))
                if took:
                    self._filling.learn(took, sum(riding.values()))
                    self._keep()
                self._embeddings.step(self._filling.room() if took else PIECE)
                if not (took or self._running or self._outputs) and any(map(self._awaits_drafts, self._waiting)):
                    self.menu.await_drafts(MOMENT)
            except BaseException:
                self._put_back()
                raise
            outputs, self._outputs = self._outputs, []
            return outputs

    def _keep(self) -> None:
        """Where all answers are there, keep what their steps have shown of costs that were not measured."""
        default = self.menu.default
        if default.unmeasured and default.drafter is not None and not (self._running or self._waiting or self._asked):
            default.policy.keep(self.target, default.drafter, default.verifier)

    def _preempt(self) -> None:
        """Those that came last wait again, before the others, where all that runs has outgrown the KV cache."""
        for s in self._room.outgrown(self._running):
            self._running.remove(s)
            self._waiting[s] = None
            self._waiting.move_to_end(s, last=False)
            self._evict(s, keep=True)
        self._room.make(self._running)

    def _put_back(self) -> None:
        """All that runs waits again, before the others; what has finished leaves."""
        stopped, self._running = self._running, []
        self._interrupted = [s for s in stopped if not s.finished]
        for s in reversed(stopped):
            if not s.finished:
                self._waiting[s] = None
                self._waiting.move_to_end(s, last=False)
        with ExitStack() as every:
            for s in stopped:
                every.callback(self._leave if s.finished else self._evict, s)

    def isolate(self) -> list[StepOutput]:
        """After a step that raised: each sequence that it interrupted takes one step alone; one that raises again ends with an error.

        The others wait, as they do after the failure, and keep their very tokens.
        """
        with self._stepping:
            suspects, others = self._interrupted, self._waiting
            for s in suspects:
                if s not in others:
                    continue
                self._waiting = OrderedDict({s: None})
                try:
                    self._admit()
                    while s.filling:
                        self._admit()
                    self._round(s.speculation, [s], {})
                except Exception as error:
                    self._put_back()
                    self._fail(s, error)
                else:
                    self._put_back()
            waiting = OrderedDict((s, None) for s in suspects if s in others and not s.finished)
            self._waiting = OrderedDict({**waiting, **{s: None for s in others if s not in suspects}})
            self._interrupted = []
            outputs, self._outputs = self._outputs, []
            return outputs

    def _stepper(self, chosen: Speculation) -> Stepper:
        if chosen not in self._steppers:
            parts = self.target, chosen, frozenset(self.eos_token_ids), self.tie_margin, self.decoding, self._second
            self._steppers[chosen] = Stepper(*parts, clock=self._clock, pace=drafting.Pace())
        return self._steppers[chosen]

    def _round(self, chosen: Speculation, sequences: list[Sequence], riding: Mapping[Sequence, int]) -> RoundTime:
        """One round of sequences that are drafted for alike, with pieces of new ones in its pass."""
        began = self._pricing()
        chosen.policy.expect(self._expected, sum(riding.values()))
        done = self._stepper(chosen)(sequences, riding, beside=len(self._running) > 1)
        start = self._clock()
        failed = list(done.failed)
        for b, s in enumerate(done.sequences):
            try:
                output, failure = emit(done, b, s, chosen.source)
                self._give(output)
            except Exception as error:
                failure = error
            if failure is not None:
                failed.append((s, failure))
        for s, error in failed:
            self._fail(s, error)
        for s in done.sequences:
            if s.finished and s in self._running:
                self._leave(s, keep=True)
        done.seconds["other"] += self._clock() - start
        whole = sum(done.seconds.values()) - done.seconds["prefill"]
        took = RoundTime(done.num_scored + sum(riding.values()), done.seconds["scoring"], whole)
        self._filling.book(riding, done.seconds)
        _share(sequences, done.seconds)
        if done.sequences and not riding:
            share = (self._pricing() - began) / max(sum(done.seconds.values()), 1e-9)
            chosen.policy.time({phase: share * seconds for phase, seconds in done.seconds.items()})
        return took


def step_overhead(target: Target, stopped: Callable[[], bool] = lambda: False) -> float:
    """Seconds of a step of plain decoding beside its forward pass, of an idle target: of the second of two short requests.

    Raises:
        Interrupted: where it is `stopped`.
    """
    loop = Loop(target, Menu(target, PLAIN), clock=pricing_clock(target))
    params, stats = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True), None
    for number in range(2):
        stats = loop.add_request(Request(f"overhead-{number}", (1, 2, 3, 4), params, 0)).stats
        while loop.has_unfinished_requests:
            if stopped():
                loop.abort_all()
                loop.step()
                raise Interrupted
            loop.step()
    assert stats is not None
    return (stats.seconds["verifying"] + stats.seconds["other"]) / stats.steps


def _alike(sequences: Seq[Sequence]) -> list[tuple[Speculation, list[Sequence]]]:
    """Those that are drafted for alike, in order."""
    groups: dict[Speculation, list[Sequence]] = {}
    for s in sequences:
        groups.setdefault(s.speculation, []).append(s)
    return list(groups.items())


def _share(sequences: Seq[Sequence], seconds: dict[str, float]) -> None:
    """Book a step's seconds on its sequences, equally."""
    for s in sequences:
        for phase, value in seconds.items():
            s.sample.stats.seconds[phase] += value / len(sequences)
