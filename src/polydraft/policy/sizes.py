"""How large each draft of a step is: decided here, once. Drafters draw the budget that they are given, and nobody changes it on the way.

asked for   by the request itself, else by the policy: from costs, acceptance and neighbours
room        what `max_tokens` and the contexts of the target and of the drafter leave
shape       one that the drafter draws: trees that grow only where it grows them, spare siblings only beside chains
"""

from collections.abc import Sequence
from typing import Any

from polydraft.core import Budget, Method, Offers, TreeShape
from polydraft.drafters.base import as_chain, drawable
from polydraft.policy.fixed import Policy, RunningSequence

__all__ = ["decided", "room_of"]


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
