"""How large each draft of a step is: decided here, once. Drafters draw the budget that they are given, and nobody changes it on the way.

asked for   by the request itself, else by the policy: from costs, acceptance and neighbours
room        what `max_tokens` and the contexts of the target and of the drafter leave
shape       one that the drafter draws: trees that grow only where it grows them, spare siblings only beside chains
"""

from collections.abc import Sequence
from typing import Any

from polydraft.core import Budget, Drawing, Method, Offers, SamplingParams, TreeShape
from polydraft.core.geometry import chain, paths
from polydraft.drafters.base import is_bound
from polydraft.policy.fixed import Policy, RunningSequence


def decided(
    policy: Policy,
    sequences: Sequence[Any],
    drafter: Method,
    offers: Offers,
    max_model_len: int,
    *,
    chains: bool = False,
) -> list[Budget]:
    """The draft of each sequence in this step. offers: of the drafter.  max_model_len: of the target.

    chains: whether trees that grow are drafted as chains, as a decoding method leaves a greedy row without a verifier of its own.
    """
    budgets = list[Budget]()
    for s, planned in zip(sequences, policy.budgets(sequences), strict=True):
        budget = s.request.budget or planned
        if chains and not budget.parents and TreeShape.GROWN not in drafter.shapes:
            budget = as_chain(budget)
        budgets.append(budget.within(room_of(s, max_model_len)))
    texts = [(s.request.params, len(s.token_ids)) for s in sequences]
    return drawable(budgets, texts, drafter, offers)


def room_of(s: RunningSequence, max_model_len: int) -> int:
    """Deepest useful draft: the step's extra token is the last that the context or `max_tokens` leaves room for."""
    longest = max_model_len - s.num_ahead
    if s.request.params.max_tokens is not None:
        longest = min(longest, s.num_prompt_tokens + s.request.params.max_tokens)
    return max(0, longest - len(s.token_ids) - 1)


def drawable(
    budgets: Sequence[Budget], texts: Sequence[tuple[SamplingParams, int]], drafter: Method, offers: Offers
) -> list[Budget]:
    """The same as the drafter draws them. texts: of each row, its parameters and its number of tokens.

    Siblings of one draft are drawn one way: beside several paths no spare siblings are.
    """
    draws = offers.draws
    if any(_has_paths(budget, draws) for budget in budgets):
        budgets = [budget.without_spares() for budget in budgets]
    return [
        budget if budget.copied else _drawn(budget.within(draws.room(num_tokens)), params, drafter, offers)
        for budget, (params, num_tokens) in zip(budgets, texts, strict=True)
    ]


def as_chain(budget: Budget) -> Budget:
    """A chain within the bounds of a tree that grows, which ends where that would."""
    return Budget.fixed(chain(budget.chain_length)).ending(budget.stop)


def _has_paths(budget: Budget, draws: Drawing) -> bool:
    """Whether its siblings are drawn as those of several paths."""
    return budget.width > 1 and (bool(budget.parents) or not draws.foretells)


def _drawn(budget: Budget, params: SamplingParams, drafter: Method, offers: Offers) -> Budget:
    """A budget in a shape that the drafter draws for such a request; one that grows trees takes any as their bounds."""
    if budget.shape in drafter.shapes or TreeShape.GROWN in drafter.shapes:
        return budget
    if budget.parents and budget.has_spares and offers.draws.branches:
        return budget
    if not budget.parents and params.greedy and offers.draws.branches:
        return budget
    if not budget.parents and budget.stop is not None and offers.draws.foretells:
        return as_chain(budget) if is_bound(params, offers.model.draft_ids) else budget
    width = 1 if drafter.shapes == {TreeShape.CHAIN} else budget.width
    return Budget.fixed(paths(width, min(budget.max_depth, budget.max_nodes // width)))
