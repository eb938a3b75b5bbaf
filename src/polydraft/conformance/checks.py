"""Is a sampler lossless? Enumerated exactly where it is a function of uniforms, else tested, and the mistake named that it most likely has.

of_uniforms    a sampler whose fourth argument is a source of uniforms: exact
of_array       one that takes an array of so many uniforms, such as compiled ones: exact for threshold tests and inverse transforms
of_seeds       one that takes a seed: a sequential test at a stated error
of_steps       a system that drafts for itself from the rows of target and draft, with a source of uniforms: exact
of_seeded_steps  the same with a seed: tested
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from polydraft.conformance import branching, intervals
from polydraft.conformance.branching import Branches
from polydraft.conformance.mistakes import Mistake, catalogue
from polydraft.conformance.report import ALIKE, Report, alike, example_of, ranked
from polydraft.conformance.sequential import Evidence
from polydraft.conformance.steps import (
    DraftSetting,
    Sampler,
    Step,
    blocks_of_sampler,
    blocks_of_step,
    cases,
    drafted,
    emitted,
    rows_of,
    text_probs,
)
from polydraft.core import DraftSampling
from polydraft.errors import InvalidInputError
from polydraft.testing import FromNumpy, Path, RowSource, Tables, target_text_probs

TOLERANCE = 1e-9
"""Total variation distance that is taken for rounding, of samplers in float64."""
TOLERANCE_OF_FLOAT32 = 1e-5
"""Of samplers that compute in float32: a hundred roundings of 6e-8."""
LEVEL = 1e-4
"""Probability of a false alarm, at most."""
RESOLUTION = 0.05
"""Total variation distance that a test has to exclude before it passes."""
MOST_SAMPLES = 100_000
SAMPLES_TO_NAME = 20_000
"""Drawn after a failure, at most, until one mistake is the likeliest."""
LIKELIER = np.log(100.0)
"""By which a mistake has to be likelier than another, as a logarithm of a ratio, to be named alone."""
BATCH = 500
"""Texts between two looks."""
SAMPLED_TABLES = (2, 5)
"""Seeds of the rows that are sampled: plain ones, and ones with zeros in the target's; of ten, those on which every known mistake shows."""
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
        return branching.outcomes(lambda source: _whole(sampler(*given, source)))

    how = "all drafts and all outcomes of its comparisons enumerated"
    return _enumerated(DraftSetting(tuple(parents), sampling), outcomes, how, tolerance)


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
        return intervals.outcomes(lambda u: _whole(sampler(*given, arrays(u))), num_uniforms, grid=grid)

    how = f"all drafts enumerated, uniforms by bisection from {grid} points each: exact unless an outcome comes back between two of them"
    return _enumerated(DraftSetting(tuple(parents), sampling), outcomes, how, tolerance)


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
    return _compared(setting, lambda case: blocks_of_step(case, step), how, tolerance, drafts=True)


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

    return _tested(setting, block, SeedLimits(level, resolution, most_samples), seed, drafts=False)


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
    return _tested(setting, block, limits, seed, drafts=True, tables=tables)


@dataclass(frozen=True)
class Drawn:
    """A source that draws, where `Branches` follows every option."""

    rng: np.random.Generator

    def branch(self, probs: Sequence[float]) -> int:
        weights = np.asarray(probs, np.float64)
        return int(self.rng.choice(len(weights), p=weights / weights.sum()))


@dataclass(frozen=True)
class SeedLimits:
    """See `of_seeds`."""

    level: float
    resolution: float
    most_samples: int

    def __post_init__(self) -> None:
        if not (0 < self.level < 1 and 0 < self.resolution < 1 and self.most_samples >= BATCH):
            raise InvalidInputError(
                f"level={self.level}, resolution={self.resolution} and most_samples={self.most_samples} were given; "
                f"expected the first two between 0 and 1, and at least {BATCH} samples."
            )


def _whole(outcome: tuple[Any, Any]) -> tuple[int, int]:
    node, token = outcome
    return int(node), int(token)


def _enumerated(setting: DraftSetting, outcomes: Any, how: str, tolerance: float) -> Report:
    blocks = partial(_blocks, setting, outcomes)
    return _compared(setting, blocks, how, tolerance, drafts=False)


def _blocks(setting: DraftSetting, outcomes: Any, case: RowSource) -> dict[Path, float]:
    return blocks_of_sampler(setting, case, outcomes)


def _compared(
    setting: DraftSetting,
    blocks: Callable[[RowSource], Mapping[Path, float]],
    how: str,
    tolerance: float,
    *,
    drafts: bool,
) -> Report:
    """All cases, exactly."""
    length = setting.depth + 1
    tables = cases(setting)
    seen = [text_probs(case, blocks(case), length) for case in tables]
    expected = [target_text_probs(case, length) for case in tables]
    errors = [float(np.abs(one - other).sum() / 2) for one, other in zip(seen, expected, strict=True)]
    error = max(errors)
    if error <= tolerance:
        return Report("passed", how, error, error, len(tables))
    first = next(i for i, each in enumerate(errors) if each > max(tolerance, error / 10))
    suspects = ranked(seen, expected, _signatures(setting, drafts))
    return Report(
        "failed",
        how,
        error,
        error,
        len(tables),
        candidates=alike(suspects),
        nearest=suspects[0] if suspects else None,
        example=example_of(tables[first], seen[first], expected[first]),
    )


@lru_cache(maxsize=32)
def _signatures(setting: DraftSetting, drafts: bool) -> dict[str, list[np.ndarray]]:
    """What each known mistake makes of the cases."""
    return signatures(setting, cases(setting), drafts=drafts)


def signatures(
    setting: DraftSetting, tables: Sequence[RowSource], *, drafts: bool
) -> dict[str, list[np.ndarray]]:
    """The exact distribution of texts of each known mistake, [V] * length a case."""
    return {
        mistake.name: [
            text_probs(case, blocks_of_mistake(setting, case, mistake), setting.depth + 1) for case in tables
        ]
        for mistake in catalogue(setting, drafts=drafts)
    }


def blocks_of_mistake(setting: DraftSetting, case: RowSource, mistake: Mistake) -> dict[Path, float]:
    """What a sampler with the mistake emits."""

    def outcomes(p: np.ndarray, q: np.ndarray, tokens: np.ndarray) -> Mapping[tuple[int, int], float]:
        def ran(source: Branches) -> tuple[int, int]:
            return _whole(mistake.sampler(p, q, tokens, source))

        return branching.outcomes(ran)

    return blocks_of_sampler(setting, case, outcomes, mistake.draws)


def _tested(
    setting: DraftSetting,
    block: Callable[[RowSource, np.random.Generator], Path],
    limits: SeedLimits,
    seed: int,
    *,
    drafts: bool,
    tables: Sequence[RowSource] = (),
) -> Report:
    """Sample until it is decided."""
    V = max(3, setting.most_siblings + (setting.sampling is not DraftSampling.IID))
    tables = tables or [Tables(V, table) for table in SAMPLED_TABLES]
    length = setting.depth + 1
    expected = [target_text_probs(case, length) for case in tables]
    known = signatures(setting, tables, drafts=drafts)
    evidence = Evidence(expected, known)
    rng = np.random.default_rng(seed)

    def sample() -> None:
        for number, case in enumerate(tables):
            texts = [_continued(block(case, rng), case, length, rng) for _ in range(BATCH // len(tables))]
            evidence.add(number, np.ravel_multi_index(np.array(texts).T, (case.V,) * length))

    while evidence.p_value > limits.level and evidence.bound(limits.level) > limits.resolution:
        if evidence.samples >= limits.most_samples:
            return _told(evidence, "inconclusive", tables, expected, limits)
        sample()
    if evidence.p_value > limits.level:
        return _told(evidence, "passed", tables, expected, limits)
    most = min(limits.most_samples, evidence.samples + SAMPLES_TO_NAME)
    while evidence.samples < most and len(_likeliest(evidence)) > 1:
        sample()
    return _told(evidence, "failed", tables, expected, limits)


def _likeliest(evidence: Evidence) -> list[str]:
    """Known mistakes none of which is much less likely than the first, in the order of their likelihood."""
    likelihoods = evidence.log_likelihoods
    best = max(likelihoods.values())
    near = [name for name, value in likelihoods.items() if value > best - LIKELIER]
    return sorted(near, key=lambda name: -likelihoods[name])


def _continued(block: Path, case: RowSource, length: int, rng: np.random.Generator) -> Path:
    """A block with the target's own tokens behind it."""
    if not 0 < len(block) <= length:
        raise InvalidInputError(
            f"a step emitted {len(block)} tokens; expected 1 to {length}: the accepted ones and one more."
        )
    text = block
    while len(text) < length:
        text = (*text, int(rng.choice(case.V, p=case.row("p", text))))
    return text


def _told(
    evidence: Evidence,
    status: str,
    tables: Sequence[RowSource],
    expected: Sequence[np.ndarray],
    limits: SeedLimits,
) -> Report:
    """A report. A mistake is named if the sample does not refuse it, or if it leaves less than half of the bias."""
    frequencies = [
        (counts / max(counts.sum(), 1)).reshape(probs.shape)
        for counts, probs in zip(evidence.counts, expected, strict=True)
    ]
    how = f"tested by texts: a false alarm has probability {limits.level:g} at most, and it passes where no case is off by more than {limits.resolution:g}"
    deviation = evidence.deviation
    bound = evidence.bound(limits.level)
    p_value = evidence.p_value
    if status != "failed":
        return Report(status, how, deviation, bound, len(tables), p_value, evidence.samples)
    likeliest = _likeliest(evidence)
    (nearest,) = ranked(
        [probs.ravel() for probs in frequencies],
        evidence.expected,
        {likeliest[0]: evidence.mistakes[likeliest[0]]},
    ) or (None,)
    refused = evidence.refuses(likeliest[0], limits.level)
    known = not refused or (nearest is not None and nearest.distance <= ALIKE)
    worst = int(np.argmax([np.abs(a - b).sum() for a, b in zip(frequencies, expected, strict=True)]))
    return Report(
        status,
        how,
        deviation,
        bound,
        len(tables),
        p_value,
        evidence.samples,
        tuple(likeliest) if known else (),
        nearest,
        example_of(tables[worst], frequencies[worst], expected[worst]),
    )
