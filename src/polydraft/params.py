"""Sampling parameters, named as vLLM's `SamplingParams` and checked when they are made."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from polydraft.errors import InvalidInputError

__all__ = ["SamplingParams"]

LogprobsMode = Literal["raw", "processed"]


def _refuse(name: str, given: object, expected: str, advice: str) -> InvalidInputError:
    return InvalidInputError(f"{name}={given!r} was given; expected {expected}. {advice}")


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks of the target's law, and when to stop.

    Fields:
        temperature: logits are divided by it; 0 is greedy decoding.
        top_p: keep the smallest set of tokens with at least this mass; in (0, 1].
        top_k: keep the k largest; 0 and -1 switch it off; above the vocabulary it is clipped.
        min_p: keep tokens with at least this fraction of the largest probability; in [0, 1].
        repetition_penalty: > 1 discourages tokens of prompt and output (transformers' definition).
        presence_penalty, frequency_penalty: subtracted from logits of tokens in the output, once or per occurrence.
        logit_bias: token id -> number added to its logit (-inf bans it).
        max_tokens: most tokens to emit; None = as many as the context holds.
        min_tokens: end-of-sequence and stop ids have no mass before this many tokens.
        stop: text that ends the output; it is not part of the output.
        stop_token_ids: ids that end the output, kept as its last token id.
        ignore_eos: go on after the end-of-sequence token.
        n: independent samples of the same prompt, each with its own sample index.
        seed: noise of the request; None = drawn once from the system and recorded in the result.
        logprobs: None, or how many top alternatives to report beside each emitted token.
        logprobs_mode: "raw" = log-softmax of the target's logits; "processed" = log of the law sampled from.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        InvalidInputError: a value outside its range.

    Example:
        >>> SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64).greedy
        False
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, ok, expected, advice in self._rules():
            if not ok:
                raise _refuse(name, getattr(self, name), expected, advice)

    def _rules(self) -> list[tuple[str, bool, str, str]]:
        """(field, holds, what was expected, what to do) for each range."""
        finite = math.isfinite
        return [
            ("temperature", finite(self.temperature) and self.temperature >= 0, "a finite number >= 0", "Use 0 for greedy decoding."),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]", "Use 1 to switch it off."),
            ("top_k", self.top_k >= -1, "an integer >= -1", "Use 0 or -1 to switch it off."),
            ("min_p", 0 <= self.min_p <= 1, "a number in [0, 1]", "Use 0 to switch it off."),
            ("repetition_penalty", finite(self.repetition_penalty) and self.repetition_penalty > 0, "a finite number > 0", "Use 1 to switch it off."),
            ("presence_penalty", finite(self.presence_penalty), "a finite number", "Use 0 to switch it off."),
            ("frequency_penalty", finite(self.frequency_penalty), "a finite number", "Use 0 to switch it off."),
            ("logit_bias", all(b < math.inf for b in self.logit_bias.values()), "numbers below +inf, no NaN", "Use -inf to ban a token."),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "an integer >= 1 or None", "None fills the context."),
            ("min_tokens", self.min_tokens >= 0 and (self.max_tokens is None or self.min_tokens <= self.max_tokens), "an integer in [0, max_tokens]", "Lower min_tokens or raise max_tokens."),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings", "Drop the empty string: it would stop at once."),
            ("n", self.n >= 1, "an integer >= 1", "Ask for at least one sample."),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "an integer >= 0 or None", "0 reports the emitted token alone."),
            ("seed", self.seed is None or (isinstance(self.seed, int) and 0 <= self.seed < 2**63), "None or an integer in [0, 2**63)", "Use any whole number there."),
            ("logprobs_mode", self.logprobs_mode in ("raw", "processed"), '"raw" or "processed"', "Choose one of the two."),
        ]  # fmt: skip

    @property
    def greedy(self) -> bool:
        """Whether the law is a point mass at the largest processed logit."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether the law depends on which tokens came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def with_(self, **changes: Any) -> "SamplingParams":
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)
