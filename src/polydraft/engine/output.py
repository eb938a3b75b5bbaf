"""What one step did for its batch, and what it gives one sequence: its tokens up to a stop, their origins, their log-probabilities, and the text that became certain.

An outbox holds outputs until a call of `step` returns them; inboxes get theirs at once.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float

from polydraft.core import Account, Draft, Outcome, SamplingParams, Scores
from polydraft.engine.sequence import Origin, Sample, Sequence, TokenLogprob
from polydraft.engine.stopping import Stopper
from polydraft.methods.registry import COPYING
from polydraft.sampling import processing as sampling
from polydraft.sampling.softmax import log_softmax, top


class DraftedTree(NamedTuple):
    """The tree of one step: node 0 is the last committed token, padding has parent -1 as it has.  path: the accepted nodes below it."""

    token_ids: list[int]
    parents: list[int]
    path: list[int]


@dataclass(frozen=True)
class StepOutput:
    """What one step gave one sample: new tokens with their origins, the text that became certain, and whether it is the last.

    sample: all of it, which goes on filling.  tree: what was drafted; None where nothing was verified.
    """

    request_id: str
    token_ids: list[int]
    origins: list[Origin]
    text: str
    sample: Sample
    finished: bool
    tree: DraftedTree | None = None


@dataclass(frozen=True)
class StepResult:
    """What one step did for its batch: the draft, what was scored, the logits that were decoded, what was accepted.

    sequences: the rows.  logits: as of `sampling.in_context`; softened: they are the logarithm of the distribution itself.
    failed: those that have no row, as their decoding method or their verifier failed, and why.  num_scored: nodes of the forward pass, theirs too.
    """

    sequences: Seq[Sequence]
    draft: Draft
    scores: Scores
    logits: Float[np.ndarray, "B N V"]
    outcome: Outcome
    softened: bool = False
    failed: Seq[tuple[Sequence, Exception]] = ()
    num_scored: int = 0
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @cached_property
    def probs(self) -> Float[np.ndarray, "B N V"]:
        """The target distribution at each drafted node."""
        if self.softened:
            return np.exp(self.logits)
        return sampling.distributions_of(
            self.logits, self.draft.tree, [s.request.params for s in self.sequences]
        )

    @cached_property
    def nodes(self) -> list[list[int]]:
        """Nodes whose rows emitted each row's tokens: the root, then the accepted path."""
        return [[0, *path] for path in self.outcome.lists.paths]

    @cached_property
    def tokens(self) -> list[list[int]]:
        """What each row emits, before any stop."""
        return self.outcome.emitted(self.draft.tree)

    @property
    def parents(self) -> list[list[int]]:
        """`draft.tree.parents` as lists."""
        return self.draft.tree.lists.parents


def _origins(s: Sequence, account: Account, branch: int, num_drafted: int, source: str) -> list[Origin]:
    """Of the drafted tokens that were accepted, and of the target's own. account: of the drafter.  source: its name."""
    sources = [COPYING] * num_drafted
    if not s.copying:
        sources = (account.sources or [source] * num_drafted)[:num_drafted]
    return [*(Origin(source, branch) for source in sources), Origin("target")]


def emit(done: StepResult, b: int, s: Sequence, source: str) -> tuple[StepOutput, Exception | None]:
    """Append the step's tokens to row b's sequence, up to a stop or to one that cannot be read, with the reason. source: the drafter."""
    nodes = done.nodes[b]
    tokens = done.tokens[b]
    offers = s.speculation.offers
    account = Account() if offers.account is None or s.state is None else offers.account(s.state)
    num_emitted, failure = _read(s.stopper, tokens, s.sample.text_ends)
    s.sample.stats.discard(len(tokens) - num_emitted)
    emitted = tokens[:num_emitted]
    origins = _origins(s, account, _branch(done, b), len(tokens) - 1, source)[:num_emitted]
    if s.sample.logprobs is not None:
        s.sample.logprobs += _logprobs(s.request.params, done, b, nodes[:num_emitted], emitted)
    s.commit(emitted, origins)
    s.sample.sources += account.places[:num_emitted]
    s.sample.stats.emitted(num_emitted)
    text = s.publish()
    tree = DraftedTree(done.draft.tree.lists.tokens[b], done.parents[b], nodes[1:])
    return StepOutput(s.request.id, emitted, origins, text, s.sample, s.finished, tree), failure


def _read(stopper: Stopper, tokens: list[int], text_ends: list[int]) -> tuple[int, Exception | None]:
    """How many of a step's tokens are emitted: up to a stop, or to one that cannot be read, with the reason. text_ends: goes on behind each."""
    for count, token in enumerate(tokens, 1):
        try:
            stopper.push(token)
        except Exception as error:
            return count - 1, error
        text_ends.append(len(stopper.text))
        if stopper.stop:
            return count, None
    return len(tokens), None


def _branch(done: StepResult, b: int) -> int:
    """Which child, in draw order, the accepted path takes where the tree first branches on its way."""
    parents = done.parents[b]
    parted = next((n for n in done.nodes[b][1:] if parents.count(parents[n]) > 1), 0)
    return parents[:parted].count(parents[parted])


def _logprobs(
    params: SamplingParams, done: StepResult, b: int, nodes: list[int], tokens: list[int]
) -> list[TokenLogprob]:
    """Log-probabilities of the emitted tokens and of the top alternatives, from raw logits or the processed distribution."""
    if params.logprobs_mode == "processed":
        with np.errstate(divide="ignore"):
            rows = np.log(done.probs[b, nodes], dtype=np.float64)
    else:
        rows = log_softmax(done.scores.logits[b, nodes])
    k = min(params.logprobs or 0, rows.shape[-1])
    values, ids = top(rows, k)
    token_logits = rows[np.arange(len(rows)), tokens].tolist()
    return [
        TokenLogprob(token, logprob, dict(zip(top, tops, strict=True)))
        for token, logprob, top, tops in zip(tokens, token_logits, ids.tolist(), values.tolist(), strict=True)
    ]


class Inbox(Protocol):
    """Where the outputs of a request go, as steps give them."""

    def append(self, output: StepOutput, /) -> None: ...


class Outbox:
    """streams: inboxes by the id of their request."""

    def __init__(self) -> None:
        self._outputs: list[StepOutput] = []
        self.streams: dict[str, Inbox] = {}

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def give(self, output: StepOutput) -> None:
        """One more."""
        self._outputs.append(output)
        if (inbox := self.streams.get(output.request_id)) is not None:
            inbox.append(output)

    def take(self) -> list[StepOutput]:
        """All of them, once."""
        outputs = self._outputs
        self._outputs = []
        return outputs

    def drop(self, request_ids: Collection[str]) -> None:
        """Nobody reads those of these requests."""
        self._outputs = [output for output in self._outputs if output.request_id not in request_ids]
