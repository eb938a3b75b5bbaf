"""What is captured once, when an engine is built: the graphs of its models' passes, so that no request waits for one."""

import sys
from collections.abc import Sequence
from typing import Any

from polydraft.models.slots import TREE_ROOM

__all__ = ["MOST_DEFAULT", "warm_up"]

MOST_DEFAULT = 64
"""Rows of the largest graph where a plan does not say how much it drafts."""
DRAFT_ROWS = 8
"""Rows of a draft model's largest graph: nodes of one depth that have children."""


def warm_up(target: Any, draft: Any, plan: Any, layers: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Capture the graphs of models that have some, with a bar on the terminal; by role how many, seconds, and bytes that they hold.

    draft: or None.  plan: whose `most_nodes` bounds a tree.  layers: of the target whose states are wanted.

    Example:
        >>> warm_up(object(), None, object(), ())
        {}
    """
    from rich.progress import Progress

    most = min(1 + getattr(plan, "most_nodes", MOST_DEFAULT - 1), TREE_ROOM)
    found: dict[str, dict[str, Any]] = {}
    wanted = (("target", target, most, layers), ("draft", draft, min(most, DRAFT_ROWS), ()))
    models = [each for each in wanted if getattr(each[1], "graphed", False)]
    if not models:
        return found
    with Progress(disable=not sys.stderr.isatty(), transient=True) as bar:
        for role, model, rows, hidden in models:
            task = bar.add_task(f"capturing graphs of the {role}", total=None)

            def shown(left: int, task: Any = task) -> None:
                done = bar.tasks[task].completed
                bar.update(task, total=done + left, completed=done + 1)

            found[role] = model.capture(rows, hidden, progress=shown)._asdict()
    return found
