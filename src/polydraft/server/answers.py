"""What clients get: OpenAI's objects from the engine's outputs, whole or in chunks, and what drafts did under `speculation`.

Of each sample a `Reader` knows how far it was told. Outputs share a sample that goes on filling in the engine's thread, so a chunk is made of
the output's own tokens and of the log-probabilities at their positions, which are there before it is given.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import time
from typing import Any
from uuid import uuid4

from polydraft.engine.output import StepOutput
from polydraft.engine.sequence import Sample, TokenLogprob
from polydraft.engine.stopping import REPLACEMENT, Detokenizer
from polydraft.models.vocabulary import byte_alphabet
from polydraft.params import SamplingParams
from polydraft.server.errors import ApiError
from polydraft.server.reasoning import ReasoningParser, opens_reasoning
from polydraft.server.tools import HERMES, CallFormat, CallParser, Piece, ToolCall

LOWEST = -9999.0
"""Written for a log-probability of -inf, which JSON does not have."""


def token_text(tokenizer: Any, token_id: int) -> tuple[str, list[int] | None]:
    """A token's text and its UTF-8 bytes, which may be part of a character; None where the tokenizer does not tell them.

    Example:
        >>> from polydraft.models import load, pair
        >>> tokenizer = load.load_tokenizer(str(pair.target_folder()))
        >>> token_text(tokenizer, tokenizer("é")["input_ids"][0])
        ('bytes:\\\\xc3', [195])
    """
    text = tokenizer.decode([token_id])
    if REPLACEMENT not in text:
        return text, list(text.encode())
    piece = tokenizer.convert_ids_to_tokens(token_id)
    letters = byte_alphabet()
    if piece.startswith("<0x"):  # byte fallback of SentencePiece
        parts = [int(piece[3:5], 16)]
    elif all(character in letters for character in piece):
        parts = [letters[character] for character in piece]
    else:
        return text, None
    return "bytes:" + "".join(f"\\x{part:02x}" for part in parts), parts


@dataclass
class Reader:
    """What was told of one sample. push: gives the text that a token completes, where tokens are traced."""

    push: Callable[[int], str] | None
    num_tokens: int = 0
    num_characters: int = 0

    def logprobs(self, output: StepOutput) -> list[TokenLogprob]:
        """Of the output's tokens, which count as told."""
        start, self.num_tokens = self.num_tokens, self.num_tokens + len(output.token_ids)
        return [] if output.sample.logprobs is None else output.sample.logprobs[start : self.num_tokens]


@dataclass
class Answer(ABC):
    """One response in the making. prompts: their ids.  params: of each sample.  echo: what stands before each text.

    kind: the object's name, and that of its chunks.  methods: drafter and rule, as usage tells them.  num_predicted: tokens of the prediction.
    tools: names of those that may be called.  calls: how the model writes calls of them.  trace: tell where each token comes from.
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
    calls: CallFormat = HERMES
    tools: Collection[str] = ()

    kind = chunk_kind = prefix = ""
    end = "data: [DONE]\n\n"

    def __post_init__(self) -> None:
        self.readers: dict[int, Reader] = {}
        self.samples: dict[int, Sample] = {}

    @property
    def n(self) -> int:
        """Choices of a prompt."""
        return self.params.n

    def reader(self, index: int, output: StepOutput) -> Reader:
        """Of the choice that an output belongs to."""
        if index not in self.readers:
            push = (
                Detokenizer(self.tokenizer, self.prompts[index // self.n], skip_special_tokens=True).push if self.trace else None
            )
            self.readers[index] = Reader(push)
            self.samples[index] = output.sample
        return self.readers[index]

    def number(self, prompt: int, output: StepOutput) -> int:
        """Of the choice: the samples of the first prompt, then those of the next."""
        return prompt * self.n + output.sample.index

    @abstractmethod
    def whole(self, outputs: Iterable[tuple[int, StepOutput]]) -> dict[str, Any]:
        """The response, from all outputs."""

    @abstractmethod
    def chunks(self, prompt: int, output: StepOutput) -> list[dict[str, Any]]:
        """Events that an output is worth, often one, none where no text is certain yet."""

    @abstractmethod
    def closing(self, usage: bool) -> list[dict[str, Any]]:
        """Events behind the last output. usage: whether it was asked for."""

    @abstractmethod
    def failed(self, error: ApiError) -> dict[str, Any]:
        """The event of an error in the middle of a stream."""

    def usage(self) -> dict[str, Any]:
        """Tokens, and what the drafts were worth, of all choices together."""
        stats = [sample.stats for sample in self.samples.values()]
        prompt, completion = sum(map(len, self.prompts)), sum(s.generated_tokens for s in stats)
        calls = sum(s.steps for s in stats)
        followed = sum(int((s.drafter_counts or {}).get("accepted_predictions", 0)) for s in stats)
        depth = max((len(s.drafted_by_depth) for s in stats), default=0)
        reached = [sum(s.drafted_by_depth[d] for s in stats if d < len(s.drafted_by_depth)) for d in range(depth)]
        accepted = [sum(s.accepted_by_depth[d] for s in stats if d < len(s.accepted_by_depth)) for d in range(depth)]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": min((s.cached_tokens for s in stats), default=0)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": followed,
                "rejected_prediction_tokens": max(self.num_predicted * len(stats) - followed, 0),
            },
            "speculation": {
                **self.methods,
                "steps": calls,
                "tokens_per_step": completion / calls if calls else 0.0,
                "drafted_tokens": sum(s.drafted_tokens for s in stats),
                "accepted_tokens": sum(s.accepted_tokens for s in stats),
                "acceptance_by_depth": [k / r if r else 0.0 for k, r in zip(accepted, reached, strict=True)],
            },
        }


class Choices(Answer):
    """One with choices, in chunks of one kind."""

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def whole(self, outputs: Iterable[tuple[int, StepOutput]]) -> dict[str, Any]:
        by_choice: dict[int, list[StepOutput]] = {}
        for prompt, output in outputs:
            check(output)
            index = self.number(prompt, output)
            self.reader(index, output)
            by_choice.setdefault(index, []).append(output)
        choices = [self._choice(index, by_choice[index]) for index in sorted(by_choice)]
        return {**self._head(self.kind), "choices": choices, "usage": self.usage()}

    def chunks(self, prompt: int, output: StepOutput) -> list[dict[str, Any]]:
        check(output)
        index = self.number(prompt, output)
        first = index not in self.readers
        reader = self.reader(index, output)
        logprobs = reader.logprobs(output)
        if not (first or output.text or logprobs or output.finished or self.trace):
            return []
        choice = self._delta(index, output, logprobs, reader, first)
        reader.num_characters += len(output.text)
        body = {**self._head(self.chunk_kind), "choices": [choice]}
        if self.trace:
            body["speculation"] = traced(self.tokenizer, output, reader, logprobs)
        return [body]

    def closing(self, usage: bool) -> list[dict[str, Any]]:
        return [{**self._head(self.chunk_kind), "choices": [], "usage": self.usage()}] if usage else []

    def failed(self, error: ApiError) -> dict[str, Any]:
        return error.body

    @abstractmethod
    def _choice(self, index: int, outputs: list[StepOutput]) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def _delta(self, index: int, output: StepOutput, told: list[TokenLogprob], reader: Reader, first: bool) -> dict[str, Any]:
        """What a chunk adds to a choice."""

    def _told(self, index: int, outputs: list[StepOutput]) -> list[TokenLogprob]:
        reader = self.reader(index, outputs[0])
        return [logprob for output in outputs for logprob in reader.logprobs(output)]


class Completion(Choices):
    """Of /v1/completions."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def _choice(self, index: int, outputs: list[StepOutput]) -> dict[str, Any]:
        before, sample = self.echo[index // self.n] if self.echo else "", outputs[-1].sample
        logprobs = self._logprobs(self._told(index, outputs), len(before)) if sample.logprobs is not None else None
        text = before + "".join(output.text for output in outputs)
        return {"index": index, "text": text, "logprobs": logprobs, **ended(outputs[-1])}

    def _delta(self, index: int, output: StepOutput, told: list[TokenLogprob], reader: Reader, first: bool) -> dict[str, Any]:
        before = self.echo[index // self.n] if self.echo and first else ""
        reader.num_characters += len(before)
        logprobs = self._logprobs(told, reader.num_characters) if output.sample.logprobs is not None else None
        return {"index": index, "text": before + output.text, "logprobs": logprobs, **ended(output)}

    def _logprobs(self, told: list[TokenLogprob], offset: int) -> dict[str, Any]:
        texts = [token_text(self.tokenizer, t.token_id)[0] for t in told]
        offsets = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
        tops = [{token_text(self.tokenizer, k)[0]: _finite(v) for k, v in t.top.items()} for t in told]
        values = [_finite(t.logprob) for t in told]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


@dataclass
class Chat(Choices):
    """Of /v1/chat/completions. reasoning: whether <think> parts are told apart."""

    reasoning: bool = False

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._parsers: dict[int, CallParser] = {}
        self._thoughts: dict[int, ReasoningParser] = {}

    def _read(self, index: int, text: str, last: bool) -> list[Piece]:
        """What a text adds to a choice."""
        reasoning = ""
        if self.reasoning:
            if index not in self._thoughts:
                self._thoughts[index] = ReasoningParser(opens_reasoning(self.tokenizer, self.prompts[0]))
            reasoning, text = self._thoughts[index].push(text, last=last)
        if not self.tools:
            return [Piece(content=text, reasoning=reasoning)]
        parser = self._parsers.setdefault(index, CallParser(self.tools, self.calls))
        return [*([Piece(reasoning=reasoning)] if reasoning else []), *parser.push(text, last=last)]

    def _ended(self, index: int, output: StepOutput) -> dict[str, Any]:
        end, parser = ended(output), self._parsers.get(index)
        called = parser is not None and any(call.complete for call in parser.calls)
        return {**end, "finish_reason": "tool_calls"} if called and end["finish_reason"] == "stop" else end

    def _choice(self, index: int, outputs: list[StepOutput]) -> dict[str, Any]:
        own_logprobs = self._told(index, outputs)
        logprobs = self._logprobs(own_logprobs) if outputs[-1].sample.logprobs is not None else None
        text = "".join(output.text for output in outputs)
        pieces = self._read(index, text, last=True)
        content, reasoning = ("".join(getattr(piece, name) for piece in pieces) for name in ("content", "reasoning"))
        calls = [_call(call) for call in self._parsers[index].calls if call.complete] if self.tools else []
        message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        message |= ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})
        return {"index": index, "message": message, "logprobs": logprobs, **self._ended(index, outputs[-1])}

    def _delta(self, index: int, output: StepOutput, told: list[TokenLogprob], reader: Reader, first: bool) -> dict[str, Any]:
        pieces = self._read(index, output.text, output.finished)
        content, reasoning = ("".join(getattr(piece, name) for piece in pieces) for name in ("content", "reasoning"))
        calls = dict[int, dict[str, Any]]()
        for piece in pieces:
            if piece.call is not None:
                call = calls.setdefault(piece.call, {"index": piece.call, "function": {"arguments": ""}})
                if piece.name is not None:
                    call |= _call(self._parsers[index].calls[piece.call])
                    call["function"]["arguments"] = ""
                call["function"]["arguments"] += piece.arguments
        delta: dict[str, Any] = ({"role": "assistant"} if first else {}) | (
            {"content": content} if content or not (calls or reasoning) else {}
        )
        delta |= ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": list(calls.values())} if calls else {})
        logprobs = self._logprobs(told) if output.sample.logprobs is not None else None
        return {"index": index, "delta": delta, "logprobs": logprobs, **self._ended(index, output)}

    def _logprobs(self, told: list[TokenLogprob]) -> dict[str, Any]:
        content = [
            {**self._token(t.token_id, t.logprob), "top_logprobs": [self._token(k, v) for k, v in t.top.items()]} for t in told
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, parts = token_text(self.tokenizer, token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": parts}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def check(output: StepOutput) -> None:
    """Raise what a client is told of a sample that did not end by itself."""
    if output.finished and output.sample.refused:
        raise ApiError(400, str(output.sample.error))
    if output.finished and output.sample.finish_reason == "error":
        raise ApiError(500, "the request failed while it ran; the server's log says why.")
    if output.finished and output.sample.finish_reason == "abort":
        raise ApiError(503, "the request was ended before it was done: its time was up, or the server is going down.")


def ended(output: StepOutput) -> dict[str, Any]:
    """Why a choice ended, with the stop id or string as vLLM tells it."""
    if not output.finished:
        return {"finish_reason": None}
    return {"finish_reason": output.sample.finish_reason, "stop_reason": output.sample.stop_reason}


def traced(tokenizer: Any, output: StepOutput, reader: Reader, told: Seq[TokenLogprob]) -> dict[str, Any]:
    """One round: each token's text, origin and depth below the last committed one, and the tree that it comes from.

    A tree's node n hangs on `parents[n]`; node 0 is the last token before the round. `path`: the accepted nodes.
    """
    push, tree = reader.push or str, output.tree
    tokens = [
        {"id": token, "text": push(token), "source": origin.source, "branch": origin.branch, "depth": depth}
        for depth, (token, origin) in enumerate(zip(output.token_ids, output.origins, strict=True), 1)
    ]
    for token, logprob in zip(tokens, told, strict=False):
        token["logprob"] = _finite(logprob.logprob)
    if tree is None:
        return {"tokens": tokens, "tree": None}
    nodes = [n for n, parent in enumerate(tree.parents) if n == 0 or parent >= 0]
    texts = [tokenizer.decode([tree.token_ids[n]]) for n in nodes]
    return {"tokens": tokens, "tree": {"texts": texts, "parents": [tree.parents[n] for n in nodes], "path": tree.path}}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
