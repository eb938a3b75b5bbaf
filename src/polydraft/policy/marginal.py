"""The rule for how much to draft: a drafted token is worth it when

    P(it is accepted) / (seconds of one more draft step at its depth + of one more row of the forward pass) > present tokens per second

At the best ratio of tokens to seconds a token belongs in exactly when its probability exceeds that ratio times its price (Dinkelbach 1967), and the
present speed converges to that ratio. Path probabilities fall along a path and prices do not fall (`costs`), so that looking one token ahead is
enough. What drafting costs before its first token is weighed once, the whole draft against none (`gain`).

    speed           tokens per second of all sequences of a step
    reach           P(a node is accepted), see `polydraft.core.confidence`
    minimum reach   of a depth: the one with which its nodes go on, as a token more is then accepted with reach x acceptance of a next token
"""

from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

from polydraft.policy.costs import Costs

MOST_DEPTH = 12


class Expected(NamedTuple):
    """What a step with drafts brings and takes: its tokens, the drafted nodes, and the draft steps."""

    tokens: float
    nodes: float
    steps: float


CERTAIN = Expected(2.0, 1.0, 1.0)
"""A drafted token that is accepted for sure: where not even that pays, nothing is looked for."""


class Beside(NamedTuple):
    """What a draft is weighed beside. speed: tokens per second of the batch.  rows: of the forward pass without it.  drafting: sequences that draft, this one
    among them."""

    speed: float
    rows: float
    drafting: int
    costs: Costs


class Weighed(NamedTuple):
    """What a draft was weighed by. speed: tokens per second of the batch.  rows: of the forward pass without it.  gain: of the draft, see `gain`."""

    speed: float = 0.0
    rows: float = 1.0
    gain: float = 0.0


UNWEIGHED = Weighed()


def speed_of(drafts: Sequence[Expected], num_sequences: int, costs: Costs) -> float:
    """Tokens per second of a step in which some of the sequences draft; of none, plain decoding.

    Example:
        >>> round(speed_of([], 1, Costs.assumed()), 2), round(speed_of([Expected(2.5, 3, 3)], 1, Costs.assumed()), 2)
        (1.0, 1.89)
    """
    tokens = num_sequences + sum(expected.tokens - 1.0 for expected in drafts)
    rows = num_sequences + sum(expected.nodes for expected in drafts)
    steps = max((expected.steps for expected in drafts), default=0.0)
    return tokens / costs.step(rows, steps, max(len(drafts), 1))


def fastest_share(drafts: Sequence[Expected], num_sequences: int, costs: Costs) -> tuple[int, float]:
    """How many of these drafts, the first ones, make the fastest step, and its tokens per second; what drafting costs before its first token is shared.

    Example:
        >>> sure, unsure = Expected(1.9, 1, 1), Expected(1.1, 1, 1)
        >>> fastest_share([sure, sure, unsure, unsure], 4, Costs.of({1: 1.0, 6: 1.3, 8: 2.5}, draft_start=0.0, draft_step=0.1))[0]
        2
    """
    tokens = float(num_sequences)
    rows = float(num_sequences)
    steps = 0.0
    best = 0, tokens / costs.step(rows, 0)
    for number, draft in enumerate(drafts, 1):
        tokens = tokens + draft.tokens - 1.0
        rows = rows + draft.nodes
        steps = max(steps, draft.steps)
        speed = tokens / costs.step(rows, steps, number)
        if speed > best[1]:
            best = number, speed
    return best


def gain(draft: Expected, speed: float, rows: float, drafting: int, costs: Costs) -> float:
    """Tokens that the whole draft of a sequence brings beyond those that its seconds are worth, those before its first token included.

    rows: of the forward pass without this draft.
    """
    draft_seconds = costs.drafting(draft.steps, drafting) / drafting
    return draft.tokens - 1.0 - speed * (draft_seconds + costs.rows(rows + draft.nodes) - costs.rows(rows))


def min_reaches(
    speed: float, next_acceptance: float, rows: float, drafting: int, costs: Costs, nodes: float = 0.0
) -> tuple[float, ...]:
    """By depth from 1 on, the reach with which a node goes on; it ends before the first depth that no reach is enough for.

    rows: of the forward pass without this draft.  nodes: that a tree is expected to have, beside which a deeper one comes.
    """
    reaches = list[float]()
    draft_step = costs.draft_step * costs.breadth(drafting) / drafting
    for depth in range(1, MOST_DEPTH):
        price = draft_step + costs.row(rows + max(depth, nodes))
        reaches.append(speed * price / next_acceptance)
        if reaches[-1] >= 1.0:
            break
    return tuple(reaches)


def min_spare_chances(speed: float, most: float, rows: float, depth: int, costs: Costs) -> tuple[float, ...]:
    """By the number of drafted tokens, from 1 on, the chance of acceptance with which a spare sibling is worth its row; ends with the last row that a
    chance of `most` is worth.

    rows: of the forward pass without this draft.  depth: of the chain, at most.
    """
    seconds = [costs.rows(rows + drafted) for drafted in range(1, 2 * depth + 1)]
    chances = [speed * (more - fewer) for fewer, more in pairwise(seconds)]
    while chances and chances[-1] > most:
        chances.pop()
    return tuple(chances)


def min_branch_chances(speed: float, most: float, rows: float, nodes: int, costs: Costs) -> tuple[float, ...]:
    """By the number of drafted tokens, from 1 on, the chance of acceptance with which one more is worth its row where it takes no draft step; as prices do
    not fall, it ends before the first row that a chance of `most` is not worth.

    rows: of the forward pass without this draft.  nodes: of the tree, at most.

    Example:
        >>> costs = Costs.of({1: 1.0, 4: 1.0, 8: 1.4}, draft_start=0.0, draft_step=0.0)
        >>> [round(chance, 2) for chance in min_branch_chances(1.5, 1.0, 1, 6, costs)]
        [0.0, 0.0, 0.15, 0.15, 0.15]
    """
    prices = (speed * costs.row(rows + drafted) for drafted in range(1, nodes))
    return tuple(takewhile(lambda price: price <= most, prices))


def depth_of(reaches: Sequence[float], first: float, following: float) -> int:
    """The depth at which a chain ends whose tokens are accepted with these probabilities, for drafts without confidence."""
    reach = first
    depth = 1
    while depth <= len(reaches) and reach >= reaches[depth - 1]:
        reach = reach * following
        depth = depth + 1
    return depth


def foreseen(first: float, following: float, costs: Costs) -> Expected:
    """What drafts of these acceptances bring under the rule, before anything was drafted."""
    speed = 1.0 / costs.step(1, 0)
    best = Expected(1.0 + first, 1.0, 1.0)
    for _ in range(3):
        depth = depth_of(min_reaches(speed, following, 1, 1, costs), first, following)
        tokens = 1.0 + first * (sum(following**d for d in range(depth)))
        best = Expected(tokens, depth, depth)
        speed = max(speed, speed_of([best], 1, costs))
    return best
