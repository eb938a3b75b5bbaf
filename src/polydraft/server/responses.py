"""/v1/responses: one answer to a text or a conversation, of text and calls of tools, whole or as OpenAI's typed events. Nothing is stored."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from polydraft.engine.output import StepOutput
from polydraft.engine.sequence import TokenLogprob
from polydraft.server.answers import Answer, finite, is_cut, token_text, traced
from polydraft.server.bodies import Body, Requested, Text, TextAlone, by_type, hosted_left_out
from polydraft.server.errors import ApiError
from polydraft.server.protocol import (
    MOST_LOGPROBS,
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
from polydraft.server.tools import CallParser, Piece

PART = {"type": "output_text", "annotations": list[Any](), "logprobs": list[Any]()}


class InputText(Body):
    """Given by a user, or by the model before."""

    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(Message):
    """One of a conversation; those that were answered may be given back as they came."""

    type: Literal["message"] = "message"
    content: Annotated[str | list[Annotated[InputText | RefusalPart, by_type(InputText, RefusalPart)]], TextAlone]  # pyright: ignore[reportIncompatibleVariableOverride]


class FunctionCall(Called):
    """One that the model made before."""

    type: Literal["function_call"]
    call_id: str


class ReasoningItem(Body):
    """What the model thought before; it comes encrypted or in summary, and is not read."""

    type: Literal["reasoning"]


class FunctionCallOutput(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[str | list[Annotated[InputText, by_type(InputText)]], TextAlone]


class FunctionTool(Function):
    type: Literal["function"]


class NamedFunction(Body):
    type: Literal["function"]
    name: str


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


Item = Annotated[
    InputMessage | FunctionCall | FunctionCallOutput | ReasoningItem,
    by_type(InputMessage, FunctionCall, FunctionCallOutput, ReasoningItem, default=InputMessage),
]


class ResponsesRequest(Sampled):
    """Of /v1/responses. include: further parts of the answer, of which log-probabilities are there."""

    group: ClassVar[str] = "responses"

    input: Text | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool] | None, hosted_left_out("function")] = None
    tool_choice: Choice | NamedFunction | None = None
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
        """The conversation, with the instructions before it."""
        messages = [Message(role="system", content=self.instructions)] if self.instructions else []
        for item in [Message(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            if isinstance(item, Message):
                messages.append(item)
            elif isinstance(item, FunctionCallOutput):
                output = item.output if isinstance(item.output, str) else "".join(part.text for part in item.output)
                messages.append(Message(role="tool", content=output, tool_call_id=item.call_id))
            elif isinstance(item, FunctionCall):
                call = Call(id=item.call_id, function=Called(name=item.name, arguments=item.arguments))
                if messages and messages[-1].role == "assistant":
                    messages[-1] = Message(
                        role="assistant",
                        content=messages[-1].plain()["content"],
                        tool_calls=[*(messages[-1].tool_calls or ()), call],
                    )
                else:
                    messages.append(Message(role="assistant", content="", tool_calls=[call]))
        return messages

    def offered_tools(self) -> Tools:
        """What may be called."""
        named = self.tool_choice.name if isinstance(self.tool_choice, NamedFunction) else None
        choice = self.tool_choice if isinstance(self.tool_choice, str) else None
        return replace(Tools.of(self.tools or (), choice, named, self.parallel_tool_calls), place="tools.{}.parameters")

    def template_options(self) -> dict[str, Any]:
        """What else the chat template is given."""
        effort = {"reasoning_effort": self.reasoning.effort} if self.reasoning and self.reasoning.effort else {}
        return effort | (self.chat_template_kwargs or {})

    def wanted_format(self) -> ResponseFormat | None:
        form = self.text and self.text.format
        if form is None:
            return None
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

    prefix, end = "resp", ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parser, self._items = CallParser(self.tools, self.calls), list[dict[str, Any]]()
        self._untold = list[dict[str, Any]]()
        """Log-probabilities of tokens whose text is still to come."""

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
        return [self._event(f"response.{kind}", response=self._body("in_progress")) for kind in ("created", "in_progress")]

    def closing(self) -> list[dict[str, Any]]:
        return []

    def failed(self, error: ApiError) -> dict[str, Any]:
        content = error.body["error"]
        return self._event("error", code=content["code"] or content["type"], message=content["message"], param=content["param"])

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "speculation": usage["speculation"],
        }

    def _events(self, prompt: int, output: StepOutput) -> list[dict[str, Any]]:
        """What an output adds to the items of the answer."""
        self.check(prompt, output)
        reader = self.reader(self.number(prompt, output), output)
        pieces = (
            self._parser.push(output.text, last=output.finished, cut=is_cut(output))
            if self.tools
            else [Piece(content=output.text)]
        )
        told_tokens = reader.read(output)
        trace = traced(self.tokenizer, output, told_tokens) if self.trace else None
        self._untold += [self._logprob(token.logprob) for token in told_tokens if token.logprob is not None]
        events = list[dict[str, Any]]()
        for piece in pieces or [Piece()]:
            if piece.content or trace or not (self.tools or self._items):
                events += self._text_events(piece.content, trace)
                trace = None
            if piece.call is not None:
                events += self._called(piece)
        if output.finished:
            is_text = not self._items or self._items[-1]["type"] == "message"
            events += self._text_events("", None) if not self._items or (self._untold and is_text) else []
            events += self._closed(_status(output))
        return events

    def _text_events(self, text: str, trace: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Events of more text."""
        events = list[dict[str, Any]]()
        if not self._items or self._items[-1]["type"] != "message":
            events += self._closed("completed")
            item = {
                "id": f"msg-{self.id}",
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "content": list[Any](),
            }
            self._items.append(item)
            events.append(self._event("response.output_item.added", output_index=len(self._items) - 1, item={**item}))
            item["content"] = [{**PART, "text": "", "logprobs": list[Any]()}]
            events.append(self._event("response.content_part.added", **self._place(), content_index=0, part={**PART, "text": ""}))
        logprobs, self._untold = self._untold, list[dict[str, Any]]()
        self._items[-1]["content"][0]["text"] += text
        self._items[-1]["content"][0]["logprobs"] += logprobs
        if text or trace or logprobs:
            delta = {"delta": text, "logprobs": logprobs} | ({"speculation": trace} if trace else {})
            events.append(self._event("response.output_text.delta", **self._place(), content_index=0, **delta))
        return events

    def _logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        """Of a token, and of those beside it."""
        own, *others = [
            {"token": self.word(token), "logprob": finite(logprob), "bytes": token_text(self.tokenizer, token)[1] or []}
            for token, logprob in ((entry.token_id, entry.logprob), *entry.top.items())
        ]
        return {**own, "top_logprobs": others}

    def _called(self, piece: Piece) -> list[dict[str, Any]]:
        """Events of a piece of a call."""
        assert piece.call is not None
        call, events = self._parser.calls[piece.call], list[dict[str, Any]]()
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
            events.append(self._event("response.output_item.added", output_index=len(self._items) - 1, item={**self._items[-1]}))
        if piece.arguments:
            self._items[-1]["arguments"] += piece.arguments
            events.append(self._event("response.function_call_arguments.delta", **self._place(), delta=piece.arguments))
        return events

    def _closed(self, status: str) -> list[dict[str, Any]]:
        """Events at the end of an item; a call that is broken off is incomplete."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item, events = self._items[-1], list[dict[str, Any]]()
        if item["type"] == "message":
            part = item["content"][0]
            events.append(
                self._event(
                    "response.output_text.done", **self._place(), content_index=0, text=part["text"], logprobs=part["logprobs"]
                )
            )
            events.append(self._event("response.content_part.done", **self._place(), content_index=0, part={**part}))
        else:
            status = "completed" if self._parser.calls[-1].complete else "incomplete"
            call = {"name": item["name"], "arguments": item["arguments"]}
            events += (
                [self._event("response.function_call_arguments.done", **self._place(), **call)] if status == "completed" else []
            )
        item["status"] = status
        return [*events, self._event("response.output_item.done", output_index=len(self._items) - 1, item={**item})]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self.num_events += 1
        return {"type": kind, "sequence_number": self.num_events - 1, **more}

    def _body(self, status: str) -> dict[str, Any]:
        request, running = self.request, status == "in_progress"
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
            else [item for item in self._items if item["type"] == "message" or item["status"] == "completed"],
            "usage": None if running else self.usage(),
            "parallel_tool_calls": request.parallel_tool_calls,
            "tool_choice": tools.get("tool_choice", "auto" if self.tools else "none"),
            "tools": tools.get("tools", []),
            "store": False,
            "metadata": request.metadata or {},
            "top_logprobs": request.top_logprobs or 0,
            "truncation": "disabled",
        }


def _status(output: StepOutput) -> str:
    return "incomplete" if output.sample.finish_reason == "length" else "completed"
