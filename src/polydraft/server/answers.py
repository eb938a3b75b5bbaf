"""What clients get: OpenAI's objects from the engine's outputs, whole or in chunks, and what drafts did under `speculation`."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import time
from typing import Any
from uuid import uuid4

from polydraft.core.params import SamplingParams
from polydraft.engine.detokenizer import Detokenizer
from polydraft.engine.output import StepOutput
from polydraft.engine.sequence import Sample, TokenLogprob
from polydraft.models.tokens.spelling import Spelling
from polydraft.server.answer_tokens import AnswerToken, PieceReader, SampleReader, finite, token_text, traced
from polydraft.server.errors import ApiError
from polydraft.server.formats.form import Format
from polydraft.server.formats.named import HERMES
from polydraft.server.measured import drafts_of, speculative_decoding, timings


@dataclass
class Answer(ABC):
    """One response in the making. prompts: their ids.  params: of each sample.  echo: what stands before each text.

    kind: the object's name, and that of its chunks.  methods: drafter and verifier, as usage tells them.  num_predicted: tokens of the prediction.
    tools: parameters of those that may be called, by name.  calls: how the model writes.  trace: tell where each token comes from.
    include_usage: whether a stream ends with the usage.  continuous_usage: whether every chunk has it.
    tells_ids, tells_prompt_ids: whether ids are told, of answers and of prompts.  names_ids: whether log-probabilities name ids.
    prompt_logprobs: of the tokens of each prompt; they are there before the first output.
    """

    tokenizer: Any
    model: str
    prompts: Seq[Seq[int]]
    params: SamplingParams
    trace: bool = False
    echo: Seq[str] = ()
    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time()))
    methods: dict[str, Any] = field(default_factory=dict[str, Any])
    num_predicted: int = 0
    calls: Format = HERMES
    tools: Mapping[str, Any] = field(default_factory=dict[str, Any])
    include_usage: bool = False
    continuous_usage: bool = False
    tells_ids: bool = False
    tells_prompt_ids: bool = False
    names_ids: bool = False
    prompt_logprobs: Seq[Seq[TokenLogprob | None]] = ()

    kind = chunk_kind = prefix = ""
    media = "text/event-stream"
    end = "data: [DONE]\n\n"

    def written(self, event: dict[str, Any]) -> str:
        """An event as it stands in a stream."""
        kind = f"event: {event['type']}\n" if "type" in event else ""
        return f"{kind}data: {in_one_line(event)}\n\n"

    def __post_init__(self) -> None:
        self.readers: dict[int, SampleReader] = {}
        self.samples: dict[int, Sample] = {}
        self._failed = set[int]()
        """Choices that ended in an error."""

    def piece_reader(self, *, apart: bool = True) -> PieceReader:
        """That tells content and calls of a choice apart. apart: its thoughts, too."""
        return PieceReader(self.params.thinking if apart else None, self.tools, self.calls)

    @property
    def n(self) -> int:
        """Choices of a prompt."""
        return self.params.n

    def reader(self, index: int, output: StepOutput) -> SampleReader:
        """Of the choice that an output belongs to."""
        if index not in self.readers:
            prompt = self.prompts[index // self.n]
            skip = self.params.skip_special_tokens
            tells_tokens = self.trace or self.params.logprobs is not None
            detokenizer = (
                Detokenizer(self.tokenizer, prompt, skip_special_tokens=skip) if tells_tokens else None
            )
            offset = len(self.echo[index // self.n]) if self.echo else 0
            self.readers[index] = SampleReader(detokenizer, offset, self.params.include_stop_str_in_output)
            self.samples[index] = output.sample
        return self.readers[index]

    def word(self, token_id: int) -> str:
        """A token's name in log-probabilities."""
        return f"token_id:{token_id}" if self.names_ids else token_text(self.tokenizer, token_id)[0]

    def number(self, prompt: int, output: StepOutput) -> int:
        """Of the choice: the samples of the first prompt, then those of the next."""
        return prompt * self.n + output.sample.index

    def check(self, prompt: int, output: StepOutput) -> None:
        """Raise what a client is told where nothing of the answer is good; a choice that failed beside others says so itself."""
        if output.finished and output.sample.finish_reason == "error":
            self._failed.add(self.number(prompt, output))
            if len(self._failed) == len(self.prompts) * self.n:
                raise _failure(output.sample)
        if output.finished and output.sample.finish_reason == "abort":
            raise ApiError(
                503, "the request was ended before it was done: its time was up, or the server is going down."
            )

    @abstractmethod
    def whole(self, outputs: Iterable[tuple[int, StepOutput]]) -> dict[str, Any]:
        """The response, from all outputs."""

    def opening(self) -> list[dict[str, Any]]:
        """Events with which a stream opens, before anything is read."""
        return []

    def pause(self, doing: str) -> str:
        """What stands in a stream where nothing has come for a while. doing: what its request does, in words."""
        return f": {doing}\n\n"

    @abstractmethod
    def chunks(self, prompt: int, output: StepOutput) -> list[dict[str, Any]]:
        """Events that an output is worth, often one, none where no text is certain yet."""

    @abstractmethod
    def closing(self) -> list[dict[str, Any]]:
        """Events behind the last output."""

    @abstractmethod
    def failed(self, error: ApiError) -> dict[str, Any]:
        """The event of an error in the middle of a stream."""

    def usage(self) -> dict[str, Any]:
        """Tokens, and what the drafts were worth, of all choices together."""
        stats = [sample.stats for sample in self.samples.values()]
        prompt = sum(map(len, self.prompts))
        completion = sum(s.generated_tokens for s in stats)
        followed = sum(int((s.drafter_counts or {}).get("accepted_predictions", 0)) for s in stats)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": min((s.cached_tokens for s in stats), default=0)},
            "completion_tokens_details": {
                "reasoning_tokens": self._reasoning_tokens(),
                "accepted_prediction_tokens": followed,
                "rejected_prediction_tokens": max(self.num_predicted * len(stats) - followed, 0),
            },
            "speculation": {**self.methods, **drafts_of(stats)},
        }

    def measured(self) -> dict[str, Any]:
        """Time and drafts of all choices together, as llama.cpp and vLLM tell them."""
        stats = [sample.stats for sample in self.samples.values()]
        return {
            "timings": timings(sum(map(len, self.prompts)), stats),
            "metrics": {"speculative_decoding": speculative_decoding(stats)},
        }

    def _reasoning_tokens(self) -> int:
        """Tokens of all thoughts."""
        thinking = self.params.thinking
        spelling = Spelling.of(self.tokenizer)
        if thinking is None:
            return 0
        return sum(
            thinking.num_tokens(map(spelling.bytes_of, sample.token_ids)) for sample in self.samples.values()
        )


class ChoiceAnswer(Answer):
    """One with choices, in chunks of one kind."""

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def whole(self, outputs: Iterable[tuple[int, StepOutput]]) -> dict[str, Any]:
        by_choice: dict[int, list[StepOutput]] = {}
        for prompt, output in outputs:
            self.check(prompt, output)
            index = self.number(prompt, output)
            self.reader(index, output)
            by_choice.setdefault(index, []).append(output)
        choices = [self._choice(index, by_choice[index]) for index in sorted(by_choice)]
        return {
            **self._head(self.kind),
            **self._of_prompt(),
            "choices": choices,
            "usage": self.usage(),
            **self.measured(),
        }

    def chunks(self, prompt: int, output: StepOutput) -> list[dict[str, Any]]:
        self.check(prompt, output)
        index = self.number(prompt, output)
        first = index not in self.readers
        reader = self.reader(index, output)
        told_tokens = reader.read(output)
        if not (first or output.text or told_tokens or output.finished or self.trace or self.tells_ids):
            return []
        choice = self._delta(index, output, told_tokens, first)
        if not (
            first
            or told_tokens
            or output.finished
            or self.trace
            or self.tells_ids
            or choice.get("delta", True)
        ):
            return []  # of what a call may be
        body = {**self._head(self.chunk_kind), **(self._of_prompt() if first else {}), "choices": [choice]}
        if self.include_usage:
            body["usage"] = self._usage_so_far() if self.continuous_usage else None
        if self.trace:
            body["speculation"] = traced(self.tokenizer, output, told_tokens)
        if output.finished and not self.include_usage:
            body |= self.measured()
        return [body]

    def _usage_so_far(self) -> dict[str, Any]:
        """The usage of what was told; the engine may be ahead of that."""
        usage = self.usage()
        told = sum(reader.num_tokens for reader in self.readers.values())
        return {**usage, "completion_tokens": told, "total_tokens": usage["prompt_tokens"] + told}

    def closing(self) -> list[dict[str, Any]]:
        return (
            [{**self._head(self.chunk_kind), "choices": [], "usage": self.usage(), **self.measured()}]
            if self.include_usage
            else []
        )

    def failed(self, error: ApiError) -> dict[str, Any]:
        return error.body

    def _of_prompt(self) -> dict[str, Any]:
        """What is told of the prompt beside the choices."""
        return {}

    def _ids(self, outputs: Iterable[StepOutput]) -> dict[str, Any]:
        """Token ids of a part of a choice."""
        return (
            {"token_ids": [token for output in outputs for token in output.token_ids]}
            if self.tells_ids
            else {}
        )

    def _likelihoods(self, prompt: int) -> list[dict[str, Any] | None]:
        """Of a prompt's tokens, as vLLM tells them: each token and its alternatives by their ids."""
        return [None if entry is None else self._ranked(entry) for entry in self.prompt_logprobs[prompt]]

    def _ranked(self, entry: TokenLogprob) -> dict[str, Any]:
        ranks = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top.items(), 1)}
        ranks = {entry.token_id: (entry.logprob, entry.rank)} | ranks
        return {
            str(token): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": token_text(self.tokenizer, token)[0],
            }
            for token, (logprob, rank) in ranks.items()
        }

    @abstractmethod
    def _choice(self, index: int, outputs: list[StepOutput]) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def _delta(
        self, index: int, output: StepOutput, tokens: list[AnswerToken], first: bool
    ) -> dict[str, Any]:
        """What a chunk adds to a choice."""

    def _all_tokens(self, index: int, outputs: list[StepOutput]) -> list[AnswerToken]:
        reader = self.reader(index, outputs[0])
        return [token for output in outputs for token in reader.read(output)]


def in_one_line(body: Any) -> str:
    """JSON without a character at which a client might end a line."""
    # some clients end lines at these, though JSON and server-sent events do not
    line_ends = {ord(character): f"\\u{ord(character):04x}" for character in "\u0085\u2028\u2029"}
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(line_ends)


def _failure(sample: Sample) -> ApiError:
    """What a client is told of a sample that ended in an error."""
    if sample.refused:
        return ApiError(400, str(sample.error))
    return ApiError(500, "the request failed while it ran; the server's log says why.")


def ended(output: StepOutput) -> dict[str, Any]:
    """Why a choice ended, with the stop id or string as vLLM tells it, and what failed."""
    if not output.finished:
        return {"finish_reason": None}
    end = {"finish_reason": output.sample.finish_reason, "stop_reason": output.sample.stop_reason}
    return end | (_failure(output.sample).body if end["finish_reason"] == "error" else {})
