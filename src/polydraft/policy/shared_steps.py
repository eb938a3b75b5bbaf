"""Drafts that others wait for: beside prompts that are read in the same forward pass, and of sequences that look again, all of a batch at once.

A forward pass that reads a piece of a prompt has many rows, and what is drafted beside it costs a row's full arithmetic. The time of a step is one budget:
a piece takes what it takes beside plain decoding, and drafts a little more than that.
"""

from collections.abc import Sequence
from dataclasses import replace

from polydraft.core import Budget
from polydraft.policy.costs import Costs
from polydraft.policy.course import Course, Stage
from polydraft.policy.marginal import gain

LONGER = 1.2
"""How many times as long a step may be for drafts that others wait for."""


def most_rows(budget: Budget) -> int:
    """Rows of a forward pass that a draft may have, its spare siblings included.

    Example:
        >>> from polydraft.core.budget import Stop
        >>> most_rows(Budget.fixed((-1, 0)).ending(Stop((0.5,), min_spare_chance=(0.1, 0.2))))
        3
    """
    return max(
        budget.max_nodes, len(budget.stop.min_spare_chance) + 1 if budget.stop and budget.has_spares else 0
    )


def cut_to(budget: Budget, rows: int) -> Budget:
    """The same with so many rows at most.

    Example:
        >>> cut_to(Budget.fixed((-1, 0, 1, 2)), 2).parents, cut_to(Budget.grown(24, 4, 3), 2).max_nodes
        ((-1, 0, 1), 2)
    """
    if rows >= most_rows(budget):
        return budget
    shorter = budget.without_spares().within(rows)
    return shorter if budget.parents else replace(shorter, max_nodes=rows)


def fit(courses: Sequence[Course], num_sequences: int, riding: int, costs: Costs) -> None:
    """Cut what is asked for in this step. riding: prompt tokens in its forward pass.  costs: behind the texts of the batch.

    Drafts that survive most often come first, those that look again last, as long as the step takes no more than LONGER times what it takes without them,
    beside prompts none that the full price of its rows makes a loss. All stay where every sequence drafts, and none is expected to wait for a token longer
    than that. Without prompts one sequence may always look. Requests with a seed are left as they are.
    """
    waiting = [
        c for c in courses if c.step_budget.max_depth and not c.costs and (riding or c.stage is Stage.LOOKING)
    ]
    if not waiting or num_sequences + riding == 1:
        return
    others = [c.step_budget for c in courses if c.step_budget.max_depth and c not in waiting]
    rows = num_sequences + riding + sum(map(most_rows, others))
    number = len(others)
    steps = max((budget.max_depth for budget in others), default=0)
    longest = LONGER * costs.step(rows, steps, max(number, 1))
    if riding and number + len(waiting) == num_sequences:
        tokens, nodes, depths = zip(*(c.acceptance.expected for c in courses), strict=True)
        if costs.step(num_sequences + riding + sum(nodes), max(depths), num_sequences) <= longest * min(
            tokens
        ):
            return
    for course in sorted(waiting, key=lambda c: (c.stage is Stage.LOOKING, -c.survival)):
        looks = course.stage is Stage.LOOKING
        depth = course.step_budget.max_depth
        pays = looks or gain(course.acceptance.expected, course.weighed.speed, rows, number + 1, costs) > 0
        counts = range(1, pays * most_rows(course.step_budget) + 1)
        count = sum(costs.step(rows + n, max(steps, min(n, depth)), number + 1) <= longest for n in counts)
        count = max(count, not riding and number == len(others))
        if count == 0:
            course.wait()
            continue
        course.step_budget = cut_to(course.step_budget, count)
        rows = rows + count
        number = number + 1
        steps = max(steps, course.step_budget.max_depth)
