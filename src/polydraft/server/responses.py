"""/v1/responses: one answer to a text or a conversation, of thoughts, text and calls of tools, whole or as OpenAI's typed events. Nothing is stored."""

import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field

from polydraft.engine.output import StepOutput
from polydraft.engine.sequence import TokenLogprob
from polydraft.server.answers import Answer, finite, token_text, traced
from polydraft.server.bodies import Body, Requested, Text, TextAlone, by_type, hosted_left_out
from polydraft.server.errors import ApiError
from polydraft.server.parts import ReadableOutput
from polydraft.server.protocol import (
    MOST_LOGPROBS,
    AllowedOf,
    Call,
    Called,
    Choice,
    Function,
    JsonSchema,
    Message,
    RefusalPart,
    ResponseFormat,
    Sampled,
    Tools,
)
from polydraft.server.tools import Piece

log = logging.getLogger("polydraft.server")


class Texts(NamedTuple):
    """Items of text. event: what its events are called.  head: the prefix of identifiers, and fields.  part: what its text is a part of."""

    event: str
    head: dict[str, Any]
    part: dict[str, Any]


TEXTS = {
    "message": Texts(
        "output_text",
        {"prefix": "msg", "fields": {"role": "assistant"}},
        {"type": "output_text", "annotations": list[Any](), "logprobs": list[Any]()},
    ),
    "reasoning": Texts(
        "reasoning_text", {"prefix": "rs", "fields": {"summary": list[Any]()}}, {"type": "reasoning_text"}
    ),
}
"""Items of text by their type."""


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


@dataclass
class Responses(Answer):
    """Of /v1/responses. request: parts of it are told again."""

    request: ResponsesRequest | None = None
    num_events: int = 0

    prefix = "resp"
    end = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pieces = self.piece_reader()
        self._items = list[dict[str, Any]]()
        self._logprobs = list[dict[str, Any]]()
        self._num_told = 0
        """Of all tokens, and of how many of them something was told or is not to be."""

    def whole(self, outputs: Iterable[tuple[int, StepOutput]]) -> dict[str, Any]:
        status = "completed"
        for prompt, output in outputs:
            self._events(prompt, output)
            status = _status(output)
        return self._body(status)

    def chunks(self, prompt: int, output: StepOutput) -> list[dict[str, Any]]:
        events = self._events(prompt, output)
        if output.finished:
            status = _status(output)
            events.append(self._event(f"response.{status}", response=self._body(status)))
        return events

    def opening(self) -> list[dict[str, Any]]:
        return [
            self._event(f"response.{kind}", response=self._body("in_progress"))
            for kind in ("created", "in_progress")
        ]

    def closing(self) -> list[dict[str, Any]]:
        return []

    def failed(self, error: ApiError) -> dict[str, Any]:
        content = error.body["error"]
        return self._event(
            "error",
            code=content["code"] or content["type"],
            message=content["message"],
            param=content["param"],
        )

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
            },
            "total_tokens": usage["total_tokens"],
            "speculation": usage["speculation"],
        }

    def _events(self, prompt: int, output: StepOutput) -> list[dict[str, Any]]:
        """What an output adds to the items of the answer."""
        self.check(prompt, output)
        reader = self.reader(self.number(prompt, output), output)
        pieces = self._pieces.read(output)
        told_tokens = reader.read(output)
        trace = traced(self.tokenizer, output, told_tokens) if self.trace else None
        self._logprobs += [self._logprob(token.logprob) for token in told_tokens if token.logprob is not None]
        events = list[dict[str, Any]]()
        for piece in pieces or [Piece()]:
            kind = "reasoning" if piece.reasoning or self._is_thinking(pieces) else "message"
            if piece.reasoning or piece.content or trace:
                events += self._text_events(kind, piece.reasoning or piece.content, trace)
                trace = None
            if piece.call is not None:
                events += self._called(piece)
        if output.finished:
            is_text = not self._items or self._items[-1]["type"] == "message"
            has_untold = len(self._logprobs) > self._num_told
            events += (
                self._text_events("message", "", None) if not self._items or (has_untold and is_text) else []
            )
            events += self._closed(_status(output))
        return events

    def _is_thinking(self, pieces: Seq[Piece]) -> bool:
        """Whether an output that adds nothing goes on with the thoughts that are open."""
        return not pieces and bool(self._items) and self._items[-1]["type"] == "reasoning"

    def _text_events(self, kind: str, text: str, trace: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Events of more text in an item of a kind: a message, or reasoning."""
        events = list[dict[str, Any]]()
        name, head, part = TEXTS[kind]
        if not self._items or self._items[-1]["type"] != kind:
            events += self._closed("completed")
            item = {
                "id": f"{head['prefix']}-{self.id}",
                "type": kind,
                **head["fields"],
                "status": "in_progress",
                "content": list[Any](),
            }
            self._items.append(item)
            events.append(
                self._event("response.output_item.added", output_index=len(self._items) - 1, item={**item})
            )
            item["content"] = [
                {**part, "text": "", **({"logprobs": list[Any]()} if kind == "message" else {})}
            ]
            events.append(
                self._event(
                    "response.content_part.added", **self._place(), content_index=0, part={**part, "text": ""}
                )
            )
        content = self._items[-1]["content"][0]
        content["text"] += text
        logprobs = self._untold_logprobs() if kind == "message" else []
        if kind == "message":
            content["logprobs"] += logprobs
        if text or trace or logprobs:
            delta = (
                {"delta": text}
                | ({"logprobs": logprobs} if kind == "message" else {})
                | ({"speculation": trace} if trace else {})
            )
            events.append(self._event(f"response.{name}.delta", **self._place(), content_index=0, **delta))
        return events

    def _untold_logprobs(self) -> list[dict[str, Any]]:
        """Of the answer's tokens that are new; those of thoughts are not told."""
        if not self._logprobs:
            return []
        begin = max(self._num_told, self._reasoning_tokens())
        self._num_told = max(begin, len(self._logprobs))
        return self._logprobs[begin:]

    def _logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        """Of a token, and of those beside it."""
        own, *others = [
            {
                "token": self.word(token),
                "logprob": finite(logprob),
                "bytes": token_text(self.tokenizer, token)[1] or [],
            }
            for token, logprob in ((entry.token_id, entry.logprob), *entry.top.items())
        ]
        return {**own, "top_logprobs": others}

    def _called(self, piece: Piece) -> list[dict[str, Any]]:
        """Events of a piece of a call."""
        assert piece.call is not None
        call = self._pieces.calls[piece.call]
        events = list[dict[str, Any]]()
        if piece.name is not None:
            events += self._closed("completed")
            item = {
                "id": f"fc-{self.id}-{piece.call}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": "",
            }
            self._items.append({**item, "status": "in_progress"})
            events.append(
                self._event(
                    "response.output_item.added", output_index=len(self._items) - 1, item={**self._items[-1]}
                )
            )
        if piece.arguments:
            self._items[-1]["arguments"] += piece.arguments
            events.append(
                self._event("response.function_call_arguments.delta", **self._place(), delta=piece.arguments)
            )
        return events

    def _closed(self, status: str) -> list[dict[str, Any]]:
        """Events at the end of an item; a call that is broken off is incomplete."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item = self._items[-1]
        events = list[dict[str, Any]]()
        if item["type"] in TEXTS:
            part = item["content"][0]
            name, *_ = TEXTS[item["type"]]
            logprobs = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            events.append(
                self._event(
                    f"response.{name}.done", **self._place(), content_index=0, text=part["text"], **logprobs
                )
            )
            events.append(
                self._event("response.content_part.done", **self._place(), content_index=0, part={**part})
            )
            if item["type"] == "reasoning":
                item["encrypted_content"] = b64encode(part["text"].encode()).decode()
        else:
            status = "completed" if self._pieces.calls[-1].complete else "incomplete"
            call = {"name": item["name"], "arguments": item["arguments"]}
            events += (
                [self._event("response.function_call_arguments.done", **self._place(), **call)]
                if status == "completed"
                else []
            )
        item["status"] = status
        return [
            *events,
            self._event("response.output_item.done", output_index=len(self._items) - 1, item={**item}),
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self.num_events += 1
        return {"type": kind, "sequence_number": self.num_events - 1, **more}

    def _body(self, status: str) -> dict[str, Any]:
        request = self.request
        running = status == "in_progress"
        assert request is not None
        tools = request.model_dump(include={"tools", "tool_choice"}, exclude_none=True)
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "text": {"format": {"type": "text"}}
            | (request.text.model_dump(by_alias=True, exclude_none=True) if request.text else {}),
            "output": []
            if running
            else [item for item in self._items if item["type"] in TEXTS or item["status"] == "completed"],
            "usage": None if running else self.usage(),
            "parallel_tool_calls": request.parallel_tool_calls,
            "tool_choice": tools.get("tool_choice", "auto" if self.tools else "none"),
            "tools": tools.get("tools", []),
            "store": False,
            "metadata": request.metadata or {},
            "top_logprobs": request.top_logprobs or 0,
            "truncation": "disabled",
        }


@lru_cache(maxsize=64)  # once
def _tell(kind: str, what: str) -> None:
    log.info("items of the type %r in the input of responses are %s", kind, what)


def _of_assistant(item: Message | FunctionCall | OtherCall, thoughts: str, before: list[Message]) -> Message:
    """What the assistant said or called, joined with its last message, which is taken from those before, where it is one turn."""
    calls = list[Call]()
    if isinstance(item, FunctionCall):
        calls = [Call(id=item.call_id, function=Called(name=item.name, arguments=item.arguments))]
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


def _status(output: StepOutput) -> str:
    return "incomplete" if output.sample.finish_reason == "length" else "completed"
