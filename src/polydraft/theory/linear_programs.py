"""Optimal acceptance and block efficiency by linear programming, for small cases: what closed forms are checked against.

    one node   maximise sum F(w, x) over draws w and their tokens x:  sum_x F(w, x) <= Pr(w),  sum_w F(w, x) <= p(x)
    blocks     F(D, v) = Pr(draft D, last accepted context v);  T(v) = sum over D and u at or below v of F(D, u)
               maximise the sum of T:  sum_v F(D, v) = Pr(D),  T(v y) <= p(y | v) T(v)

The second sees every draft at once, so no lossless verifier can do better. SciPy solves them (the extra `theory`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polydraft.errors import IncompatibleError, InvalidInputError

Path = tuple[int, ...]
Entry = tuple[int, int, float]
"""Row, column and value of a matrix."""


def best_acceptance(p: np.ndarray, draws: Sequence[tuple[float, Sequence[int]]]) -> float:
    """The largest acceptance of any lossless verifier at one node.

    p: [V].  draws: (probability, tokens) of every possible draw.

    Example:
        >>> pairs = [(0.81, (0, 0)), (0.09, (0, 1)), (0.09, (1, 0)), (0.01, (1, 1))]
        >>> round(best_acceptance(np.array([0.5, 0.5]), pairs), 6)
        0.69
    """
    cells = [(w, x) for w, (_, tokens) in enumerate(draws) for x in sorted(set(tokens))]
    of_draws = [(w, column, 1.0) for column, (w, _) in enumerate(cells)]
    of_tokens = [(len(draws) + x, column, 1.0) for column, (_, x) in enumerate(cells)]
    limits = [*(probability for probability, _ in draws), *p]
    return _largest(np.ones(len(cells)), above=(of_draws + of_tokens, limits))


def best_block_efficiency(
    row: Callable[[Path], np.ndarray], drafts: Sequence[tuple[float, Sequence[Path]]]
) -> float:
    """E[accepted] + 1 of the best lossless verifier.

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
    entries: list[Entry] = []
    for column, (_, path) in enumerate(cells):
        for depth in range(1, len(path) + 1):  # T(path[:depth]) counts in its own row
            entries.append((place[path[:depth]], column, 1.0))
        for child in contexts:  # and in those of its children
            if path[: len(child) - 1] == child[:-1]:
                entries.append((place[child], column, -float(row(child[:-1])[child[-1]])))
    of_drafts = [(d, column, 1.0) for column, (d, _) in enumerate(cells)]
    accepted = np.array([len(path) for _, path in cells], float)
    return 1 + _largest(
        accepted,
        above=(entries, [0.0] * len(contexts)),
        equal=(of_drafts, [probability for probability, _ in drafts]),
    )


def _largest(
    gain: np.ndarray,
    *,
    above: tuple[list[Entry], Sequence[float]],
    equal: tuple[list[Entry], Sequence[float]] | None = None,
) -> float:
    """The largest gain @ x for x >= 0 with A x <= limits and E x = sums.

    Raises:
        IncompatibleError: SciPy is not installed.  InvalidInputError: no solution.
    """
    try:
        from scipy.optimize import linprog
        from scipy.sparse import coo_array
    except ModuleNotFoundError:
        raise IncompatibleError(
            "a linear programme was asked for and SciPy is not installed. Install the extra: pip install 'polydraft[theory]'."
        ) from None

    def matrix(entries: list[Entry], num_rows: int) -> Any:
        rows, columns, values = zip(*entries, strict=True)
        return coo_array((values, (rows, columns)), shape=(num_rows, len(gain))).tocsr()

    limits = {"A_ub": matrix(above[0], len(above[1])), "b_ub": above[1]}
    sums = {} if equal is None else {"A_eq": matrix(equal[0], len(equal[1])), "b_eq": equal[1]}
    solution = linprog(-gain, **limits, **sums)
    if not solution.success:
        raise InvalidInputError(
            f"the linear programme was not solved: {solution.message}. Expected distributions that sum to one; check them."
        )
    return -float(solution.fun)
