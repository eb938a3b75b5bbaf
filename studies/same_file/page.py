"""The page of the comparison: one table of all prompts together; each kind of prompt is in a CSV file beside it."""

from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from polydraft.bench.record import command_line, csv_table, markdown_table, processor
from polydraft.numerics.processor import usable_cores
from studies.peers import flags
from studies.same_file.comparison import FileComparison
from studies.same_file.records import CONTEXT, DRAFT_LENGTH, OURS, PEER, PEERS, PROGRAM, Continuation

RESAMPLES = 2000
ALL = "all"
"""Kinds of prompts together."""


class Speeds:
    """Tokens per second of one number of threads and temperature, whose prompts are resampled alike for all modes."""

    def __init__(self, continuations: Sequence[Continuation], threads: int, temperature: float) -> None:
        self._by_mode: dict[str, dict[int, list[Continuation]]] = {}
        self.categories: dict[str, list[int]] = {}
        for continuation in continuations:
            if (continuation.threads, continuation.temperature) == (threads, temperature):
                self._by_mode.setdefault(continuation.mode, {}).setdefault(continuation.prompt, []).append(
                    continuation
                )
        complete = (
            set.intersection(*(set(by_prompt) for by_prompt in self._by_mode.values()))
            if self._by_mode
            else set()
        )
        for continuation in continuations:
            prompts = self.categories.setdefault(continuation.category, [])
            if continuation.prompt in complete and continuation.prompt not in prompts:
                prompts.append(continuation.prompt)

    @property
    def modes(self) -> list[str]:
        return list(self._by_mode)

    @property
    def prompts(self) -> list[int]:
        """Those that every mode has continued."""
        return [prompt for prompts in self.categories.values() for prompt in prompts]

    def _totals(self, mode: str, prompts: Sequence[int]) -> np.ndarray:
        """[prompts, 2] tokens and seconds."""
        by_prompt = self._by_mode[mode]
        return np.array(
            [
                [
                    sum(c.num_tokens - c.first_tokens for c in by_prompt[p]),
                    sum(c.seconds for c in by_prompt[p]),
                ]
                for p in prompts
            ]
        )

    def speed(self, mode: str, prompts: Sequence[int]) -> float:
        tokens, seconds = self._totals(mode, prompts).sum(0)
        return float(tokens / seconds)

    def interval(self, mode: str, prompts: Sequence[int], over: str | None = None) -> tuple[float, float]:
        """95% of the speed, or of its ratio to another mode's."""
        chosen = np.random.default_rng(0).integers(len(prompts), size=(RESAMPLES, len(prompts)))
        ours = self._totals(mode, prompts)[chosen].sum(1)
        rates = ours[:, 0] / ours[:, 1]
        if over is not None:
            theirs = self._totals(over, prompts)[chosen].sum(1)
            rates = rates * theirs[:, 1] / theirs[:, 0]
        low, high = np.quantile(rates, (0.025, 0.975))
        return float(low), float(high)

    def first_token(self, mode: str) -> float:
        """Median seconds."""
        return median(c.first_token_seconds for by_prompt in self._by_mode[mode].values() for c in by_prompt)


class Interval(NamedTuple):
    """A speed in tokens per second, or a ratio of two, with its 95% interval."""

    value: float
    low: float
    high: float

    def shown(self, unit: str = "") -> str:
        """As cells of the page have it; a single prompt has no spread."""
        return f"{self.value:.3g}{unit}" + (
            f" [{self.low:.3g}, {self.high:.3g}]" if self.low < self.high else ""
        )


class Row(NamedTuple):
    """One mode on one kind of prompts, or on `ALL`. over_plain: of this library without drafts.  over_peer: over the peers' fastest mode."""

    threads: int
    temperature: float
    mode: str
    category: str
    num_prompts: int
    speed: Interval
    over_plain: Interval | None
    over_peer: Interval | None
    first_token_seconds: float


def rows(continuations: Sequence[Continuation]) -> list[Row]:
    """By threads and temperature: every mode, this library's first, on every kind of prompts and on all."""
    table = list[Row]()
    for threads, temperature in sorted({(c.threads, c.temperature) for c in continuations}):
        speeds = Speeds(continuations, threads, temperature)
        kinds = {name: prompts for name, prompts in speeds.categories.items() if prompts}
        peer = fastest_peer(speeds) if kinds else None
        for mode in sorted(speeds.modes, key=lambda mode: (not mode.startswith(OURS), mode)) if kinds else ():
            for category, prompts in {**kinds, ALL: speeds.prompts}.items():
                speed = Interval(speeds.speed(mode, prompts), *speeds.interval(mode, prompts))
                over = [_over(speeds, mode, baseline, prompts) for baseline in (f"{OURS}, plain", peer)]
                table.append(
                    Row(
                        threads,
                        temperature,
                        mode,
                        category,
                        len(prompts),
                        speed,
                        over[0],
                        over[1],
                        speeds.first_token(mode),
                    )
                )
    return table


def fastest_peer(speeds: Speeds) -> str | None:
    """Of the peers' modes, on all prompts."""
    peers = [mode for mode in speeds.modes if mode.startswith(PEERS)]
    return max(peers, key=lambda mode: speeds.speed(mode, speeds.prompts), default=None)


def _over(speeds: Speeds, mode: str, baseline: str | None, prompts: Sequence[int]) -> Interval | None:
    if baseline is None or baseline == mode or baseline not in speeds.modes:
        return None
    ratio = speeds.speed(mode, prompts) / speeds.speed(baseline, prompts)
    return Interval(ratio, *speeds.interval(mode, prompts, baseline))


def page(comparison: FileComparison, file: Path) -> dict[Path, str]:
    """Texts of the page and of the CSV file beside it, by path."""
    table = rows(comparison.continuations)
    beside = file.with_suffix(".csv")
    return {file: _markdown(comparison, table, beside.name), beside: _csv(table)}


def _csv(table: Sequence[Row]) -> str:
    names = ("tokens_per_second", "over_plain", "over_peers")
    head = ["threads", "temperature", "mode", "prompts", "num_prompts"]
    head += [f"{name}{end}" for name in names for end in ("", "_low", "_high")] + ["first_token_seconds"]

    def cells(row: Row) -> list[Any]:
        numbers = [
            "" if x is None else f"{x:.3g}"
            for over in (row.speed, row.over_plain, row.over_peer)
            for x in over or [None] * 3
        ]
        return [*row[:5], *numbers, f"{row.first_token_seconds:.2f}"]

    return csv_table(head, map(cells, table))


def _markdown(comparison: FileComparison, table: Sequence[Row], csv_name: str) -> str:
    settings = comparison.settings
    pair = f"{settings['file']}, draft model {settings['draft']}" if settings["draft"] else settings["file"]
    parts = [
        f"{pair}; {date.today()}; {processor()}, {usable_cores()} cores; `{command_line(PROGRAM)}`; {settings['tokens']} tokens a prompt. "
        "All modes by turns, prompt by prompt, with all engines loaded.",
        "Tokens per second of all prompts together; in brackets 95% intervals, bootstrap over prompts. "
        f"[Every kind of prompt]({csv_name}) is in a table of its own.",
    ]
    if comparison.server:
        peers = [mode.partition(", ")[2] for mode in comparison.modes if mode.startswith(PEER)]
        parts += [
            "llama.cpp is built for this processor (`python -m studies.peers`); its flags, beside the file, threads and context: "
            + _flags(peers)
        ]
    parts += [_by_mode(table, lambda row: row.speed.shown()), "Over other modes:", _ratios(table)]
    parts += ["First token, median seconds:", _by_mode(table, lambda row: f"{row.first_token_seconds:.2f}")]
    if comparison.starts:
        starts = [
            [s.engine, s.threads, f"{s.start_seconds:.1f}", f"{s.memory_mb:.0f}"] for s in comparison.starts
        ]
        parts.append(markdown_table(["engine", "threads", "start, s", "peak memory, MB"], starts))
    return "\n\n".join(parts) + "\n"


def _by_mode(table: Sequence[Row], cell: Callable[[Row], str]) -> str:
    """A line for each number of threads and temperature, a column for each mode, of all prompts together."""
    lines: dict[tuple[int, float], dict[str, str]] = {}
    for row in table:
        if row.category == ALL:
            lines.setdefault((row.threads, row.temperature), {})[row.mode] = cell(row)
    modes = list(dict.fromkeys(row.mode for row in table))
    cells = [[n, f"{T:g}", *(line.get(mode, "-") for mode in modes)] for (n, T), line in lines.items()]
    return markdown_table(["threads", "T", *modes], cells)


def _ratios(table: Sequence[Row]) -> str:
    """What this library's default makes of its plain decoding and of the peers' fastest mode."""
    rows = [row for row in table if (row.category, row.mode) == (ALL, f"{OURS}, auto")]
    cells = [
        [row.threads, f"{row.temperature:g}", *(over.shown("x") if over else "-" for over in row[6:8])]
        for row in rows
    ]
    return markdown_table(["threads", "T", f"{OURS}, auto over plain", "auto over the fastest peer"], cells)


def _flags(modes: Sequence[str]) -> str:
    plain = flags(Path("FILE"), 1, CONTEXT, None, "plain", DRAFT_LENGTH)
    own = {
        mode: flags(Path("FILE"), 1, CONTEXT, Path("DRAFT"), mode, DRAFT_LENGTH)[len(plain) :]
        for mode in modes
    }
    return (
        ", ".join(f"{mode} `{' '.join(given)}`" if given else f"{mode} none" for mode, given in own.items())
        + "."
    )
