"""Is what a server samples what its model says? Tested from outside, on texts that the server gives, whatever it drafts with.

Each text is judged by a forward pass of transformers over the server's own tokens, so that one that differs spoils none behind it.

temperature 0   each token is the most likely one, or its margin, the logits by which the most likely one is above it, is within what the
                server's arithmetic explains; the first larger one of a text is told.
temperature T   X_j = f(x_j) - sum_y p_j(y) f(y) for the token x_j at position j and the exact distribution p_j there has mean 0 for any f:
                f = p/max p, the indicator of the best token, and the token's place in the cumulative distribution. All lie in [0, 1], so
                |mean| is a lower bound of the total variation distance. Position 1 comes from reading the prompt; drafts show behind it.
log-probabilities, where a server sends them, have a verdict of their own, as a server may report them from something else than what it samples
                from. Where they are the model's they say how exact its arithmetic is: half of what they differ from ours on average, about the
                total variation distance that comes of it, is allowed everywhere, up to `MOST_NOISE`.
mistakes        above temperature 0, texts are more likely under the mistake that the server has than under its model: `suspects` bets on each.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from polydraft.check.check import DOUBTFUL, IMPLAUSIBLE, SMALLEST
from polydraft.check.finding import POWER, Finding, two_sided
from polydraft.check.remote import Completions, RemoteText
from polydraft.check.steps import FEWEST_STEPS
from polydraft.check.suspects import Suspects, Suspicion
from polydraft.errors import InvalidInputError
from polydraft.models.torch.door import logits_of_text
from polydraft.sampling.softmax import log_softmax, softmax

PARTS = 3
"""Of the level: tests of all positions, of each, and known mistakes."""
STATISTICS = ("sharp", "best", "place")
UNTOLD_NOISE = 0.04
MOST_NOISE = 0.1
"""Mean difference of log-probabilities that is taken for arithmetic where a server sends none, and at most; llama.cpp's eight-bit activations on
four-bit weights of a model of 135M come to 0.06."""
NOT_THE_MODELS = 0.25
"""One that no arithmetic explains: log-probabilities of something else."""
MARGIN_PER_NOISE = 8.0
SMALLEST_MARGIN = 0.05
"""Logits that a token of temperature 0 may be below the best, by the mean difference of log-probabilities, and always."""


@dataclass(frozen=True)
class Difference:
    """The first token of a text that arithmetic does not explain. margin: logits below the best one."""

    text: int
    position: int
    margin: float
    token: int
    best: int


@dataclass(frozen=True)
class Audit:
    """What was found. findings: above temperature 0.  differences: at temperature 0, one a text.  ties: tokens within the margin that is allowed.

    noise: mean absolute difference of log-probabilities, None where the server sends none.  off: share of tokens whose own differs by more than
    `NOT_THE_MODELS`.  guessed: texts whose ids had to be guessed.
    allowed: deviation that is taken for arithmetic.  suspicion: what the texts say of known mistakes, None at temperature 0.
    """

    findings: list[Finding]
    differences: list[Difference]
    texts: int
    tokens: int
    ties: int
    noise: float | None
    off: float
    margin: float
    guessed: int
    greedy: bool
    allowed: float
    suspicion: Suspicion | None = None

    @property
    def p_value(self) -> float:
        """Smallest p-value after correction (Bonferroni; a third of the level each for the tests of all positions, for those of each and for known
        mistakes), at most 1; 0 where a text of temperature 0 differs."""
        if self.differences:
            return 0.0
        groups = [
            [f.p_value for f in self.findings if f.what.startswith("all") == together]
            for together in (True, False)
        ]
        if self.suspicion is not None:
            groups.append([self.suspicion.p_value])
        return min(1.0, *(PARTS * len(p_values) * min(p_values) for p_values in groups if p_values), 1.0)

    @property
    def detectable(self) -> float:
        """Deviation of all positions together, in each statistic, that so many tokens show with probability `POWER`; 1 without any."""
        together = [f for f in self.findings if f.what.startswith("all")]
        return self.allowed + max(
            (f.detectable(IMPLAUSIBLE / PARTS / len(together)) for f in together), default=1.0
        )

    @property
    def tokens_verdict(self) -> tuple[str, str]:
        """Of what the server samples: "passed", "failed" or "inconclusive", and why in one sentence."""
        if self.differences:
            return (
                "failed",
                f"{len(self.differences)} of {self.texts} texts leave the model's most likely tokens",
            )
        if self.p_value <= IMPLAUSIBLE:
            reason = f"sampled tokens do not follow the model's distribution, p = {self.p_value:.2g}"
            return "failed", reason + self._likeliest
        if self.p_value <= DOUBTFUL:
            return (
                "inconclusive",
                f"the worst p-value is between {IMPLAUSIBLE:g} and {DOUBTFUL:g}: more steps decide",
            )
        if not self.greedy and self.detectable > SMALLEST:
            enough = 100 * math.ceil(
                self.tokens
                * ((self.detectable - self.allowed) / max(SMALLEST - self.allowed, 0.01)) ** 2
                / 100
            )
            return (
                "inconclusive",
                f"{self.tokens} tokens find a deviation of {self.detectable:.2g} with probability {POWER:g}; about {enough} find one of {SMALLEST:g}",
            )
        return (
            "passed",
            f"tokens are the model's: nothing beyond chance and the server's arithmetic, p = {self.p_value:.2g}",
        )

    @property
    def _likeliest(self) -> str:
        """The known mistake that texts which fail look like, as the end of a sentence."""
        if self.suspicion is None:
            return ""
        names = self.suspicion.candidates
        return f"; they look like: {' or '.join(names)}" if names else "; they look like no known mistake"

    @property
    def logprobs_verdict(self) -> tuple[str, str]:
        """Of the log-probabilities that the server reports: "passed", "failed" or "not sent", and why."""
        if self.noise is None:
            return "not sent", "the server sends no log-probabilities"
        if self.noise > NOT_THE_MODELS:
            return "failed", f"reported log-probabilities are not the model's: {self.noise:.2g} off on average, and beyond {NOT_THE_MODELS:g} at {self.off:.0%} of the tokens"  # fmt: skip
        return "passed", f"reported log-probabilities are the model's, {self.noise:.2g} off on average"

    @property
    def verdict(self) -> tuple[str, str]:
        """Of both together: "passed", "failed" or "inconclusive", and what differs."""
        tokens, why = self.tokens_verdict
        logprobs, _ = self.logprobs_verdict
        if logprobs != "failed":
            return tokens, why
        if tokens == "failed":
            return "failed", "tokens and reported log-probabilities both differ, as those of another model do"
        return (
            "failed",
            f"reported log-probabilities differ, tokens {'do not' if tokens == 'passed' else 'show nothing so far'}",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        status, reason = self.verdict
        verdicts = {
            f"{name}_verdict": {"status": verdict[0], "reason": verdict[1]}
            for name, verdict in (("tokens", self.tokens_verdict), ("logprobs", self.logprobs_verdict))
        }
        tests = [
            {"what": f.what, "count": f.count, "effect": f.effect, "p_value": f.p_value}
            for f in self.findings
        ]
        reported = {
            "texts": self.texts,
            "tokens": self.tokens,
            "near_ties": self.ties,
            "margin": self.margin,
            "texts_with_guessed_ids": self.guessed,
        }
        reported |= {
            "logprob_difference": self.noise,
            "logprobs_off": self.off,
            "p_value": self.p_value,
            "detectable": None if self.greedy else self.detectable,
        }
        return {
            "status": status,
            "reason": reason,
            **verdicts,
            **reported,
            "mistake": None if self.suspicion is None else self.suspicion.to_dict(),
            "differences": [vars(d) for d in self.differences],
            "tests": tests,
        }


@dataclass(frozen=True)
class _Judged:
    """A text beside the model. margins: logits below the best token.  values: X of each statistic and position.  off: log-probabilities less ours."""

    margins: Float[np.ndarray, " T"]
    best: list[int]
    values: Float[np.ndarray, "S T"]
    off: Float[np.ndarray, " T"] | None


def audit(
    server: Completions,
    judge: Any,
    prompts: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_tokens: int,
    tokens: int,
    eos_token_ids: Sequence[int] = (),
    seed: int = 0,
    draft: Any = None,
    suspects: Suspects | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Ask for about so many tokens, and test them. judge: the model as a module of transformers.  prompts: token ids, taken in turns.

    draft: the server's draft model, such a module too, None where it is not known.  suspects: of its drafts; default those that show without them.

    Raises:
        InvalidInputError: too few tokens for a test, or no prompt; what the server refuses.
    """
    _check_sizes(len(prompts), max_tokens, tokens)
    num_texts = -(-tokens // max_tokens) if temperature else min(len(prompts), -(-tokens // max_tokens))
    requested = [prompts[i % len(prompts)] for i in range(num_texts)]
    rng = np.random.default_rng(seed)
    texts = list[RemoteText]()
    judged = list[_Judged]()
    suspects = suspects or Suspects(None)
    for text in server.texts(requested, temperature, max_tokens, range(seed, seed + num_texts)):
        if text.token_ids:
            texts.append(text)
            logits = logits_of_text(judge, [*text.prompt, *text.token_ids])[len(text.prompt) - 1 :]
            judged.append(_judged(logits, text, temperature, eos_token_ids, rng))
            if temperature:
                p = softmax(logits / temperature)[:-1]
                drafted = None if draft is None else _rows(draft, text, temperature)
                suspects.add(p, drafted, text.token_ids)
        if progress is not None:
            progress(len(texts), num_texts)
    return _audited(texts, judged, None if not temperature else suspects, temperature)


def _check_sizes(num_prompts: int, max_tokens: int, tokens: int) -> None:
    """Raise InvalidInputError where there is too little for a test."""
    if not num_prompts or max_tokens < 2 or tokens < FEWEST_STEPS * max_tokens / 4:
        raise InvalidInputError(
            f"{num_prompts} prompts, max_tokens={max_tokens} and {tokens} tokens were given; expected a prompt, at least 2 tokens of each text and some texts."
        )


def _rows(module: Any, text: RemoteText, temperature: float) -> Float[np.ndarray, "T V"]:
    """Distributions of a model for each token of a text."""
    logits = logits_of_text(module, [*text.prompt, *text.token_ids])[len(text.prompt) - 1 : -1]
    return softmax(logits / temperature)


def _audited(
    texts: Sequence[RemoteText], judged: Sequence[_Judged], suspects: Suspects | None, temperature: float
) -> Audit:
    """All tests of texts, with margins by how far the server's log-probabilities are from the model's."""
    off = np.concatenate([np.empty(0), *(np.abs(each.off) for each in judged if each.off is not None)])
    noise = float(off.mean()) if len(off) else None
    arithmetic = UNTOLD_NOISE if noise is None or noise > NOT_THE_MODELS else min(noise, MOST_NOISE)
    margin = max(SMALLEST_MARGIN, MARGIN_PER_NOISE * arithmetic)
    allowed = arithmetic / 2
    greedy = not temperature
    differences, ties = _differences(texts, judged, margin) if greedy else ([], 0)
    return Audit(
        [] if greedy else _findings([each.values for each in judged], allowed),
        differences,
        len(texts),
        sum(len(each.margins) for each in judged),
        ties,
        noise,
        float((off > NOT_THE_MODELS).mean()) if len(off) else 0.0,
        margin,
        sum(text.guessed for text in texts),
        greedy,
        allowed,
        None if suspects is None else suspects.verdict(IMPLAUSIBLE / PARTS, arithmetic / temperature),
    )


def _differences(
    texts: Sequence[RemoteText], judged: Sequence[_Judged], margin: float
) -> tuple[list[Difference], int]:
    """Of greedy texts: the first token of each that is not the most likely one by more than a margin, and the number of near ties."""
    differences = list[Difference]()
    ties = 0
    for number, (text, judgement) in enumerate(zip(texts, judged, strict=True)):
        margins = judgement.margins
        ties += int(((margins > 0) & (margins <= margin)).sum())
        for at in np.flatnonzero(margins > margin).tolist()[:1]:
            found = text.token_ids[at], judgement.best[at]
            differences.append(Difference(number, at + 1, float(margins[at]), *found))
    return differences, ties


def _judged(
    logits: Float[np.ndarray, "T V"],
    text: RemoteText,
    temperature: float,
    end_ids: Sequence[int],
    rng: np.random.Generator,
) -> _Judged:
    tokens = text.token_ids
    if text.stopped and end_ids and tokens[-1] not in end_ids:  # the end was sampled, and is not told
        tokens = [*tokens, max(end_ids, key=lambda token: float(logits[-1, token]))]
    logits = logits[: len(tokens)]
    index = np.array(tokens, np.int64)
    of_tokens = logits[np.arange(len(index)), index]
    off = _off(logits, index, text.logprobs or ())
    values = np.zeros((0, len(tokens)))
    if temperature:
        values = _values(softmax(logits / temperature), index, rng)
    return _Judged(logits.max(-1) - of_tokens, logits.argmax(-1).tolist(), values, off)


def _off(
    logits: Float[np.ndarray, "T V"], index: Int[np.ndarray, " T"], logprobs: Sequence[float | None]
) -> Float[np.ndarray, " T"] | None:
    """Log-probabilities that the server reports less ours; None where it reports none."""
    count = min(len(index), len(logprobs))
    raw = log_softmax(logits)[np.arange(count), index[:count]]
    reported = np.array([np.nan if x is None else x for x in logprobs[:count]], np.float64)
    return (reported - raw)[np.isfinite(reported) & (reported > -100)] if count else None


def _values(
    p: Float[np.ndarray, "T V"], index: Int[np.ndarray, " T"], rng: np.random.Generator
) -> Float[np.ndarray, "S T"]:
    """X of each statistic at each position."""
    of_tokens = p[np.arange(len(p)), index]
    largest = p.max(-1)
    sharp = of_tokens / largest - np.square(p).sum(-1) / largest
    best = (of_tokens >= largest) - largest
    above = np.where(p > of_tokens[:, None], p, 0.0).sum(-1)
    place = above + rng.random(len(of_tokens)) * of_tokens - 0.5
    return np.stack([sharp, best, place])


def _findings(values: Sequence[Float[np.ndarray, "S _"]], allowed: float) -> list[Finding]:
    """Tests by statistic: of all tokens, of all behind the first, and of each position."""
    findings = list[Finding]()
    longest = max(v.shape[1] for v in values)
    for s, name in enumerate(STATISTICS):
        places = [
            ("all positions", [v[s] for v in values]),
            ("all behind the first", [v[s, 1:] for v in values]),
        ]
        places += [
            (f"position {j + 1}", [v[s, j : j + 1] for v in values if v.shape[1] > j]) for j in range(longest)
        ]
        for where, parts in places:
            x = np.concatenate(parts)
            if len(x) >= FEWEST_STEPS:
                findings.append(_mean(f"{where}, {name}", x, allowed))
    return findings


def _mean(what: str, x: Float[np.ndarray, " n"], allowed: float) -> Finding:
    """A test that the mean is 0, but for what arithmetic explains."""
    error = max(float(x.std(ddof=1)) / math.sqrt(len(x)), 1e-9)
    effect = max(abs(float(x.mean())) - allowed, 0.0)
    return Finding(what, len(x), effect, two_sided(effect / error), error)
