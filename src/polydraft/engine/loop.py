"""Sequences join and leave between steps: a scheduler over slots, first come, first served.

`add_request`, `step` and `abort_request` are all that a server needs; `generate` and `stream` are faces on them.
The committed token ids are the one truth: after any interruption inside a step the sequences concerned are prefilled
again from them, so that no cache can hold a token that was not emitted.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from polydraft import sampling
from polydraft.compile_time import working
from polydraft.core import Drafter, Request, SamplingParams, Target, Verifier
from polydraft.engine import drafting
from polydraft.engine.plan import Plan
from polydraft.engine.sequence import Origin, Sample, Sequence, TokenLogprob
from polydraft.engine.stats import Stopwatch
from polydraft.engine.step import Round, Stepper
from polydraft.engine.stopping import Stopper
from polydraft.engine.ties import check_margin
from polydraft.errors import CapacityError, InvalidInputError

__all__ = ["Loop", "StepOutput"]


@dataclass(frozen=True)
class StepOutput:
    """What one step gave one sample: new tokens with their origins, the text that became certain, and its state so far."""

    request_id: str
    token_ids: list[int]
    origins: list[Origin]
    text: str
    sample: Sample

    @property
    def finished(self) -> bool:
        return self.sample.finish_reason is not None


class Loop:
    """Continuous batching over the target's slots.

    target, drafter, verifier, plan: the parts of a step, already checked against each other.
    tokenizer: None to work on token ids only.  eos_token_ids: ids that end a text.
    tie_margin: see `ties`; None = off.
    clock: of the seconds that steps take; it stands still while functions are compiled.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        verifier: Verifier,
        plan: Plan,
        *,
        tokenizer: Any = None,
        eos_token_ids: Seq[int] = (),
        tie_margin: float | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        check_margin(target, tie_margin)
        self.tie_margin = tie_margin
        self.target, self.drafter, self.verifier, self.plan = target, drafter, verifier, plan
        self.tokenizer, self.eos_token_ids, self._clock = tokenizer, tuple(eos_token_ids), working(clock)
        self._free = list(range(target.max_num_seqs))[::-1]
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._source = "" if drafter is None else drafter.info.name

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._running)

    def add_request(self, request: Request) -> None:
        """Queue one sample of a request.

        Raises:
            InvalidInputError: ids outside the vocabulary, or stop strings without a tokenizer.
            CapacityError: the prompt, or the prompt and `max_tokens`, does not fit the context.
        """
        self._check(request)
        params = request.params
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(self.eos_token_ids))
        room = self.target.max_model_len - len(request.prompt_token_ids)
        stopper = Stopper(
            self.tokenizer,
            request.prompt_token_ids,
            stop_ids=stop_ids,
            stop_strings=params.stop,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )
        sample = Sample(request.sample, request.seed, logprobs=None if params.logprobs is None else [])
        sample.stats.prompt_tokens = len(request.prompt_token_ids)
        self._waiting.append(
            Sequence(request, stopper, sample, list(request.prompt_token_ids), drafting=self.drafter is not None)
        )

    def _check(self, request: Request) -> None:
        prompt, params = request.prompt_token_ids, request.params
        V, longest = self.target.vocab_size, self.target.max_model_len
        bad = next((t for t in prompt if not 0 <= t < V), None)
        if bad is not None:
            raise InvalidInputError(
                f"token id {bad} was given in the prompt of {request.id!r}; expected 0 <= id < {V}. Use the target's own tokenizer."
            )
        sampling.check_vocabulary(params, V)
        if params.stop and self.tokenizer is None:
            raise InvalidInputError(
                "stop strings were given without a tokenizer; use stop_token_ids, or give the engine a tokenizer."
            )
        if len(prompt) >= longest:
            raise CapacityError(
                f"a prompt of {len(prompt)} tokens was given; the context holds {longest}, so it may have at most {longest - 1}. Shorten it."
            )
        if params.max_tokens is not None and len(prompt) + params.max_tokens > longest:
            raise CapacityError(
                f"a prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} were given; the context holds {longest}. "
                f"Use max_tokens <= {longest - len(prompt)} or shorten the prompt."
            )

    def abort_request(self, request_id: str) -> list[StepOutput]:
        """End all samples of a request now; what was emitted stays. Unknown ids are ignored.

        Returns:
            one last output for each sample that was not finished.
        """
        gone = [s for s in (*self._waiting, *self._running) if s.request.id == request_id]
        for s in gone:
            s.sample.finish_reason = "abort"
            self._leave(s)
        return [StepOutput(request_id, [], [], s.stopper.take(), s.sample) for s in gone]

    def _leave(self, sequence: Sequence) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
        self._evict(sequence)

    def _evict(self, sequence: Sequence) -> None:
        """Take a sequence off its slot; what it emitted stays with it."""
        if sequence.slot is not None:
            slot, sequence.slot = sequence.slot, None
            self._free.append(slot)
            self.target.release([slot])
        if self.drafter is not None:
            drafting.release(self.drafter, [sequence])

    def _admit(self) -> None:
        """Move waiting sequences into free slots and fill their caches with all committed tokens but the last."""
        new: list[Sequence] = []
        while self._waiting and self._free:
            s = self._waiting.popleft()
            s.slot = self._free.pop()
            self._running.append(s)
            new.append(s)
        if not new:
            return
        watch = Stopwatch(self._clock)
        with watch.phase("prefill"):
            behind = [(s.slot, s.token_ids[:-1]) for s in new if s.slot is not None and len(s.token_ids) > 1]
            if behind:
                self.target.prefill([slot for slot, _ in behind], [ids for _, ids in behind])
            if self.drafter is not None:
                drafting.start(self.drafter, new)
        _share(new, watch.stop())

    def step(self) -> list[StepOutput]:
        """One round for everything that runs; an empty list when nothing is left to do."""
        try:
            self._admit()
            return self._round(list(self._running)) if self._running else []
        except BaseException:
            for s in self._running[::-1]:
                self._evict(s)
                self._waiting.appendleft(s)
            self._running.clear()
            raise

    def _round(self, sequences: list[Sequence]) -> list[StepOutput]:
        stop_ids = frozenset(self.eos_token_ids)
        parts = self.target, self.drafter, self.verifier, self.plan, stop_ids, self.tie_margin
        done = Stepper(*parts, clock=self._clock)(sequences)
        start = self._clock()
        outputs = [self._emit(b, s, done) for b, s in enumerate(sequences)]
        for s in sequences:
            if s.finished:
                self._leave(s)
        done.seconds["other"] += self._clock() - start
        _share(sequences, done.seconds)
        return outputs

    def _emit(self, b: int, s: Sequence, done: Round) -> StepOutput:
        """Append the round's tokens up to a stop, with text, origins and log-probabilities."""
        nodes, tokens = done.nodes[b], done.tokens[b]
        branch, drafted = _branch(done, b), len(tokens) - 1
        sources = (getattr(s.state, "credit", None) or [self._source] * drafted)[:drafted]
        origins = [*(Origin(source, branch) for source in sources), Origin("target")]
        kept = 0
        for token in tokens:
            s.stopper.push(token)
            kept += 1
            if s.stopper.stop:
                break
        s.sample.stats.cut_off(len(tokens) - kept)
        if s.sample.logprobs is not None:
            s.sample.logprobs += _logprobs(s.request.params, done, b, nodes[:kept], tokens[:kept])
        s.token_ids += tokens[:kept]
        s.sample.token_ids += tokens[:kept]
        s.sample.origins += origins[:kept]
        s.sample.text = s.stopper.text
        if s.sample.stats.seconds_to_first_token is None:
            s.sample.stats.seconds_to_first_token = perf_counter() - s.arrival
        if s.stopper.stop:
            s.sample.finish_reason, s.sample.stop_reason = s.stopper.stop.finish_reason, s.stopper.stop.stop_reason
        return StepOutput(s.request.id, tokens[:kept], origins[:kept], s.stopper.take(), s.sample)


def _branch(done: Round, b: int) -> int:
    """Which child, in draw order, the accepted path takes where the tree first branches on its way."""
    parents = done.parents[b]
    parted = next((n for n in done.nodes[b][1:] if parents.count(parents[n]) > 1), 0)
    return parents[:parted].count(parents[parted])


def _share(sequences: Seq[Sequence], seconds: dict[str, float]) -> None:
    """Book a step's seconds on its sequences, equally."""
    for s in sequences:
        for phase, value in seconds.items():
            s.sample.stats.seconds[phase] += value / len(sequences)


def _logprobs(params: SamplingParams, done: Round, b: int, nodes: list[int], tokens: list[int]) -> list[TokenLogprob]:
    """Log-probabilities of the emitted tokens and of the top alternatives, from raw logits or the processed law."""
    if params.logprobs_mode == "processed":
        rows = done.probs[b, nodes].double().log()
    else:
        rows = torch.log_softmax(done.scores.logits[b, nodes].double(), -1)
    k = min(params.logprobs or 0, rows.shape[-1])
    values, ids = rows.topk(k, -1)
    own = rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].tolist()
    return [
        TokenLogprob(token, logprob, dict(zip(top, tops, strict=True)))
        for token, logprob, top, tops in zip(tokens, own, ids.tolist(), values.tolist(), strict=True)
    ]
