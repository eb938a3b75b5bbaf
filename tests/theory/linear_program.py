"""Optimal acceptance and block efficiency by linear programming, for small cases: what closed forms are checked against.

    one node   maximise sum F(w, x) over draws w and their tokens x:  sum_x F(w, x) <= Pr(w),  sum_w F(w, x) <= p(x)
    blocks     F(D, v) = Pr(draft D, last accepted context v);  T(v) = sum over D and u at or below v of F(D, u)
               maximise the sum of T:  sum_v F(D, v) = Pr(D),  T(v y) <= p(y | v) T(v)

The second sees every draft at once, so no lossless rule can do better.
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from polydraft.errors import InvalidInputError

Path = tuple[int, ...]


def best_acceptance(p: np.ndarray, draws: Sequence[tuple[float, Sequence[int]]]) -> float:
    """The largest acceptance of any lossless rule at one node.

    p: [V].  draws: (probability, tokens) of every possible draw.

    Example:
        >>> pairs = [(0.81, (0, 0)), (0.09, (0, 1)), (0.09, (1, 0)), (0.01, (1, 1))]
        >>> round(best_acceptance(np.array([0.5, 0.5]), pairs), 6)
        0.69
    """
    cells = [(w, x) for w, (_, tokens) in enumerate(draws) for x in sorted(set(tokens))]
    rows = [w for w, _ in cells] + [len(draws) + x for _, x in cells]
    A = coo_array(
        (np.ones(2 * len(cells)), (rows, [*range(len(cells))] * 2)), shape=(len(draws) + len(p), len(cells))
    )
    return -_solved(linprog(-np.ones(len(cells)), A_ub=A.tocsr(), b_ub=[*(w for w, _ in draws), *p]))


def best_block_efficiency(
    row: Callable[[Path], np.ndarray], drafts: Sequence[tuple[float, Sequence[Path]]]
) -> float:
    """E[accepted] + 1 of the best lossless rule.

    row: target distribution after a path.  drafts: (probability, paths of all its nodes, the root () among them).

    Example:
        >>> half = np.array([0.5, 0.5])
        >>> chains = [(0.9, [(), (0,)]), (0.1, [(), (1,)])]
        >>> round(best_block_efficiency(lambda path: half, chains), 6)
        1.6
    """
    cells = [(d, path) for d, (_, paths) in enumerate(drafts) for path in sorted(set(paths))]
    contexts = sorted({path for _, path in cells if path})
    place = {path: i for i, path in enumerate(contexts)}
    gain = np.array([len(path) for _, path in cells], float)
    entries: list[tuple[int, int, float]] = []
    for column, (_, path) in enumerate(cells):
        for depth in range(
            1, len(path) + 1
        ):  # T(path[:depth]) counts in its own row, and in those of its children
            entries.append((place[path[:depth]], column, 1.0))
        for vy in contexts:
            if path[: len(vy) - 1] == vy[:-1]:
                entries.append((place[vy], column, -float(row(vy[:-1])[vy[-1]])))
    i, j, value = (np.array(x) for x in zip(*entries, strict=True))
    A = coo_array((value, (i, j)), shape=(len(contexts), len(cells)))
    draft_of = [d for d, _ in cells]
    E = coo_array((np.ones(len(cells)), (draft_of, range(len(cells)))), shape=(len(drafts), len(cells)))
    return 1 - _solved(
        linprog(
            -gain, A_ub=A.tocsr(), b_ub=np.zeros(len(contexts)), A_eq=E.tocsr(), b_eq=[w for w, _ in drafts]
        )
    )


def _solved(found) -> float:
    if not found.success:
        raise InvalidInputError(
            f"the linear programme was not solved: {found.message}. Expected distributions that sum to one; check them."
        )
    return float(found.fun)
