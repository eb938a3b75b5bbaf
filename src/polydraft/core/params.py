"""Sampling parameters, named as vLLM's `SamplingParams` and checked when they are made."""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float

from polydraft.core.thinking import Thinking
from polydraft.errors import InvalidInputError

LogprobsMode = Literal["raw", "processed"]
LARGEST = 1e9
"""Size of a bias or a penalty, at most, and of a repetition penalty's inverse: with these no sound logit overflows float32."""
MAX_TOKENS = 512
"""Of an output where `max_tokens` is not given."""
WHOLE_CONTEXT = -1
"""As `max_tokens`: as many as the context holds."""
CHAT_DEFAULTS = {"temperature": 0.7, "top_p": 0.95}
"""Of chats, where the model comes with no defaults of its own."""
MOST_SAMPLES = 65_536
"""Samples of one prompt, and prompts of one call: both fit the 32 bits that noise has for them."""
MOST_LOGPROBS = 1000
"""Alternatives that are reported beside a token."""


def _is_whole(x: object) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


def _is_number(x: object) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _refuse(name: str, given: object, expected: str, advice: str) -> InvalidInputError:
    return InvalidInputError(f"{name}={given!r} was given; expected {expected}. {advice}")


@runtime_checkable
class Constraint(Protocol):
    """Which tokens may come next in one output; the distribution of a node is the target's over these alone."""

    def allowed(
        self, context: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
    ) -> Bool[np.ndarray, "N V"]:
        """What may follow each node of a tree whose root is the end of `context`, the prompt and the output so far.

        One token or more each; rows of padding and of nodes that may not be there themselves are read by nobody.
        """
        ...


@runtime_checkable
class WeightedConstraint(Constraint, Protocol):
    """One that weighs tokens, too: the distribution of a node is proportional to the target's times the weights."""

    def log_weights(
        self, context: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
    ) -> Float[np.ndarray, "N V"]:
        """Logarithms of the weights, -inf of tokens that may not follow; arguments as of `allowed`."""
        ...


@runtime_checkable
class ConstraintSource(Protocol):
    """What makes the constraint of each output."""

    def constraint(self, prompt_length: int) -> Constraint:
        """Of one output, which begins behind so many tokens."""
        ...


@dataclass(frozen=True)
class StructuredOutputs:
    """The form that an output has to have; one of these, named as vLLM's. The distribution is that of the target's tokens that may come next.

    Fields:
        json: a JSON schema, as a mapping or as text.
        json_object: any JSON object.
        regex: that the whole output matches, as of Rust's crate `regex`.
        choice: texts, of which the output is one.
        grammar: a context-free one in Lark's notation, as of llguidance.
        exact: beside one of these that has few outputs: sample them as the target does given that its output is one of them, see
            `engine.exact_outputs`. Without it, each token is masked, which is another distribution.

    An output that `max_tokens` or a stop ends may be cut off in the middle.

    Raises:
        InvalidInputError: none or several of them, or values of another kind.

    Example:
        >>> StructuredOutputs(choice=["yes", "no"]).kind
        'choice'
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.exact, bool):
            raise _refuse("structured_outputs.exact", self.exact, "True or False", "Check its type.")
        forms = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(forms) != 1:
            raise _refuse("structured_outputs", forms, f"one of {', '.join(_FORMS)}", "Give one of them.")
        value = getattr(self, forms[0])
        if not _FORMS[forms[0]](value):
            raise _refuse(f"structured_outputs.{forms[0]}", value, "a value of its kind", "Check its type.")

    @property
    def kind(self) -> str:
        """Which of the fields is given."""
        return next(name for name in _FORMS if getattr(self, name) not in (None, False))


def _is_text(x: object) -> bool:
    return isinstance(x, str) and bool(x)


_FORMS: dict[str, Callable[[Any], bool]] = {
    "json": lambda x: _is_text(x) or isinstance(x, Mapping),
    "json_object": lambda x: x is True,
    "regex": _is_text,
    "choice": lambda x: (
        isinstance(x, Sequence) and not isinstance(x, str) and bool(x) and all(map(_is_text, x))
    ),
    "grammar": _is_text,
}


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks of the target's distribution, and when to stop.

    Fields:
        temperature: logits are divided by it; 0 is greedy decoding.
        top_p: sample from the smallest set of tokens with this mass or more; in (0, 1].
        top_k: sample from the k largest; 0 and -1 switch it off; above the vocabulary it is clipped.
        min_p: sample from tokens with this fraction of the largest probability or more; in [0, 1].
        repetition_penalty: > 1 discourages tokens of prompt and output (transformers' definition); in [1e-9, 1e9].
        presence_penalty, frequency_penalty: subtracted from logits of tokens in the output, once or per occurrence; in [-1e9, 1e9].
        logit_bias: token id -> number added to its logit, in [-1e9, 1e9] (-inf bans it).
        max_tokens: most tokens to emit; None = 512, or what the context holds where that is less; -1 = all that it holds.
        min_tokens: end-of-sequence and stop ids have no mass before this many tokens; stop strings that these complete do not end the output.
        stop: text that ends the output and is not part of it; special tokens in it are found where they are hidden, too.
        stop_token_ids: ids that end the output, as its last token id.
        include_stop_str_in_output: what ended the output, a text of `stop` or a token's, is part of its text.
        ignore_eos: go on after tokens that end a text.
        n: independent samples of the same prompt, each with its own sample index; at most 65,536.
        seed: noise of the request, another one for each prompt of a call; None = drawn once from the system. The result records what repeats it.
            Which text of the distribution it gives depends on how much is drafted, but for temperature 0 and the verifier `race`; a policy that learns its
            costs looks at the clock for that, a fixed policy or a given profile does not.
        logprobs: None, or how many top alternatives to report beside each emitted token, at most 1000.
        logprobs_mode: "raw" = log-softmax of the target's logits; "processed" = log of the distribution sampled from.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: the form that outputs have to have, see `StructuredOutputs`; or a `Constraint` or `ConstraintSource` of one's own.
        thinking: what the model thinks before it answers, see `Thinking`: stops and the form begin behind it. None: with the output.

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
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | Constraint | ConstraintSource | None = None
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        for name, kind, expected in _KINDS:
            value = getattr(self, name)
            if not kind(value):
                raise _refuse(name, value, expected, "Check its type.")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for name, ok, expected, advice in (*self._rules(), *self._rules_of_output()):
            if not ok:
                raise _refuse(name, getattr(self, name), expected, advice)

    def _rules(self) -> list[tuple[str, bool, str, str]]:
        """(field, holds, what was expected, what to do) for each range of how a token is sampled."""
        finite = math.isfinite
        return [
            ("temperature", finite(self.temperature) and self.temperature >= 0, "a finite number >= 0", "Use 0 for greedy decoding."),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]", "Use 1 to switch it off."),
            ("top_k", self.top_k >= -1, "an integer >= -1", "Use 0 or -1 to switch it off."),
            ("min_p", 0 <= self.min_p <= 1, "a number in [0, 1]", "Use 0 to switch it off."),
            ("repetition_penalty", 1 / LARGEST <= self.repetition_penalty <= LARGEST, "a number in [1e-9, 1e9]", "Use 1 to switch it off."),
            ("presence_penalty", abs(self.presence_penalty) <= LARGEST, "a number in [-1e9, 1e9]", "Use 0 to switch it off."),
            ("frequency_penalty", abs(self.frequency_penalty) <= LARGEST, "a number in [-1e9, 1e9]", "Use 0 to switch it off."),
            ("logit_bias", all(b == -math.inf or abs(b) <= LARGEST for b in self.logit_bias.values()), "numbers in [-1e9, 1e9], or -inf", "Use -inf to ban a token."),
        ]  # fmt: skip

    def _rules_of_output(self) -> list[tuple[str, bool, str, str]]:
        """The same of what is generated and told."""
        return [
            ("max_tokens", self.max_tokens in (None, WHOLE_CONTEXT) or self.max_tokens >= 1, "an integer >= 1, -1 or None", "Use -1 to fill the context."),
            ("min_tokens", self.min_tokens >= 0 and (self.max_tokens in (None, WHOLE_CONTEXT) or self.min_tokens <= self.max_tokens), "an integer in [0, max_tokens]", "Lower min_tokens or raise max_tokens."),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings", "Drop the empty string: it would stop at once."),
            ("n", 1 <= self.n <= MOST_SAMPLES, f"an integer in [1, {MOST_SAMPLES}]", "Ask for more in several calls, each with its own seed."),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS, f"an integer in [0, {MOST_LOGPROBS}] or None", "0 reports the emitted token alone."),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "None or an integer in [0, 2**63)", "Use any whole number there."),
            ("min_tokens", self.min_tokens == 0 or self.structured_outputs is None, "0 beside structured_outputs", "Its form says where the output ends."),
            *self._rules_of_exact_outputs(),
            ("logprobs_mode", self.logprobs_mode in ("raw", "processed"), '"raw" or "processed"', "Choose one of the two."),
        ]  # fmt: skip

    def _rules_of_exact_outputs(self) -> list[tuple[str, bool, str, str]]:
        """Of what changes a distribution token by token, which has no meaning for the distribution of whole outputs."""
        form = self.structured_outputs
        if not (isinstance(form, StructuredOutputs) and form.exact):
            return []
        advice = "Leave it out, or structured_outputs.exact."
        beside = "beside structured_outputs.exact"
        return [
            ("temperature", self.temperature > 0, f"a number > 0 {beside}", advice),
            ("top_p", self.top_p == 1, f"1 {beside}", advice),
            ("top_k", self.top_k in (0, -1), f"0 {beside}", advice),
            ("min_p", self.min_p == 0, f"0 {beside}", advice),
            ("thinking", self.thinking is None, f"None {beside}", advice),
        ]

    @property
    def greedy(self) -> bool:
        """Whether the distribution is a point mass at the largest processed logit."""
        return self.temperature == 0

    @property
    def follows_drafts(self) -> bool:
        """Whether the text depends on what is drafted: it was given a seed, and is sampled."""
        return self.seed is not None and not self.greedy

    @property
    def has_penalties(self) -> bool:
        """Whether the distribution depends on which tokens came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def within(self, capacity: int) -> "SamplingParams":
        """With `max_tokens` as a number. capacity: tokens that the context still holds.

        Example:
            >>> SamplingParams().within(8192).max_tokens, SamplingParams(max_tokens=-1).within(8192).max_tokens
            (512, 8192)
        """
        if self.max_tokens not in (None, WHOLE_CONTEXT):
            return self
        unset = max(MAX_TOKENS, self.min_tokens) if self.max_tokens is None else capacity
        return self.with_(max_tokens=min(unset, capacity), min_tokens=min(self.min_tokens, capacity))

    def with_(self, **changes: Any) -> "SamplingParams":
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)


def _is_mapping_of_biases(x: object) -> bool:
    return isinstance(x, Mapping) and all(map(_is_whole, x)) and all(map(_is_number, x.values()))


_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_KINDS: list[tuple[str, Callable[[Any], bool], str]] = [
    *((name, _is_number, "a number") for name in _NUMBERS),
    *((name, _is_whole, "an integer") for name in ("top_k", "min_tokens", "n")),
    *(
        (name, lambda x: x is None or _is_whole(x), "an integer or None")
        for name in ("max_tokens", "seed", "logprobs")
    ),
    ("logit_bias", _is_mapping_of_biases, "a mapping from token ids to numbers"),
    ("stop", lambda x: isinstance(x, (str, Sequence)), "a string or a list of them"),
    (
        "stop_token_ids",
        lambda x: isinstance(x, (Sequence, Set)) and all(map(_is_whole, x)),
        "a list of token ids",
    ),
    (
        "structured_outputs",
        lambda x: x is None or isinstance(x, (StructuredOutputs, Constraint, ConstraintSource)),
        "a StructuredOutputs or None",
    ),
    ("thinking", lambda x: x is None or isinstance(x, Thinking), "a Thinking or None"),
]
"""(field, test, what was expected): the types, before the ranges."""
