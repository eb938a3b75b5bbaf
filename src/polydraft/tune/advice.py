"""What to do with drafts on these models: what was measured, in plain words, and what a better draft would promise."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from polydraft.plan.acceptance import DEPTHS
from polydraft.plan.costs import PHASES, Charges, RoundCosts, Work, seconds
from polydraft.plan.fixed import Plan
from polydraft.plan.profile import Profile
from polydraft.plan.sizes import NOTHING, expected_tokens, paths

WORTH = 1.03
"""A speed-up below this is not worth a draft model."""


@dataclass
class Trial:
    """One setting that is run. predicted: tokens per second, None for "adaptive".  size: (paths, depth) of a fixed one."""

    name: str
    plan: Plan
    predicted: float | None
    size: tuple[int, int] | None = None
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


def predicted(profile: Profile, width: int, depth: int, *, batch: int = 1, context: int = 0) -> float:
    """Tokens per second that the profile promises for equal sequences, each with so many paths; depth 0 for plain decoding.

    Example:
        >>> predicted(Profile.assumed(), 1, 4) > predicted(Profile.assumed(), 1, 0)
        True
    """
    tokens = expected_tokens(profile.prior(1.0), width, depth)
    return batch * tokens / profile.costs.seconds(_work(width, depth, batch, context))


def _work(width: int, depth: int, batch: int, context: int) -> Work:
    return Work.of([paths(width, depth) if depth else NOTHING] * batch, [context] * batch)


def _best(profile: Profile, context: int, max_width: int) -> tuple[float, int, int]:
    """(tokens per second, width, depth) of the best size, plain decoding included."""
    sizes = [(1, 0), *((w, d) for w in range(1, max_width + 1) for d in range(1, DEPTHS + 1))]
    return max((predicted(profile, w, d, context=context), w, d) for w, d in sizes)


def break_even(profile: Profile, context: int = 0, max_width: int = 4) -> float | None:
    """The least acceptance of one draft, the same at every depth, at which drafting beats plain decoding; None if it never does.

    Example:
        >>> 0.1 < break_even(Profile.assumed()) < 0.5
        True
    """
    plain = predicted(profile, 1, 0, context=context)
    for percent in range(1, 100):
        if _best(replace(profile, acceptance=(percent / 100,) * DEPTHS), context, max_width)[0] > plain:
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
    def max_width(self) -> int:
        """Most paths that were run."""
        return max([1, *(t.size[0] for t in self.trials if t.size)])

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
        need = break_even(self.profile, self.context, self.max_width)
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
        if adaptive.measured >= 0.97 * best.measured or best.size is None:
            fixed = max((t for t in self.trials if t.size), key=lambda t: t.measured)
            return (
                f"Leave the plan adaptive: {adaptive.measured / plain.measured:.2f} times plain decoding; the best fixed size, "
                f"{fixed.name}, makes {fixed.measured:.0f} tokens/s, adaptive {adaptive.measured:.0f}. "
                f"Drafting pays from an acceptance of {'-' if need is None else f'{need:.0%}'}; it is {here:.0%} here."
            )
        width, depth = best.size
        return f"Use --num-paths {width} --depth {depth}: {gain}; the adaptive plan makes {adaptive.measured:.0f}."

    def advice(self) -> list[str]:
        """What a better draft would look like: each line one change and the speed it promises."""
        known, context, most = self.profile, self.context, self.max_width
        now, width, depth = _best(known, context, most)
        if depth == 0:
            depth = 4
        share = {p: float(seconds(known.costs.by_phase[p], _work(width, depth, 1, context))) for p in PHASES}
        total = sum(share.values())
        lines = [
            f"A round with {width} x {depth} drafts takes {1e3 * total:.2f} ms: drafting {share['drafting'] / total:.0%}, "
            f"the target's pass {share['scoring'] / total:.0%}, the rest {share['other'] / total:.0%}."
        ]
        quick = replace(known, costs=_scaled(known.costs, "drafting", 0.5))
        better = replace(known, acceptance=tuple(min(1.0, a + 0.05) for a in known.acceptance))
        lines += [
            f"A draft twice as fast with the same acceptance: {_best(quick, context, most)[0] / now:.2f} times the speed.",
            f"A draft accepted 5 points more often at the same cost: {_best(better, context, most)[0] / now:.2f} times the speed.",
        ]
        if self.shapes:
            layers, hidden, _, now_takes = self.shapes[0]
            quickest = min(self.shapes, key=lambda s: s[3])
            if quickest[3] < 0.9 * now_takes:
                faster = replace(known, costs=_scaled(known.costs, "drafting", quickest[3] / now_takes))
                reach = _best(faster, context, most)[0] / now
                lines.append(
                    f"Depth against width: with as many parameters, {quickest[0]} layers of {quickest[1]} take {1e6 * quickest[3]:.0f} us a "
                    f"token, {layers} of {hidden} take {1e6 * now_takes:.0f}; at equal acceptance that is {reach:.2f} times the speed."
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
            "break_even": break_even(self.profile, self.context, self.max_width),
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
    scaled = Charges(*(factor * x for x in costs.by_phase[phase]))
    return RoundCosts({**costs.by_phase, phase: scaled})
