"""The draft worker: a thread that draws ahead of what is committed, for all sequences that may be drafted for, in batches.

It alone touches the draft model. The lock guards the leads, and nothing is computed under it; both workers sleep on its condition.
A thread and not a process: compiled forward passes run without the interpreter's lock, so two threads use two cores, share the rows of q without
a copy, and end together. What ends the worker is raised in whoever waits for it, see `check`.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from polydraft.core import Budget, Request
from polydraft.core.geometry import chain
from polydraft.drafters.base import as_one_step
from polydraft.drafters.model.by_depth import ModelState
from polydraft.drafters.model.paths import ModelDrafter
from polydraft.errors import DraftWorkerError, InvalidInputError
from polydraft.models.slot_pool import common_length
from polydraft.papers.amusd.lead import Item, Lead, Step
from polydraft.papers.amusd.trace import DRAFT, Trace
from polydraft.sampling.noise import epoch_seed

HEARTBEAT = 0.5
"""Seconds after which who waits looks whether the thread is there at all."""


@dataclass(eq=False)
class Drafting:
    """One request: its lead, which both workers know, and what the draft worker alone knows: its state in the draft model, and of which epoch.

    request: of the draft worker, with the seed of the epoch's draws.  seed: of the request itself.
    """

    request: Request
    lead: Lead
    seed: int
    state: ModelState | None = None
    epoch: int = -1
    text: tuple[int, ...] = ()


@dataclass(eq=False)
class Worker:
    """drafter: draws chains from a model.  burst: most tokens of one call.  core: to run on, or None.  delay: called before each call, for tests."""

    drafter: ModelDrafter
    burst: int = 1
    core: int | None = None
    trace: Trace | None = None
    delay: Callable[[], None] | None = None
    condition: threading.Condition = field(default_factory=threading.Condition)
    leads: list[Drafting] = field(default_factory=list[Drafting])
    error: BaseException | None = None
    raised: bool = False
    closing: bool = False
    _thread: threading.Thread | None = None
    _process: int = 0

    def add(self, drafting: Drafting) -> None:
        """Draft for a request from now on; the first one starts the thread.

        Raises:
            DraftWorkerError: the worker has died.
        """
        with self.condition:
            self._check()
            if self._thread is None:
                self._process = os.getpid()
                self._thread = threading.Thread(target=self._run, daemon=True, name="polydraft-draft-worker")
                self._thread.start()
            self.leads.append(drafting)
            self.condition.notify_all()

    def close(self, drafting: Drafting) -> None:
        """Draft for a request no more; the worker gives its slot back."""
        with self.condition:
            drafting.lead.closed = True
            self.condition.notify_all()

    def end(self) -> None:
        """End the thread and wait for it."""
        with self.condition:
            self.closing = True
            self.condition.notify_all()
        thread = self._thread
        if thread not in (None, threading.current_thread()) and self._process == os.getpid():
            thread.join(timeout=10.0)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Sleep until something holds, with the lock held.

        Raises:
            DraftWorkerError: the worker has died, at once, and within HEARTBEAT seconds if it could not say so.
        """
        while True:
            self._check()
            if ready():
                return
            self.condition.wait(HEARTBEAT)

    def _check(self) -> None:
        if self.error is not None:
            self.raised = True
            raise DraftWorkerError(
                f"the draft worker has died: {self.error!r}. What was emitted stays; the next request starts another one."
            ) from self.error
        if self._thread is None:
            return
        if self._process != os.getpid():
            raise DraftWorkerError(
                f"this process, {os.getpid()}, was forked from {self._process}, whose draft worker is a thread that a fork does not copy. "
                "Build the engine in the new process, or start processes with the method 'spawn'."
            )
        if self.closing or not self._thread.is_alive():
            raise DraftWorkerError("the draft worker has ended. Build the engine anew.")

    def _run(self) -> None:
        try:
            if self.core is not None and hasattr(os, "sched_setaffinity"):  # Linux alone has it
                os.sched_setaffinity(0, {self.core})
            with _own_stream(self.drafter.model):
                while self._turn():
                    pass
        except BaseException as error:
            for d in self.leads:
                if d.state is not None:
                    self.drafter.release([d.state])
            with self.condition:
                self.error = error
                self.condition.notify_all()

    def _due(self) -> bool:
        return self.closing or any(d.lead.closed or d.lead.room for d in self.leads)

    def _turn(self) -> bool:
        """One batch of steps; False at the end."""
        with self.condition:
            self.condition.wait_for(self._due)
            if self.closing:
                return False
            gone = [d for d in self.leads if d.lead.closed]
            self.leads = [d for d in self.leads if not d.lead.closed]
            steps = [(d, step) for d in self.leads if (step := d.lead.next()) is not None]
            for d, step in steps:
                if step.epoch != d.epoch or d.state is None or len(d.state.context) != step.place:
                    self._adopt(d, step)
        self.drafter.release([d.state for d in gone if d.state is not None])
        if not steps:
            return True
        if self.delay is not None:
            self.delay()
        began = perf_counter()
        drawn = self._draw(steps)
        with self.condition:
            for (d, _), items in zip(steps, drawn, strict=True):
                d.lead.publish(items)
            self.condition.notify_all()
        if self.trace is not None:
            tokens = [[item.token for item in items] for items in drawn]
            epochs = [step.epoch for _, step in steps]
            places = [step.place for _, step in steps]
            self.trace.add(DRAFT, "draft", began, perf_counter(), tokens=tokens, epochs=epochs, places=places)
        return True

    def _adopt(self, d: Drafting, step: Step) -> None:
        """Take over the text of a new epoch, or what was committed beyond the own drafts, and acknowledge it."""
        text = tuple(d.lead.before(step))
        if step.epoch != d.epoch and self.drafter.kind != "coupled":
            d.request = replace(d.request, seed=epoch_seed(d.seed, d.request.sample, step.start))
        if d.state is not None:
            d.state.cursor.cut(min(common_length(d.state.context, text), len(text) - 1))
            d.state = ModelState(d.request, d.state.cursor, text)
        d.epoch = step.epoch
        d.text = text
        d.lead.acknowledge(step.epoch)

    def _begun(self, d: Drafting) -> ModelState:
        """The state of a lead; a new one reads its text."""
        if d.state is None:
            (d.state,) = self.drafter.start([replace(d.request, prompt_token_ids=d.text)])
        return replace(d.state, request=d.request)

    def _draw(self, steps: Sequence[tuple[Drafting, Step]]) -> list[list[Item]]:
        """Draw the next tokens of each lead; its state then is that of a step in which all of them were accepted."""
        states = [self._begun(d) for d, _ in steps]
        rooms = [self.drafter.offers.draws.room(len(state.context)) for state in states]
        budgets = [
            Budget.fixed(chain(min(self.burst, step.room, room)))
            for (_, step), room in zip(steps, rooms, strict=True)
        ]
        draft = self.drafter.propose(states, budgets)
        tokens, parents = draft.tree.lists
        chains = [
            [t for t, above in zip(row, up, strict=True) if above >= 0]
            for row, up in zip(tokens, parents, strict=True)
        ]
        if not all(chains) or min(map(min, chains)) < 0:
            raise InvalidInputError(
                f"{self.drafter.info.name!r} gave a row that is no distribution. Check the draft model's logits for NaN."
            )
        drafted = as_one_step([s.context[-1] for s in states], chains)
        for (d, _), state in zip(steps, self.drafter.observe(states, *drafted), strict=True):
            d.state = state
        rows = draft.rows.tolist()
        return [
            [
                Item(
                    token,
                    None if draft.probs is None else draft.probs[b, rows[b][n]],
                    step.epoch,
                    step.place + n - 1,
                )
                for n, token in enumerate(drawn, 1)
            ]
            for b, ((_, step), drawn) in enumerate(zip(steps, chains, strict=True))
        ]


def _own_stream(model: Any) -> AbstractContextManager[Any]:
    """On a GPU the worker's kernels go to a stream of their own; its tokens are read back before they are published."""
    if not model.on_device:
        return nullcontext()
    import torch

    return torch.cuda.stream(torch.cuda.Stream(model.device))
