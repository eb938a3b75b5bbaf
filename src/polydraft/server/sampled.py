"""What requests of all formats have in common: sampling parameters, the form of the text, drafts, and which tokens are told."""

import re
from abc import ABC, abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from polydraft.core import Budget
from polydraft.core import geometry as tree
from polydraft.core.params import WHOLE_CONTEXT, LogprobsMode, SamplingParams, StructuredOutputs
from polydraft.engine.structured import lark_of
from polydraft.errors import InvalidInputError
from polydraft.server.bodies import (
    Body,
    Requested,
    Seed,
    Stops,
    Text,
    TopP,
    also,
    by_type,
)
from polydraft.server.conversation import TextPart
from polydraft.server.errors import ApiError


class RequestedSpeculation(Body):
    """How one request is drafted for.

    enabled: False decodes plainly.  depth, num_paths: a fixed size of its drafts; without them the server's policy.
    drafter: one that the server was started with.  verifier: any that is exact for it.
    seed_exact: the text is a function of the seed alone, whatever the load; refused where drafter, verifier and size do not give that.
    trace: tell the origin of each token, and the tree of each step.
    """

    model_config = ConfigDict(extra="forbid")  # it is ours: an unknown field is a mistake

    enabled: bool = True
    depth: Annotated[int, Field(ge=1, le=255)] | None = None
    num_paths: Annotated[int, Field(ge=1, le=255)] | None = None
    drafter: str | None = None
    verifier: str | None = None
    seed_exact: bool = False
    trace: bool = False

    def budget(self) -> Budget | None:
        """The size that was asked for."""
        if not self.enabled:
            return Budget.fixed((-1,))
        if self.depth is None and self.num_paths is None:
            return None
        return Budget.fixed(tree.paths(self.num_paths or 1, self.depth or 5))


MOST_LOGPROBS = 20
"""Alternatives beside each token, at most."""
MOST_STOPS = 1024
"""Texts that end an answer, each of which is looked for behind every token."""
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
    "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "n", "seed", "logprobs_mode", "skip_special_tokens",
)  # fmt: skip
"""Fields that are those of `SamplingParams`."""


class StreamOptions(Requested):
    """continuous_usage_stats: tell the usage with every chunk."""

    group: ClassVar[str] = "stream_options"

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """Named as OpenAI does. strict: it is always so here."""

    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class Prediction(Body):
    """What the answer may be, such as the file that it is to change: drafts are looked up in it."""

    type: Literal["content"]
    content: str | list[Annotated[TextPart, by_type(TextPart)]]


def grammar_text(grammar: str | None, param: str) -> str | None:
    """A grammar in Lark's notation, or in that of llama.cpp, which vLLM's clients send too, as Lark's."""
    is_gbnf = (
        grammar is not None
        and "::=" in grammar
        and not re.search(r"^\s*\??start\s*:(?!:=)", grammar, re.MULTILINE)
    )
    return _gbnf(grammar, param) if is_gbnf else grammar


def _gbnf(grammar: str | None, param: str) -> str | None:
    try:
        return lark_of(grammar) if grammar else None
    except InvalidInputError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from error


def without_window(repeat_last_n: int | None, params: SamplingParams) -> dict[str, float]:
    """Penalties of a request that names how far back they look: none where that is nowhere.

    Raises:
        ApiError: they are to look at a part of the context.
    """
    if repeat_last_n == 0:
        return {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    if repeat_last_n not in (None, -1) and params.has_penalties:
        raise ApiError(
            400, f"repeat_last_n={repeat_last_n} was given; penalties look at the whole context here. Give -1, or 0 for none.", param="repeat_last_n"
        )  # fmt: skip
    return {}


class ResponseFormat(Body):
    """json_schema: beside the type of that name.  schema: beside json_object, as llama.cpp has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class WantedForm(Requested):
    """vLLM's `structured_outputs`, one of whose forms is given.  exact: see `core.StructuredOutputs`, ours."""

    group: ClassVar[str] = "structured_outputs"

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    grammar: Text | None = None
    exact: bool = False

    def forms(self) -> dict[str, Any]:
        """By name, as `StructuredOutputs` has them."""
        names = {
            "json": "json_",
            "json_object": "json_object",
            "regex": "regex",
            "choice": "choice",
            "grammar": "grammar",
        }
        return {name: getattr(self, field) for name, field in names.items()}


class Sampled(Requested, ABC):
    """What completions and chats have in common; ranges are those of `SamplingParams`.

    repeat_last_n: how far back penalties look; -1 is the whole context, as they do here.
    regex, ebnf, json_schema, grammar: SGLang's and llama.cpp's names of forms; the two grammars are in GBNF.
    """

    model: str | None = None
    temperature: float | None = None
    top_p: TopP | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: Annotated[int | None, also("n", "n_cmpl")] = 1
    stop: Annotated[Text | list[Text] | None, Stops] = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: Annotated[bool, also("include_stop_str_in_output", "no_stop_trim")] = False
    seed: Seed = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: Annotated[float | None, also("repetition_penalty", "repeat_penalty")] = None
    repeat_last_n: int | None = None
    min_tokens: int = 0
    max_tokens: Annotated[int | None, also("max_tokens", "n_predict")] = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs_mode: LogprobsMode = "raw"
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: WantedForm | None = None
    regex: Text | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    grammar: str | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1)] | None = None
    guided_grammar: Text | None = None
    speculation: RequestedSpeculation = Field(default_factory=RequestedSpeculation)
    prediction: Prediction | None = None
    best_of: int | None = None

    form_field: ClassVar[str] = "response_format"
    """Where the form of the text is asked for."""

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """The engine's parameters. defaults: those of fields that are not given.

        Raises:
            InvalidInputError: a value outside its range.
            ApiError: biases that are not of token ids; several samples of which the best is asked for.
        """
        if self.best_of not in (None, self.n or 1):
            raise ApiError(400, "best_of is only taken where it equals n.", param="best_of")
        if isinstance(self.stop, list) and len(self.stop) > MOST_STOPS:
            raise ApiError(
                400, f"stop has {len(self.stop)} texts; expected at most {MOST_STOPS}.", param="stop"
            )
        sampling = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        sampling |= without_window(self.repeat_last_n, defaults.with_(**sampling))
        return defaults.with_(
            **sampling,
            logit_bias={_token_id(k): bias for k, bias in (self.logit_bias or {}).items()},
            max_tokens=self.most_tokens() or 1,
            logprobs=self.most_logprobs(),
            structured_outputs=self.form(),
        )

    def form(self) -> StructuredOutputs | None:
        """What the text has to be like.

        Raises:
            ApiError: several forms, a type without its schema, or a grammar that cannot be read.
        """
        forms = [(name, value) for name, value in self._forms() if value not in (None, False)]
        if len(forms) > 1:
            raise ApiError(400, f"several forms of the text were asked for; expected one of {self.form_field}, structured_outputs and guided_*.", param=self.form_field)  # fmt: skip
        exact = self.structured_outputs is not None and self.structured_outputs.exact
        return StructuredOutputs(**dict(forms), exact=exact) if forms else None

    def _forms(self) -> list[tuple[str, Any]]:
        """All that were asked for, as `StructuredOutputs` names them."""
        wanted = self.wanted_format()
        schema = wanted.json_schema.schema_ if wanted and wanted.json_schema else None
        if wanted and (wanted.type == "json_schema") != (schema is not None):
            raise ApiError(400, f"{self.form_field} has the type {wanted.type!r}; expected json_schema.schema beside 'json_schema' alone.", param=self.form_field)  # fmt: skip
        is_object = wanted is not None and wanted.type == "json_object"
        if wanted is not None and is_object:
            schema = wanted.schema_
        named = {} if self.structured_outputs is None else self.structured_outputs.forms()
        if self.structured_outputs is not None and all(value in (None, False) for value in named.values()):
            raise ApiError(
                400,
                f"structured_outputs has no form; expected one of {', '.join(named)}.",
                param="structured_outputs",
            )
        named["grammar"] = grammar_text(named.get("grammar"), "structured_outputs.grammar")
        return [
            ("json", schema),
            ("json_object", is_object and schema is None),
            *named.items(),
            ("json", self.guided_json),
            ("regex", self.guided_regex),
            ("choice", self.guided_choice),
            ("grammar", grammar_text(self.guided_grammar, "guided_grammar")),
            ("regex", self.regex),
            ("json", self.json_schema),
            ("grammar", _gbnf(self.ebnf, "ebnf")),
            ("grammar", _gbnf(self.grammar, "grammar")),
        ]

    def wanted_format(self) -> ResponseFormat | None:
        """The form by its type, beside `guided_*`."""
        return self.response_format

    def has_grammar(self) -> bool:
        """Whether a grammar has to be read, which may take a second."""
        named = self.structured_outputs and self.structured_outputs.grammar
        return any((named, self.guided_grammar, self.ebnf, self.grammar))

    def most_tokens(self) -> int:
        """Of each choice; a chat may fill the context."""
        return WHOLE_CONTEXT if self.max_tokens is None else self.max_tokens

    def continues(self) -> bool:
        """Whether the last message is the beginning of the answer."""
        return False

    def opens(self) -> bool:
        """Whether the template opens the answer's turn."""
        return True

    @abstractmethod
    def most_logprobs(self) -> int | None:
        """Alternatives to tell beside each token; None tells nothing of any."""

    def most_prompt_logprobs(self) -> int | None:
        """Alternatives to tell beside each token of the prompt; None tells nothing of any."""
        return None


class TokensTold(Sampled, ABC):
    """Whose answers tell tokens, too.

    prompt_logprobs: alternatives to tell beside each token of the prompt.  return_token_ids: tell ids.
    return_tokens_as_token_ids: in log-probabilities a token is `token_id:5`, and not its text.
    """

    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    def most_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 12):
        raise ApiError(400, f"logit_bias has the key {key[:40]!r}; expected token ids.", param="logit_bias")
    return int(key)


def most_prompt_logprobs(body: Sampled, params: SamplingParams) -> int | None:
    """Alternatives to tell beside each token of the prompt, None where nothing of them is asked for.

    Raises:
        ApiError: of the distribution that is sampled from, which a prompt was not.
    """
    most = body.most_prompt_logprobs()
    if most is not None and params.logprobs_mode != "raw":
        raise ApiError(400, f"logprobs_mode={params.logprobs_mode!r} was given; those of a prompt are 'raw'. Leave it out.", param="logprobs_mode")  # fmt: skip
    return most
