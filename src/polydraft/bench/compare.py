"""Contenders measured in one interleaved run: every prompt by every contender in turn, again and again.

A machine's speed drifts while one measures. So each repetition of a prompt is a round in which all contenders run one
after the other, in an order that turns; a speed-up is the median over rounds of the ratio within a round.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch

from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.engine.stats import RequestStats

__all__ = ["Contender", "Measurement", "Run", "engine_contender", "measure", "near_tie", "transformers_contender"]


@dataclass(frozen=True)
class Run:
    """One continuation of one prompt. seconds: wall time of the whole call, prefill included.  stats: ours only."""

    token_ids: list[int]
    seconds: float
    stats: RequestStats | None = None


@dataclass(frozen=True)
class Contender:
    """Something that continues prompts. drafter, verifier: names, or None where there is none."""

    name: str
    drafter: str | None
    verifier: str | None
    temperature: float
    generate: Callable[[Sequence[int], SamplingParams], Run]


@dataclass
class Measurement:
    """What a contender did: `runs[round]`, rounds in the same order for all contenders of a `measure`."""

    contender: Contender
    runs: list[Run] = field(default_factory=list[Run])

    @property
    def tokens_per_second(self) -> float:
        """Median over rounds."""
        return median(len(run.token_ids) / run.seconds for run in self.runs)

    @property
    def tokens_per_call(self) -> float:
        """Emitted tokens per pass of the target after the prefill; 1 for those that do not draft."""
        stats = [run.stats for run in self.runs if run.stats is not None]
        calls = sum(s.target_calls for s in stats)
        return sum(s.emitted for s in stats) / calls if calls else 1.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of the rounds that drafted at depth d+1 in which a token there was kept."""
        stats = [run.stats for run in self.runs if run.stats is not None]
        deepest = max((len(s.drafted_by_depth) for s in stats), default=0)

        def total(counts: list[list[int]], d: int) -> int:
            return sum(c[d] for c in counts if d < len(c))

        kept, tried = [s.accepted_by_depth for s in stats], [s.drafted_by_depth for s in stats]
        return [total(kept, d) / total(tried, d) for d in range(deepest) if total(tried, d)]

    def speedup_over(self, other: "Measurement") -> float:
        """Median over rounds of seconds per token of `other` divided by ours."""
        pairs = zip(self.runs, other.runs, strict=True)
        return median(b.seconds / len(b.token_ids) * len(a.token_ids) / a.seconds for a, b in pairs)


def engine_contender(name: str, engine: Engine, temperature: float) -> Contender:
    """An engine as a contender."""

    def generate(prompt: Sequence[int], params: SamplingParams) -> Run:
        start = perf_counter()
        result = engine.generate(list(prompt), params)[0]
        return Run(result.token_ids, perf_counter() - start, result.stats)

    drafter = None if engine.drafter is None else engine.drafter.info.name
    return Contender(name, drafter, None if drafter is None else engine.verifier.info.name, temperature, generate)


def transformers_contender(model: Any, temperature: float) -> Contender:
    """`generate` of a transformers model; its sampling uses torch's global generator, which is put back afterwards."""

    def generate(prompt: Sequence[int], params: SamplingParams) -> Run:
        ids = torch.tensor([list(prompt)])
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(params.seed or 0)
            start = perf_counter()
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=params.max_tokens,
                eos_token_id=None,
                pad_token_id=0,
                **how,
            )
            seconds = perf_counter() - start
        return Run(out[0, len(prompt) :].tolist(), seconds)

    return Contender("transformers", None, None, temperature, generate)


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    repetitions: int,
    budget_seconds: float = math.inf,
    seed: int = 0,
) -> list[Measurement]:
    """Run every contender on every prompt, interleaved; end-of-text is ignored so that lengths agree.

    Round r continues prompt r modulo their number with seed + r, the same for all contenders.

    repetitions: of all prompts; fewer where one more would exceed `budget_seconds`, but at least one.
    """
    found = [Measurement(contender) for contender in contenders]
    start = perf_counter()
    for repetition in range(repetitions):
        if repetition and (perf_counter() - start) * (repetition + 1) / repetition > budget_seconds:
            break
        for number, prompt in enumerate(prompts, start=repetition * len(prompts)):
            _round(found, prompt, number, max_tokens, seed + number)
    return found


def _round(found: list[Measurement], prompt: Sequence[int], number: int, max_tokens: int, seed: int) -> None:
    """Everyone continues one prompt; who begins changes from round to round."""
    turn = number % len(found)
    for measurement in found[turn:] + found[:turn]:
        temperature = measurement.contender.temperature
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=seed)
        measurement.runs.append(measurement.contender.generate(prompt, params))


def near_tie(model: Any, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> float | None:
    """Margin in logits between two greedy continuations where they part; None where they are equal.

    model: a transformers model, the judge.  Below 1e-4 the order of float operations decides.
    """
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
    if at is None:
        return None
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *ours[:at]]])).logits[0, -1]
    return float((logits[ours[at]] - logits[theirs[at]]).abs())
