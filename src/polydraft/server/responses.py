"""What clients send to /v1/responses: a text, or items of a conversation, with instructions and tools. Nothing is stored."""

import json
import logging
from base64 import b64decode
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from polydraft.server.bodies import Body, Requested, Text, TextAlone, by_type, hosted_left_out
from polydraft.server.conversation import (
    AllowedOf,
    Called,
    Choice,
    Function,
    Message,
    PastCall,
    ReadableOutput,
    RefusalPart,
    Tools,
)
from polydraft.server.protocol import ThoughtBudget, budget_of
from polydraft.server.sampled import MOST_LOGPROBS, JsonSchema, ResponseFormat, Sampled

log = logging.getLogger("polydraft.server")


class InputText(Body):
    """Given by a user, or by the model before."""

    type: Literal["input_text", "output_text", "text"]
    text: str


InputContent = str | list[Annotated[InputText | RefusalPart, by_type(InputText, RefusalPart)]]


class InputMessage(Message):
    """One of a conversation; those that were answered may be given back as they came."""

    type: Literal["message"] = "message"
    content: Annotated[InputContent, TextAlone]  # pyright: ignore[reportIncompatibleVariableOverride]


class FunctionCall(Called):
    """One that the model made before."""

    type: Literal["function_call"]
    call_id: str


class ReasoningText(Body):
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Body):
    """What the model thought before. encrypted_content: the same, for clients that give back nothing else; that of other servers is not read."""

    type: Literal["reasoning"]
    content: list[Annotated[ReasoningText, by_type(ReasoningText)]] | None = None
    encrypted_content: str | None = None

    @property
    def thoughts(self) -> str:
        """As text, or none of it."""
        if self.content:
            return "".join(part.text for part in self.content)
        try:
            return b64decode(self.encrypted_content or "", validate=True).decode()
        except ValueError:
            return ""


class FunctionCallOutput(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[str | list[Annotated[InputText, by_type(InputText)]], ReadableOutput]


class OtherCall(Body):
    """One of a tool that is not offered here, such as a host's own, or that is called with text."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "custom_tool_call",
        "tool_search_call",
        "local_shell_call",
        "shell_call",
        "apply_patch_call",
        "web_search_call",
        "mcp_call",
    ]
    name: str | None = None

    @property
    def text(self) -> str:
        """What was called, as the model is told of it."""
        more = self.model_extra or {}
        given = next(
            (more[name] for name in ("input", "action", "arguments", "operation") if more.get(name)), ""
        )
        return f"[{self.name or self.type.removesuffix('_call')}] {given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)}".rstrip()


class OtherOutput(Body):
    """What such a call gave."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "custom_tool_call_output",
        "tool_search_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
    ]

    @property
    def text(self) -> str:
        """Its text."""
        more = self.model_extra or {}
        given = next((more[name] for name in ("output", "tools") if more.get(name)), "")
        if isinstance(given, list) and all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in given
        ):
            return "".join(part["text"] for part in given)
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


class LeftOut(Body):
    """What says nothing to a model, or is kept by a host alone."""

    type: Literal[
        "item_reference",
        "compaction",
        "context_compaction",
        "compaction_trigger",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "additional_tools",
    ]


class FunctionTool(Function):
    type: Literal["function"]


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class AllowedFunctions(AllowedOf):
    type: Literal["allowed_tools"]
    tools: Annotated[list[NamedFunction], hosted_left_out("function")]  # pyright: ignore[reportIncompatibleVariableOverride]


class Reasoning(Requested):
    group: ClassVar[str] = "reasoning"

    effort: str | None = None
    max_tokens: int | None = None


class OutputFormat(JsonSchema):
    """As `response_format` of chats, with the schema beside its type."""

    type: Literal["text", "json_object", "json_schema"]


class OutputText(Requested):
    """How the answer is written."""

    group: ClassVar[str] = "text"

    format: OutputFormat | None = None


KINDS = (InputMessage, FunctionCall, FunctionCallOutput, ReasoningItem, OtherCall, OtherOutput, LeftOut)
Item = Annotated[
    InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem | OtherCall | OtherOutput | LeftOut,
    by_type(*KINDS, default=InputMessage),
]


class ResponsesRequest(Sampled):
    """Of /v1/responses. include: further parts of the answer, of which log-probabilities are there."""

    group: ClassVar[str] = "responses"

    input: Text | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool] | None, hosted_left_out("function")] = None
    tool_choice: Annotated[
        Choice | NamedFunction | AllowedFunctions | None, by_type(NamedFunction, AllowedFunctions)
    ] = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parse_special: bool = False
    max_output_tokens: int | None = None
    text: OutputText | None = None
    n: None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    max_tokens: None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    response_format: None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None

    form_field = "text.format"

    def messages(self) -> list[Message]:
        """The conversation, with the instructions before it; thoughts and calls are the assistant's that speaks next to them."""
        messages = [Message(role="system", content=self.instructions)] if self.instructions else []
        thoughts = ""
        for item in [Message(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            if isinstance(item, ReasoningItem):
                thoughts += item.thoughts
            elif isinstance(item, LeftOut):
                _tell(item.type, "left out")
            elif isinstance(item, FunctionCallOutput):
                output = (
                    item.output
                    if isinstance(item.output, str)
                    else "".join(part.text for part in item.output)
                )
                messages.append(Message(role="tool", content=output, tool_call_id=item.call_id))
            elif isinstance(item, OtherOutput):
                _tell(item.type, "read as text")
                messages.append(
                    Message(role="user", content=f"<tool_response>\n{item.text}\n</tool_response>")
                )
            elif isinstance(item, Message) and item.role != "assistant":
                messages.append(item)
            else:
                messages.append(_of_assistant(item, thoughts, messages))
                thoughts = ""
        return messages

    def offered_tools(self) -> Tools:
        """What may be called."""
        tools = Tools.chosen(self.tools or (), self.tool_choice, self.parallel_tool_calls)
        return replace(tools, place="tools.{}.parameters")

    def budget_of_thoughts(self) -> ThoughtBudget:
        """How many tokens may be thoughts."""
        return ThoughtBudget(
            budget_of(self.reasoning and self.reasoning.max_tokens, None, self.template_options())
        )

    def template_options(self) -> dict[str, Any]:
        """What else the chat template is given."""
        effort = (
            {"reasoning_effort": self.reasoning.effort} if self.reasoning and self.reasoning.effort else {}
        )
        return effort | (self.chat_template_kwargs or {})

    def wanted_format(self) -> ResponseFormat | None:
        form = self.text and self.text.format
        if form is None:
            return None
        if form.type == "json_object":
            return ResponseFormat(type=form.type, schema=form.schema_)
        schema = JsonSchema(schema=form.schema_) if form.schema_ is not None else None
        return ResponseFormat(type=form.type, json_schema=schema)

    def most_tokens(self) -> int:
        return super().most_tokens() if self.max_output_tokens is None else self.max_output_tokens

    def most_logprobs(self) -> int | None:
        included = "message.output_text.logprobs" in (self.include or ())
        return self.top_logprobs or (0 if included else None)


@lru_cache(maxsize=64)  # once
def _tell(kind: str, what: str) -> None:
    log.info("items of the type %r in the input of responses are %s", kind, what)


def _of_assistant(item: Message | FunctionCall | OtherCall, thoughts: str, before: list[Message]) -> Message:
    """What the assistant said or called, joined with its last message, which is taken from those before, where it is one turn."""
    calls = list[PastCall]()
    if isinstance(item, FunctionCall):
        calls = [PastCall(id=item.call_id, function=Called(name=item.name, arguments=item.arguments))]
        text = ""
    elif isinstance(item, OtherCall):
        _tell(item.type, "read as text")
        text = item.text
    else:
        text = item.plain()["content"]
    joins = bool(before) and before[-1].role == "assistant" and not isinstance(item, Message)
    last = before.pop() if joins else Message(role="assistant", content="")
    texts = [part for part in (last.plain()["content"], text) if part]
    return Message(
        role="assistant",
        content="\n".join(texts),
        tool_calls=[*(last.tool_calls or ()), *calls] or None,
        reasoning_content="".join(
            part for part in (last.thoughts, thoughts, isinstance(item, Message) and item.thoughts) if part
        )
        or None,
    )
