"""Tokens per step and speed by shape, with standard errors over answers, and the shape that wins for each number of paths."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from studies.several_drafts.costs import StepCosts
from studies.several_drafts.verified import Case, Values
from studies.theory.efficiency import Estimate, estimate, paired

__all__ = ["BOUND", "Choice", "Comparison", "Setting", "comparisons"]

BOUND = "bound"
PARTS = 10
"""Of the answers, each compared by what was chosen on the others."""


class Setting(NamedTuple):
    """What is compared with each other: one draft model, one temperature, one kind of text."""

    draft: str
    temperature: float
    text: str


class Choice(NamedTuple):
    """The fastest shape of its kind. speed: over plain decoding.  over_chain: over the best chain, each chosen on other answers than it is compared on."""

    case: Case
    tokens: Estimate
    speed: Estimate
    over_chain: Estimate


class Comparison:
    """Values of one setting by answer, and seconds. beside: further names of draft models whose cases compete, such as two models together."""

    def __init__(self, values: Sequence[Values], setting: Setting, costs: StepCosts, beside: Sequence[str] = ()) -> None:
        self.setting, self.costs = setting, costs
        by_answer: dict[int, list[Values]] = {}
        for value in values:
            if value.text == setting.text:
                by_answer.setdefault(value.answer, []).append(value)
        self._answers = list(by_answer.values())
        first = self._answers[0][0]
        names = (setting.draft, *beside)
        self.cases = [case for case in first.tokens if case.draft in names and case.temperature == setting.temperature]
        self._tokens = {case: self._by_answer(lambda v, case=case: v.tokens[case]) for case in self.cases}
        self._seconds = {case: self._by_answer(self._seconds_of(case)) for case in self.cases if case.kind != BOUND}

    def _by_answer(self, value: Callable[[Values], float]) -> np.ndarray:
        return np.array([np.mean([value(context) for context in contexts]) for contexts in self._answers])

    def _seconds_of(self, case: Case) -> Callable[[Values], float]:
        return lambda v: self.costs.seconds(
            case.draft, case.kind, v.nodes[case.draft, case.temperature, case.kind, case.paths], case.depth
        )

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    @property
    def overlap(self) -> float:
        """How often one drafted token is accepted."""
        key = self.setting.draft, self.setting.temperature
        return float(self._by_answer(lambda v: v.overlap[key]).mean())

    def tokens(self, case: Case) -> Estimate:
        """Per step."""
        return estimate(self._tokens[case])

    def over(self, case: Case, other: Case) -> Estimate:
        """Ratio of tokens per step, paired by answer."""
        return paired(self._tokens[case], self._tokens[other])

    def speed(self, case: Case) -> Estimate:
        """Over plain decoding."""
        ratio = paired(self._tokens[case], self._seconds[case])
        return Estimate(ratio.mean * self.costs.plain, ratio.standard_error * self.costs.plain)

    def _speed_in(self, case: Case, part: slice | np.ndarray) -> float:
        return float(self._tokens[case][part].sum() / self._seconds[case][part].sum())

    def best(self, fits: Callable[[Case], bool]) -> Choice:
        """The fastest of the cases that fit."""
        timed = list(self._seconds)
        some, chains = [case for case in timed if fits(case)], [case for case in timed if case.kind == "chain"]
        case = max(some, key=lambda case: self._speed_in(case, slice(None)))
        return Choice(case, self.tokens(case), self.speed(case), self._over_chain(some, chains))

    def _over_chain(self, cases: Sequence[Case], chains: Sequence[Case]) -> Estimate:
        """The ratio of two speeds, on each part of the answers of the cases that are fastest on all other parts; error by linearisation."""
        n = self.num_answers
        sums = np.zeros((2, 2, n))
        for part in range(min(PARTS, n)):
            compared = np.arange(n) % PARTS == part
            for side, group in enumerate((cases, chains)):
                case = max(group, key=lambda case: self._speed_in(case, ~compared))
                sums[side, 0, compared], sums[side, 1, compared] = self._tokens[case][compared], self._seconds[case][compared]
        totals = sums.sum(2)
        ratio = totals[0, 0] / totals[0, 1] / (totals[1, 0] / totals[1, 1])
        shares = sums / totals[:, :, None]
        spread = n * (shares[0, 0] - shares[0, 1] - shares[1, 0] + shares[1, 1])
        return Estimate(float(ratio), float(ratio * np.std(spread, ddof=1) / np.sqrt(n)))

    def families(self) -> Iterator[tuple[str, Callable[[Case], bool]]]:
        """What competes: chains, several paths by their number, chains with spare siblings, two different draft models."""
        yield "one path", lambda case: case.kind == "chain"
        for paths in (2, 3, 4):
            yield (
                f"{paths} paths",
                lambda case, paths=paths: (
                    case.paths == paths and case.kind not in ("chain", "independent") and "spare" not in case.kind
                ),
            )
        yield "chain with spares", lambda case: "spare" in case.kind
        if any(case.kind == "independent" for case in self.cases):
            yield "two different drafts", lambda case: case.kind == "independent"


def settings(values: Sequence[Values]) -> list[Setting]:
    """All of them, of one draft model each, by draft model, temperature and text."""
    names = dict.fromkeys((case.draft, case.temperature) for case in values[0].tokens if " + " not in case.draft)
    return [Setting(*name, text) for name in names for text in dict.fromkeys(v.text for v in values)]


def beside(values: Sequence[Values], draft: str) -> list[str]:
    """Names of a draft model together with another one."""
    return list(dict.fromkeys(c.draft for c in values[0].tokens if c.draft.startswith(f"{draft} + ")))


def comparisons(values: Sequence[Values], passes: Mapping[str, Sequence[float]], free_rows: bool = False) -> list[Comparison]:
    """One for each setting."""
    costs = StepCosts(passes, free_rows)
    return [Comparison(values, setting, costs, beside(values, setting.draft)) for setting in settings(values)]
