"""Answers as Ollama writes them: lines of JSON, the last with counts and nanoseconds."""

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from time import perf_counter
from typing import Any

from polydraft.engine.output import StepOutput
from polydraft.server.answers import in_one_line
from polydraft.server.choices import Chat
from polydraft.server.errors import ApiError
from polydraft.server.formats.reader import Piece


class ChatAnswer(Chat):
    """Of /api/chat."""

    media = "application/x-ndjson"
    end = ""

    def written(self, event: dict[str, Any]) -> str:
        return in_one_line(event) + "\n"

    def pause(self, doing: str) -> str:
        return self.written(self._line([], False, []))

    def whole(self, outputs: Iterable[tuple[int, StepOutput]]) -> dict[str, Any]:
        pieces = list[Piece]()
        told_tokens = list[Any]()
        last = None
        for prompt, output in outputs:
            self.check(prompt, output)
            told_tokens += self.reader(0, output).read(output)
            pieces += self._pieces_of(0).read(output)
            last = output
        assert last is not None
        return {**self._line(pieces, last.finished, told_tokens), **self._end(last)}

    def chunks(self, prompt: int, output: StepOutput) -> list[dict[str, Any]]:
        self.check(prompt, output)
        told_tokens = self.reader(0, output).read(output)
        pieces = self._pieces_of(0).read(output)
        lines = [self._line(pieces, output.finished, told_tokens)]
        if not (
            (pieces and any(piece.content or piece.reasoning for piece in pieces))
            or self._called(output.finished)
            or self._cut(output.finished)
            or told_tokens
        ):
            lines = []
        return [*lines, {**self._line([], False, []), **self._end(output)}] if output.finished else lines

    def closing(self) -> list[dict[str, Any]]:
        return []

    def failed(self, error: ApiError) -> dict[str, Any]:
        return error.ollama

    def message(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """What a line adds."""
        more = ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
        return {"message": {"role": "assistant", "content": content, **more}}

    def counted(self, output: StepOutput) -> dict[str, Any]:
        """What the last line tells beyond times."""
        return {}

    def _called(self, last: bool) -> list[dict[str, Any]]:
        """Calls, all of them in the line of the last text: Ollama's clients take them whole."""
        calls = [call for call in self._pieces_of(0).calls if call.complete] if last else []
        return [
            {"id": call.id, "function": {"index": index, "name": call.name, "arguments": call.input}}
            for index, call in enumerate(calls)
        ]

    def _cut(self, last: bool) -> str:
        """A call that is broken off: nothing of Ollama's says so of a call, so it is text."""
        calls = self._pieces_of(0).calls if last else []
        return "".join(f"{call.name} {call.arguments}" for call in calls if not call.complete)

    def _line(self, pieces: Sequence[Piece], last: bool, tokens: Sequence[Any]) -> dict[str, Any]:
        content, thinking = (
            "".join(getattr(piece, name) for piece in pieces) for name in ("content", "reasoning")
        )
        logprobs = self._logprobs(list(tokens)) if tokens else None
        logprobs_field = {"logprobs": logprobs["content"]} if logprobs else {}
        head = {"model": self.model, "created_at": now()}
        return {
            **head,
            **self.message(content + self._cut(last), thinking, self._called(last)),
            "done": False,
            **logprobs_field,
        }

    def _end(self, output: StepOutput) -> dict[str, Any]:
        stats = output.sample.stats
        usage = self.usage()
        return {
            "done": True,
            "done_reason": "length" if output.sample.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(perf_counter() - stats.arrival),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": nanoseconds(stats.reading_seconds),
            "eval_count": usage["completion_tokens"],
            "reasoning_tokens": self._reasoning_tokens(),
            "eval_duration": nanoseconds(stats.writing_seconds),
            "speculation": usage["speculation"],
            **self.counted(output),
        }


class GenerateAnswer(ChatAnswer):
    """Of /api/generate."""

    def message(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"response": content} | ({"thinking": thinking} if thinking else {})

    def counted(self, output: StepOutput) -> dict[str, Any]:
        return {"context": [*self.prompts[0], *output.sample.token_ids]}


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    """Of seconds."""
    return int(seconds * 1e9)
