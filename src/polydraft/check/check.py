"""Is the output of this engine, with these models and settings, the target's? A test on texts that it generates itself.

Six looks at real, many-round texts, in which the engine does all that it does otherwise:

rule    the verdict, worked out beside each round, gives the law of its block before any randomness of the rule. For every position j,
            M_j = sum over nodes n of depth j - 1 of  sum_y w(n, y) f_n(y)  -  R(n) sum_y p_n(y) f_n(y)
        with w(n, y) the mass of blocks that go through n and then y, R(n) the mass that goes through n, p_n the target's law.
        If the rule is lossless and drafts are drawn as reported, M_j has mean 0 over rounds for any f that is a function of the
        context alone: tokens of later rounds add nothing. f = q/(p+q), to which every mistake with q or with the draws is
        sensitive, f = p/max p, and the indicators of the best token by p and by q. All lie in [0, 1], so |mean| is a lower bound of the total variation distance.
draws   the same with the tokens that the engine kept, X_j = f_n(x_j) - sum_y p_n(y) f_n(y): it sees mistakes of the noise and of
        the way to the outcome as well, be it the verdict, a fused walk, the greedy one or one on a device; without drafts too.
beside  M_j minus that of another lossless rule on the same draft: what both owe to the chance of the draft falls out, and a
        small mistake of the rule shows in few rounds.
noise   X_j - M_j: what the engine kept against the verdict.
again   positions that are drafted again after a rejection: the new draw's place in the draft's cumulative law times that of the
        draw before. Fresh noise makes the mean 0; noise keyed by a token's own position repeats the place.
text    the tokens that come out of the same requests with no look at the rounds and the engine's own plan, judged by transformers:
        their places in the cumulative law of a pass of the plain model over the finished text are uniform (Kolmogorov-Smirnov),
        for each position of a block; at temperature 0 each is the largest.

Rounds follow each other as martingale differences, so mean / standard error is a standard normal for many rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polydraft import sampling, tree
from polydraft.check.rounds import LEAST_ROUNDS, Finding, Recorder
from polydraft.check.texts import text_findings
from polydraft.check.wrong_rules import FEW, Reversed, mistakes
from polydraft.core import Budget, Draft, NoiseKey, Outcome, SamplingParams, Target
from polydraft.engine.api import Engine
from polydraft.errors import InvalidInputError
from polydraft.plan.fixed import Plan

IMPLAUSIBLE = 1e-4
"""A smallest p-value below this, after correction for the number of tests, is a failure."""
WHEN_PAUSED = Budget.fixed(tree.chain(4))
"""Drafted where the engine's plan would sit a round out."""
EMPTY = 8
"""Rounds with nothing drafted for each one that is wanted, before the check makes do with those it saw."""
SELF_TEST = 3
"""Times as many rounds at most for a known mistake; most are found in a few hundred."""


@dataclass(frozen=True)
class Report:
    """All tests of a check, the worst p-value after correction for their number, and whether it is plausible."""

    findings: list[Finding]
    rounds: int
    tokens: int

    @property
    def p_value(self) -> float:
        """Smallest p-value times the number of tests (Bonferroni), at most 1."""
        return min(1.0, len(self.findings) * min((f.p_value for f in self.findings), default=1.0))

    @property
    def passed(self) -> bool:
        return self.p_value > IMPLAUSIBLE

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [{"what": f.what, "count": f.count, "effect": f.effect, "p_value": f.p_value} for f in self.findings]
        return {"passed": self.passed, "p_value": self.p_value, "rounds": self.rounds, "tokens": self.tokens, "tests": rows}


@dataclass(frozen=True)
class Watched:
    """The engine's plan, which shows the recorder every round that is over; the rule and its walks stay as they are.

    It does not pause: a plain round tests no rule, and how much is drafted changes no law.
    """

    plan: Plan
    recorder: Recorder

    def budgets(self, sequences: Sequence[Any]) -> list[Budget]:
        given = self.plan.budgets(sequences)
        if any(g.max_depth for g in given):
            return given
        return [WHEN_PAUSED if s.drafting else g for s, g in zip(sequences, given, strict=True)]

    def learn(self, sequences: Sequence[Any], draft: Draft, processed: Tensor, outcome: Outcome) -> None:
        requests = [s.request for s in sequences]
        key = NoiseKey.of([r.seed for r in requests], [r.sample for r in requests], [len(s.token_ids) for s in sequences])
        self.recorder.see(draft, sampling.soften(processed, [r.params for r in requests]), key, outcome)
        self.plan.learn(sequences, draft, processed, outcome)


def check(
    engine: Engine,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams,
    *,
    judge: Any = None,
    rounds: int = 2000,
    progress: Callable[[int, int], None] | None = None,
    stop_early: bool = False,
) -> Report:
    """Generate from the prompts with different seeds until `rounds` rounds with drafts are over, and test them.

    Where the engine's plan pauses, four tokens are drafted all the same. A drafter that rarely has something to draft ends the
    check after `EMPTY` times as many rounds, and one that is absent after `rounds`: the report says how many drafts it saw.

    judge: the target as a module of transformers; without it only rounds are tested, not texts. With it the same requests are
        generated once more with no look at the rounds, and judged.
    progress: told of rounds done and rounds wanted.  stop_early: end as soon as the rule's tests fail.

    Raises:
        InvalidInputError: fewer rounds than a test needs, or no prompt.

    Example:
        >>> engine = Engine.embedded(drafter="model:chain", depth=2)
        >>> check(engine, ["import os\\n"], SamplingParams(max_tokens=16), rounds=60).passed
        True
    """
    if rounds < LEAST_ROUNDS or not prompts:
        raise InvalidInputError(
            f"rounds={rounds} and {len(prompts)} prompts were given; expected rounds >= {LEAST_ROUNDS} and at least one prompt."
        )
    recorder, plan = Recorder(engine.verifier), engine.plan
    results: list[Any] = []
    asked: list[list[SamplingParams]] = []
    seed = 0 if params.seed is None else params.seed
    engine.generate(list(prompts[:1]), params.with_(max_tokens=1))  # a plan measures its costs before the rounds that count
    engine.plan = Watched(plan, recorder)
    most = rounds if engine.drafter is None else EMPTY * rounds
    try:
        while len(recorder.values) < rounds and recorder.rounds < most:
            asked.append([params.with_(seed=seed + i) for i in range(len(prompts))])
            results += engine.generate(list(prompts), asked[-1])
            seed += len(prompts)
            if progress is not None:
                progress(min(len(recorder.values), rounds), rounds)
            beyond_chance = stop_early and Report(recorder.findings, 0, 0).p_value < IMPLAUSIBLE / 100
            if beyond_chance:  # so far that looking more than once does not matter
                break
    finally:
        engine.plan = plan
    found = recorder.findings
    if judge is not None:
        results = [result for each in asked for result in engine.generate(list(prompts), each)]
        found += text_findings(judge, engine, results, params)
    return Report(found, len(recorder.values), sum(len(s.token_ids) for r in results for s in r.samples))


def self_test(
    engine: Engine, draft_model: Target, prompts: Sequence[str | Sequence[int]], params: SamplingParams, *, rounds: int = 2000
) -> Iterator[tuple[str, Report]]:
    """Check every known mistake on the engine's own pair; a report that passed is a mistake that was not caught.

    Laws are cut to `FEW` tokens, and the draft's are swapped (`Reversed`): a draft that agrees with the target would hide most
    mistakes, as there is nothing to reject.
    """
    bad: Any = Reversed(draft_model)
    few = params.with_(top_k=FEW, temperature=params.temperature or 1.0)
    for mistake in mistakes(engine.eos_token_ids):
        wrong = Engine.of(
            engine.target,
            tokenizer=engine.tokenizer,
            draft_model=bad,
            drafter=mistake.drafter(bad),
            verifier=mistake.rule,
            depth=mistake.depth,
            num_paths=mistake.width,
            eos_token_ids=engine.eos_token_ids,
        )
        yield mistake.name, check(wrong, prompts, few, rounds=SELF_TEST * rounds, stop_early=True)
