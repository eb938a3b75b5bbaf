"""Drafts that are sampled from rows, where there are too many to enumerate: `testing.enumerate_drafts`, one draft at a time."""

from collections.abc import Iterator

import numpy as np

from polydraft.core import DraftSampling
from polydraft.errors import InvalidInputError
from polydraft.testing import Counts, Grown, Path, RowSource


def draw_siblings(sampling: DraftSampling, q: np.ndarray, n: int, rng: np.random.Generator) -> Path:
    """n children of a node in draw order. q: [V] what they are drawn from; fewer where it has fewer tokens.

    Raises:
        InvalidInputError: draws that need more than one row.

    Example:
        >>> q = np.array([0.5, 0.3, 0.2])
        >>> draw_siblings(DraftSampling.POINT_MASS, q, 2, np.random.default_rng(0))
        (0, 1)
        >>> sorted(draw_siblings(DraftSampling.WITHOUT_REPLACEMENT, q, 3, np.random.default_rng(0)))
        [0, 1, 2]
    """
    ranked = np.argsort(-q, kind="stable")
    match sampling:
        case DraftSampling.IID:
            chosen = rng.choice(len(q), n, p=q)
        case DraftSampling.WITHOUT_REPLACEMENT | DraftSampling.COUPLED:
            with np.errstate(divide="ignore"):
                arrivals = rng.exponential(size=len(q)) / q  # a race: tokens without mass never arrive
            chosen = np.argsort(arrivals)[: min(n, int((q > 0).sum()))]
        case DraftSampling.POINT_MASS:
            chosen = ranked[:n]
        case DraftSampling.GREEDY_PLUS_ONE:
            rest = q.copy()
            rest[ranked[: n - 1]] = 0.0
            last = [rng.choice(len(q), p=rest / rest.sum())] if rest.sum() > 0 else []
            chosen = [*ranked[: n - 1], *last]
        case DraftSampling.SYSTEMATIC:
            steps = (rng.random() + np.arange(n)) / n
            last_token = np.flatnonzero(q)[-1]
            chosen = np.minimum(np.searchsorted(q.cumsum() / q.sum(), steps, side="right"), last_token)
        case _:
            raise InvalidInputError(
                f"sampling={sampling.name} was given; expected draws from one row. Enumerate them, or use a drafter."
            )
    return tuple(int(token) for token in chosen)


def sampled_drafts(
    tables: RowSource,
    sampling: DraftSampling,
    counts: Counts,
    depth: int,
    num_drafts: int,
    rng: np.random.Generator,
) -> Iterator[Grown]:
    """Drafts of a tree by position, each with an equal share of the probability; arguments as of `testing.enumerate_drafts`.

    Systematic draws of a context are shared by all its copies, as by one that is drawn once.
    """
    for _ in range(num_drafts):
        draft = Grown(1 / num_drafts, [0], [-1], [()], [0], [()])
        while draft.frontier:
            node, *draft.frontier = draft.frontier
            path = draft.paths[node]
            count = counts(draft, node) if len(path) < depth else 0
            if count == 0:
                continue
            if sampling is not DraftSampling.SYSTEMATIC:
                children = draw_siblings(sampling, tables.row("q", path), count, rng)
                draft = draft.with_children(node, 1.0, children, ())
                continue
            drawn = draft.pooled.get(path)
            if drawn is None:
                copies = sum(counts(draft, other) for other in draft.frontier if draft.paths[other] == path)
                drawn = draw_siblings(sampling, tables.row("q", path), count + copies, rng)
            draft = draft.with_children(node, 1.0, drawn[:count], drawn[count:])
        yield draft
