"""Is the output of this engine, with these models and settings, the target's? A test on texts that it generates itself.

Several looks at real, many-step texts, in which the engine does all that it does otherwise:

walk    the tokens that the engine accepted against those that the verdict samples on the same noise, token by token: exact, no statistics.
verifier   the verdict, worked out beside each step, gives the distribution of its block before any randomness of the verifier. For every position j,
            M_j = sum over nodes n of depth j - 1 of  sum_y w(n, y) f_n(y)  -  R(n) sum_y p_n(y) f_n(y)
        with w(n, y) the mass of blocks that go through n and then y, R(n) the mass that goes through n, p_n the target's distribution.
        If the verifier is lossless and drafts are drawn as reported, M_j has mean 0 over steps for any f that is a function of the
        context alone: tokens of later steps add nothing. f = q/(p+q), to which every mistake with q or with the draws is
        sensitive, f = p/max p, and the indicators of the best token by p and by q. All lie in [0, 1], so |mean| is a lower bound of the total variation distance.
draws   the same with the tokens that the engine accepted, X_j = f_n(x_j) - sum_y p_n(y) f_n(y): it sees mistakes of the noise and of
        the way to the outcome as well, be it the verdict, a fused walk, the greedy one or one on a device; without drafts too.
beside  M_j minus that of another lossless verifier on the same draft: what both owe to the chance of the draft falls out, and a
        small mistake of the verifier shows in few steps.
noise   X_j - M_j: what the engine accepted against the verdict.
again   positions that are drafted again after a rejection: the new draw's place in the draft's cumulative distribution times that of the
        draw before. Fresh noise makes the mean 0; noise keyed by a token's own position repeats the place.
text    the tokens that come out of the same requests with no look at the steps and the engine's own policy, judged by transformers:
        their places in the cumulative distribution of a forward pass of the plain model over the finished text are uniform (Kolmogorov-Smirnov),
        for each position of a block; at temperature 0 each is the largest.

Steps follow each other as martingale differences, so mean / standard error is a standard normal for many steps.
A check that succeeds has tested something: too few steps to find a bias of `SMALLEST` are inconclusive, and none with a draft is a failure.
"""

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from polydraft.check.finding import POWER, Finding
from polydraft.check.mutants import mistakes
from polydraft.check.steps import FEWEST_STEPS, Recorder
from polydraft.check.texts import text_findings
from polydraft.check.wrong_drafters import FEW, Reversed
from polydraft.core import Budget, Draft, DraftSampling, NoiseKey, Outcome, SamplingParams, Target
from polydraft.core import geometry as tree
from polydraft.core.batch import select
from polydraft.engine.api import Engine
from polydraft.engine.sequence import Result
from polydraft.errors import InvalidInputError
from polydraft.policy.fixed import Policy
from polydraft.verifiers.match import match

IMPLAUSIBLE = 1e-4
"""A smallest p-value below this, after correction for the number of tests, is a failure."""
DOUBTFUL = 1e-3
"""One below this decides nothing: more steps do."""
SMALLEST = 0.1
"""Total variation distance at a position that a check must be able to find; fewer steps are inconclusive."""
WHEN_PAUSED = Budget.fixed(tree.chain(4))
"""Drafted where the engine's policy would sit a step out."""
EMPTY = 8
"""Steps with nothing drafted for each one that is wanted, before the check makes do with those it saw."""
SELF_TEST = 3
"""Times as many steps at most for a known mistake; most are found in a few hundred."""


@dataclass(frozen=True)
class CheckReport:
    """All tests of a check and what they come to.

    steps: steps with a draft, or without where the engine drafts nothing.  drafting: whether the engine has a drafter.
    spares: steps whose chain had spare siblings, see `budget.Stop`.  failures: what the drafter failed with, each once.  differing: outcomes that are not the verdict's on the same noise, in words.
    """

    findings: list[Finding]
    steps: int
    tokens: int
    drafting: bool = True
    failures: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    spares: int = 0

    @property
    def p_value(self) -> float:
        """Smallest p-value times the number of tests (Bonferroni), at most 1."""
        return min(1.0, len(self.findings) * min((f.p_value for f in self.findings), default=1.0))

    @property
    def level(self) -> float:
        """p-value below which one test is a failure."""
        return IMPLAUSIBLE / max(len(self.findings), 1)

    @property
    def detectable(self) -> float:
        """Bias of the verifier at the first position, in each of its statistics, that so many steps find with probability `POWER`; 1 without any."""
        look = "verifier, position 1," if self.drafting else "steps without drafts, position 1,"
        return max((f.detectable(self.level) for f in self.findings if f.what.startswith(look)), default=1.0)

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def status(self) -> str:
        """ "passed", "failed" or "inconclusive"."""
        return self.verdict[0]

    @property
    def verdict(self) -> tuple[str, str]:
        """The status, and why in one sentence."""
        if self.drafting and not self.steps:
            return "failed", "no step had a draft, so neither drafter nor verifier was tested"
        if self.p_value <= IMPLAUSIBLE:
            return "failed", "the output does not follow the target's distribution"
        if self.p_value <= DOUBTFUL:
            return (
                "inconclusive",
                f"the worst p-value is between {IMPLAUSIBLE:g} and {DOUBTFUL:g}: more steps decide",
            )
        if self.detectable > SMALLEST:
            advice = f"about {self.enough} steps find one of {SMALLEST:g}"
            return (
                "inconclusive",
                f"{self.steps} steps find a bias of {self.detectable:.2g} with probability {POWER:g}; {advice}",
            )
        return "passed", "nothing beyond chance"

    @property
    def enough(self) -> int:
        """Steps, in hundreds, that would find a bias of `SMALLEST`."""
        needed = self.steps * (self.detectable / SMALLEST) ** 2
        return 100 * max(1, math.ceil(needed / 100))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [
            {
                "what": f.what,
                "count": f.count,
                "effect": f.effect,
                "detectable": f.detectable(self.level),
                "p_value": f.p_value,
            }
            for f in self.findings
        ]
        return {
            "passed": self.passed,
            "status": self.status,
            "reason": self.verdict[1],
            "p_value": self.p_value,
            "limit": IMPLAUSIBLE,
            "detectable": self.detectable,
            "power": POWER,
            "steps": self.steps,
            "steps_with_spare_siblings": self.spares,
            "tokens": self.tokens,
            "drafter_failures": list(self.failures),
            "differing": list(self.differing),
            "tests": rows,
        }


@dataclass(frozen=True)
class Watched(Policy):
    """The engine's policy, which shows the recorder every step that is over; the verifier and its walks stay as they are.

    It does not pause: a plain step tests no verifier, and how much is drafted changes no distribution.
    """

    policy: Policy
    recorder: Recorder
    own_sampling: frozenset[DraftSampling] = frozenset(DraftSampling)
    """How the drafter draws siblings where it is asked for no spare ones."""

    def budgets(self, sequences: Sequence[Any]) -> list[Budget]:
        budgets = self.policy.budgets(sequences)
        if any(g.max_depth for g in budgets):
            return budgets
        return [WHEN_PAUSED if s.drafting else g for s, g in zip(sequences, budgets, strict=True)]

    def learn(
        self, sequences: Sequence[Any], draft: Draft, probs: Callable[[], Any], outcome: Outcome
    ) -> None:
        if draft.sampling not in self.own_sampling:
            self.recorder.spares += _num_branching(draft)
        requests = [s.request for s in sequences]
        seeds = [r.seed for r in requests]
        samples = [r.sample for r in requests]
        key = NoiseKey.of(seeds, samples, [len(s.token_ids) for s in sequences])
        parts = draft, probs(), key, outcome
        copying = [b for b, s in enumerate(sequences) if s.copying]
        if drafted := [b for b in range(len(sequences)) if b not in copying]:
            self.recorder.see(*(select(parts, drafted) if copying else parts), self.recorder.verifier)
        if copying:
            copied, *rest = select(parts, copying)
            self.recorder.see(replace(copied, sampling=DraftSampling.POINT_MASS, probs=None), *rest, match)
        self.policy.learn(sequences, draft, probs, outcome)


def _num_branching(draft: Draft) -> int:
    """Rows in which two nodes have one parent."""
    parents = [row[row >= 0].tolist() for row in draft.tree.host.parents]
    return sum(len({*above}) < len(above) for above in parents)


def _is_beyond_chance(recorder: Recorder) -> bool:
    """So far that looking more than once does not matter."""
    return CheckReport(recorder.findings, 0, 0).p_value < IMPLAUSIBLE / 100


def check(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    *,
    judge: Any = None,
    steps: int = 2000,
    progress: Callable[[int, int], None] | None = None,
    stop_early: bool = False,
) -> CheckReport:
    """Generate from the prompts with different noise until `steps` steps with drafts are over, and test them.

    Requests are those that users send by default, which name no seed: they are drafted for by live costs, with spare siblings where these pay.
    params.seed: of the noise of the first request.

    Where the engine's policy pauses, four tokens are drafted all the same. A drafter that rarely has something to draft ends the
    check after `EMPTY` times as many steps, and one that is absent after `steps`: the report says how many drafts it saw.

    judge: the target as a module of transformers; without it only steps are tested, not texts. With it the same requests are
        generated once more with no look at the steps, and judged.
    progress: told of steps done and steps wanted.  stop_early: end as soon as the verifier's tests fail.

    Raises:
        InvalidInputError: fewer steps than a test needs, or no prompt.

    Example:
        >>> engine = Engine.embedded(drafter="model:chain", depth=2)
        >>> report = check(engine, ["import os\\n"], SamplingParams(max_tokens=16), steps=60)
        >>> report.status, report.p_value > 1e-3
        ('inconclusive', True)
    """
    if steps < FEWEST_STEPS or not prompts:
        raise InvalidInputError(
            f"steps={steps} and {len(prompts)} prompts were given; expected steps >= {FEWEST_STEPS} and at least one prompt."
        )
    recorder = Recorder(engine.verifier)
    seed = 0 if params.seed is None else params.seed
    params = params.with_(seed=None)
    first = params.with_(max_tokens=1)
    engine.generate(list(prompts[:1]), first)  # a policy measures its costs before the steps that count
    results = list[Result]()
    with closing(_watched(engine, prompts, params, recorder, seed, steps)) as batches:
        for batch in batches:
            results += batch
            if progress is not None:
                progress(min(len(recorder.values), steps), steps)
            if stop_early and _is_beyond_chance(recorder):
                break
    findings = recorder.findings
    failures = _failures(results)
    if judge is not None:
        seeds = range(seed, seed + len(results), len(prompts))
        results = [result for seed in seeds for result in _generated(engine, prompts, params, seed)]
        findings += text_findings(judge, engine, results, params)
    drafting = engine.drafter is not None
    return CheckReport(
        findings,
        len(recorder.values if drafting else recorder.plain),
        sum(len(s.token_ids) for r in results for s in r.samples),
        drafting,
        failures,
        recorder.walks.examples,
        recorder.spares,
    )


def _watched(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    recorder: Recorder,
    seed: int,
    steps: int,
) -> Generator[list[Result], None, None]:
    """Results of the prompts again and again, each time with other noise, until enough steps were seen."""
    policy = engine.policy
    drafter = engine.drafter
    own = [] if drafter is None else [drafter.info.draft_sampling]
    most = steps if drafter is None else EMPTY * steps
    engine.policy = Watched(policy, recorder, *own)
    try:
        while len(recorder.values) < steps and recorder.steps < most:
            steps_before = recorder.steps
            results = _generated(engine, prompts, params, seed)
            seed += len(prompts)
            failed = recorder.steps == steps_before  # every request
            yield results
            if failed:
                return
    finally:
        engine.policy = policy


def _generated(
    engine: Engine, prompts: Sequence[str | Sequence[int]], params: SamplingParams, seed: int
) -> list[Result]:
    """One request a prompt, which names no seed, with noise of its own."""
    results = [
        engine.submit(prompt, params, index, seed=seed + index) for index, prompt in enumerate(prompts)
    ]
    while engine.has_unfinished_requests:
        engine.step()
    return results


def _failures(results: Sequence[Result]) -> tuple[str, ...]:
    """What drafters failed with, and in how many requests."""
    counts = Counter(s.stats.drafter_error for r in results for s in r.samples if s.stats.drafter_error)
    total = sum(len(r.samples) for r in results)
    return tuple(
        f"the drafter failed in {count} of {total} requests: {error}" for error, count in counts.items()
    )


def self_test(
    engine: Engine,
    draft_model: Target,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    *,
    steps: int = 2000,
) -> Iterator[tuple[str, CheckReport]]:
    """Check every known mistake on the engine's own pair; a report that did not fail is a mistake that was not found.

    Distributions are cut to `FEW` tokens, and the draft's are swapped (`Reversed`): a draft that agrees with the target would hide most
    mistakes, as there is nothing to reject.
    """
    bad: Any = Reversed(draft_model)
    few = params.with_(top_k=FEW, temperature=params.temperature or 1.0)
    for mistake in mistakes():
        wrong = Engine.of(
            engine.target,
            tokenizer=engine.tokenizer,
            draft_model=bad,
            drafter=mistake.drafts(bad, engine.eos_token_ids),
            verifier=mistake.verifier(),
            depth=mistake.depth,
            num_paths=mistake.width,
            eos_token_ids=engine.eos_token_ids,
        )
        yield mistake.name, check(wrong, prompts, few, steps=SELF_TEST * steps, stop_early=True)
