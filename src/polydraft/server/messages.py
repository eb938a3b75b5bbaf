"""/v1/messages: Anthropic's format of a conversation and its answer, of thoughts, text and calls of tools, whole or as its events."""

import json
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from polydraft.core.params import SamplingParams
from polydraft.engine.output import StepOutput
from polydraft.server.answers import Answer
from polydraft.server.bodies import Body, Requested, TextAlone, by_type, hosted_left_out
from polydraft.server.conversation import (
    Called,
    Function,
    Message,
    PastCall,
    ReadableBlocks,
    ReadableResult,
    ToolName,
    Tools,
)
from polydraft.server.errors import ApiError
from polydraft.server.protocol import ThinkingSwitch, ThoughtBudget, budget_of
from polydraft.server.sampled import JsonSchema, ResponseFormat, Sampled


class TextBlock(Body):
    type: Literal["text"]
    text: str


class ToolUse(Body):
    """A call that the model made before."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(Body):
    """What the model thought before, for templates that take it; none of it where it comes encrypted. signature: any is taken."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""
    signature: str | None = None
    data: str | None = None


class ToolResult(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | list[Annotated[TextBlock, by_type(TextBlock)]], ReadableResult] = ""
    is_error: bool = False


Block = Annotated[
    TextBlock | ToolUse | ToolResult | ThinkingBlock, by_type(TextBlock, ToolUse, ToolResult, ThinkingBlock)
]


class Turn(Body):
    """One message. content: text or blocks; results of tools are the user's."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[Block], TextAlone, ReadableBlocks]

    def messages(self) -> list[Message]:
        """As chats have it: results of tools each as a message of its own, before what else is said."""
        if isinstance(self.content, str):
            return [Message(role=self.role, content=self.content)]
        results = [
            Message(role="tool", content=_tool_text(b), tool_call_id=b.tool_use_id)
            for b in self.content
            if isinstance(b, ToolResult)
        ]
        called = [
            (b.id, Called(name=b.name, arguments=json.dumps(b.input)))
            for b in self.content
            if isinstance(b, ToolUse)
        ]
        calls = [PastCall(id=name, function=call) for name, call in called]
        text = "".join(block.text for block in self.content if isinstance(block, TextBlock))
        thought = "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock))
        message = Message(
            role=self.role, content=text, tool_calls=calls or None, reasoning_content=thought or None
        )
        messages = [message] if text or calls or not results else []
        return [*results, *messages]


class InputTool(Body):
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"


class ToolChoice(Body):
    """name: of the tool that has to be called, beside the type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class WantedFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Requested):
    group: ClassVar[str] = "output_config"

    effort: str | None = None
    format: WantedFormat | None = None


class CountRequest(Sampled):
    """Of /v1/messages/count_tokens."""

    group: ClassVar[str] = "count_tokens"

    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[Annotated[TextBlock, by_type(TextBlock)]] | None = None
    tools: Annotated[list[InputTool] | None, hosted_left_out("custom")] = None
    tool_choice: ToolChoice | None = None
    stop_sequences: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parse_special: bool = False
    output_config: OutputConfig | None = None
    output_format: WantedFormat | None = None
    thinking: ThinkingSwitch | None = None
    n: None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    form_field = "output_format"

    def conversation(self) -> list[Message]:
        """As chats have it."""
        system = [Message(role="system", content=_text(self.system))] if self.system else []
        return [*system, *(message for turn in self.messages for message in turn.messages())]

    def offered_tools(self) -> Tools:
        """What may be called."""
        functions = [
            Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
            for tool in self.tools or ()
        ]
        tool_choice = self.tool_choice or ToolChoice(type="auto")
        if (tool_choice.type == "tool") != (tool_choice.name is not None):
            raise ApiError(
                400,
                f"tool_choice has the type {tool_choice.type!r}; expected a name beside 'tool' alone.",
                param="tool_choice",
            )
        choice = {"any": "required", "tool": "required", "none": "none"}.get(tool_choice.type)
        allowed = None if tool_choice.name is None else [tool_choice.name]
        tools = Tools.of(functions, choice, allowed, not (tool_choice.disable_parallel_tool_use or allowed))
        return replace(tools, place="tools.{}.input_schema")

    def params(self, defaults: SamplingParams) -> SamplingParams:
        params = super().params(defaults)
        return params.with_(stop=(*params.stop, *(self.stop_sequences or ())))

    def template_options(self) -> dict[str, Any]:
        """What else the chat template is given."""
        effort = self.output_config and self.output_config.effort
        switch = {} if self.thinking is None else self.thinking.options()
        return switch | ({"reasoning_effort": effort} if effort else {}) | (self.chat_template_kwargs or {})

    def budget_of_thoughts(self) -> ThoughtBudget:
        """How many tokens may be thoughts."""
        return ThoughtBudget(
            budget_of(None, self.thinking and self.thinking.budget_tokens, self.template_options())
        )

    def continues(self) -> bool:
        last = self.messages[-1]
        return last.role == "assistant" and not any(message.tool_calls for message in last.messages())

    def wanted_format(self) -> ResponseFormat | None:
        form = self.output_format or (self.output_config and self.output_config.format)
        return (
            ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=form.schema_))
            if form
            else self.response_format
        )

    def most_logprobs(self) -> int | None:
        return None


class MessagesRequest(CountRequest):
    """Of /v1/messages."""

    group: ClassVar[str] = "messages"

    max_tokens: int  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]


def _text(content: str | list[TextBlock] | None) -> str:
    return content or "" if isinstance(content, str | None) else "".join(block.text for block in content)


def _tool_text(result: ToolResult) -> str:
    """What a tool gave; a failure says that it is one."""
    text = _text(result.content)
    return f"Error: {text}" if result.is_error and not text.lower().startswith("error") else text


class MessageAnswer(Answer):
    """Of /v1/messages."""

    prefix = "msg"
    end = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pieces = self.piece_reader()
        self._blocks = list[dict[str, Any]]()
        self._open = False
        self._last: StepOutput | None = None

    def whole(self, outputs: Iterable[tuple[int, StepOutput]]) -> dict[str, Any]:
        for prompt, output in outputs:
            self._events(prompt, output)
        return self._body()

    def chunks(self, prompt: int, output: StepOutput) -> list[dict[str, Any]]:
        events = self._events(prompt, output)
        if output.finished:
            ending = {"stop_reason": self._reason(), "stop_sequence": self._stop_sequence()}
            events += [
                {"type": "message_delta", "delta": ending, "usage": self.usage()},
                {"type": "message_stop"},
            ]
        return events

    def opening(self) -> list[dict[str, Any]]:
        return [{"type": "message_start", "message": self._body()}]

    def pause(self, doing: str) -> str:
        return f'{super().pause(doing)}event: ping\ndata: {{"type": "ping"}}\n\n'

    def closing(self) -> list[dict[str, Any]]:
        return []

    def failed(self, error: ApiError) -> dict[str, Any]:
        return {"type": "error", **error.body}

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens()},
            "speculation": usage["speculation"],
        }

    def _events(self, prompt: int, output: StepOutput) -> list[dict[str, Any]]:
        """What an output adds to the blocks of the answer."""
        self.check(prompt, output)
        self.reader(self.number(prompt, output), output)
        self._last = output
        events = list[dict[str, Any]]()
        for piece in self._pieces.read(output):
            if piece.reasoning:
                events += self._written("thinking", piece.reasoning, signature="")
            if piece.content:
                events += self._written("text", piece.content)
            if piece.name is not None and piece.call is not None:
                events += self._opened(
                    {
                        "type": "tool_use",
                        "id": self._pieces.calls[piece.call].id,
                        "name": piece.name,
                        "input": {},
                    }
                )
            if piece.arguments:
                events.append(self._delta({"type": "input_json_delta", "partial_json": piece.arguments}))
        return events + (self._closed() if output.finished else [])

    def _written(self, kind: str, text: str, **fields: str) -> list[dict[str, Any]]:
        """Events of more text in a block of a kind, which is opened with these fields."""
        events = list[dict[str, Any]]()
        if not (self._open and self._blocks[-1]["type"] == kind):
            events += self._opened({"type": kind, kind: "", **fields})
        self._blocks[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _opened(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        events = self._closed()
        self._blocks.append(block)
        self._open = True
        return [
            *events,
            {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {**block}},
        ]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _closed(self) -> list[dict[str, Any]]:
        was_open = self._open
        self._open = False
        if not was_open:
            return []
        block = self._blocks[-1]
        signed = list[dict[str, Any]]()
        if (
            block["type"] == "thinking"
        ):  # clients give thoughts back with what signs them, which nothing here asks for
            block["signature"] = b64encode(sha256(block["thinking"].encode()).digest()).decode()
            signed = [self._delta({"type": "signature_delta", "signature": block["signature"]})]
        return [*signed, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _stop_sequence(self) -> str | None:
        reason = self._last.sample.stop_reason if self._last is not None else None
        return reason if isinstance(reason, str) else None

    def _reason(self) -> str:
        assert self._last is not None
        if self._last.sample.finish_reason == "length":
            return "max_tokens"
        if self._pieces.called:
            return "tool_use"
        return "end_turn" if self._stop_sequence() is None else "stop_sequence"

    def _content(self) -> list[dict[str, Any]]:
        """Blocks; a call that is broken off has what was written of its input."""
        inputs = {call.id: {"input": call.input} for call in self._pieces.calls}
        return [{**block, **inputs.get(block.get("id", ""), {})} for block in self._blocks]

    def _body(self) -> dict[str, Any]:
        ended = self._last is not None and self._last.finished
        return {
            "id": f"{self.prefix}_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self._content(),
            "stop_reason": self._reason() if ended else None,
            "stop_sequence": self._stop_sequence() if ended else None,
            "usage": self.usage(),
        }
