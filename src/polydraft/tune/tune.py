"""`polydraft tune`: what the policy knows of these models on these prompts, and how right it is.

Plain decoding, the adaptive policy and ten fixed shapes run in turn on every prompt, so that contention meets all of them alike. What steps of the
other shapes took and accepted predicts each shape's speed, beside which the measured one stands: seconds come from chains alone, and how often a path
beside the first is accepted, where the first is not, from the other shapes of several paths. (The policy's own costs are averages of its latest
steps, and its acceptance that of drafts that end when they are unsure: a chain that goes on is accepted less.) Rates count decoding only, in CPU
seconds where one thread does all the work.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.bench.speedup import Speedup
from polydraft.core import Budget, Drafter, SamplingParams
from polydraft.core import geometry as tree
from polydraft.engine.api import Engine
from polydraft.engine.loop import rehearsed
from polydraft.engine.sample_text import sample_ids, sample_prompts
from polydraft.engine.speculation import Menu, Speculation
from polydraft.engine.stats import RequestStats
from polydraft.errors import InvalidInputError
from polydraft.policy.acceptance import FIRST, NEXT
from polydraft.policy.adaptive import AdaptivePolicy
from polydraft.policy.costs import MEASURED, TOKEN_SECONDS, Costs
from polydraft.policy.fixed import FixedPolicy, Policy
from polydraft.policy.measuring import clock
from polydraft.policy.profile import Profile
from polydraft.verifiers import pairing

DEPTHS = (1, 2, 3, 4, 5, 6, 8)
SHAPES = tuple(Budget.fixed(tree.chain(depth)) for depth in DEPTHS) + tuple(
    Budget.fixed(tree.paths(k, depth)) for k, depth in ((2, 2), (2, 4), (3, 2))
)
"""What runs beside the policy."""
MISSED = 0.25
"""Of a measured speed, by which a prediction may be off without a word: 48% beside other work."""
WORTH = 1.03
"""A speed-up below this is not worth a draft model, nor a fixed shape in place of the adaptive policy."""


@dataclass
class ShapeTrial:
    """One setting that is run. budget: of a fixed one.  scoring, drafting, beside: seconds of forward passes, of drafts and of the rest.

    rates: tokens per second of each run, in the same order for all settings.  drafted, accepted: steps by depth.
    """

    name: str
    policy: Policy
    budget: Budget | None = None
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    scoring: float = 0.0
    drafting: float = 0.0
    beside: float = 0.0
    rates: list[float] = field(default_factory=list[float])
    drafted: Counter[int] = field(default_factory=Counter[int])
    accepted: Counter[int] = field(default_factory=Counter[int])

    @classmethod
    def of(cls, budget: Budget) -> "ShapeTrial":
        """Of a fixed shape."""
        depth = budget.max_depth
        name = f"chain of {depth}" if budget.width == 1 else f"{budget.width} paths of {depth}"
        return cls(name, FixedPolicy(budget), budget)

    def record(self, stats: RequestStats) -> None:
        """Add what one request took and accepted."""
        self.tokens += stats.generated_tokens
        self.steps += stats.steps
        seconds = stats.total_seconds - stats.seconds["prefill"]
        self.seconds += seconds
        self.rates.append(stats.generated_tokens / max(seconds, 1e-9))
        self.scoring += stats.seconds["scoring"]
        self.drafting += stats.seconds["drafting"]
        self.beside += stats.seconds["verifying"] + stats.seconds["other"]
        self.drafted.update(dict(enumerate(stats.drafted_by_depth)))
        self.accepted.update(dict(enumerate(stats.accepted_by_depth)))

    @property
    def is_chain(self) -> bool:
        return self.budget is not None and self.budget.width == 1

    @property
    def measured(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def speedup_over(self, other: "ShapeTrial") -> Speedup:
        """Of tokens per second, run by run."""
        return Speedup.of([ours / theirs for ours, theirs in zip(self.rates, other.rates, strict=True)])


@dataclass
class Tuning:
    """What was found. profile: what the policy learnt.  greedy: of which requests."""

    profile: Profile
    trials: list[ShapeTrial]
    greedy: bool

    def trial(self, name: str) -> ShapeTrial:
        return next(t for t in self.trials if t.name == name)

    def predicted(self, trial: ShapeTrial) -> float | None:
        """Tokens per second by the costs and acceptance of other shapes; None for the adaptive policy, and for several paths where none other ran."""
        if trial.name == "plain":
            return 1.0 / self.profile.costs.step(1, 0)
        if trial.budget is None:
            return None
        depth = trial.budget.max_depth
        width = trial.budget.width
        others = [t for t in self.trials if t is not trial]
        drafted = [trial.drafted[d] / trial.steps if trial.drafted else 1.0 for d in range(depth)]
        reach = self._reach_of_paths(others, width, depth)
        if reach is None:
            return None
        tokens = 1.0 + sum(share * rate for share, rate in zip(drafted, reach, strict=True))
        costs = chain_costs(others)
        steps = sum(drafted)
        if costs is None:
            return tokens / self.profile.costs.step(1 + width * steps, steps)
        return tokens / (scoring(others, 1 + width * steps) + costs.drafting(steps) + costs.overhead)

    def _reach_of_paths(self, trials: Sequence[ShapeTrial], width: int, depth: int) -> list[float] | None:
        """How often one of several paths is accepted to each depth; None where these do not tell it."""
        reach = self._reach(trials, depth)
        if width == 1:
            return reach
        rejected = self._rejected_beside(trials)
        if rejected is None or not 0.0 < reach[0] < 1.0:
            return None
        some = 1.0 - (1.0 - reach[0]) * rejected ** (width - 1)
        return [some / reach[0] * r for r in reach]  # at most one of the paths goes on

    def _rejected_beside(self, trials: Sequence[ShapeTrial]) -> float | None:
        """How often a path beside the first is rejected at its first token, where those before it are: by these of several paths."""
        first = self._reach(trials, 1)[0]
        several = [t for t in trials if t.budget is not None and not t.is_chain and t.drafted[0]]
        if not several or first >= 1.0:
            return None
        misses = [(t, 1.0 - t.accepted[0] / t.drafted[0]) for t in several]
        rates = [
            (min(miss / (1.0 - first), 1.0)) ** (1.0 / (t.budget.width - 1)) for t, miss in misses if t.budget
        ]
        return sum(rates) / len(rates)

    def _reach(self, trials: Sequence[ShapeTrial], depth: int) -> list[float]:
        """How often a chain is accepted to each depth: as these chains were, beyond them at their last rate, and as the policy knows without any."""
        rates, _ = self.profile.known(self.greedy)
        chains = [t for t in trials if t.is_chain]
        reach = [1.0]
        rate = rates[FIRST]
        for d in range(depth):
            if drafted := sum(t.drafted[d] for t in chains):
                share = sum(t.accepted[d] for t in chains) / drafted
                rate = share / reach[-1] if reach[-1] else 0.0
            elif d and not any(t.drafted for t in chains):
                rate = rates[NEXT]
            reach.append(rate * reach[-1])
        return reach[1:]

    def doubt(self) -> str:
        """What is said of predictions that are far from what was measured; "" where none is."""
        errors = [
            abs(p / t.measured - 1.0)
            for t in self.trials
            if t.measured and (p := self.predicted(t)) is not None
        ]
        if max(errors, default=0.0) <= MISSED:
            return ""
        return f"Predictions are up to {max(errors):.0%} off: speeds changed while shapes ran, as beside other work. Measure on an idle machine before you use the profile."

    def recommendation(self) -> str:
        """One setting, in plain words; or that the runs do not tell one."""
        plain = self.trial("plain")
        adaptive = self.trial("adaptive")
        best, *others = sorted((t for t in self.trials if t.budget is not None), key=lambda t: -t.measured)
        assert best.budget is not None
        fastest = max(adaptive, best, key=lambda t: t.measured)
        gain = fastest.speedup_over(plain)
        over_adaptive = best.speedup_over(adaptive)
        if (gain.interval is not None and gain.interval[1] < WORTH) or gain.doubt:
            return _no_gain(gain, plain, fastest)
        if over_adaptive.doubt or over_adaptive.ratio < WORTH:
            return (
                f"Leave the policy adaptive: over plain decoding {adaptive.speedup_over(plain)}; "
                f"the best fixed shape, {best.name}, over adaptive {over_adaptive}."
            )
        second = (
            f"; over the second shape, {others[0].name}, {best.speedup_over(others[0])}" if others else ""
        )
        return (
            f"Use --num-paths {best.budget.width} --depth {best.budget.max_depth}: {gain} times plain decoding "
            f"({best.measured:.0f} against {plain.measured:.0f} tokens/s), {over_adaptive} times the adaptive policy{second}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        costs = self.profile.costs
        return {
            "recommendation": self.recommendation(),
            "doubt": self.doubt(),
            "draft_in_forward_passes": {
                "first": costs.first_draft / costs.rows(1),
                "further": costs.draft_step / costs.rows(1),
            },
            "trials": [
                {
                    "name": t.name,
                    "predicted": self.predicted(t),
                    "measured": t.measured,
                    "over_plain": asdict(t.speedup_over(self.trial("plain"))),
                    "tokens": t.tokens,
                    "steps": t.steps,
                }
                for t in self.trials
            ],
            "profile": self.profile.to_dict(),
        }


def _no_gain(gain: Speedup, plain: ShapeTrial, fastest: ShapeTrial) -> str:
    """What is recommended where drafts do not pay, or the runs do not tell whether they do."""
    if gain.interval is not None and gain.interval[1] < WORTH:
        return (
            f"Do not draft here: plain decoding makes {plain.measured:.0f} tokens/s and the best drafts {fastest.measured:.0f}, "
            f"{gain.ratio:.2f} times as many. Use --drafter none, or a draft that costs less or fits better."
        )
    assert gain.doubt is not None
    return (
        f"{gain.doubt.capitalize()} whether drafts pay: the fastest, {fastest.name}, made {fastest.measured:.0f} tokens/s and plain decoding "
        f"{plain.measured:.0f}. Leave the policy adaptive, or measure on an idle machine with more prompts or repetitions."
    )


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
    drafter = _tuned_drafter(engine)
    if not prompts:
        raise InvalidInputError("no prompt was given; expected at least one. Give some with --prompts FILE.")
    sampling = replace(params or SamplingParams(max_tokens=64), ignore_eos=True, seed=None)
    adaptive = _measured_policy(engine, drafter)
    trials = [ShapeTrial("plain", FixedPolicy(Budget.fixed((-1,)))), ShapeTrial("adaptive", adaptive)]
    trials += [
        ShapeTrial.of(budget) for budget in pairing.allowed(shapes, drafter.info, engine.verifier.info)
    ]
    loops = [_loop(engine, None if t.name == "plain" else drafter, t.policy) for t in trials]
    for number in range(repetitions * len(prompts)):
        for turn in range(len(trials)):
            at = (number + turn) % len(trials)
            (result,) = loops[at].generate([list(prompts[number % len(prompts)])], sampling)
            trials[at].record(result.stats)
            progress(len(trials) * repetitions * len(prompts))
    return Tuning(_with_chain_costs(adaptive.learnt(), trials), trials, sampling.greedy)


def _with_chain_costs(profile: Profile, trials: Sequence[ShapeTrial]) -> Profile:
    """What the policy learnt, with costs by what chains took, where those tell them."""
    costs = chain_costs(trials)
    if costs is None:
        return profile
    token_seconds = {name: getattr(profile.costs, name) for name in TOKEN_SECONDS}
    return replace(profile, costs=replace(costs, **token_seconds))


def _tuned_drafter(engine: Engine) -> Drafter:
    """The drafter of an engine that can be tuned."""
    if engine.drafter is None:
        raise InvalidInputError(
            "an engine without a drafter was given; there is nothing to tune. Give a draft model or a drafter."
        )
    if engine.decoding is not None:
        raise InvalidInputError(
            f"an engine whose outputs follow {engine.lossless_to} was given; expected one that samples from its target. Build it without decoding=...; with a "
            "decoding method, the adaptive policy learns its costs while requests run."
        )
    return engine.drafter


def _measured_policy(engine: Engine, drafter: Drafter) -> AdaptivePolicy:
    """An adaptive policy that has measured this engine's steps."""
    adaptive = AdaptivePolicy()
    adaptive.prepare(engine.target, drafter, engine.verifier)
    prompts = sample_prompts(engine.tokenizer)
    adaptive.measure(
        engine.target,
        drafter,
        engine.verifier,
        lambda: rehearsed(engine.target, engine.menu.default, prompts),
        text=sample_ids(engine.tokenizer),
    )
    return adaptive


def _loop(engine: Engine, drafter: Drafter | None, policy: Policy) -> Engine:
    """An engine on the same target that drafts so."""
    menu = Menu(engine.target, Speculation(drafter, engine.verifier, policy))
    return Engine(engine.target, menu, clock=clock(engine.target))


def scoring(trials: Sequence[ShapeTrial], rows: float) -> float:
    """Seconds of a forward pass of so many rows, between the nearest of plain and chain steps; behind the longest at the price of a row of them all."""
    points = sorted(
        (1 + t.drafted.total() / t.steps, t.scoring / t.steps)
        for t in trials
        if t.steps and (t.is_chain or t.name == "plain")
    )
    numbers, seconds = zip(*points, strict=True)
    row = max((seconds[-1] - seconds[0]) / max(numbers[-1] - numbers[0], 1.0), 0.0)
    return float(np.interp(rows, numbers, seconds)) + row * max(rows - numbers[-1], 0.0)


def chain_costs(trials: Sequence[ShapeTrial]) -> Costs | None:
    """Costs of steps by what plain and chain steps took: forward passes by rows, and a line through drafts by draft steps. None without two lengths of drafts."""
    plain = next(t for t in trials if t.name == "plain")
    chains = sorted(
        (t for t in trials if t.is_chain and t.steps and t.drafted), key=lambda t: t.drafted.total() / t.steps
    )
    steps = np.array([t.drafted.total() / t.steps for t in chains])
    if len(chains) < 2 or steps[-1] - steps[0] < 1.0:
        return None
    overhead = plain.beside / plain.steps
    step, start = np.polyfit(steps, [(t.drafting + t.beside) / t.steps - overhead for t in chains], 1)
    costs = Costs.of(
        {n: scoring(trials, n) for n in MEASURED},
        draft_start=max(float(start), 0.0),
        draft_step=max(float(step), 0.0),
    )
    return replace(costs, overhead=overhead)


def picture(tuning: Tuning, path: Path) -> None:
    """Tokens per second over depth; plain decoding and the adaptive policy level."""
    from matplotlib import pyplot as plt

    chains = [
        (t.budget.max_depth, tuning.predicted(t), t.measured)
        for t in tuning.trials
        if t.budget and t.budget.width == 1
    ]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    if chains:
        depths, predicted, measured = zip(*chains, strict=True)
        axes.plot(depths, predicted, label="chains, predicted")
        axes.plot(depths, measured, "o", label="chains, measured")
    for name, label, style in (("plain", "without drafts", ":"), ("adaptive", "speculation policy", "--")):
        axes.axhline(tuning.trial(name).measured, color="black", linestyle=style, label=label)
    axes.set_xlabel("speculation length (draft tokens of a chain)")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
