"""The study of repeats of the text, on the embedded pair, and its arithmetic."""

import pytest

from studies.repeats import WITH, WITHOUT, Answer, ratio


def _answer(mode: str, number: int, tokens: int, cpu: float) -> Answer:
    return Answer(mode, "chat", 1.0, number, tokens, 3, tokens // 2, cpu, 2 * cpu)


ANSWERS = [
    answer
    for number, seconds in enumerate((1.0, 2.0, 4.0))
    for answer in (_answer(WITH, number, 80, seconds / 1.1), _answer(WITHOUT, number, 80, seconds))
]


def test_a_ratio_of_speeds_is_paired_by_prompt_and_has_its_interval():
    """Every prompt is faster by the same factor: resampling prompts changes nothing."""
    assert ratio(ANSWERS) == pytest.approx((1.1, 1.1, 1.1))
    slower = [*ANSWERS, _answer(WITH, 3, 80, 8.0), _answer(WITHOUT, 3, 80, 4.0)]
    of_totals, low, high = ratio(slower)
    assert of_totals == pytest.approx(11 / (7 / 1.1 + 8)) and low < of_totals < high
