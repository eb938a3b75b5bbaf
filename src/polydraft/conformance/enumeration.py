"""A sampler's own distribution by enumeration, beside the target's in all cases, and what each known mistake makes of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from polydraft.conformance import branching
from polydraft.conformance.branching import Branches
from polydraft.conformance.mistakes import Mistake, catalogue
from polydraft.conformance.report import Report, alike, example_of, ranked
from polydraft.conformance.steps import DraftSetting, blocks_of_sampler, cases, text_probs
from polydraft.testing import Path, RowSource, target_text_probs

TOLERANCE = 1e-9
"""Total variation distance that is taken for rounding, of samplers in float64."""
TOLERANCE_OF_FLOAT32 = 1e-5
"""Of samplers that compute in float32: a hundred roundings of 6e-8."""


def whole(outcome: tuple[Any, Any]) -> tuple[int, int]:
    """A node and a token as numbers, whatever they are arrays of."""
    node, token = outcome
    return int(node), int(token)


def enumerated(setting: DraftSetting, outcomes: Any, how: str, tolerance: float) -> Report:
    """Of a sampler. outcomes: of target rows, draft rows and drafted tokens.  how: told in the report."""
    blocks = partial(_blocks, setting, outcomes)
    return compared(setting, blocks, how, tolerance, drafts=False)


def _blocks(setting: DraftSetting, outcomes: Any, case: RowSource) -> dict[Path, float]:
    return blocks_of_sampler(setting, case, outcomes)


def compared(
    setting: DraftSetting,
    blocks: Callable[[RowSource], Mapping[Path, float]],
    how: str,
    tolerance: float,
    *,
    drafts: bool,
) -> Report:
    """All cases, exactly. blocks: what is emitted in a case.  drafts: whether it drafts for itself."""
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
            return whole(mistake.sampler(p, q, tokens, source))

        return branching.outcomes(ran)

    return blocks_of_sampler(setting, case, outcomes, mistake.draws)
