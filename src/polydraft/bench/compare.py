"""Contenders measured in one interleaved run: every prompt by every contender in turn, again and again.

A machine's speed drifts while one measures. So each repetition of a prompt is a turn in which all contenders run one
after the other, in an order that changes; a speed-up is the median over turns of the ratio within a turn.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

from polydraft.bench.speedup import Speedup
from polydraft.core import Request, SamplingParams
from polydraft.core.params import MOST_SAMPLES
from polydraft.engine.api import Engine
from polydraft.engine.stats import RequestStats

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Run:
    """One call: a continuation of every prompt of a batch.

    seconds: wall time of the call, prefill included.  cpu_seconds: of all threads of this process.
    arrivals: seconds after the call began at which tokens were handed out.  stats: ours only, one for each prompt.
    """

    outputs: list[list[int]]
    seconds: float
    cpu_seconds: float
    arrivals: list[float]
    stats: list[RequestStats] = field(default_factory=list[RequestStats])

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def token_ids(self) -> list[int]:
        """Of the first prompt."""
        return self.outputs[0]


class Timer:
    """Times one call: make it when the call begins, `arrive` at each delivery, `run` when it ends."""

    def __init__(self) -> None:
        self.arrivals: list[float] = []
        self._cpu = process_time()
        self._start = perf_counter()

    def arrive(self) -> None:
        """Tokens were handed out now."""
        self.arrivals.append(perf_counter() - self._start)

    def run(self, outputs: list[list[int]], stats: Sequence[RequestStats] = ()) -> Run:
        """The call is over."""
        return Run(
            outputs, perf_counter() - self._start, process_time() - self._cpu, self.arrivals, list(stats)
        )


@dataclass(frozen=True)
class Contender:
    """Something that continues a batch of prompts. drafter, verifier: names, or None where there is none.

    lossless: whether it claims the target's distribution.  bits: of a stored weight, where formats are compared.
    compared: contenders that its speed is told against, by the title of the column.
    """

    name: str
    drafter: str | None
    verifier: str | None
    temperature: float
    generate: Callable[[Prompts, SamplingParams], Run]
    lossless: bool = True
    bits: float | None = None
    compared: Mapping[str, str] = field(
        default_factory=lambda: {"plain": "plain", "transformers": "transformers"}
    )


@dataclass
class Measurement:
    """What a contender did: `runs[turn]`, turns in the same order for all contenders of a `measure`.

    error: why it was taken out, or None.  memory: bytes that the process grew by when it was built and first run, or None.
    """

    contender: Contender
    runs: list[Run] = field(default_factory=list[Run])
    error: str | None = None
    memory: int | None = None

    def _rates(self) -> list[float]:
        return [run.num_tokens / run.seconds for run in self.runs]

    @property
    def tokens_per_second(self) -> float:
        """Median over turns."""
        return median(self._rates())

    @property
    def spread(self) -> tuple[float, float]:
        """Quartiles of tokens per second over turns."""
        low, high = np.percentile(self._rates(), [25, 75])
        return float(low), float(high)

    @property
    def tokens_per_cpu_second(self) -> float:
        """Median over turns."""
        return median(run.num_tokens / max(run.cpu_seconds, 1e-9) for run in self.runs)

    @property
    def time_to_first_token(self) -> float | None:
        """Median over turns, in seconds; None where it was not observed."""
        first = [run.arrivals[0] for run in self.runs if run.arrivals]
        return median(first) if first else None

    def inter_token(self, percent: float) -> float | None:
        """A percentile of the seconds between deliveries, which may hold several tokens; None where not observed."""
        gaps = np.concatenate([np.zeros(0), *(np.diff(run.arrivals) for run in self.runs)])
        return float(np.percentile(gaps, percent)) if len(gaps) else None

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per forward pass of the target and sequence after the prefill; 1 for those that do not draft."""
        stats = [s for run in self.runs for s in run.stats]
        calls = sum(s.steps for s in stats)
        return sum(s.generated_tokens for s in stats) / calls if calls else 1.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of the steps that drafted at depth d+1 in which a token there was accepted."""
        stats = [s for run in self.runs for s in run.stats]
        deepest = max((len(s.drafted_by_depth) for s in stats), default=0)

        def total(counts: list[list[int]], d: int) -> int:
            return sum(c[d] for c in counts if d < len(c))

        accepted = [s.accepted_by_depth for s in stats]
        tried = [s.drafted_by_depth for s in stats]
        return [total(accepted, d) / total(tried, d) for d in range(deepest) if total(tried, d)]

    def row(self) -> dict[str, Any]:
        """What both `bench` and `demo` tell of it, as plain data."""
        of_contender = {
            name: getattr(self.contender, name) for name in ("drafter", "verifier", "temperature")
        }
        return {
            **of_contender,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_step": self.tokens_per_step,
        }

    def texts(self, prompts: Prompts, batch_size: int = 1) -> Iterator[tuple[Sequence[int], list[int]]]:
        """Each prompt with what followed, in the order of the runs."""
        for number, run in enumerate(self.runs):
            yield from zip(_batch(prompts, number, batch_size), run.outputs, strict=True)

    def speedup_over(self, baseline: "Measurement") -> Speedup:
        """Of each turn: seconds per token of `baseline` divided by ours."""
        pairs = zip(self.runs, baseline.runs, strict=True)
        return Speedup.of([b.seconds / b.num_tokens * a.num_tokens / a.seconds for a, b in pairs])


def engine_contender(name: str, engine: Engine, temperature: float) -> Contender:
    """An engine as a contender, driven step by step as a server would."""

    def generate(prompts: Prompts, params: SamplingParams) -> Run:
        timer = Timer()
        ids = [f"{name}-{i}" for i in range(len(prompts))]
        for i, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True)):
            engine.add_request(Request(request_id, tuple(prompt), params, params.seed or 0, MOST_SAMPLES * i))
        done: dict[str, Any] = {}
        while len(done) < len(ids):
            outputs = engine.step()
            timer.arrive()
            done |= {o.request_id: o.sample for o in outputs if o.finished}
        return timer.run([done[i].token_ids for i in ids], [done[i].stats for i in ids])

    drafter = None if engine.drafter is None else engine.drafter.info.name
    verifier = None if drafter is None else engine.verifier.info.name
    return Contender(name, drafter, verifier, temperature, generate, engine.verifier.info.lossless)


def measure(
    contenders: Sequence[Contender],
    prompts: Prompts,
    *,
    max_tokens: int,
    repetitions: int,
    batch_size: int = 1,
    budget_seconds: float = math.inf,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Run every contender on every prompt, interleaved; end-of-text is ignored so that lengths agree.

    Turn r continues `batch_size` prompts from prompt r on, modulo their number, with seed + r, the same for all contenders.
    A contender that raises is taken out with its error; the others go on.

    repetitions: of all prompts; fewer where one more would exceed `budget_seconds`, but at least one.
    progress: called after each call of a contender.
    """
    measurements = [Measurement(contender) for contender in contenders]
    start = perf_counter()
    for repetition in range(repetitions):
        if repetition and (perf_counter() - start) * (repetition + 1) / repetition > budget_seconds:
            break
        for number in range(repetition * len(prompts), (repetition + 1) * len(prompts)):
            _turn(
                measurements, _batch(prompts, number, batch_size), number, max_tokens, seed + number, progress
            )
    return measurements


def _batch(prompts: Prompts, number: int, size: int) -> list[Sequence[int]]:
    return [prompts[(number + i) % len(prompts)] for i in range(size)]


def _turn(
    measurements: list[Measurement],
    batch: Prompts,
    number: int,
    max_tokens: int,
    seed: int,
    progress: Callable[[], None],
) -> None:
    """Everyone continues one batch; who begins changes from turn to turn."""
    turn = number % len(measurements)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed)
    for measurement in measurements[turn:] + measurements[:turn]:
        if measurement.error is None:
            try:
                own_params = replace(params, temperature=measurement.contender.temperature)
                measurement.runs.append(measurement.contender.generate(batch, own_params))
            except Exception as error:
                measurement.error = f"{type(error).__name__}: {error}"
        progress()
