"""What a request has to be to be taken: known ids, room in the context, and parts that are there; and whether it begins with drafts.

It begins without them while their code is compiled, and in a batch in which they do not pay. A text that depends on drafts, as a seed or a budget was
given, or on their costs, waits until these are there. The size of the batch is the one that is expected: clients that have their answers ask anew, one
after the other, and the first of them would see an empty batch.
"""

import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import exp
from typing import Any

from polydraft.core import Decoding, EncoderDecoder, Request, Target
from polydraft.core.params import MOST_SAMPLES, WHOLE_CONTEXT, ConstraintSource, StructuredOutputs
from polydraft.core.thinking import Thinking
from polydraft.engine import reading
from polydraft.engine.exact_outputs import ExactGrammar
from polydraft.engine.second import Second
from polydraft.engine.sequence import Sample, Sequence
from polydraft.engine.speculation import Menu
from polydraft.engine.stopping import Stopper
from polydraft.engine.structured import Grammars
from polydraft.engine.thoughts import BehindThoughts, BudgetOfThoughts, MarkTokens
from polydraft.errors import CapacityError, IncompatibleError, InvalidInputError, too_long
from polydraft.policy.fixed import check_draft
from polydraft.sampling import processing as sampling


class Admission:
    """From requests to sequences, in the thread of whoever asks. Arguments as of `Loop`."""

    def __init__(
        self,
        target: Target,
        tokenizer: Any,
        eos_token_ids: Seq[int],
        menu: Menu,
        decoding: Decoding | None,
        second: Second | None,
    ) -> None:
        self._target = target
        self._tokenizer = tokenizer
        self._eos = tuple(eos_token_ids)
        self._menu = menu
        self._decoding = decoding
        self._second = second
        self._grammars: Grammars | None = None
        self._lock = threading.Lock()

    def _stopper(self, request: Request, room: int) -> Stopper:
        """What ends its output. room: tokens that it may have at most."""
        params = request.params
        return Stopper(
            self._tokenizer,
            request.prompt_token_ids,
            stop_ids=frozenset() if params.ignore_eos else frozenset(self._eos),
            answer_stop_ids=frozenset(params.stop_token_ids),
            stop_strings=params.stop,
            max_tokens=params.max_tokens or room,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            thinking=params.thinking,
            include_stop=params.include_stop_str_in_output,
        )

    def sequence(self, request: Request) -> Sequence:
        """Errors as of `Loop.add_request`."""
        chosen = self._menu.find(request.drafter, request.verifier)
        self._check(request)
        if chosen.drafter is not None and request.budget is not None:
            check_draft(request.budget, chosen.drafter.info, chosen.verifier.info)
        second_prompt = () if self._second is None else self._second.begins(request)
        room = self._check_room(request, second_prompt)
        request = self._bound(replace(request, params=request.params.within(room)))
        params = request.params
        prompt = request.prompt_token_ids
        sample = Sample(
            request.sample % MOST_SAMPLES, request.seed, logprobs=None if params.logprobs is None else []
        )
        sample.stats.prompt_tokens = len(request.source_token_ids or prompt)
        drafts = chosen.drafter is not None and (request.budget is None or request.budget.max_depth > 0)
        return Sequence(
            request,
            self._stopper(request, room),
            sample,
            list(prompt),
            drafting=drafts,
            second_ids=second_prompt,
            speculation=chosen,
        )

    def _check(self, request: Request) -> None:
        prompt = request.prompt_token_ids
        params = request.params
        V = self._target.vocab_size
        self._check_source(request)
        bad = next(
            (
                t
                for t in (*request.source_token_ids, *prompt, *request.prediction_token_ids)
                if not 0 <= t < V
            ),
            None,
        )
        if bad is not None:
            raise InvalidInputError(
                f"token id {bad} was given in the prompt or prediction of {request.id!r}; expected 0 <= id < {V}. Use the target's own tokenizer."
            )
        sampling.check_vocabulary(params, V, self._eos)
        if params.stop and self._tokenizer is None:
            raise InvalidInputError(
                "stop strings were given without a tokenizer; use stop_token_ids, or give the engine a tokenizer."
            )
        if (
            params.structured_outputs is not None
            and self._decoding is not None
            and not self._decoding.gives_logits
        ):
            raise IncompatibleError(
                f"structured_outputs were given beside the decoding method {type(self._decoding).__name__}, which makes probabilities of its own. Leave one out."
            )

    def _check_source(self, request: Request) -> None:
        if isinstance(self._target, EncoderDecoder):
            self._target.check_source(request.source_token_ids, f"request {request.id!r}")
        elif request.source_token_ids:
            raise InvalidInputError(
                f"a source of {len(request.source_token_ids)} tokens was given for request {request.id!r} to a model without an encoder. "
                "Give it as the prompt."
            )

    def _check_room(self, request: Request, second: Seq[int]) -> int:
        """Tokens for which the context leaves room. second: how the second sequence begins."""
        length = len(request.prompt_token_ids)
        max_tokens = request.params.max_tokens
        longest = self._target.max_model_len
        length = max(length, len(second))
        if length >= longest:
            raise too_long(length, longest)
        if max_tokens not in (None, WHOLE_CONTEXT) and length + max_tokens > longest:
            raise CapacityError(
                f"a prompt of {length} tokens and max_tokens={max_tokens} were given; the context holds {longest}. "
                f"Use max_tokens <= {longest - length} or shorten the prompt."
            )
        return longest - length

    def grammars(self) -> Grammars:
        """Of the target's tokenizer, made when they are first asked for."""
        with self._lock:
            if self._grammars is None:
                self._grammars = Grammars(self._tokenizer, self._target.vocab_size, self._eos)
                MarkTokens.of(self._tokenizer, Thinking())  # a large vocabulary takes a while
            return self._grammars

    def _bound(self, request: Request) -> Request:
        """With the grammar of its own output, where it asks for one."""
        constraint_source = request.params.structured_outputs
        if isinstance(constraint_source, StructuredOutputs):
            constraint_source = self.grammars().compiled(constraint_source)
        if isinstance(constraint_source, ExactGrammar):
            self._check_exact(constraint_source, request)
        thinking = request.params.thinking
        form = constraint_source if isinstance(constraint_source, ConstraintSource) else None
        size = self._target.vocab_size
        if form is not None and thinking is not None:
            form = BehindThoughts(form, thinking, self._tokenizer, size, self._eos)
        if thinking is not None and thinking.budget is not None:
            form = BudgetOfThoughts(form, thinking, self._tokenizer, size)
        if form is None:
            return request
        constraint = form.constraint(len(request.prompt_token_ids))
        return replace(request, params=request.params.with_(structured_outputs=constraint))

    def _check_exact(self, grammar: ExactGrammar, request: Request) -> None:
        """Whether the target can score all outputs before the first."""
        if self._target.plain_reason is not None:
            raise IncompatibleError(
                f"structured_outputs.exact was given for {self._target.name!r}, which scores no trees: {self._target.plain_reason}. Leave exact out."
            )
        beside = "thinking" if request.params.thinking else "a decoding method" if self._decoding else None
        if beside is not None:
            raise IncompatibleError(
                f"structured_outputs.exact was given beside {beside}; expected the target's own distribution from the first token on. Leave one out."
            )
        length = len(request.prompt_token_ids)
        if length + grammar.longest > self._target.max_model_len:
            raise CapacityError(
                f"a prompt of {length} tokens and outputs of up to {grammar.longest} were given; the context holds {self._target.max_model_len}. "
                "Shorten the prompt, or leave structured_outputs.exact out."
            )


FADES = 1.0
"""Seconds after which 1 / e of those that left are still expected back. Sixteen that have left count for two after three seconds."""


class Arrivals:
    """How many sequences run together soon: as many as now, or nearly as many as a moment ago. clock: in seconds.

    Example:
        >>> now = 0.0
        >>> arrivals = Arrivals(lambda: now)
        >>> arrivals.expect(16)
        16
        >>> now = 0.1
        >>> arrivals.expect(1), arrivals.expect(20)
        (15, 20)
        >>> now = 5.0
        >>> arrivals.expect(1)
        1
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._expected = 0.0
        self._time = 0.0

    def expect(self, num_sequences: int) -> int:
        """So many run and wait now."""
        now = self._clock()
        faded = exp(min(self._time - now, 0.0) / FADES)
        self._time = now
        self._expected = num_sequences + max(self._expected - num_sequences, 0.0) * faded
        return round(self._expected)


class Opening:
    """menu: whose default's drafts may still be compiled."""

    def __init__(self, target: Target, menu: Menu) -> None:
        self._target = target
        self._menu = menu

    def _compiles(self, s: Sequence) -> bool:
        """Whether the code of its drafts is being compiled."""
        return s.speculation is self._menu.default and self._menu.is_compiling

    def follows_costs(self, s: Sequence) -> bool:
        """Whether its text depends on costs that are missing: it is first in line, and waits until nothing runs and they are measured."""
        shared_noise = s.speculation.verifier.info.shared_noise
        return s.follows_drafts and s.request.budget is None and not shared_noise and s.speculation.unmeasured

    def awaits_drafts(self, s: Sequence) -> bool:
        """Whether it waits while drafts are compiled, as its text depends on them or on their costs; those behind it do not."""
        budget = s.request.budget
        depends = s.follows_drafts if budget is None else budget.max_nodes > 0
        return depends and (self._compiles(s) or (self.follows_costs(s) and self._menu.is_compiling))

    def next(self, waiting: Iterable[Sequence]) -> Sequence | None:
        """The first that does not wait for drafts."""
        return next((s for s in waiting if not self.awaits_drafts(s)), None)

    def begin(self, s: Sequence, expected: int) -> None:
        """Join without drafts where those would not pay in a batch of so many, so that no drafter reads the prompt for nothing."""
        drafter = s.speculation.drafter
        policy = s.speculation.policy
        if s.postponed or s.held:
            s.drafting = True
            s.postponed = 0
            s.held = False
        if s.drafting and self._compiles(s):
            s.drafting = False
            s.held = True
        elif drafter is not None and drafter.needs.hidden and s.drafting:
            s.drafting = policy.opens(s, expected)
            s.postponed = 0 if s.drafting else expected

    def resume(self, running: Seq[Sequence], expected: int) -> list[Sequence]:
        """Draft for what began before its drafts were compiled, and for what joined a batch twice as large, where it pays to read it once more:
        those are returned."""
        resumed = list[Sequence]()
        for s in [s for s in running if s.held and not s.filling and not self._compiles(s)]:
            reads_states = s.speculation.drafter is not None and s.speculation.drafter.needs.hidden
            s.drafting = not reads_states
            s.held = False
            s.postponed = 2 * expected if reads_states else 0
        for s in [s for s in running if s.postponed >= 2 * max(expected, 1) and not s.filling]:
            policy = s.speculation.policy
            s.postponed = expected
            if policy.opens(s, expected, again=True):
                reading.resume(self._target, s)
                resumed.append(s)
        return resumed
