"""AMUSD as a drafter: what it proposes are the tokens that wait, and the worker draws on while the target scores them.

McDanel 2024 (arXiv 2410.17375). The engine's thread is the verify worker: between `propose` and `observe` lies its forward pass.

    amusd            one iid chain; the rows of q are published with the tokens                IID
    amusd:coupled    the winners of the race; with the verifier `race` the tokens do not depend on timing   COUPLED

How many tokens wait depends on the clock, so for the iid kind a seed repeats its text only where `min_lead` is the depth; it is lossless always.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

import numpy as np

from polydraft.core import (
    Account,
    Budget,
    Draft,
    Drafter,
    DraftSampling,
    Drawing,
    Method,
    Needs,
    NoiseKey,
    Offers,
    Outcome,
    Request,
    Scores,
    TreeShape,
    Verifier,
)
from polydraft.core import geometry as trees
from polydraft.drafters.base import Parts, named_kind
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.methods import registry
from polydraft.methods.papers import method
from polydraft.numerics.processor import usable_processors
from polydraft.papers.amusd.lead import Counts, Item, Lead
from polydraft.papers.amusd.trace import VERIFY, Trace
from polydraft.papers.amusd.worker import Drafting, Worker

LEAD_CAP = 16
MIN_LEAD = 2
BURST = 4
_METHODS = (
    method(
        "amusd",
        "Draft model that runs ahead while the target verifies",
        "2410.17375",
        {DraftSampling.IID},
        {TreeShape.CHAIN},
    ),
    method(
        "amusd:coupled",
        "The same, by a shared race",
        "2410.17375",
        {DraftSampling.COUPLED},
        {TreeShape.CHAIN},
    ),
)
KINDS = {"chain": _METHODS[0], "coupled": _METHODS[1]}


COUPLED = {"model:coupled", "amusd:coupled"}
AHEAD = {"auto", "model", "model:chain", "amusd", "amusd:chain", *COUPLED}
"""Drafters that may be asked for where drafts are asynchronous, and those of them that share the verifier's noise, whichever it is."""


def asynchronous(named: str | Drafter | None, verifier: str | Verifier) -> str:
    """The drafter that runs ahead, in place of the one that was asked for: what the option `asynchronous` means.

    Raises:
        IncompatibleError: one that cannot run ahead.

    Example:
        >>> asynchronous("auto", "auto"), asynchronous("auto", "race"), asynchronous("model:chain", "race")
        ('amusd', 'amusd:coupled', 'amusd')
    """
    if not isinstance(named, str) or named not in AHEAD:
        raise IncompatibleError(
            f"asynchronous=True was given with drafter={named!r}; expected a draft model, which alone can run ahead of what is verified: "
            f"{', '.join(map(repr, sorted(AHEAD)))}. Heads and drafters of text need the verified states or text first. Leave asynchronous out for them."
        )
    if named in COUPLED:
        return "amusd:coupled"
    rule = registry.verifier(verifier) if isinstance(verifier, str) and verifier != "auto" else verifier
    coupled = named in ("auto", "model") and not isinstance(rule, str) and rule.info.shared_noise
    return "amusd:coupled" if coupled else "amusd"


class AmusdDrafter:
    """A draft model that draws in a thread of its own.

    model: the draft model, which nobody else may use.  kind: see the module.  stop_ids: end-of-sequence ids.
    lead_cap: most tokens that wait.  min_lead: of them, before a forward pass begins, unless no more can come; 0 never waits.
    burst: most tokens that the worker draws in one call and publishes together.
    pin: whether the worker stays on the last core of this process.  trace: whether to note what ran when.  delay: see `Worker`.

    Raises:
        InvalidInputError: a cap or a burst below 1, or a smallest lead that the cap does not allow.
        UnknownNameError: a kind that does not exist.

    Example:
        >>> from polydraft import Engine, SamplingParams
        >>> engine = Engine.embedded(asynchronous=True)
        >>> result = engine.generate("import os\\n", SamplingParams(temperature=0, max_tokens=8))[0]
        >>> result.stats.generated_tokens, engine.drafter.counts.published > 0
        (8, True)
        >>> engine.drafter.close()
    """

    methods = _METHODS
    needs = Needs(every_step=True)

    def __init__(
        self,
        model: Any,
        kind: str = "chain",
        *,
        stop_ids: Sequence[int] = (),
        lead_cap: int = LEAD_CAP,
        min_lead: int | None = None,
        burst: int = BURST,
        pin: bool = False,
        trace: bool = False,
        delay: Callable[[], None] | None = None,
    ) -> None:
        self.info = self.of_kind(kind)
        Lead((), lead_cap)
        min_lead = min(MIN_LEAD, lead_cap) if min_lead is None else min_lead
        if burst < 1 or not 0 <= min_lead <= lead_cap:
            raise InvalidInputError(
                f"burst={burst} and min_lead={min_lead} were given beside lead_cap={lead_cap}; expected burst >= 1 and 0 <= min_lead <= lead_cap."
            )
        self.lead_cap = lead_cap
        self.min_lead = min_lead
        self.trace = notes = Trace() if trace else None
        self._stop_ids = frozenset(stop_ids)
        drafter = ModelDrafter(model, kind, stop_ids=tuple(stop_ids))
        self._make = lambda: Worker(drafter, burst, usable_processors()[-1] if pin else None, notes, delay)
        self._model = model
        self._began = 0.0
        self._counts = Counts()
        self._worker = self._make()
        weakref.finalize(self, self._worker.end)

    @classmethod
    def of_kind(cls, kind: str = "chain") -> Method:
        """What it declares.

        Raises:
            UnknownNameError: a kind that does not exist.
        """
        return named_kind(KINDS, kind, "amusd")

    @classmethod
    def build(cls, parts: Parts, *, kind: str = "chain", **options: Any) -> "AmusdDrafter":
        """For the engine: draft with its draft model, which must be a model of its own; options as the constructor.

        Raises:
            InvalidInputError: no draft model; see also the constructor.
            IncompatibleError: one core only, a draft model that somebody else runs, or a process that was forked from one that uses CUDA.
        """
        if parts.draft_model is None:
            raise InvalidInputError(
                "asynchronous drafting was asked for without a draft model; give draft_model=..., a smaller model with the same vocabulary."
            )
        if parts.draft_model is parts.target or parts.draft_model is parts.second_model:
            raise IncompatibleError(
                "asynchronous drafting was asked for with a draft model that the target's forward passes use too; expected one of its own. "
                "Load it once more, or draft synchronously."
            )
        if hasattr(parts.target, "decoder_prompt"):
            raise IncompatibleError(
                "asynchronous drafting was asked for with an encoder-decoder; expected a target that reads one text. Draft synchronously."
            )
        check_machine(parts.draft_model)
        return cls(parts.draft_model, kind, stop_ids=parts.eos_token_ids, **options)

    @property
    def offers(self) -> Offers:
        """See `core.Drafter`."""
        return Offers(draws=Drawing(lead_cap=self.lead_cap), account=self.account)

    @property
    def counts(self) -> Counts:
        """Of all requests so far."""
        with self._worker.condition:
            return sum((d.lead.counts for d in self._worker.leads if not d.lead.closed), self._counts)

    def close(self) -> None:
        """End the worker; the drafter cannot be used any more."""
        self._worker.end()

    def start(self, requests: Sequence[Request]) -> list[Drafting]:
        """Hand requests to the worker, which reads their texts; a new worker if the last one died and that was raised.

        Raises:
            IncompatibleError: a form of the output, whose grammar two threads cannot follow at once.
            DraftWorkerError: the worker has died, or is in another process.
        """
        if any(r.params.structured_outputs is not None for r in requests):
            raise IncompatibleError(
                "structured_outputs were asked for beside asynchronous drafting; a grammar cannot be followed by two threads. "
                "Such a request is decoded without drafts; draft synchronously for it."
            )
        if self._worker.error is not None and self._worker.raised:
            self._worker = self._make()
            weakref.finalize(self, self._worker.end)
        return [self._begin(r, r.prompt_token_ids) for r in requests]

    def _begin(self, request: Request, text: Sequence[int], start: int | None = None) -> Drafting:
        p = request.params
        longest = self._model.max_model_len - 1
        end_ids = {*p.stop_token_ids, *(() if p.ignore_eos else self._stop_ids)}
        if p.max_tokens is not None:
            longest = min(longest, len(request.prompt_token_ids) + p.max_tokens)
        lead = Lead(text, self.lead_cap, end_ids, longest)
        lead.start = lead.start if start is None else start
        begun = Drafting(request, lead, request.seed)
        self._worker.add(begun)
        return begun

    def propose(self, states: Sequence[Drafting], budgets: Sequence[Budget]) -> Draft:
        """What waits, once it is enough; until `observe` the same tokens, or more.

        Raises:
            DraftWorkerError: the worker has died, or is in another process.
        """
        most = [g.chain_length for g in budgets]
        worker = self._worker
        began = perf_counter()
        leads = [d.lead for d in states]
        with worker.condition:
            worker.wait(
                lambda: all(
                    len(x.ring) >= min(self.min_lead, n) or not x.room
                    for x, n in zip(leads, most, strict=True)
                )
            )
            roots = [x.text[-1] for x in leads]
            leads_taken = [x.take(n) for x, n in zip(leads, most, strict=True)]
            positions = [len(x.text) for x in leads]
        self._began = perf_counter()
        if self.trace is not None:
            self.trace.add(VERIFY, "wait", began, self._began, taken=[len(items) for items in leads_taken])
        key = NoiseKey.of([d.seed for d in states], [d.request.sample for d in states], positions)
        return self._drafted(roots, leads_taken, key)

    def _drafted(self, roots: Sequence[int], taken: Sequence[Sequence[Item]], key: NoiseKey) -> Draft:
        (draft_sampling,) = self.info.draft_sampling
        (shape,) = self.info.shapes
        chains = [[root, *(i.token for i in items)] for root, items in zip(roots, taken, strict=True)]
        tree = trees.chains(chains)
        V = self._model.vocab_size
        drawn = next((items[0].row for items in taken if items), np.empty(0, np.float32))
        probs = np.full((len(roots), max(1, tree.num_nodes - 1), V), 1 / V, drawn.dtype)
        for b, items in enumerate(taken):
            for n, item in enumerate(items):
                probs[b, n] = item.row
        return Draft(
            tree,
            draft_sampling,
            shape,
            probs,
            tree.parents,
            key if draft_sampling is DraftSampling.COUPLED else None,
        )

    def observe(self, states: Sequence[Drafting], outcome: Outcome, scores: Scores) -> list[Drafting]:
        """The forward pass is over: each lead learns what it emitted."""
        emitted = outcome.emitted(scores.tree)
        accepted = outcome.num_accepted.tolist()
        with self._worker.condition:
            for d, tokens, count in zip(states, emitted, accepted, strict=True):
                d.lead.verified(tokens, count)
            self._worker.condition.notify_all()
        if self.trace is not None:
            num_taken = (scores.tree.parents >= 0).sum(1).tolist()
            self.trace.add(
                VERIFY, "verify", self._began, perf_counter(), drafted=num_taken, accepted=accepted
            )
        return list(states)

    def account(self, state: Drafting) -> Account:
        """See `core.Offers`."""
        return Account(asdict(state.lead.counts))

    def release(self, states: Sequence[Drafting]) -> None:
        """The worker drafts for them no more, and gives their slots back before it takes others."""
        for d in states:
            if not d.lead.closed:
                self._worker.close(d)
                self._counts += d.lead.counts


def check_machine(model: Any) -> None:
    """Refuse a machine on which two workers would take turns, or where they cannot start.

    Raises:
        IncompatibleError: one core only; or a process forked from one that uses CUDA.
    """
    if not model.on_device and len(usable_processors()) < 2:
        raise IncompatibleError(
            f"asynchronous drafting was asked for on one core ({usable_processors()}); expected two, one for each model: on one they would take turns, and be slower "
            "than synchronous drafting. Leave it off, or give the process another core (taskset, the container's limits)."
        )
    if model.on_device and _is_in_bad_fork():
        raise IncompatibleError(
            "asynchronous drafting was asked for in a process that was forked from one that uses CUDA, where CUDA cannot start. "
            "Start processes with the method 'spawn', or build the engine before anything uses CUDA."
        )


def _is_in_bad_fork() -> bool:
    """Whether this process was forked from one that uses CUDA."""
    import torch

    return torch.cuda._is_in_bad_fork()
