"""What is checked and on what: how drafts look, and the exact distribution of the texts that a sampler makes of them.

    sampler  (p [N, V], q [N - 1, V], tokens [N - 1], source of uniforms) -> (last accepted node, the one token behind it)
             row n of p is the target's distribution after node n, node 0 being the root; row n - 1 of q is what node n was drawn from.
             In a chain the last accepted node is the number of accepted tokens.
    step     (target rows, draft rows, source of uniforms) -> emitted tokens: a system that drafts for itself

Each block is extended by the target's own tokens to the depth of the tree and one more: a lossless sampler makes texts of the target's
probabilities, as in `testing.enumerate_outputs`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polydraft.conformance import branching
from polydraft.conformance.branching import Branches
from polydraft.core import DraftSampling
from polydraft.errors import InvalidInputError
from polydraft.testing import Path, Rows, RowSource, Tables, extended, sibling_draws

Sampler = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
Step = Callable[[Rows, Rows, Any], Sequence[Any]]
Draws = Callable[[DraftSampling, np.ndarray, int], Iterable[tuple[float, Path]]]
"""(draft sampling, the reported row, number of children) -> each way to draw them, with its probability."""
Outcomes = Mapping[tuple[int, int], float]
"""(last accepted node, token behind it) -> probability."""


@dataclass(frozen=True)
class DraftSetting:
    """How drafts look. parents: the tree by position, as of `Budget.fixed`.  sampling: how siblings are drawn.

    Example:
        >>> DraftSetting((-1, 0, 0)).depth, DraftSetting((-1, 0, 1)).is_chain
        (1, True)
    """

    parents: tuple[int, ...] = (-1, 0, 1)
    sampling: DraftSampling = DraftSampling.IID

    def __post_init__(self) -> None:
        ordered = all(0 <= parent < node for node, parent in enumerate(self.parents[1:], 1))
        if len(self.parents) < 2 or self.parents[0] != -1 or not ordered:
            raise InvalidInputError(
                f"parents={self.parents} were given; expected -1 for the root, and for each further node a node before it."
            )
        if self.sampling not in DRAWN:
            raise InvalidInputError(
                f"sampling={self.sampling.name} was given; expected {', '.join(kind.name for kind in DRAWN)}."
            )

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return max(depths)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def most_siblings(self) -> int:
        return max(len(self.children(node)) for node in range(len(self.parents)))

    def children(self, node: int) -> list[int]:
        """In draw order."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


DRAWN = (
    DraftSampling.IID,
    DraftSampling.WITHOUT_REPLACEMENT,
    DraftSampling.POINT_MASS,
    DraftSampling.GREEDY_PLUS_ONE,
)
"""Draft sampling whose siblings are drawn for themselves from one row."""


def as_declared(sampling: DraftSampling, row: np.ndarray, count: int) -> Iterator[tuple[float, Path]]:
    """Draws as the draft sampling says."""
    return sibling_draws(sampling, [row], count)


MISSING: Path = (-1,)


def drafted(
    setting: DraftSetting, draft: Rows, source: Branches, draws: Draws = as_declared
) -> tuple[Path, ...]:
    """Tokens of a draft, as the path to each node, the root first; a node that was not drawn has the path (-1,)."""
    paths: list[Path] = [(), *[MISSING] * (len(setting.parents) - 1)]
    for node in range(len(setting.parents)):
        children = setting.children(node)
        if children and paths[node] != MISSING:
            options = list(draws(setting.sampling, draft(paths[node]), len(children)))
            _, tokens = options[source.branch([probability for probability, _ in options])]
            for child, token in zip(children, tokens, strict=False):
                paths[child] = (*paths[node], token)
    return tuple(paths)


def rows_of(
    setting: DraftSetting, case: RowSource, paths: Sequence[Path]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """p [N, V], q [N - 1, V] and tokens [N - 1] of a draft; q of a deterministic child is 1 at its token."""
    p = np.stack([case.row("p", path if path != MISSING else ()) for path in paths])
    tokens = np.array([path[-1] for path in paths[1:]], np.int64)
    if setting.sampling is DraftSampling.POINT_MASS:
        return p, np.eye(p.shape[1])[tokens], tokens
    return p, np.stack([case.row("q", path[:-1]) for path in paths[1:]]), tokens


def emitted(setting: DraftSetting, paths: Sequence[Path], outcome: tuple[Any, Any], V: int) -> Path:
    """The block of an outcome.

    Raises:
        InvalidInputError: what a sampler returned is no node and token.
    """
    node, token = map(int, outcome)
    if not (0 <= node < len(setting.parents) and 0 <= token < V):
        raise InvalidInputError(
            f"the sampler returned ({node}, {token}); expected the last accepted node, 0 to {len(setting.parents) - 1}, and a token below {V}."
        )
    return (*paths[node], token)


def blocks_of_sampler(
    setting: DraftSetting,
    case: RowSource,
    outcomes: Callable[[np.ndarray, np.ndarray, np.ndarray], Outcomes],
    draws: Draws = as_declared,
) -> dict[Path, float]:
    """Probability of each emitted block, all drafts enumerated. outcomes: of the sampler, given p, q and the draft tokens."""
    blocks = dict[Path, float]()

    def draft(path: Path) -> np.ndarray:
        return case.row("q", path)

    drafts = branching.outcomes(lambda source: drafted(setting, draft, source, draws))
    for paths, chance in drafts.items():
        p, q, tokens = rows_of(setting, case, paths)
        for outcome, probability in outcomes(p, q, tokens).items():
            block = emitted(setting, paths, outcome, case.V)
            blocks[block] = blocks.get(block, 0.0) + chance * probability
    return blocks


def blocks_of_step(case: RowSource, step: Step) -> dict[Path, float]:
    """Probability of each block of a system that drafts for itself."""

    def target(path: Path) -> np.ndarray:
        return case.row("p", path)

    def draft(path: Path) -> np.ndarray:
        return case.row("q", path)

    return branching.outcomes(lambda source: tuple(map(int, step(target, draft, source))))


def text_probs(case: RowSource, blocks: Mapping[Path, float], length: int) -> np.ndarray:
    """Probability of each text of this length that begins with an emitted block and goes on with the target's tokens, [V] * length.

    Raises:
        InvalidInputError: a block that is empty or longer.
    """
    tables = [np.zeros((case.V,) * size) for size in range(1, length + 1)]
    for block, probability in blocks.items():
        if not 0 < len(block) <= length:
            raise InvalidInputError(
                f"a step emitted {len(block)} tokens; expected 1 to {length}: the accepted ones and one more."
            )
        tables[len(block) - 1][block] += probability
    return extended(case, tables)


def can_draft(setting: DraftSetting, case: RowSource) -> bool:
    """Whether the rows of a case have as many tokens as siblings that differ need."""
    if setting.sampling is DraftSampling.IID:
        return True
    paths: list[Path] = [()]
    for path in paths:
        if (case.row("q", path) > 0).sum() < setting.most_siblings:
            return False
        paths += [(*path, token) for token in range(case.V)] if len(path) + 1 < setting.depth else []
    return True


def cases(setting: DraftSetting) -> list[RowSource]:
    """Rows that show mistakes, the smallest first: plain, with zeros, with ties, sharp and flat."""
    V = max(3, setting.most_siblings if setting.sampling is DraftSampling.IID else setting.most_siblings + 1)
    tables: list[RowSource] = [Tables(2, 0), *(Tables(V, seed) for seed in range(6)), Tables(V, 6)]
    return [case for case in tables if can_draft(setting, case)]
