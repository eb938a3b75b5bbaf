"""`polydraft tune`: which drafts pay on these models, these prompts and this machine, predicted and measured.

Costs of rounds and acceptance are measured first (`tune/measure.py`); with them the planner's model predicts tokens per second
for every size, and a few sizes are then run in turn to see how far it is off. Rates count decoding only, without the prefill,
in CPU seconds where one thread does all the work.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.engine.stats import clock
from polydraft.errors import InvalidInputError
from polydraft.plan.fixed import FixedPlan
from polydraft.plan.plan import AdaptivePlan
from polydraft.plan.sizes import most_paths, paths
from polydraft.tune.advice import Trial, Tuning, predicted
from polydraft.tune.measure import measured_profile
from polydraft.tune.shapes import draft_shapes

SIZES = ((1, 1), (1, 2), (1, 4), (1, 6), (1, 8), (2, 2), (2, 4), (3, 3))
"""(paths, depth) of what is run; 1x2, 1x6 and 2x2 are not among the rounds that costs are fitted to."""

Prompts = Sequence[Sequence[int]]


def tune(
    engine: Engine,
    prompts: Prompts,
    *,
    params: SamplingParams | None = None,
    sizes: Sequence[tuple[int, int]] = SIZES,
    repetitions: int = 1,
    budget_seconds: float = 1.0,
    draft_config: Any = None,
    progress: Callable[[str, int], None] = lambda what, number: None,
) -> Tuning:
    """Measure, predict, and run plain decoding, the adaptive plan and fixed ones in turn on every prompt.

    engine: an idle one; its target, drafter and rule are used.  sizes: (paths, depth) of the fixed ones, as far as the drafter makes them.
    params: sampling and `max_tokens`, default 64 tokens at temperature 1; end-of-text is ignored.
    budget_seconds: for the measurement of costs, see `measured`.  draft_config: transformers' configuration of the draft
    model, to compare shapes of its size.  progress: called after each measurement with what it is of and the number of them all.

    Raises:
        InvalidInputError: an engine that decodes plainly or has a law, or no prompt.
    """
    if engine.drafter is None:
        raise InvalidInputError(
            "an engine without a drafter was given; there is nothing to tune. Give a draft model or a drafter."
        )
    if engine.law is not None:
        raise InvalidInputError(
            f"an engine whose outputs follow {engine.lossless_to} was given; costs and acceptance are measured of the target's own law only. "
            "Build it without law=...; with a law, the adaptive plan learns its costs while requests run."
        )
    if not prompts:
        raise InvalidInputError("no prompt was given; expected at least one. Give some with --prompts FILE.")
    wanted = replace(params or SamplingParams(max_tokens=64), ignore_eos=True)
    asked = replace(wanted, max_tokens=None, seed=None)
    said = partial(progress, "costs of rounds", len(prompts[:4]))
    parts = engine.target, engine.drafter, engine.verifier
    profile = measured_profile(*parts, prompts[:4], progress=said, params=asked, budget_seconds=budget_seconds)
    context = round(float(np.mean([len(p) for p in prompts])) + (wanted.max_tokens or 64) / 2)
    guess = partial(predicted, profile, context=context)
    trials = [Trial("plain", FixedPlan(paths(1, 1)), guess(1, 0)), Trial("adaptive", AdaptivePlan(profile), None)]
    most = most_paths(engine.drafter.info, engine.verifier.info, max(w for w, _ in sizes))
    for width, depth in sizes:
        if width <= most:
            trials.append(Trial(f"{width}x{depth}", FixedPlan(paths(width, depth)), guess(width, depth), (width, depth)))
    for number in range(repetitions * len(prompts)):
        turn = number % len(trials)
        for trial in trials[turn:] + trials[:turn]:
            _run(engine, trial, prompts[number % len(prompts)], replace(wanted, seed=number))
            progress("sizes", len(trials) * repetitions * len(prompts))
    return Tuning(profile, trials, context, [] if draft_config is None else draft_shapes(draft_config))


def _run(engine: Engine, trial: Trial, prompt: Sequence[int], params: SamplingParams) -> None:
    drafter = None if trial.name == "plain" else engine.drafter
    fresh = Engine(engine.target, drafter, engine.verifier, trial.plan, clock=clock(engine.target))
    stats = fresh.generate([list(prompt)], params)[0].stats
    trial.tokens += stats.emitted
    trial.calls += stats.target_calls
    trial.seconds += stats.total_seconds - stats.seconds["prefill"]
