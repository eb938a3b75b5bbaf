"""The answer of /v1/responses: items of thoughts, text and calls, whole or as OpenAI's typed events."""

from base64 import b64encode
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

from polydraft.engine.output import StepOutput
from polydraft.engine.sequence import TokenLogprob
from polydraft.server.answer_tokens import finite, token_text, traced
from polydraft.server.answers import Answer
from polydraft.server.errors import ApiError
from polydraft.server.formats.reader import Piece
from polydraft.server.responses import ResponsesRequest


class TextItems(NamedTuple):
    """Items of text. event: what its events are called.  head: the prefix of identifiers, and fields.  part: what its text is a part of."""

    event: str
    head: dict[str, Any]
    part: dict[str, Any]


TEXTS = {
    "message": TextItems(
        "output_text",
        {"prefix": "msg", "fields": {"role": "assistant"}},
        {"type": "output_text", "annotations": list[Any](), "logprobs": list[Any]()},
    ),
    "reasoning": TextItems(
        "reasoning_text", {"prefix": "rs", "fields": {"summary": list[Any]()}}, {"type": "reasoning_text"}
    ),
}
"""Items of text by their type."""


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
        return events + self._last_events(_status(output)) if output.finished else events

    def _last_events(self, status: str) -> list[dict[str, Any]]:
        """Events at the end of the answer, which has one item at least."""
        is_text = not self._items or self._items[-1]["type"] == "message"
        has_untold = len(self._logprobs) > self._num_told
        says_more = not self._items or (has_untold and is_text)
        events = self._text_events("message", "", None) if says_more else []
        return events + self._closed(status)

    def _is_thinking(self, pieces: Seq[Piece]) -> bool:
        """Whether an output that adds nothing goes on with the thoughts that are open."""
        return not pieces and bool(self._items) and self._items[-1]["type"] == "reasoning"

    def _text_events(self, kind: str, text: str, trace: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Events of more text in an item of a kind: a message, or reasoning."""
        is_new = not self._items or self._items[-1]["type"] != kind
        events = self._opened(kind) if is_new else []
        content = self._items[-1]["content"][0]
        content["text"] += text
        logprobs = self._untold_logprobs() if kind == "message" else []
        if kind == "message":
            content["logprobs"] += logprobs
        if text or trace or logprobs:
            delta: dict[str, Any] = {"delta": text}
            delta |= {"logprobs": logprobs} if kind == "message" else {}
            delta |= {"speculation": trace} if trace else {}
            name = f"response.{TEXTS[kind].event}.delta"
            events.append(self._event(name, **self._place(), content_index=0, **delta))
        return events

    def _opened(self, kind: str) -> list[dict[str, Any]]:
        """Events at the beginning of an item of text; the one before it ends."""
        events = self._closed("completed")
        _, head, part = TEXTS[kind]
        item = {
            "id": f"{head['prefix']}-{self.id}",
            "type": kind,
            **head["fields"],
            "status": "in_progress",
            "content": list[Any](),
        }
        events.append(self._added(item))
        item["content"] = [{**part, "text": "", **({"logprobs": list[Any]()} if kind == "message" else {})}]
        begun = {**part, "text": ""}
        return [
            *events,
            self._event("response.content_part.added", **self._place(), content_index=0, part=begun),
        ]

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        """The event of an item that begins."""
        self._items.append(item)
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item={**item})

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
                "status": "in_progress",
            }
            events.append(self._added(item))
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
            events = self._closed_text(item)
        elif self._pieces.calls[-1].complete:
            status = "completed"
            call = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **self._place(), **call)]
        else:
            status = "incomplete"
        item["status"] = status
        return [
            *events,
            self._event("response.output_item.done", output_index=len(self._items) - 1, item={**item}),
        ]

    def _closed_text(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        part = item["content"][0]
        place = {**self._place(), "content_index": 0}
        logprobs = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        name = f"response.{TEXTS[item['type']].event}.done"
        if item["type"] == "reasoning":
            item["encrypted_content"] = b64encode(part["text"].encode()).decode()
        return [
            self._event(name, **place, text=part["text"], **logprobs),
            self._event("response.content_part.done", **place, part={**part}),
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
            "output": [] if running else self._items,
            "usage": None if running else self.usage(),
            **({} if running else self.measured()),
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
