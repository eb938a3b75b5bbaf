"""`polydraft tune`: what the policy knows of these models on these prompts, and how right it is.

Plain decoding, the adaptive policy and ten fixed shapes run in turn on every prompt. From the adaptive runs come the seconds and the acceptance that
the policy learnt; they predict the speed of each fixed shape, beside which the measured one stands. Rates count decoding only, in CPU
seconds where one thread does all the work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polydraft import tree
from polydraft.clock import clock
from polydraft.core import Budget, SamplingParams
from polydraft.engine.api import Engine
from polydraft.errors import InvalidInputError
from polydraft.policy.acceptance import FIRST, NEXT
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.fixed import FixedPolicy, Policy
from polydraft.policy.marginal import Expected, speed_of
from polydraft.policy.profile import Profile
from polydraft.verifiers import pairing

DEPTHS = (1, 2, 3, 4, 5, 6, 8)
SHAPES = tuple(Budget.fixed(tree.chain(depth)) for depth in DEPTHS) + tuple(
    Budget.fixed(tree.paths(k, depth)) for k, depth in ((2, 2), (2, 4), (3, 2))
)
"""What runs beside the policy."""
WORTH = 1.03
"""A speed-up below this is not worth a draft model."""


@dataclass
class Trial:
    """One setting that is run. budget: of a fixed one."""

    name: str
    policy: Policy
    budget: Budget | None = None
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0

    @property
    def measured(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Tuning:
    """What was found. profile: what the policy learnt.  greedy: of which requests."""

    profile: Profile
    trials: list[Trial]
    greedy: bool

    def trial(self, name: str) -> Trial:
        return next(t for t in self.trials if t.name == name)

    def predicted(self, trial: Trial) -> float | None:
        """Tokens per second by costs and acceptance; None for the adaptive policy, and for several paths, whose acceptance it does not count."""
        if trial.name == "plain":
            return speed_of([], 1, self.profile.costs)
        if trial.budget is None or trial.budget.width > 1:
            return None
        rates, _ = self.profile.known(self.greedy)
        depth = trial.budget.max_depth
        tokens = 1.0 + rates[FIRST] * sum(rates[NEXT] ** d for d in range(depth))
        return speed_of([Expected(tokens, depth, depth)], 1, self.profile.costs)

    def recommendation(self) -> str:
        """One setting, in plain words."""
        plain, adaptive = self.trial("plain"), self.trial("adaptive")
        best = max((t for t in self.trials if t.budget is not None), key=lambda t: t.measured)
        if max(adaptive.measured, best.measured) < WORTH * plain.measured:
            return (
                f"Do not draft here: plain decoding makes {plain.measured:.0f} tokens/s and the best drafts {best.measured:.0f}. "
                "Use --drafter none, or a draft that costs less or fits better."
            )
        if adaptive.measured >= 0.97 * best.measured:
            return (
                f"Leave the policy adaptive: {adaptive.measured / plain.measured:.2f} times plain decoding; the best fixed shape, "
                f"{best.name}, makes {best.measured:.0f} tokens/s, adaptive {adaptive.measured:.0f}."
            )
        assert best.budget is not None
        return (
            f"Use --num-paths {best.budget.width} --depth {best.budget.max_depth}: {best.measured / plain.measured:.2f} times plain decoding "
            f"({best.measured:.0f} against {plain.measured:.0f} tokens/s); the adaptive policy makes {adaptive.measured:.0f}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "recommendation": self.recommendation(),
            "trials": [
                {"name": t.name, "predicted": self.predicted(t), "measured": t.measured, "tokens": t.tokens, "steps": t.steps}
                for t in self.trials
            ],
            "profile": self.profile.to_dict(),
        }


def tune(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    params: SamplingParams | None = None,
    shapes: Sequence[Budget] = SHAPES,
    repetitions: int = 1,
    progress: Callable[[int], None] = lambda number: None,
) -> Tuning:
    """Run plain decoding, the adaptive policy and fixed shapes in turn on every prompt.

    engine: an idle one; its target, drafter and verifier are used.  shapes: of the fixed ones, as far as the drafter draws them and the verifier
    is exact.  params: sampling and `max_tokens`, default 64 tokens at temperature 1; end-of-text is ignored.  progress: called after each run
    with the number of them all.

    Raises:
        InvalidInputError: an engine that decodes plainly or has a decoding method, or no prompt.
    """
    if engine.drafter is None:
        raise InvalidInputError(
            "an engine without a drafter was given; there is nothing to tune. Give a draft model or a drafter."
        )
    if engine.decoding is not None:
        raise InvalidInputError(
            f"an engine whose outputs follow {engine.lossless_to} was given; expected one that samples from its target. Build it without decoding=...; with a "
            "decoding method, the adaptive policy learns its costs while requests run."
        )
    if not prompts:
        raise InvalidInputError("no prompt was given; expected at least one. Give some with --prompts FILE.")
    wanted = replace(params or SamplingParams(max_tokens=64), ignore_eos=True, seed=None)
    adaptive, drafter = AdaptivePolicy(), engine.drafter
    adaptive.prepare(engine.target, drafter, engine.verifier)
    trials = [Trial("plain", FixedPolicy(Budget.fixed((-1,)))), Trial("adaptive", adaptive)]
    for budget in pairing.allowed(shapes, drafter.info, engine.verifier.info):
        name = f"chain of {budget.max_depth}" if budget.width == 1 else f"{budget.width} paths of {budget.max_depth}"
        trials.append(Trial(name, FixedPolicy(budget), budget))
    loops = [
        Engine(engine.target, None if t.name == "plain" else drafter, engine.verifier, t.policy, clock=clock(engine.target))
        for t in trials
    ]
    for number in range(repetitions * len(prompts)):
        for turn in range(len(trials)):
            at = (number + turn) % len(trials)
            stats = loops[at].generate([list(prompts[number % len(prompts)])], wanted)[0].stats
            trials[at].tokens += stats.generated_tokens
            trials[at].steps += stats.steps
            trials[at].seconds += stats.total_seconds - stats.seconds["prefill"]
            progress(len(trials) * repetitions * len(prompts))
    return Tuning(adaptive.learnt(), trials, wanted.greedy)
