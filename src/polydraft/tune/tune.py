"""`polydraft tune`: which drafts pay on these models, these prompts and this machine, predicted and measured.

Costs of rounds and acceptance are measured first (`engine/calibrate.py`); with them the planner's model predicts tokens per second
for every size, and a few sizes are then run in turn to see how far it is off. Rates count decoding only, without the prefill,
in CPU seconds where one thread does all the work.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from polydraft.core import Drafter, SamplingParams, Target, Verifier
from polydraft.engine import tree_search
from polydraft.engine.acceptance import DEPTHS, expected_tokens
from polydraft.engine.api import Engine
from polydraft.engine.best_first_plan import plan_for
from polydraft.engine.calibrate import calibrate
from polydraft.engine.costs import PHASES, RoundCosts, features
from polydraft.engine.plan import FixedPlan, Plan
from polydraft.engine.profile import Profile
from polydraft.engine.stats import clock
from polydraft.errors import InvalidInputError
from polydraft.verifiers import pairing

__all__ = ["FIXED", "Parts", "Trial", "Tuning", "break_even", "picture", "predicted", "settings", "tree_for", "tune"]

FIXED = (
    *(FixedPlan(depth) for depth in (1, 2, 4, 6, 8)),
    *(FixedPlan(depth, width) for depth, width in ((2, 2), (4, 2), (3, 3))),
    FixedPlan(4, 2, trunk=1),
    FixedPlan(6, 2, short=2),
)
"""What is run, beside a tree by position; 1x2, 1x6, 2x2 and those with a trunk or a short path are not among the rounds that costs are fitted to."""
TREE = 12, 4
"""Nodes and depth of that tree."""
WORTH = 1.03
"""A speed-up below this is not worth a draft model."""

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Parts:
    """What is tuned: idle parts of an engine."""

    target: Target
    drafter: Drafter
    verifier: Verifier

    @classmethod
    def of(cls, engine: Engine) -> "Parts":
        """Those of an engine.

        Raises:
            InvalidInputError: an engine that decodes plainly.
        """
        if engine.drafter is None:
            raise InvalidInputError(
                "an engine without a drafter was given; there is nothing to tune. Give a draft model or a drafter."
            )
        return cls(engine.target, engine.drafter, engine.verifier)


@dataclass
class Trial:
    """One setting. name: "plain", "adaptive", or that of a fixed plan.  predicted: tokens per second, None for "adaptive"."""

    name: str
    plan: Plan | None
    predicted: float | None
    tokens: int = 0
    calls: int = 0
    seconds: float = 0.0

    @property
    def measured(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_call(self) -> float:
        return self.tokens / self.calls if self.calls else 0.0

    @property
    def fixed(self) -> FixedPlan | None:
        """The plan where it is a fixed one."""
        return self.plan if isinstance(self.plan, FixedPlan) else None

    @property
    def size(self) -> tuple[int, int] | None:
        """(paths, depth) of equal paths."""
        fixed = self.fixed
        return None if fixed is None or len(fixed.size) > 4 or any(fixed.size[2:]) else (fixed.width, fixed.depth)


def predicted(profile: Profile, *size: Any, batch: int = 1, context: int = 0) -> float:
    """Tokens per second that the profile promises for equal sequences. size: as `costs.budget_of` takes it.

    Example:
        >>> predicted(Profile.assumed(), 1, 4) > predicted(Profile.assumed(), 1, 0)
        True
    """
    tokens = expected_tokens(profile.prior(1.0), *size)
    return batch * tokens / profile.costs.seconds([size] * batch, [context] * batch)


def tree_for(profile: Profile, num_nodes: int = TREE[0], depth: int = TREE[1]) -> FixedPlan:
    """The tree by position of so many nodes that keeps most under this acceptance.

    Example:
        >>> tree_for(Profile.assumed()).name
        'tree of 12, depth 4'
    """
    rates, tokens, parents = profile.prior(1.0), np.empty(1 + num_nodes), np.empty(1 + num_nodes, np.int64)
    chance = np.empty((depth, profile.max_width))
    tree_search.chances(rates, chance)
    tree_search.grow(chance, depth, parents, tokens)
    return FixedPlan.of_tree([p for n, p in enumerate(parents.tolist()) if n == 0 or p >= 0])


def _best(profile: Profile, context: int, max_depth: int = 16) -> tuple[float, int, int]:
    """(tokens per second, width, depth) of the best size, plain decoding included."""
    sizes = [(1, 0), *((w, d) for w in range(1, profile.max_width + 1) for d in range(1, max_depth + 1))]
    return max((predicted(profile, w, d, context=context), w, d) for w, d in sizes)


def break_even(profile: Profile, context: int = 0) -> float | None:
    """The least acceptance of one draft, the same at every depth, at which drafting beats plain decoding; None if it never does.

    Example:
        >>> 0.1 < break_even(Profile.assumed()) < 0.5
        True
    """
    plain = predicted(profile, 1, 0, context=context)
    for percent in range(1, 100):
        if _best(replace(profile, acceptance=(percent / 100,) * DEPTHS), context)[0] > plain:
            return percent / 100
    return None


@dataclass
class Tuning:
    """What was found. shapes: (layers, hidden size, parameters, seconds of a token) of drafts as large as this one."""

    profile: Profile
    trials: list[Trial]
    context: int
    shapes: list[tuple[int, int, int, float]] = field(default_factory=list[tuple[int, int, int, float]])

    def trial(self, name: str) -> Trial:
        return next(t for t in self.trials if t.name == name)

    @property
    def best(self) -> Trial:
        """The fastest, plain decoding included."""
        return max(self.trials, key=lambda t: t.measured)

    @property
    def error(self) -> float:
        """Mean relative error of predicted speeds over all settings that were run, "adaptive" aside."""
        return float(np.mean([abs(t.predicted / t.measured - 1) for t in self.trials if t.predicted is not None]))

    @property
    def advised(self) -> Profile:
        """The profile to save: plans make drafts by it only if some of those that were run paid."""
        return replace(self.profile, drafts=self.best.measured >= WORTH * self.trial("plain").measured)

    def recommendation(self) -> str:
        """One setting, in plain words."""
        plain, best, adaptive = self.trial("plain"), self.best, self.trial("adaptive")
        need = break_even(self.profile, self.context)
        here = self.profile.acceptance[0]
        if not self.advised.drafts:
            pays = (
                "This draft pays at no acceptance"
                if need is None
                else f"This draft pays only where more than {need:.0%} of drafts are accepted; {here:.0%} of its first tokens are"
                if here <= need
                else f"By the costs of single rounds, drafts pay where more than {need:.0%} are accepted, and {here:.0%} of first tokens are; "
                "whole runs, in which there is not always something to draft, are what counts"
            )
            return (
                f"Do not draft here: plain decoding makes {plain.measured:.0f} tokens/s and the best drafts {best.measured:.0f}. {pays}. "
                "Use --drafter none (a profile that is saved now does the same), or a draft that costs less or fits better."
            )
        gain = f"{best.measured / plain.measured:.2f} times plain decoding ({best.measured:.0f} against {plain.measured:.0f} tokens/s)"
        if adaptive.measured >= 0.97 * best.measured or best.fixed is None:
            fixed = max((t for t in self.trials if t.fixed), key=lambda t: t.measured)
            return (
                f"Leave the plan adaptive: {adaptive.measured / plain.measured:.2f} times plain decoding; the best fixed size, "
                f"{fixed.name}, makes {fixed.measured:.0f} tokens/s, adaptive {adaptive.measured:.0f}. "
                f"Drafting pays from an acceptance of {'-' if need is None else f'{need:.0%}'}; it is {here:.0%} here."
            )
        if best.size is None:
            return f"Give the engine plan={best.fixed!r}: {gain}; the adaptive plan makes {adaptive.measured:.0f}."
        width, depth = best.size
        return f"Use --num-paths {width} --depth {depth}: {gain}; the adaptive plan makes {adaptive.measured:.0f}."

    def advice(self) -> list[str]:
        """What a better draft would look like: each line one change and the speed it promises."""
        known, context = self.profile, self.context
        now, width, depth = _best(known, context)
        if depth == 0:
            depth = 4
        size = [(width, depth)]
        share = {p: float(np.dot(known.costs.coefficients[p], features(size, [context]))) for p in PHASES}
        total = sum(share.values())
        lines = [
            f"A round with {width} x {depth} drafts takes {1e3 * total:.2f} ms: drafting {share['drafting'] / total:.0%}, "
            f"the target's pass {share['scoring'] / total:.0%}, the rest {share['other'] / total:.0%}."
        ]
        quick = replace(known, costs=_scaled(known.costs, "drafting", 0.5))
        better = replace(known, acceptance=tuple(min(1.0, a + 0.05) for a in known.acceptance))
        lines += [
            f"A draft twice as fast with the same acceptance: {_best(quick, context)[0] / now:.2f} times the speed.",
            f"A draft accepted 5 points more often at the same cost: {_best(better, context)[0] / now:.2f} times the speed.",
        ]
        if self.shapes:
            layers, hidden, _, seconds = self.shapes[0]
            quickest = min(self.shapes, key=lambda s: s[3])
            if quickest[3] < 0.9 * seconds:
                faster = replace(known, costs=_scaled(known.costs, "drafting", quickest[3] / seconds))
                reach = _best(faster, context)[0] / now
                lines.append(
                    f"Depth against width: with as many parameters, {quickest[0]} layers of {quickest[1]} take {1e6 * quickest[3]:.0f} us a "
                    f"token, {layers} of {hidden} take {1e6 * seconds:.0f}; at equal acceptance that is {reach:.2f} times the speed."
                )
            else:
                lines.append(
                    f"Depth against width: {layers} layers of {hidden} are already about the quickest shape of this size."
                )
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "recommendation": self.recommendation(),
            "advice": self.advice(),
            "model_error": self.error,
            "cost_error": self.profile.costs.error,
            "break_even": break_even(self.profile, self.context),
            "context": self.context,
            "trials": [
                {
                    "name": t.name,
                    "predicted": t.predicted,
                    "measured": t.measured,
                    "tokens_per_call": t.tokens_per_call,
                    "tokens": t.tokens,
                }
                for t in self.trials
            ],
            "draft_shapes": [dict(zip(("layers", "hidden", "parameters", "seconds"), s, strict=True)) for s in self.shapes],
            "profile": self.advised.to_dict(),
        }


def _scaled(costs: RoundCosts, phase: str, factor: float) -> RoundCosts:
    return RoundCosts({p: tuple(x * (factor if p == phase else 1.0) for x in v) for p, v in costs.coefficients.items()})


def _profile(
    parts: Parts, prompts: Prompts, params: SamplingParams, seconds: float, progress: Callable[[str, int], None]
) -> Profile:
    """Costs and acceptance over the first prompts together."""
    each = list[Profile]()
    for prompt in prompts[:4]:
        each.append(calibrate(parts.target, parts.drafter, parts.verifier, prompt, params=params, budget_seconds=seconds))
        progress("costs of rounds", len(prompts[:4]))
    rates = np.mean([p.acceptance for p in each], axis=0)
    return replace(
        each[0], costs=RoundCosts.fit([o for p in each for o in p.costs.observations]), acceptance=tuple(rates.tolist())
    )


def tune(
    parts: Parts,
    prompts: Prompts,
    *,
    params: SamplingParams | None = None,
    fixed: Sequence[FixedPlan] | None = None,
    repetitions: int = 1,
    budget_seconds: float = 1.0,
    draft_config: Any = None,
    progress: Callable[[str, int], None] = lambda what, number: None,
) -> Tuning:
    """Measure, predict, and run plain decoding, the adaptive plan and fixed ones in turn on every prompt.

    fixed: default all of FIXED, and a tree by position, that the drafter makes and the rule is exact for.
    params: sampling and `max_tokens`, default 64 tokens at temperature 1; end-of-text is ignored.
    budget_seconds: for the measurement of costs, see `calibrate`.  draft_config: transformers' configuration of the draft
    model, to compare shapes of its size.  progress: called after each measurement with what it is of and the number of them all.

    Raises:
        InvalidInputError: no prompt.
    """
    if not prompts:
        raise InvalidInputError("no prompt was given; expected at least one. Give some with --prompts FILE.")
    wanted = replace(params or SamplingParams(max_tokens=64), ignore_eos=True)
    profile = _profile(parts, prompts, replace(wanted, max_tokens=None, seed=None), budget_seconds, progress)
    context = round(float(np.mean([len(p) for p in prompts])) + (wanted.max_tokens or 64) / 2)
    trials = [
        Trial("plain", None, predicted(profile, 1, 0, context=context)),
        Trial("adaptive", plan_for(parts.drafter, profile), None),
    ]
    for each in settings(parts, profile) if fixed is None else fixed:
        if each.width <= profile.max_width:
            trials.append(Trial(each.name, each, predicted(profile, *each.size, context=context)))
    for number in range(repetitions * len(prompts)):
        turn = number % len(trials)
        for trial in trials[turn:] + trials[:turn]:
            _run(parts, trial, prompts[number % len(prompts)], replace(wanted, seed=number))
            progress("sizes", len(trials) * repetitions * len(prompts))
    return Tuning(profile, trials, context, [] if draft_config is None else draft_shapes(draft_config))


def settings(parts: Parts, profile: Profile) -> list[FixedPlan]:
    """Fixed plans that the drafter makes and the rule is exact for."""
    found, infos = [*FIXED, *([tree_for(profile)] if profile.max_width > 1 else [])], (parts.drafter.info, parts.verifier.info)
    return [plan for plan in found if plan.budget.asks_for is None or pairing.allows(plan.budget.asks_for, *infos)]


def _run(parts: Parts, trial: Trial, prompt: Sequence[int], params: SamplingParams) -> None:
    plan, drafter = trial.plan, parts.drafter if trial.plan is not None else None
    engine = Engine(parts.target, drafter, parts.verifier, plan or FixedPlan(1), clock=clock(parts.target))
    stats = engine.generate([list(prompt)], params)[0].stats
    trial.tokens += stats.emitted
    trial.calls += stats.target_calls
    trial.seconds += stats.total_seconds - stats.seconds["prefill"]


LARGEST = 200_000_000


def draft_shapes(config: Any, *, repetitions: int = 20) -> list[tuple[int, int, int, float]]:
    """Seconds of a one-row pass of random drafts with as many parameters beside the embedding: this shape, then deeper and wider ones.

    Empty for drafts that do not compile or are larger than LARGEST parameters. Yan et al. 2024 (arXiv 2402.01528): at an equal
    number of parameters latency follows layers, and acceptance hardly does.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from polydraft.core import TokenTree
    from polydraft.models.llama import CompiledLlama

    layers, hidden, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    if 12 * layers * hidden**2 > LARGEST:
        return []
    made: list[tuple[int, int, int, Any]] = []
    step = math.lcm(8, 2 * heads)
    for count in dict.fromkeys((layers, max(1, layers // 2), 1, 2 * layers)):
        width = max(1, round(hidden * (layers / count) ** 0.5 / step)) * step
        shape = type(config).from_dict(config.to_dict())
        shape.num_hidden_layers, shape.hidden_size = count, width
        shape.intermediate_size = max(8, round(config.intermediate_size * width / hidden / 8) * 8)
        shape.head_dim, shape.layer_types = width // heads, None
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(shape).float().eval()
        if CompiledLlama.why_unsupported(model) is not None:
            return []
        beside = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
        made.append((count, width, beside, CompiledLlama(model, max_num_seqs=1, max_model_len=256)))
    tree, watch = TokenTree.chain(torch.ones(1, 1, dtype=torch.int64)), clock(made[0][3])
    taken: list[list[float]] = [[] for _ in made]
    for *_, model in made:
        model.prefill([0], [[1] * 64])
    for _ in range(repetitions):
        for (*_, model), seconds in zip(made, taken, strict=True):
            start = watch()
            model.score([0], tree)
            seconds.append(watch() - start)
    return [(count, width, size, float(min(s[1:]))) for (count, width, size, _), s in zip(made, taken, strict=True)]


def picture(tuning: Tuning, path: Path) -> None:
    """Tokens per second over depth, a line for each number of paths as predicted, dots as measured, crosses for other shapes, plain and adaptive level."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for w in range(1, tuning.profile.max_width + 1):
        depths = range(13)
        rates = [predicted(tuning.profile, w, d, context=tuning.context) for d in depths]
        (line,) = axes.plot(depths, rates, label=f"{w} path{'s' if w > 1 else ''}, predicted")
        dots = [(t.size[1], t.measured) for t in tuning.trials if t.size is not None and t.size[0] == w]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=line.get_color(), label=f"{w} path{'s' if w > 1 else ''}, measured")
    for t in tuning.trials:
        if t.fixed is not None and t.size is None:
            axes.plot(t.fixed.depth, t.measured, "x", color="black")
            axes.annotate(t.name, (t.fixed.depth, t.measured), fontsize=6, xytext=(4, 3), textcoords="offset points")
    for name, style in (("plain", ":"), ("adaptive", "--")):
        axes.axhline(tuning.trial(name).measured, color="black", linestyle=style, label=f"{name}, measured")
    axes.set_xlabel("depth: drafted tokens on a path")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)
