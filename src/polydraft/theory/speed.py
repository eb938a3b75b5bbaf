"""How much faster: tokens per step against what a call costs.

After the cost analysis of Yan et al. 2024, "Decoding Speculative Decoding" (arXiv 2402.01528): a smaller and worse draft may
win, as each of its steps is on the critical path.

    c      seconds of one draft step / seconds of one plain target step
    v      seconds of one scoring pass over the tree / seconds of one plain target step
    speed-up = tokens per step / (v + c x draft steps)
"""

import math

from polydraft.errors import InvalidInputError


def speed_up(
    tokens_per_step: float, *, draft_steps: int, draft_cost: float, scoring_cost: float = 1.0
) -> float:
    """Against plain decoding; costs in units of one plain target step.

    Raises:
        InvalidInputError: a cost is negative, or a pass would be free.

    Example:
        >>> speed_up(3.0, draft_steps=4, draft_cost=0.05)
        2.5
    """
    if draft_cost < 0 or scoring_cost <= 0 or draft_steps < 0:
        raise InvalidInputError(
            f"draft_cost={draft_cost}, scoring_cost={scoring_cost}, draft_steps={draft_steps} were given; expected measured costs "
            "in units of a plain target step, scoring_cost > 0 and the others >= 0."
        )
    return tokens_per_step / (scoring_cost + draft_cost * draft_steps)


def tokens_of_chain(acceptance: float, depth: int) -> float:
    """(1 - a^(depth+1)) / (1 - a): a chain under token-by-token verification with constant acceptance (Leviathan et al.).

    Example:
        >>> tokens_of_chain(0.5, 2)
        1.75
    """
    if not 0 <= acceptance <= 1:
        raise InvalidInputError(f"acceptance {acceptance} was given; expected a probability.")
    return depth + 1.0 if acceptance == 1 else (1 - acceptance ** (depth + 1)) / (1 - acceptance)


def best_depth(
    acceptance: float, *, draft_cost: float, scoring_cost_per_node: float = 0.0, most: int = 64
) -> int:
    """The chain length of greatest speed-up; 0 where drafting does not pay. A pass over d + 1 nodes costs 1 + d x the last cost.

    Example:
        >>> best_depth(0.8, draft_cost=0.05), best_depth(0.1, draft_cost=0.5)
        (8, 0)
    """
    speeds = [
        speed_up(
            tokens_of_chain(acceptance, depth),
            draft_steps=depth,
            draft_cost=draft_cost,
            scoring_cost=1 + depth * scoring_cost_per_node,
        )
        for depth in range(most + 1)
    ]
    return speeds.index(max(speeds)) if math.isfinite(max(speeds)) else most
