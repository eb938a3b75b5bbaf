"""What no lossless verifier can exceed over several tokens, in closed form.

paths   K iid paths: T(v y) = min(T(v) p(y | v), 1 - (1 - q(path v y))^K),  E[tokens] <= 1 + sum T
race    k drafts a node that share the target's clocks: E[tokens] <= (log V + log(k + 1)) / H[R]
        R  place of the token that the target takes in the draft's order of arrival, KL(p || q) <= H[R]   (channel simulation; ERSD, 2504.15475)
"""

from collections.abc import Callable

import numpy as np

from polydraft.errors import InvalidInputError

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


def sampled_block_efficiency_of_paths(
    target_row: Callable[[Path], np.ndarray],
    draft_row: Callable[[Path], np.ndarray],
    K: int,
    depth: int,
    num_texts: int,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """The same bound without its V^depth terms: 1 + E[sum over beginnings v of a text of the target of T(v) / p(v)], and its standard error.

    Example:
        >>> p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
        >>> rows = (lambda path: p), (lambda path: q)
        >>> mean, error = sampled_block_efficiency_of_paths(*rows, 2, 3, 500, np.random.default_rng(0))
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

    return _over_texts(target_row, draft_row, depth, num_texts, rng, tokens)


def stated_by_spectr_gbv(
    target_row: Callable[[Path], np.ndarray],
    draft_row: Callable[[Path], np.ndarray],
    K: int,
    depth: int,
    num_texts: int,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """Tokens per step that SpecTr-GBV states for K iid paths, and the standard error: 1 + sum over v of P(v) (1 - (1 - min(1, Q(v) / P(v)))^K).

    P, Q: of the whole path v. Lin et al. 2026 (arXiv 2604.25925). It is no bound: at one node the optimum may be larger. Behind a block that is cut
    short the next steps follow a changed target, so that further down it may exceed what a verifier of this package can reach.

    Example:
        >>> p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
        >>> mean, error = stated_by_spectr_gbv(lambda path: p, lambda path: q, 2, 1, 2000, np.random.default_rng(0))
        >>> abs(mean - 1.68) < 4 * error  # a verifier may accept .69
        True
    """

    def tokens(p: np.ndarray, q: np.ndarray) -> float:
        ratio = np.minimum(q.cumprod() / p.cumprod(), 1.0)
        return 1 + float((1 - (1 - ratio) ** K).sum())

    return _over_texts(target_row, draft_row, depth, num_texts, rng, tokens)


def _over_texts(
    target_row: Callable[[Path], np.ndarray],
    draft_row: Callable[[Path], np.ndarray],
    depth: int,
    num_texts: int,
    rng: np.random.Generator,
    value: Callable[[np.ndarray, np.ndarray], float],
) -> tuple[float, float]:
    """Mean and standard error of a function of both models' probabilities of the tokens of a text that the target writes."""
    values = np.empty(num_texts)
    for text in range(num_texts):
        path: Path = ()
        p = np.empty(depth)
        q = np.empty(depth)
        for i in range(depth):
            row = target_row(path)
            token = int(rng.choice(len(row), p=row))
            p[i] = row[token]
            q[i] = draft_row(path)[token]
            path = (*path, token)
        values[text] = value(p, q)
    return float(values.mean()), float(values.std(ddof=1) / num_texts**0.5)


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
