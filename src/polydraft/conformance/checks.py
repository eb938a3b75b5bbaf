"""Is a sampler lossless? Enumerated exactly where it is a function of uniforms, else tested, and the mistake named that it most likely has.

of_uniforms    a sampler whose fourth argument is a source of uniforms: exact
of_array       one that takes an array of so many uniforms, such as compiled ones: exact for threshold tests and inverse transforms
of_seeds       one that takes a seed: a sequential test at a stated error
of_steps       a system that drafts for itself from the rows of target and draft, with a source of uniforms: exact
of_seeded_steps  the same with a seed: tested
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polydraft.conformance import branching, intervals
from polydraft.conformance.enumeration import TOLERANCE, compared, enumerated, whole
from polydraft.conformance.report import Report
from polydraft.conformance.sample_test import LEVEL, MOST_SAMPLES, RESOLUTION, Drawn, SeedLimits, sampled
from polydraft.conformance.steps import (
    DraftSetting,
    Sampler,
    Step,
    blocks_of_step,
    drafted,
    emitted,
    rows_of,
)
from polydraft.core import DraftSampling
from polydraft.testing import FromNumpy, Path, RowSource

CHAIN = (-1, 0, 1)


def of_uniforms(
    sampler: Sampler,
    *,
    parents: Sequence[int] = CHAIN,
    sampling: DraftSampling = DraftSampling.IID,
    arrays: FromNumpy = np.asarray,
    tolerance: float = TOLERANCE,
) -> Report:
    """Check a sampler by all ways that its comparisons can go. Certain up to rounding.

    sampler: (p [N, V], q [N - 1, V], tokens [N - 1], uniforms) -> (last accepted node, the token behind it); in a chain the first is the number
        of accepted tokens. `uniforms()` is a uniform; `uniforms.random(n)` and `uniforms.choice(n, p=row)` are those of NumPy's generators.
    parents: the tree by position.  sampling: how siblings are drawn.  arrays: makes what the sampler takes of NumPy's arrays.
    tolerance: `TOLERANCE_OF_FLOAT32` for samplers in float32.

    Raises:
        InvalidInputError: a sampler that takes uniforms for numbers, or returns no node and token.

    Example:
        >>> def accepts_too_much(p, q, tokens, uniforms):
        ...     x = tokens[0]
        ...     return (1, uniforms.choice(len(p[1]), p=p[1])) if uniforms() < p[0, x] / q[0, x] else (0, uniforms.choice(len(p[0]), p=p[0]))
        >>> report = of_uniforms(accepts_too_much, parents=(-1, 0))
        >>> report.status, report.mistake
        ('failed', 'target distribution in the place of the residual')
    """

    def outcomes(p: np.ndarray, q: np.ndarray, tokens: np.ndarray) -> Mapping[tuple[int, int], float]:
        given = arrays(p), arrays(q), arrays(tokens)
        return branching.outcomes(lambda source: whole(sampler(*given, source)))

    how = "all drafts and all outcomes of its comparisons enumerated"
    return enumerated(DraftSetting(tuple(parents), sampling), outcomes, how, tolerance)


def of_array(
    sampler: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
    num_uniforms: int,
    *,
    parents: Sequence[int] = CHAIN,
    sampling: DraftSampling = DraftSampling.IID,
    arrays: FromNumpy = np.asarray,
    grid: int = intervals.GRID,
    tolerance: float = TOLERANCE,
) -> Report:
    """Check a sampler of an array of uniforms, in the order of their use, by bisection (`intervals`); its other arguments as of `of_uniforms`.

    Example:
        >>> def first_child(p, q, tokens, u):
        ...     x = tokens[0]
        ...     rest = np.maximum(p[0] - q[0], 0)
        ...     accepted = int(u[0] < p[0, x] / q[0, x])
        ...     row = p[1] if accepted else rest / max(rest.sum(), 1e-300)
        ...     return accepted, min(np.searchsorted(row.cumsum(), u[1], side="right"), len(row) - 1)
        >>> of_array(first_child, 2, parents=(-1, 0)).status
        'passed'
    """

    def outcomes(p: np.ndarray, q: np.ndarray, tokens: np.ndarray) -> Mapping[tuple[int, int], float]:
        given = arrays(p), arrays(q), arrays(tokens)
        return intervals.outcomes(lambda u: whole(sampler(*given, arrays(u))), num_uniforms, grid=grid)

    how = f"all drafts enumerated, uniforms by bisection from {grid} points each: exact unless an outcome comes back between two of them"
    return enumerated(DraftSetting(tuple(parents), sampling), outcomes, how, tolerance)


def of_steps(
    step: Step,
    *,
    parents: Sequence[int] = CHAIN,
    sampling: DraftSampling = DraftSampling.IID,
    tolerance: float = TOLERANCE,
) -> Report:
    """Check a system that drafts for itself: (target rows, draft rows, uniforms) -> the emitted tokens.

    Rows are functions of the tokens since the step began. parents, sampling: of its drafts; mistakes are made with these, and texts have as many
    tokens as the longest path and one more.

    Example:
        >>> def drafts_the_top(target, draft, uniforms):
        ...     x = int(draft(()).argmax())
        ...     p, q = target(()), draft(())
        ...     if uniforms() < p[x] / q[x]:
        ...         return [x]
        ...     rest = np.maximum(p - q, 0)
        ...     return [uniforms.choice(len(p), p=rest)]
        >>> of_steps(drafts_the_top, parents=(-1, 0)).mistake
        'most probable tokens reported as draws'
    """
    setting = DraftSetting(tuple(parents), sampling)
    how = "all outcomes of its draws and comparisons enumerated"
    return compared(setting, lambda case: blocks_of_step(case, step), how, tolerance, drafts=True)


def of_seeds(
    sampler: Callable[[Any, Any, Any, int], tuple[Any, Any]],
    *,
    parents: Sequence[int] = CHAIN,
    sampling: DraftSampling = DraftSampling.IID,
    arrays: FromNumpy = np.asarray,
    level: float = LEVEL,
    resolution: float = RESOLUTION,
    most_samples: int = MOST_SAMPLES,
    seed: int = 0,
) -> Report:
    """Test a sampler of a seed, with drafts that are drawn here; ends as soon as it is decided.

    level: probability of a false alarm, at most, however long it samples.
    resolution: it passes when with probability 1 - level no case is farther off; after `most_samples` texts it is inconclusive.
    Its other arguments are those of `of_uniforms`.

    Example:
        >>> def untested(p, q, tokens, seed):
        ...     return 1, int(np.random.default_rng(seed).choice(len(p[1]), p=p[1]))
        >>> report = of_seeds(untested, parents=(-1, 0))
        >>> report.status, "draft tokens accepted untested" in report.candidates
        ('failed', True)
    """
    setting = DraftSetting(tuple(parents), sampling)

    def block(case: RowSource, rng: np.random.Generator) -> Path:
        paths = drafted(setting, lambda path: case.row("q", path), Drawn(rng))  # pyright: ignore[reportArgumentType]
        given = (arrays(values) for values in rows_of(setting, case, paths))
        return emitted(setting, paths, sampler(*given, int(rng.integers(2**31))), case.V)

    return sampled(setting, block, SeedLimits(level, resolution, most_samples), seed, drafts=False)


def of_seeded_steps(
    step: Callable[[Any, Any, int], Sequence[Any]],
    *,
    parents: Sequence[int] = CHAIN,
    sampling: DraftSampling = DraftSampling.IID,
    tables: Sequence[RowSource] = (),
    level: float = LEVEL,
    resolution: float = RESOLUTION,
    most_samples: int = MOST_SAMPLES,
    seed: int = 0,
) -> Report:
    """Test a system that drafts for itself: (target rows, draft rows, seed) -> the emitted tokens; see `of_steps` and `of_seeds`.

    tables: rows of the system's own models, where it has no others; they take the place of the rows given to it.
    """
    setting = DraftSetting(tuple(parents), sampling)

    def block(case: RowSource, rng: np.random.Generator) -> Path:
        def target(path: Path) -> np.ndarray:
            return case.row("p", path)

        def draft(path: Path) -> np.ndarray:
            return case.row("q", path)

        return tuple(map(int, step(target, draft, int(rng.integers(2**31)))))

    limits = SeedLimits(level, resolution, most_samples)
    return sampled(setting, block, limits, seed, drafts=True, tables=tables)
