"""What clients send: OpenAI's fields, vLLM's for sampling beyond them, and `speculation`, which is ours.

`bodies` says what becomes of other fields.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from polydraft.core.params import WHOLE_CONTEXT, LogprobsMode, SamplingParams, StructuredOutputs
from polydraft.server.bodies import Body, Requested, Seed, Stops, Text, TextAlone, Texts, TopP, Unserved, by_type, hosted_left_out
from polydraft.server.errors import ApiError
from polydraft.server.speculation import RequestedSpeculation

MOST_LOGPROBS = 20
"""Alternatives beside each token, at most."""
MOST_STOPS = 1024
"""Texts that end an answer, each of which is looked for behind every token."""
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
    "stop", "stop_token_ids", "ignore_eos", "n", "seed", "logprobs_mode", "skip_special_tokens",
)  # fmt: skip
"""Fields that are those of `SamplingParams`."""
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,256}$")]


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(Body):
    """Named as OpenAI does. strict: it is always so here."""

    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """What an assistant refused before is a part of what it said."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class Prediction(Body):
    """What the answer may be, such as the file that it is to change: drafts are looked up in it."""

    type: Literal["content"]
    content: str | list[Annotated[TextPart, by_type(TextPart)]]


def text_of(content: str | Sequence[TextPart | RefusalPart]) -> str:
    """The text of a content, in parts or whole."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ResponseFormat(Body):
    """json_schema: beside the type of that name.  schema: beside json_object, as llama.cpp has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class Sampled(Requested, ABC):
    """What completions and chats have in common; ranges are those of `SamplingParams`."""

    model: str | None = None
    temperature: float | None = None
    top_p: TopP | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = 1
    stop: Annotated[Text | list[Text] | None, Stops] = None
    stop_token_ids: list[int] | None = None
    seed: Seed = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs_mode: LogprobsMode = "raw"
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
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
            raise ApiError(400, f"stop has {len(self.stop)} texts; expected at most {MOST_STOPS}.", param="stop")
        sampling = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        return defaults.with_(
            **sampling,
            logit_bias={_token_id(k): bias for k, bias in (self.logit_bias or {}).items()},
            max_tokens=self.most_tokens(),
            logprobs=self.most_logprobs(),
            structured_outputs=self.form(),
        )

    def form(self) -> StructuredOutputs | None:
        """What the text has to be like.

        Raises:
            ApiError: several forms, or a type without its schema.
        """
        response_format = self.wanted_format()
        schema = response_format.json_schema.schema_ if response_format and response_format.json_schema else None
        if response_format and (response_format.type == "json_schema") != (schema is not None):
            raise ApiError(400, f"{self.form_field} has the type {response_format.type!r}; expected json_schema.schema beside 'json_schema' alone.", param=self.form_field)  # fmt: skip
        json_object = response_format is not None and response_format.type == "json_object"
        if response_format is not None and json_object:
            schema = response_format.schema_
        fields: dict[str, Any] = {"json": schema if schema is not None else self.guided_json, "regex": self.guided_regex}
        fields |= {"choice": self.guided_choice, "grammar": self.guided_grammar, "json_object": json_object and schema is None}  # fmt: skip
        forms = {name: value for name, value in fields.items() if value not in (None, False)}
        if len(forms) + (schema is not None and self.guided_json is not None) > 1:
            raise ApiError(400, f"several forms of the text were asked for; expected one of {self.form_field} and guided_*.", param=self.form_field)  # fmt: skip
        return StructuredOutputs(**forms) if forms else None

    def wanted_format(self) -> ResponseFormat | None:
        """The form by its type, beside `guided_*`."""
        return self.response_format

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


class CompletionRequest(Sampled):
    """Of /v1/completions. prompt: text, token ids, or several of either.  parse_special: special tokens in text are control tokens."""

    prompt: Texts
    parse_special: bool = True
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool | None = False
    suffix: str | None = None
    _further: tuple[Sequence[tuple[str, str]], str] | None = None

    @classmethod
    def infill(cls, fields: Mapping[str, Any], extra: Sequence[tuple[str, str]], begin: str) -> "CompletionRequest":
        """To fill in between `prompt` and `suffix`, either of which may be empty. extra: names and texts of further files.  begin: of what is filled in."""
        body = cls.model_validate({**fields, "prompt": fields["prompt"] or " "})
        body.prompt, body._further = fields["prompt"], (extra, begin)
        return body

    @property
    def fills_in(self) -> bool:
        """Whether what is asked for lies between two texts."""
        return bool(self.suffix) or self._further is not None

    @property
    def further(self) -> tuple[Sequence[tuple[str, str]], str]:
        """See `infill`."""
        return self._further or ((), "")

    def prompts(self) -> list[str | list[int]]:
        """Each of them."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return list(self.prompt)  # pyright: ignore[reportReturnType, reportArgumentType]

    def most_tokens(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default

    def most_logprobs(self) -> int | None:
        return self.logprobs


class Called(Body):
    """arguments: JSON."""

    name: str
    arguments: str


class Call(Body):
    """One that the model made before."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Called


class Message(Body):
    """content: what is said; an assistant that called tools may say nothing.  tool_call_id: of the call whose result a tool's message is.
    reasoning_content, reasoning, thinking: what an assistant thought before, by the names of several servers.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[Annotated[TextPart | RefusalPart, by_type(TextPart, RefusalPart)]], TextAlone]
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None

    @property
    def thoughts(self) -> str | None:
        """What an assistant thought before it said this."""
        return self.reasoning_content or self.reasoning or self.thinking

    @model_validator(mode="before")
    @classmethod
    def _with_calls_alone(cls, body: Any) -> Any:
        silent = isinstance(body, dict) and body.get("role") in ("assistant", "tool") and body.get("content") is None
        return {**body, "content": ""} if silent else body

    def plain(self) -> dict[str, Any]:
        """As chat templates know it."""
        content = text_of(self.content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": _called(call.function)} for call in self.tool_calls
            ]
        if self.thoughts and self.role == "assistant":
            message["reasoning_content"] = self.thoughts
        return message | ({"name": self.name, "tool_call_id": self.tool_call_id} if self.role == "tool" else {})


def _called(call: Called) -> dict[str, Any]:
    """As templates know it; arguments that the model wrote and that are no JSON object stay text."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return {"name": call.name, "arguments": arguments if isinstance(arguments, dict) else call.arguments}


class Function(Body):
    """strict: arguments always follow the schema here."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def described(self) -> dict[str, Any]:
        """As templates tell it to the model."""
        return {"type": "function", "function": self.model_dump(exclude={"strict", "type"}, exclude_none=True)}


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class Tools:
    """What may be called in one answer. functions: all that the model is told of.  callable: those that it may call.  required: it has to.

    place: of a function's parameters in the request.
    """

    functions: Sequence[Function] = ()
    callable: Sequence[Function] = ()
    required: bool = False
    parallel: bool = True
    place: str = "tools.{}.function.parameters"

    @classmethod
    def of(cls, functions: Sequence[Function], choice: str | None, named: str | None, parallel: bool) -> "Tools":
        """From the fields of a request. choice: auto where nothing is said.  named: the one that has to be called.

        Raises:
            ApiError: a call is asked for of a function that is not there, or of none.
        """
        names = [function.name for function in functions]
        if len(set(names)) < len(names):
            raise ApiError(400, f"tools has the names {', '.join(names)[:300]}; expected each once.", param="tools")
        if named is not None and named not in names:
            raise ApiError(
                400,
                f"tool_choice names {named[:64]!r}; expected one of tools: {', '.join(names)[:300] or 'there are none'}.",
                param="tool_choice",
            )
        if choice == "required" and not names:
            raise ApiError(400, "tool_choice is 'required' without tools; expected some to choose from.", param="tool_choice")
        if choice == "none" or not names:
            return cls()
        chosen = [function for function in functions if named in (None, function.name)]
        return cls(functions, chosen, choice == "required" or named is not None, parallel and named is None)


class ChatRequest(Sampled):
    """Of /v1/chat/completions. parse_special: special tokens in messages are control tokens, and not text."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Annotated[list[Tool] | None, hosted_left_out("function")] = None
    tool_choice: Choice | NamedTool | None = None
    functions: Unserved = None
    function_call: Unserved = None
    web_search_options: Unserved = None
    audio: Unserved = None
    modalities: list[Literal["text"]] | None = None
    chat_template: Unserved = None
    documents: Unserved = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    enable_thinking: bool | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    parse_special: bool = False
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    def most_tokens(self) -> int:
        return super().most_tokens() if self.max_completion_tokens is None else self.max_completion_tokens

    def continues(self) -> bool:
        return self.continue_final_message

    def opens(self) -> bool:
        return self.add_generation_prompt

    def offered_tools(self) -> Tools:
        """What may be called."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        choice = self.tool_choice if isinstance(self.tool_choice, str) else None
        return Tools.of([tool.function for tool in self.tools or ()], choice, named, self.parallel_tool_calls)

    def template_options(self) -> dict[str, Any]:
        """What else the chat template is given."""
        named = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.enable_thinking}
        return {name: value for name, value in named.items() if value is not None} | (self.chat_template_kwargs or {})

    def most_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs was given without logprobs; set logprobs to true.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Body):
    """Of /tokenize: text or a conversation. parse_special: as of completions, and of chats.

    content: llama.cpp's name of the text, which begins with the token that texts begin with where `add_special` says so.
    """

    model: str | None = None
    prompt: Text | None = None
    content: Text | None = None
    add_special: bool = False
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    parse_special: bool | None = None


class DetokenizeRequest(Body):
    """Of /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 12):
        raise ApiError(400, f"logit_bias has the key {key[:40]!r}; expected token ids.", param="logit_bias")
    return int(key)
