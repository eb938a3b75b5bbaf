"""A sampler of seeds beside the target, by texts that it emits, until it is decided at a stated error; then the mistakes that it most likely has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from polydraft.conformance.enumeration import signatures
from polydraft.conformance.report import ALIKE, Report, Suspect, example_of, ranked
from polydraft.conformance.sequential import Evidence
from polydraft.conformance.steps import DraftSetting
from polydraft.core import DraftSampling
from polydraft.errors import InvalidInputError
from polydraft.testing import Path, RowSource, Tables, target_text_probs

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


@dataclass(frozen=True)
class Drawn:
    """A source that draws, where `Branches` follows every option."""

    rng: np.random.Generator

    def branch(self, probs: Sequence[float]) -> int:
        weights = np.asarray(probs, np.float64)
        return int(self.rng.choice(len(weights), p=weights / weights.sum()))


@dataclass(frozen=True)
class SeedLimits:
    """See `checks.of_seeds`."""

    level: float
    resolution: float
    most_samples: int

    def __post_init__(self) -> None:
        if not (0 < self.level < 1 and 0 < self.resolution < 1 and self.most_samples >= BATCH):
            raise InvalidInputError(
                f"level={self.level}, resolution={self.resolution} and most_samples={self.most_samples} were given; "
                f"expected the first two between 0 and 1, and at least {BATCH} samples."
            )


def sampled(
    setting: DraftSetting,
    block: Callable[[RowSource, np.random.Generator], Path],
    limits: SeedLimits,
    seed: int,
    *,
    drafts: bool,
    tables: Sequence[RowSource] = (),
) -> Report:
    """Sample until it is decided. block: what one step emits in a case.  drafts: whether it drafts for itself."""
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


def _suspect(evidence: Evidence, name: str, frequencies: Sequence[np.ndarray]) -> Suspect | None:
    """A known mistake, and how far what was sampled is from it; None where it is no nearer than the target."""
    mistakes = {name: evidence.mistakes[name]}
    (nearest,) = ranked([probs.ravel() for probs in frequencies], evidence.expected, mistakes) or (None,)
    return nearest


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
    nearest = _suspect(evidence, likeliest[0], frequencies)
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
