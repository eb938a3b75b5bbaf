"""/v1/responses: one answer in text to a text or a conversation, whole or as OpenAI's typed events. Nothing is stored, and no tools are called."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from polydraft.engine.output import StepOutput
from polydraft.params import SamplingParams
from polydraft.server.answers import Answer, check, traced
from polydraft.server.errors import ApiError
from polydraft.server.protocol import Body, Message, Sampled

PART = {"type": "output_text", "annotations": list[Any](), "logprobs": list[Any]()}


class InputText(Body):
    """Given by a user, or by the model before."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Any = Field(None, exclude=True)
    logprobs: Any = Field(None, exclude=True)


class InputMessage(Message):
    """One of a conversation; those that were answered may be given back as they came."""

    type: Literal["message"] = "message"
    content: str | list[InputText]  # pyright: ignore[reportIncompatibleVariableOverride]
    id: Any = Field(None, exclude=True)
    status: Any = Field(None, exclude=True)
    phase: Any = Field(None, exclude=True)


class Format(Body):
    type: Literal["text"]


class Text(Body):
    """How the answer is written: as text. JSON by a schema is asked for at /v1/chat/completions, or here with `guided_json`."""

    format: Format | None = None


class ResponsesRequest(Sampled):
    """Of /v1/responses."""

    input: Annotated[str, Field(min_length=1)] | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    parse_special: bool = False
    max_output_tokens: int | None = None
    text: Text | None = None
    n: None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    max_tokens: None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    response_format: None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def messages(self) -> list[Message]:
        """The conversation, with the instructions before it."""
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        asked = [Message(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        return [*first, *asked]

    def most_tokens(self) -> int:
        return super().most_tokens() if self.max_output_tokens is None else self.max_output_tokens

    def most_logprobs(self) -> int | None:
        return None


@dataclass
class Responses(Answer):
    """Of /v1/responses. given, params: the request, parts of which are told again."""

    given: ResponsesRequest | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    texts: list[str] = field(default_factory=list[str])
    num_events: int = 0

    prefix, end = "resp", ""

    def whole(self, outputs: Iterable[tuple[int, StepOutput]]) -> dict[str, Any]:
        taken = [self._take(prompt, output) for prompt, output in outputs]
        return self._body(self._status(taken[-1]))

    def chunks(self, prompt: int, output: StepOutput) -> list[dict[str, Any]]:
        events = [] if self.readers else self._opening()
        self._take(prompt, output)
        at = {"item_id": self._item("")["id"], "output_index": 0, "content_index": 0}
        if output.text or self.trace:
            delta = {**at, "delta": output.text, "logprobs": []}
            if self.trace:
                delta["speculation"] = traced(self.tokenizer, output, self.reader(0, output), [])
            events.append(self._event("response.output_text.delta", **delta))
        if output.finished:
            status, text = self._status(output), "".join(self.texts)
            events += [
                self._event("response.output_text.done", **at, text=text, logprobs=[]),
                self._event("response.content_part.done", **at, part={**PART, "text": text}),
                self._event("response.output_item.done", output_index=0, item=self._item(status)),
                self._event(f"response.{status}", response=self._body(status)),
            ]
        return events

    def closing(self, usage: bool) -> list[dict[str, Any]]:
        return []

    def failed(self, error: ApiError) -> dict[str, Any]:
        told = error.body["error"]
        return self._event("error", code=told["code"] or told["type"], message=told["message"], param=told["param"])

    def usage(self) -> dict[str, Any]:
        told = super().usage()
        return {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": {**told["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": told["total_tokens"],
            "speculation": told["speculation"],
        }

    def _take(self, prompt: int, output: StepOutput) -> StepOutput:
        check(output)
        self.reader(self.number(prompt, output), output)
        self.texts.append(output.text)
        return output

    def _status(self, output: StepOutput) -> str:
        return "incomplete" if output.sample.finish_reason == "length" else "completed"

    def _opening(self) -> list[dict[str, Any]]:
        at = {"item_id": self._item("")["id"], "output_index": 0, "content_index": 0}
        body = self._body("in_progress")
        return [
            self._event("response.created", response=body),
            self._event("response.in_progress", response=body),
            self._event("response.output_item.added", output_index=0, item={**self._item("in_progress"), "content": []}),
            self._event("response.content_part.added", **at, part={**PART, "text": ""}),
        ]

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self.num_events += 1
        return {"type": kind, "sequence_number": self.num_events - 1, **more}

    def _item(self, status: str) -> dict[str, Any]:
        content = [{**PART, "text": "".join(self.texts)}]
        return {"id": f"msg-{self.id}", "type": "message", "role": "assistant", "status": status, "content": content}

    def _body(self, status: str) -> dict[str, Any]:
        given, running = self.given, status == "in_progress"
        assert given is not None
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "text": {"format": {"type": "text"}},
            "output": [] if running else [self._item(status)],
            "usage": None if running else self.usage(),
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "store": False,
            "metadata": {},
        }
