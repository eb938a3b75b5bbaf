"""The credit that drafts are paid from, in steps of plain decoding: what a request's drafts may still lose, and what those of all requests together may.

What a step with drafts took beyond the plain steps of its tokens is taken from the credit, what it saved is added. Where the credit is too small for a draft
that is rejected, nothing is drafted for the request any more; where drafts of all requests together paid, until its tokens have earned so much. So no request
loses more than it was given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, Protocol

from polydraft.policy.costs import STALLED, Costs
from polydraft.policy.steps import LastStep

CREDIT = 1.5
CREDIT_RATE = 0.0075
MOST_CREDIT = 8.0
"""Steps of plain decoding that the drafts of a request may lose: at first, and for each of its tokens, together 2% of 96 tokens; and at most, where drafts
that paid have earned it."""
FIRST_SHARED = 2 * CREDIT
RETRY = 0.25
MOST_SHARED = 32.0
"""Plain steps that drafts of all requests may lose together: at first; what each new request adds; and at most, which drafts that paid have earned."""


def least_loss(num_sequences: int, costs: Costs) -> float:
    """Plain steps that one drafted token costs which is not accepted, of all sequences of a batch that wait for it.

    Example:
        >>> round(least_loss(1, Costs.of({1: 1.0, 4: 1.3, 8: 2.0}, draft_start=0.1, draft_step=0.1)), 2)
        0.3
    """
    rows = costs.rows(num_sequences + 1) - costs.rows(num_sequences)
    return num_sequences * (rows + costs.drafting(1)) / costs.step(num_sequences, 0)


@dataclass
class Credit:
    """Of one request. left: plain steps that its drafts may still lose.  least: the least that a draft loses which is rejected.
    num_tokens: of its text, whose credit it has."""

    left: float = CREDIT
    least: float = 0.0
    num_tokens: int = 0

    @property
    def spent(self) -> bool:
        """Whether it is too small for a draft that is rejected."""
        return self.left < self.least

    def pay(self, loss: float) -> None:
        """Drafts lost so many plain steps, or saved them."""
        self.left = min(self.left - loss, MOST_CREDIT)

    def earn(self, num_tokens: int) -> None:
        """The text has so many tokens by now."""
        self.pay(-CREDIT_RATE * (num_tokens - self.num_tokens))
        self.num_tokens = num_tokens

    def renew(self) -> None:
        """As much as at first, at least."""
        self.left = max(self.left, CREDIT)

    def tokens_until_enough(self) -> int:
        """Tokens of the text that earn what is missing for a draft that is rejected."""
        return ceil((self.least - self.left) / CREDIT_RATE)


class Payer(Protocol):
    """Who pays for drafts."""

    def pay(self, loss: float) -> None: ...


class StepDrafts(NamedTuple):
    """Drafts that a step had, which are paid for by its seconds. greedy: whether the request is.  accepted: tokens of them."""

    payer: Payer
    greedy: bool
    accepted: int


class SharedCredit:
    """What drafts of sampled and of greedy requests, each, may still lose together: what one of them learns the next one begins with.

    A request with a seed neither pays into it nor takes from it.
    """

    def __init__(self) -> None:
        self.left = dict.fromkeys((False, True), FIRST_SHARED)
        self._unpaid = list[StepDrafts]()
        self._begins = False

    def grant(self, greedy: bool) -> float:
        """The credit of a new request: what the others have left, at most its own."""
        self.left[greedy] += RETRY
        return min(self.left[greedy], CREDIT)

    def grows(self, greedy: bool) -> bool:
        """Whether drafts of all requests together paid."""
        return self.left[greedy] > FIRST_SHARED

    def forget_step(self) -> None:
        """Nothing of what is noted is paid for."""
        self._unpaid.clear()
        self._begins = False

    def note(self, payer: Payer, *, greedy: bool, accepted: int, begins: bool) -> None:
        """Drafts of the step that is learnt from. begins: whether a drafter read the text for its first draft in it."""
        self._unpaid.append(StepDrafts(payer, greedy, accepted))
        self._begins |= begins

    def settle(self, seconds: Mapping[str, float], step: LastStep, costs: Costs) -> None:
        """Take what the step lost from the credit of those that drafted, with all that drafts made it do: heads, catching up, verification.

        What a drafter reads before its first draft was weighed when the request was opened.
        """
        if not self._unpaid:
            return
        costs = costs.behind(step.num_tokens, step.batch)
        reading = seconds["prefill"]
        most = STALLED * costs.step(step.rows, step.depth, step.drafting)
        whole = min(sum(seconds.values()) - reading, most) + (0.0 if self._begins else reading)
        lost_steps = (whole / costs.step(step.batch, 0) - 1.0) * step.batch
        for payer, greedy, accepted in self._unpaid:
            loss = lost_steps / len(self._unpaid) - accepted
            payer.pay(loss)
            self.left[greedy] = min(max(self.left[greedy] - loss, 0.0), MOST_SHARED)
        self._unpaid.clear()
