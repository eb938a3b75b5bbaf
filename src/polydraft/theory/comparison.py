"""All lossless verifiers side by side: expected tokens per step on rows p and q, and what no verifier exceeds.

    tokens    1 + E[depth of the node where the verdict stops], over drafts of the tree; exact where all drafts are enumerated, else a mean over sampled ones
    bound     one node: 1 + the optimum (`theory.optimum`); several iid paths and most probable children: `theory.bounds`; else for up to
              MOST_PROGRAMMED drafts by a linear programme over all of them (`theory.bounds`, with SciPy)

Each verifier is paired with every draft sampling that it is exact for on this tree. Those that share their noise with the drafts (`race`, `list_race`)
and draws of several models or listed races are left out: their acceptance is in `theory.acceptance`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from jaxtyping import Float

from polydraft.core import Budget, DraftSampling, TreeShape
from polydraft.core import geometry as trees
from polydraft.errors import IncompatibleError, InvalidInputError
from polydraft.methods import registry
from polydraft.testing import Counts, Grown, Path, RowSource, as_batch, by_position, enumerate_drafts
from polydraft.theory import bounds
from polydraft.theory.bounds import best_block_efficiency
from polydraft.theory.optimum import checked, optimum


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


Rows = Callable[[Path], Any]
"""Tokens below the root -> probabilities of the next token, [V]."""
COMPARED = (
    DraftSampling.IID,
    DraftSampling.WITHOUT_REPLACEMENT,
    DraftSampling.SYSTEMATIC,
    DraftSampling.GREEDY_PLUS_ONE,
    DraftSampling.POINT_MASS,
)
MOST_ENUMERATED = 4096
"""Drafts of a tree, V to the power of its nodes, that are all looked at."""
MOST_BOUND_TERMS = 1 << 17
"""Of the bound of several paths."""
MOST_PROGRAMMED = 256
"""Drafts of the linear programme that gives the bound where no closed form is known; it takes a tenth of a second."""
BATCH_NUMBERS = 1 << 22
"""Probabilities in a batch of drafts."""


@dataclass(frozen=True)
class Compared:
    """One verifier on one way of drafting.

    tokens: expected tokens per step, the target's own among them.  standard_error: of sampled drafts, 0 where all are enumerated.
    bound: what no verifier exceeds for such drafts, None where no closed form is known.
    """

    verifier: str
    sampling: DraftSampling
    tokens: float
    standard_error: float
    bound: float | None

    @property
    def missing(self) -> float | None:
        """What it lacks of the bound, in tokens."""
        return None if self.bound is None else self.bound - self.tokens


@dataclass(frozen=True)
class Comparison:
    """Verifiers by falling expected tokens.  tree: the parents of the draft."""

    rows: list[Compared]
    tree: tuple[int, ...]

    def of(self, verifier: str, sampling: DraftSampling) -> Compared:
        """One of them.

        Raises:
            InvalidInputError: it is not among them.
        """
        for row in self.rows:
            if (row.verifier, row.sampling) == (verifier, sampling):
                return row
        raise InvalidInputError(
            f"{verifier!r} on {sampling.name} was asked for; expected one of {[(r.verifier, r.sampling.name) for r in self.rows]}."
        )

    def __str__(self) -> str:
        lines = ["| verifier | draft sampling | tokens per step | bound |", "|---|---|---|---|"]
        for row in self.rows:
            error = f" ± {row.standard_error:.3f}" if row.standard_error else ""
            bound = "" if row.bound is None else f"{row.bound:.3f}"
            lines.append(
                f"| `{row.verifier}` | {row.sampling.name.lower()} | {row.tokens:.3f}{error} | {bound} |"
            )
        return "\n".join(lines)

    def _repr_markdown_(self) -> str:
        return str(self)

    def plot(self, file: Any = None) -> Any:
        """Bars of tokens per step with the bound of each beside them, by matplotlib. file: where it is saved, too.

        Raises:
            IncompatibleError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise IncompatibleError(
                "a plot was asked for without matplotlib; print the comparison, or pip install matplotlib."
            ) from error
        figure = Figure(figsize=(7, 1 + 0.25 * len(self.rows)), layout="constrained")
        axes = figure.subplots()
        places = range(len(self.rows))
        axes.barh(
            places,
            [row.tokens for row in self.rows],
            xerr=[row.standard_error for row in self.rows],
            color="#7a9cc6",
        )
        bounded = [(place, row.bound) for place, row in zip(places, self.rows, strict=True) if row.bound]
        axes.plot([bound for _, bound in bounded], [place for place, _ in bounded], "k|", label="bound")
        axes.set_yticks(places, [f"{row.verifier}, {row.sampling.name.lower()}" for row in self.rows])
        axes.invert_yaxis()
        axes.set_xlabel("expected tokens per step")
        axes.legend()
        if file is not None:
            figure.savefig(file)
        return figure


class _Rows:
    """A `testing.RowSource` of two functions."""

    def __init__(self, p: Rows, q: Rows) -> None:
        self._rows = {"p": cache(p), "q": cache(q)}
        self.V = len(self.row("p", ()))

    def row(self, name: str, path: Path) -> np.ndarray:
        """See `testing.RowSource`."""
        return self._rows[name](path)


def _bound_of(tables: "_Rows", sampling: DraftSampling, budget: Budget, drafts: Any) -> float | None:
    """In closed form, else by linear programming where the drafts are all there and few."""
    bound = _bound(tables, sampling, budget)
    if bound is None and drafts.is_whole and len(drafts.drafts) <= MOST_PROGRAMMED:
        return _programmed(tables, drafts.drafts)
    return bound


def compare(
    p: Any,
    q: Any,
    tree: int | Sequence[int],
    *,
    verifiers: Sequence[str] | None = None,
    num_drafts: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Expected tokens per step of every lossless verifier, and the bound.

    p, q: the target's and the draft's distribution, [V], the same after every token; or functions of the tokens below the root.
    tree: K children of one node, or the parents of a draft tree as of `core.Budget.fixed`, such as (-1, 0, 0, 1, 2) of two paths.
    verifiers: by name; default all that are lossless.  num_drafts: sampled where there are too many to enumerate.

    Raises:
        InvalidInputError: rows that are no distributions, or no tree.
        UnknownNameError: no such verifier.

    Example:
        >>> compared = compare([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], 2)
        >>> compared.rows[0].verifier, round(compared.of("recursive", DraftSampling.IID).tokens, 4)
        ('greedy_traversal_wor', 1.76)
        >>> print(compare([0.5, 0.5], [0.9, 0.1], 2, verifiers=["kseq", "transport"]))
        | verifier | draft sampling | tokens per step | bound |
        |---|---|---|---|
        | `transport` | iid | 1.690 | 1.690 |
        | `kseq` | iid | 1.658 | 1.690 |
    """
    if isinstance(tree, int) and tree < 1:
        raise InvalidInputError(
            f"tree={tree} was given; expected a number of children, at least 1, or the parents of a tree."
        )
    budget = Budget.fixed(trees.product(tree) if isinstance(tree, int) else tuple(tree))
    tables = _Rows(_function(p), _function(q))
    checked(tables.row("p", ()), tables.row("q", ()))
    names = registry.names("verifier") if verifiers is None else verifiers
    rules = [registry.verifier(name) for name in names]
    rules = [rule for rule in rules if rule.info.lossless and not rule.info.shared_noise]
    rng = np.random.default_rng(seed)
    rows = list[Compared]()
    for sampling in COMPARED:
        shape = TreeShape.GROWN if sampling is DraftSampling.POINT_MASS else budget.shape
        fitting = [r for r in rules if sampling in r.info.draft_sampling and shape in r.info.shapes]
        if fitting:
            drafts = _drafts(tables, sampling, budget, num_drafts, rng)
            bound = _bound_of(tables, sampling, budget, drafts)
            rows += [_compared(rule, tables, sampling, shape, drafts, bound) for rule in fitting]
    return Comparison(sorted(rows, key=lambda row: -row.tokens), budget.parents)


def _function(rows: Any) -> Rows:
    if callable(rows):
        return lambda path: np.asarray(rows(path), np.float64)
    (same,) = checked(np.asarray(rows, np.float64))
    return lambda path: same


@dataclass(frozen=True)
class _Drafts:
    """is_whole: whether they are all that there are, with their probabilities."""

    drafts: list[Grown]
    is_whole: bool


def _drafts(
    tables: _Rows, sampling: DraftSampling, budget: Budget, count: int, rng: np.random.Generator
) -> _Drafts:
    counts: Counts = by_position(*budget.parents)
    is_fixed = sampling is DraftSampling.POINT_MASS
    if is_fixed or tables.V**budget.max_nodes <= MOST_ENUMERATED:
        return _Drafts(enumerate_drafts(tables, sampling, counts, budget.max_depth), True)
    return _Drafts(list(sampled_drafts(tables, sampling, counts, budget.max_depth, count, rng)), False)


def _compared(
    rule: Any, tables: _Rows, sampling: DraftSampling, shape: TreeShape, drafts: _Drafts, bound: float | None
) -> Compared:
    tokens = np.concatenate(list(_tokens(rule, tables, sampling, shape, drafts.drafts)))
    if drafts.is_whole:
        probabilities = np.array([d.probability for d in drafts.drafts])
        return Compared(rule.info.name, sampling, float(probabilities @ tokens), 0.0, bound)
    error = float(tokens.std(ddof=1) / len(tokens) ** 0.5)
    return Compared(rule.info.name, sampling, float(tokens.mean()), error, bound)


def _tokens(
    rule: Any, tables: _Rows, sampling: DraftSampling, shape: TreeShape, drafts: list[Grown]
) -> Iterator[Float[np.ndarray, " B"]]:
    """Of each draft, in batches: the verdict integrates over what is accepted."""
    size = max(1, BATCH_NUMBERS // (tables.V * max(len(d.tokens) for d in drafts)))
    for start in range(0, len(drafts), size):
        draft, p = as_batch(tables, sampling, shape, drafts[start : start + size])
        depth = np.maximum(trees.depths(draft.tree), 0)
        yield 1 + (rule(draft, p).stop * depth).sum(1)


def _bound(tables: _Rows, sampling: DraftSampling, budget: Budget) -> float | None:
    p, q = tables.row("p", ()), tables.row("q", ())
    if budget.max_depth == 1 and sampling is not DraftSampling.SYSTEMATIC:
        return 1 + optimum(p, q, budget.max_nodes, sampling).alpha
    if sampling is DraftSampling.POINT_MASS:
        (draft,) = enumerate_drafts(tables, sampling, by_position(*budget.parents), budget.max_depth)
        masses = [
            np.prod([tables.row("p", path[:i])[token] for i, token in enumerate(path)])
            for path in draft.paths[1:]
        ]
        return bounds.tokens_of_tree(np.array(masses))
    is_paths = budget.parents == trees.paths(budget.width, budget.max_depth)
    if sampling is DraftSampling.IID and is_paths and tables.V**budget.max_depth <= MOST_BOUND_TERMS:
        rows = (lambda path: tables.row("p", path)), (lambda path: tables.row("q", path))
        return bounds.block_efficiency_of_paths(*rows, budget.width, budget.max_depth)
    return None


def _programmed(tables: _Rows, drafts: Sequence[Grown]) -> float | None:
    """None where SciPy is not installed."""
    try:
        return best_block_efficiency(
            lambda path: tables.row("p", path), [(d.probability, d.paths) for d in drafts]
        )
    except IncompatibleError:
        return None
