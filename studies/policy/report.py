"""Raw figures of the study as CSV, and what is printed of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from polydraft.bench.record import markdown_table
from studies.policy.comparison import compare

POLICY = "adaptive"
PLAIN = "plain"


@dataclass(frozen=True)
class Row:
    """What one prompt, or one batch of them, took by one setting. seconds: without the prefill."""

    pair: str
    temperature: str
    setting: str
    prompt: int
    category: str
    tokens: int
    seconds: float
    steps: int


def _by_setting(rows: Iterable[Row]) -> dict[str, Float[np.ndarray, "P 3"]]:
    """Tokens, seconds and steps of every prompt."""
    figures = dict[str, list[tuple[int, float, int]]]()
    for row in sorted(rows, key=lambda row: row.prompt):
        figures.setdefault(row.setting, []).append((row.tokens, row.seconds, row.steps))
    return {name: np.array(each, float) for name, each in figures.items()}


def _speed(figures: Float[np.ndarray, "P 3"]) -> float:
    tokens, seconds, _ = figures.sum(0)
    return float(tokens / seconds)


def speeds(rows: Sequence[Row]) -> str:
    """A line for each setting of one pair and temperature, the fastest first."""
    by_setting = _by_setting(rows)
    plain = _speed(by_setting[PLAIN])
    return "\n".join(
        f"{name:32} {_speed(each):8.1f} tokens/s {_speed(each) / plain:6.3f} {each[:, 0].sum() / each[:, 2].sum():6.2f} tokens/step"
        for name, each in sorted(by_setting.items(), key=lambda setting: -_speed(setting[1]))
    )


def table(rows: Sequence[Row]) -> str:
    """The policy over plain decoding and over the best fixed shape, a line for each pair and temperature.

    Example:
        >>> rows = [Row("a pair", "1", name, 0, "chat", 10, seconds, 5) for name, seconds in (("adaptive", 1), ("plain", 2), ("chain 2", 1))]
        >>> print(table(rows).splitlines()[-1])
        | a pair | 1 | 1 | chain 2 | 2.00 | 2.00 | 1.00 [1.00, 1.00] | 1.00 |
    """
    lines = list[list[object]]()
    for key in dict.fromkeys((row.pair, row.temperature) for row in rows):
        by_setting = _by_setting(row for row in rows if (row.pair, row.temperature) == key)
        policy = by_setting.pop(POLICY)
        plain = by_setting[PLAIN]
        best = max(by_setting, key=lambda name: _speed(by_setting[name]))
        comparison = compare(policy[:, :2], np.array([each[:, :2] for each in by_setting.values()]))
        over_plain = [f"{_speed(each) / _speed(plain):.2f}" for each in (by_setting[best], policy)]
        low, high = comparison.interval
        ratio = f"{comparison.ratio:.2f} [{low:.2f}, {high:.2f}]"
        lines.append([*key, len(policy), best, *over_plain, ratio, f"{comparison.hindsight:.2f}"])
    head = [
        "target and draft",
        "temperature",
        "prompts",
        "best fixed shape",
        "its speed over plain",
        "policy over plain",
    ]
    return markdown_table(
        [*head, "policy over the best fixed shape, chosen on other prompts", "chosen on the same prompts"],
        lines,
    )
