"""What no lossless verifier can exceed over several tokens, in closed form; and optima by linear programming, for small cases.

paths   K iid paths: T(v y) = min(T(v) p(y | v), 1 - (1 - q(path v y))^K),  E[tokens] <= 1 + sum T
race    k drafts a node that share the target's clocks: E[tokens] <= (log V + log(k + 1)) / H[R]
        R  place of the token that the target takes in the draft's order of arrival, KL(p || q) <= H[R]   (channel simulation; ERSD, 2504.15475)

Linear programmes, which closed forms are checked against; SciPy solves them (the extra `theory`):

node    maximise sum F(w, x) over draws w and their tokens x:  sum_x F(w, x) <= Pr(w),  sum_w F(w, x) <= p(x)
blocks  F(D, v) = Pr(draft D, last accepted context v);  T(v) = sum over D and u at or below v of F(D, u)
        maximise the sum of T:  sum_v F(D, v) = Pr(D),  T(v y) <= p(y | v) T(v);  it sees every draft at once, so no lossless verifier can do better
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from polydraft.errors import IncompatibleError, InvalidInputError

Path = tuple[int, ...]


def block_efficiency_of_paths(
    target_row: Callable[[Path], np.ndarray], draft_row: Callable[[Path], np.ndarray], K: int, depth: int
) -> float:
    """An upper bound on E[accepted] + 1 for K iid paths of `depth` tokens; tight for depth 1, V^depth terms.

    target_row, draft_row: distributions [V] after a path.

    Example:
        >>> p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
        >>> round(block_efficiency_of_paths(lambda path: p, lambda path: q, 1, 2), 6)  # one path: 1 + 11/9 is attained
        2.222222
    """

    def below(path: Path, reach: float, drafted: float) -> float:
        if len(path) == depth or reach == 0:
            return 0.0
        p = target_row(path)
        q = draft_row(path) * drafted
        T = np.minimum(reach * p, -np.expm1(K * np.log1p(-np.minimum(q, 1 - 1e-16))))
        return float(sum(T[y] + below((*path, int(y)), float(T[y]), float(q[y])) for y in np.flatnonzero(T)))

    return 1 + below((), 1.0, 1.0)


class TargetTexts(NamedTuple):
    """Texts that the target writes, to estimate on. target_row, draft_row: distributions [V] after a path.  depth: tokens of each text."""

    target_row: Callable[[Path], np.ndarray]
    draft_row: Callable[[Path], np.ndarray]
    depth: int
    num_texts: int
    rng: np.random.Generator

    def mean(self, value: Callable[[np.ndarray, np.ndarray], float]) -> tuple[float, float]:
        """Mean and standard error of a function of both models' probabilities of the tokens of a text."""
        values = np.empty(self.num_texts)
        for text in range(self.num_texts):
            path: Path = ()
            p = np.empty(self.depth)
            q = np.empty(self.depth)
            for i in range(self.depth):
                row = self.target_row(path)
                token = int(self.rng.choice(len(row), p=row))
                p[i] = row[token]
                q[i] = self.draft_row(path)[token]
                path = (*path, token)
            values[text] = value(p, q)
        return float(values.mean()), float(values.std(ddof=1) / self.num_texts**0.5)


def sampled_block_efficiency_of_paths(texts: TargetTexts, K: int) -> tuple[float, float]:
    """The same bound without its V^depth terms: 1 + E[sum over beginnings v of a text of the target of T(v) / p(v)], and its standard error.

    Example:
        >>> p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
        >>> rows = (lambda path: p), (lambda path: q)
        >>> mean, error = sampled_block_efficiency_of_paths(TargetTexts(*rows, 3, 500, np.random.default_rng(0)), 2)
        >>> abs(mean - block_efficiency_of_paths(*rows, 2, 3)) < 4 * error
        True
    """

    def tokens(p: np.ndarray, q: np.ndarray) -> float:
        total = reach = 1.0
        drawn = -np.expm1(K * np.log1p(-np.minimum(q.cumprod(), 1 - 1e-16)))
        for probability, chance, mass in zip(p, drawn, p.cumprod(), strict=True):
            reach = min(reach * probability, chance)
            total += reach / mass
        return total

    return texts.mean(tokens)


def stated_by_spectr_gbv(texts: TargetTexts, K: int) -> tuple[float, float]:
    """Tokens per step that SpecTr-GBV states for K iid paths, and the standard error: 1 + sum over v of P(v) (1 - (1 - min(1, Q(v) / P(v)))^K).

    P, Q: of the whole path v. Lin et al. 2026 (arXiv 2604.25925). It is no bound: at one node the optimum may be larger. Behind a block that is cut
    short the next steps follow a changed target, so that further down it may exceed what a verifier of this package can reach.

    Example:
        >>> p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
        >>> texts = TargetTexts(lambda path: p, lambda path: q, 1, 2000, np.random.default_rng(0))
        >>> mean, error = stated_by_spectr_gbv(texts, 2)
        >>> abs(mean - 1.68) < 4 * error  # a verifier may accept .69
        True
    """

    def tokens(p: np.ndarray, q: np.ndarray) -> float:
        ratio = np.minimum(q.cumprod() / p.cumprod(), 1.0)
        return 1 + float((1 - (1 - ratio) ** K).sum())

    return texts.mean(tokens)


def tokens_of_tree(path_masses: np.ndarray) -> float:
    """The optimum for a deterministic tree, which target sampling attains: 1 + sum over nodes of p(path to the node).

    Example:
        >>> tokens_of_tree(np.array([0.5, 0.25]))
        1.75
    """
    return 1 + float(np.sum(path_masses))


def entropy(distribution: np.ndarray) -> float:
    """In nats.

    Example:
        >>> round(entropy(np.array([0.5, 0.5])), 4)
        0.6931
    """
    positive = distribution[distribution > 0]
    return float(-(positive * np.log(positive)).sum())


def tokens_of_race(vocab_size: int, k: int, index_entropy: float) -> float:
    """Largest E[tokens] of a race tree with k nodes, whatever its form.

    index_entropy: H[R] in nats; its distribution is `acceptance.race_places`.

    Raises:
        InvalidInputError: the entropy is not positive (the draft then equals the target and nothing bounds the tokens).

    Example:
        >>> round(tokens_of_race(32_000, 4, 1.0), 2)
        11.98
    """
    if not index_entropy > 0:
        raise InvalidInputError(
            f"index_entropy {index_entropy} was given; expected a positive number of nats."
        )
    return float((np.log(vocab_size) + np.log(k + 1)) / index_entropy)


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
