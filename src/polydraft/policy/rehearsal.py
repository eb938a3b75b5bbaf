"""What short sampled requests of an idle engine show before anybody waits: seconds of a step beside its forward pass, plain and with drafts, and acceptance.

A request that names a seed is decided from measured figures and its own steps alone. From rates of no pair in particular each of them paid anew for finding
out: .97 of plain decoding on SmolLM2 and its head where drafts do not pay, .95 of the best chain on the embedded pair, which accepts more than was assumed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from polydraft.core import Budget, Draft, Drafter, Outcome, Request, SamplingParams, TreeShape, Verifier
from polydraft.core.geometry import chain
from polydraft.policy.acceptance import UNKNOWN_SAMPLED, Acceptance
from polydraft.policy.costs import Costs
from polydraft.policy.fixed import Policy
from polydraft.policy.marginal import Expected

DEPTH = 3
"""Tokens of a rehearsed draft."""
TOKENS = 16
"""Of each short answer."""
STRENGTH = 4.0
"""Tries that assumed rates count for beside those of the rehearsal."""


class Rehearsed(NamedTuple):
    """overhead, drafting: seconds of a step beside its forward pass, without drafts and with DEPTH drafted tokens, 0 where none were.  rates: of
    sampled tokens, see `acceptance`."""

    overhead: float
    drafting: float = 0.0
    rates: tuple[float, ...] = UNKNOWN_SAMPLED

    def priced(self, costs: Costs) -> Costs:
        """Costs with what a step does beside its forward pass and its draft steps: reading what was accepted, verifying several rows.

        Example:
            >>> costs = Rehearsed(0.1, 1.0).priced(Costs.of({1: 1.0, 4: 1.1, 8: 1.2}, draft_start=0.1, draft_step=0.2))
            >>> round(costs.step(4, 3), 2)
            2.1
        """
        start = max(costs.draft_start, self.drafting - self.overhead - DEPTH * costs.draft_step)
        return replace(costs, overhead=self.overhead, draft_start=start)


def unrehearsed() -> Rehearsed:
    """Where nothing is rehearsed."""
    return Rehearsed(0.0)


def can_rehearse(drafter: Drafter, verifier: Verifier) -> bool:
    """Whether short texts tell what drafts are worth: chains of a model or a head, where drafts from text depend on what stands in it."""
    return drafter.offers.model is not None and TreeShape.CHAIN in drafter.info.shapes & verifier.info.shapes


def short_requests(prompts: Sequence[Sequence[int]], max_model_len: int) -> list[Request]:
    """One after each prompt, of which as much is read as a context has room for."""
    params = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True)
    longest = max(max_model_len - TOKENS, 1)
    return [Request(f"rehearsal-{n}", tuple(ids[-longest:]), params, n) for n, ids in enumerate(prompts)]


class Rehearsal(Policy):
    """Chains of so many tokens, 0: none, whose steps are noted."""

    def __init__(self, depth: int = DEPTH) -> None:
        self._budget = Budget.fixed(chain(depth))
        self._seconds = list[float]()
        self._seen = Acceptance(UNKNOWN_SAMPLED, Expected(1.0, 0.0, 0.0), STRENGTH, 1.0)

    def budgets(self, sequences: Sequence[Any]) -> list[Budget]:
        return [self._budget] * len(sequences)

    def learn(
        self, sequences: Sequence[Any], draft: Draft, probs: Callable[[], Any], outcome: Outcome
    ) -> None:
        confidence = draft.confidence
        for b, path in enumerate(outcome.lists.paths):
            self._seen.observe(
                draft.tree.host.parents[b], path, None if confidence is None else confidence[b]
            )

    def time(self, seconds: Mapping[str, float]) -> None:
        self._seconds.append(seconds["drafting"] + seconds["verifying"] + seconds["other"])

    @property
    def seconds(self) -> float:
        """Of a step beside its forward pass."""
        return median(self._seconds)

    @property
    def rates(self) -> tuple[float, ...]:
        """Acceptance of each lane."""
        return tuple(self._seen.rates)
