"""What clients send: OpenAI's fields, those of vLLM, SGLang and llama.cpp beyond them, and `speculation`, which is ours.

`fields` says what becomes of other fields.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from polydraft.core.params import WHOLE_CONTEXT, LogprobsMode, SamplingParams, StructuredOutputs
from polydraft.engine.structured import lark_of
from polydraft.errors import InvalidInputError
from polydraft.server.bodies import (
    Body,
    Requested,
    Seed,
    Stops,
    Text,
    TextAlone,
    Texts,
    TopP,
    also,
    by_type,
    hosted_left_out,
)
from polydraft.server.errors import ApiError
from polydraft.server.parts import readable_results
from polydraft.server.speculation import RequestedSpeculation

MOST_LOGPROBS = 20
"""Alternatives beside each token, at most."""
MOST_STOPS = 1024
"""Texts that end an answer, each of which is looked for behind every token."""
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
    "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "n", "seed", "logprobs_mode", "skip_special_tokens",
)  # fmt: skip
"""Fields that are those of `SamplingParams`."""
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,256}$")]


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


def text_of(content: str | Sequence[TextPart | RefusalPart]) -> str:
    """The text of a content, in parts or whole."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ResponseFormat(Body):
    """json_schema: beside the type of that name.  schema: beside json_object, as llama.cpp has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class WantedForm(Requested):
    """vLLM's `structured_outputs`, one of whose forms is given."""

    group: ClassVar[str] = "structured_outputs"

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    grammar: Text | None = None

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
        return StructuredOutputs(**dict(forms)) if forms else None

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


class CompletionRequest(TokensTold):
    """Of /v1/completions. prompt: text, token ids, or several of either.  parse_special: special tokens in text are control tokens.

    add_special_tokens: text begins with the token that texts begin with.  echo: the answer begins with the prompt, and log-probabilities with its own.
    """

    group: ClassVar[str] = "completions"

    prompt: Texts
    parse_special: bool = True
    add_special_tokens: bool = True
    logprobs: Annotated[int | None, Field(ge=0, le=MOST_LOGPROBS), also("logprobs", "n_probs")] = None
    echo: bool | None = False
    suffix: str | None = None
    _further: tuple[Sequence[tuple[str, str]], str] | None = None

    @classmethod
    def infill(
        cls, fields: Mapping[str, Any], extra: Sequence[tuple[str, str]], begin: str
    ) -> "CompletionRequest":
        """To fill in between `prompt` and `suffix`, either of which may be empty. extra: names and texts of further files.  begin: of what is filled in."""
        body = cls.model_validate({**fields, "prompt": fields["prompt"] or " "})
        body.prompt = fields["prompt"]
        body._further = (extra, begin)
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

    def most_prompt_logprobs(self) -> int | None:
        asked = [
            most for most in (self.prompt_logprobs, self.logprobs if self.echo else None) if most is not None
        ]
        return max(asked, default=None)


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
    content: Annotated[
        str | list[Annotated[TextPart | RefusalPart, by_type(TextPart, RefusalPart)]], TextAlone
    ]
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
    def _with_readable_content(cls, body: Any) -> Any:
        if not (isinstance(body, dict) and body.get("role") in ("assistant", "tool")):
            return body
        content = "" if body.get("content") is None else body["content"]
        return {**body, "content": readable_results(content) if body["role"] == "tool" else content}

    def plain(self) -> dict[str, Any]:
        """As chat templates know it."""
        content = text_of(self.content)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        }
        if self.tool_calls:
            message["tool_calls"] = [
                {**_given(id=call.id), "type": "function", "function": _called(call.function)}
                for call in self.tool_calls
            ]
        if self.thoughts and self.role == "assistant":
            message["reasoning_content"] = self.thoughts
        return message | (
            _given(name=self.name, tool_call_id=self.tool_call_id) if self.role == "tool" else {}
        )


def _given(**fields: Any) -> dict[str, Any]:
    """Those that are not None: to a template a name that is None is there."""
    return {name: value for name, value in fields.items() if value is not None}


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
        return {
            "type": "function",
            "function": self.model_dump(exclude={"strict", "type"}, exclude_none=True),
        }


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName

    @property
    def name(self) -> str:
        """Of the function."""
        return self.function.name


class AllowedOf(Body):
    """Of those that are offered, the ones that may be called in this answer."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], hosted_left_out("function")]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedOf


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
    def chosen(cls, functions: Sequence[Function], choice: Any, parallel: bool) -> "Tools":
        """As OpenAI's clients choose: by a word, one by its name, or several by theirs."""
        if isinstance(choice, AllowedTools):
            choice = choice.allowed_tools
        if isinstance(choice, AllowedOf):
            return cls.of(functions, choice.mode, [tool.name for tool in choice.tools], parallel)
        if isinstance(choice, str | None):
            return cls.of(functions, choice, None, parallel)
        return cls.of(functions, "required", [choice.name], False)

    @classmethod
    def of(
        cls, functions: Sequence[Function], choice: str | None, allowed: Sequence[str] | None, parallel: bool
    ) -> "Tools":
        """From the fields of a request. choice: auto where nothing is said.  allowed: names of those that may be called, None: all.

        Raises:
            ApiError: a call is asked for of a function that is not there, or of none.
        """
        names = [function.name for function in functions]
        if len(set(names)) < len(names):
            raise ApiError(
                400, f"tools has the names {', '.join(names)[:300]}; expected each once.", param="tools"
            )
        unknown = next((name for name in allowed or () if name not in names), None)
        if unknown is not None:
            raise ApiError(
                400,
                f"tool_choice names {unknown[:64]!r}; expected one of tools: {', '.join(names)[:300] or 'there are none'}.",
                param="tool_choice",
            )
        may_call = [function for function in functions if allowed is None or function.name in allowed]
        if choice == "required" and not may_call:
            raise ApiError(
                400,
                "tool_choice is 'required' without tools; expected some to choose from.",
                param="tool_choice",
            )
        if choice == "none" or not names:
            return cls()
        return cls(functions, may_call, choice == "required", parallel)


class ThinkingSwitch(Requested):
    """Whether the model thinks before it answers."""

    group: ClassVar[str] = "thinking"

    type: Literal["enabled", "disabled", "adaptive", "auto"]

    def options(self) -> dict[str, Any]:
        """For templates."""
        return {"enable_thinking": self.type != "disabled"}


class ChatRequest(TokensTold):
    """Of /v1/chat/completions. parse_special: special tokens in messages are control tokens, and not text.

    echo: the answer begins with the last message where that is the assistant's.  add_special_tokens: the token that texts begin with stands before
    what the template writes.  include_reasoning, separate_reasoning: thoughts are told, and apart from the answer.
    return_prompt_text: tell what the template has written.
    """

    group: ClassVar[str] = "chats"

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: Annotated[list[Tool] | None, hosted_left_out("function")] = None
    tool_choice: Annotated[Choice | NamedTool | AllowedTools | None, by_type(NamedTool, AllowedTools)] = None
    modalities: list[Literal["text"]] | None = None
    continue_final_message: bool = False
    echo: bool = False
    add_special_tokens: bool = False
    include_reasoning: bool = True
    separate_reasoning: bool = True
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] = "auto"
    thinking: ThinkingSwitch | None = None
    return_prompt_text: bool = False
    return_prompt_token_ids: bool = False
    n_probs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
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
        return Tools.chosen(
            [tool.function for tool in self.tools or ()], self.tool_choice, self.parallel_tool_calls
        )

    def template_options(self) -> dict[str, Any]:
        """What else the chat template is given."""
        named = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.enable_thinking}
        switch = {} if self.thinking is None else self.thinking.options()
        return (
            switch
            | {name: value for name, value in named.items() if value is not None}
            | (self.chat_template_kwargs or {})
        )

    def keeps_thoughts_apart(self) -> bool:
        """Whether what the model thinks is told apart from its answer."""
        return self.separate_reasoning and self.reasoning_format != "none"

    def echoed(self) -> list[str]:
        """What the answer begins with."""
        last = self.messages[-1]
        return [text_of(last.content)] if self.echo and (last.role == "assistant" or not self.opens()) else []

    def most_logprobs(self) -> int | None:
        if self.n_probs:
            return max(self.n_probs, self.top_logprobs or 0)
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                400, "top_logprobs was given without logprobs; set logprobs to true.", param="top_logprobs"
            )
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Requested):
    """Of /tokenize: text or a conversation, whose fields are those of chats. parse_special: as of completions, and of chats.

    add_special_tokens: text begins with the token that texts begin with; `content`, llama.cpp's name of the text, where `add_special` says so.
    return_token_strs, with_pieces: tell the text of each token, vLLM's and llama.cpp's way.
    """

    group: ClassVar[str] = "tokenize"

    model: str | None = None
    prompt: Text | None = None
    content: Text | None = None
    add_special: bool = False
    add_special_tokens: bool | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    parse_special: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool = False
    with_pieces: bool = False

    def chat(self) -> ChatRequest:
        """The conversation, as chats have it."""
        return ChatRequest.model_validate(
            {name: getattr(self, name) for name in self.model_fields_set & ChatRequest.model_fields.keys()}
        )


class DetokenizeRequest(Requested):
    """Of /detokenize. skip_special_tokens: leave special tokens out of the text."""

    group: ClassVar[str] = "detokenize"

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
    skip_special_tokens: bool = False


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 12):
        raise ApiError(400, f"logit_bias has the key {key[:40]!r}; expected token ids.", param="logit_bias")
    return int(key)
