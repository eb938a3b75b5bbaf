"""The answers of /v1/completions and /v1/chat/completions, whole or in chunks."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from polydraft.engine.detokenizer import Detokenizer
from polydraft.engine.output import StepOutput
from polydraft.engine.sequence import TokenLogprob
from polydraft.server.answer_tokens import AnswerToken, PieceReader, finite, token_text
from polydraft.server.answers import ChoiceAnswer, ended
from polydraft.server.formats.reader import Piece, ToolCall


@dataclass
class Completion(ChoiceAnswer):
    """Of /v1/completions. ranked: whether prompts' log-probabilities are told vLLM's way."""

    ranked: bool = False

    kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl"

    def _choice(self, index: int, outputs: list[StepOutput]) -> dict[str, Any]:
        text = "".join(output.text for output in outputs)
        return {
            **self._part(index, text, self._all_tokens(index, outputs), outputs, first=True),
            **ended(outputs[-1]),
        }

    def _delta(
        self, index: int, output: StepOutput, tokens: list[AnswerToken], first: bool
    ) -> dict[str, Any]:
        return {**self._part(index, output.text, tokens, [output], first=first), **ended(output)}

    def _part(
        self, index: int, text: str, tokens: list[AnswerToken], outputs: Seq[StepOutput], *, first: bool
    ) -> dict[str, Any]:
        """What a choice has or is given. first: it is its beginning."""
        prompt = index // self.n
        before = self.echo[prompt] if self.echo and first else ""
        logprobs = None if self.params.logprobs is None else self._logprobs(tokens)
        if logprobs is not None and before and self.prompt_logprobs:
            echoed = self._logprobs_of_prompt(prompt)
            logprobs = {name: echoed[name] + values for name, values in logprobs.items()}
        part = {"index": index, "text": before + text, "logprobs": logprobs, **self._ids(outputs)}
        part |= {"prompt_token_ids": list(self.prompts[prompt])} if self.tells_prompt_ids and first else {}
        return part | ({"prompt_logprobs": self._likelihoods(prompt)} if self.ranked and first else {})

    def _logprobs(self, tokens: list[AnswerToken]) -> dict[str, list[Any]]:
        logprobs = [token.logprob for token in tokens if token.logprob is not None]
        return {
            "tokens": [self.word(t.token_id) for t in logprobs],
            "token_logprobs": [finite(t.logprob) for t in logprobs],
            "top_logprobs": [self._top(t) for t in logprobs],
            "text_offset": [token.offset for token in tokens],
        }

    def _logprobs_of_prompt(self, prompt: int) -> dict[str, list[Any]]:
        """Of its first token there is none."""
        ids = self.prompts[prompt]
        text = self.echo[prompt]
        detokenizer = Detokenizer(self.tokenizer, (), skip_special_tokens=False)
        offset = 0
        offsets = list[int]()
        for number, token in enumerate(ids):
            piece = detokenizer.push(token)
            offsets.append(offset)
            offset += (
                len(piece) if number or text.startswith(piece) else 0
            )  # the token that texts begin with is no text
        told = self._logprobs(
            [
                AnswerToken("", offset, entry)
                for offset, entry in zip(offsets, self.prompt_logprobs[prompt], strict=True)
            ]
        )
        first = {
            "tokens": [self.word(ids[0])],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [],
        }
        return {name: first[name] + told[name] for name in told}

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Alternatives and the token itself, the most likely first; of those with one text the most likely."""
        top = dict[str, float]()
        for token, logprob in sorted(
            {**entry.top, entry.token_id: entry.logprob}.items(), key=lambda item: -item[1]
        ):
            top.setdefault(self.word(token), finite(logprob))
        return top


@dataclass
class Chat(ChoiceAnswer):
    """Of /v1/chat/completions. tells_apart: whether thoughts are told apart from the answer.  tells_reasoning: whether they are told then.

    tells_prompt: whether the text of the prompt is told.
    """

    tells_apart: bool = True
    tells_reasoning: bool = True
    tells_prompt: bool = False

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._piece_readers: dict[int, PieceReader] = {}

    def _pieces_of(self, index: int) -> PieceReader:
        """The reader of a choice."""
        if index not in self._piece_readers:
            self._piece_readers[index] = self.piece_reader(apart=self.tells_apart)
        return self._piece_readers[index]

    def _ended(self, index: int, output: StepOutput) -> dict[str, Any]:
        end = ended(output)
        called = self._pieces_of(index).called
        return {**end, "finish_reason": "tool_calls"} if called and end["finish_reason"] == "stop" else end

    def _choice(self, index: int, outputs: list[StepOutput]) -> dict[str, Any]:
        logprobs = self._logprobs(self._all_tokens(index, outputs))
        text = "".join(output.text for output in outputs)
        reader = self._pieces_of(index)
        pieces = reader.push(text, last=True)
        content, reasoning = self._said(pieces, first=True)
        calls = [_call(call) for call in reader.calls]
        message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        message |= ({"reasoning_content": reasoning} if reasoning else {}) | (
            {"tool_calls": calls} if calls else {}
        )
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            **self._ids(outputs),
            **self._ended(index, outputs[-1]),
        }

    def _delta(
        self, index: int, output: StepOutput, tokens: list[AnswerToken], first: bool
    ) -> dict[str, Any]:
        pieces = self._pieces_of(index).read(output)
        content, reasoning = self._said(pieces, first=first)
        calls = dict[int, dict[str, Any]]()
        for piece in pieces:
            if piece.call is not None:
                call = calls.setdefault(piece.call, {"index": piece.call, "function": {"arguments": ""}})
                if piece.name is not None:
                    call |= _call(self._pieces_of(index).calls[piece.call])
                    call["function"]["arguments"] = ""
                call["function"]["arguments"] += piece.arguments
        delta: dict[str, Any] = ({"role": "assistant"} if first else {}) | (
            {"content": content} if content or (first and not (calls or reasoning)) else {}
        )
        delta |= ({"reasoning_content": reasoning} if reasoning else {}) | (
            {"tool_calls": list(calls.values())} if calls else {}
        )
        told = {"delta": delta, "logprobs": self._logprobs(tokens), **self._ids([output])}
        return {"index": index, **told, **self._ended(index, output)}

    def _said(self, pieces: Seq[Piece], *, first: bool) -> tuple[str, str]:
        """Content and thoughts of some pieces. first: of those with which the answer begins."""
        content, reasoning = (
            "".join(getattr(piece, name) for piece in pieces) for name in ("content", "reasoning")
        )
        return ("".join(self.echo) if first else "") + content, reasoning if self.tells_reasoning else ""

    def _of_prompt(self) -> dict[str, Any]:
        ids = list(self.prompts[0])
        told = {"prompt_token_ids": ids} if self.tells_prompt_ids else {}
        told |= {"prompt_text": self.tokenizer.decode(ids)} if self.tells_prompt else {}
        return told | ({"prompt_logprobs": self._likelihoods(0)} if self.prompt_logprobs else {})

    def _logprobs(self, tokens: list[AnswerToken]) -> dict[str, Any] | None:
        if self.params.logprobs is None:
            return None
        content = [
            {
                **self._token(t.token_id, t.logprob),
                "top_logprobs": [self._token(k, v) for k, v in t.top.items()],
            }
            for _, _, t in tokens
            if t is not None
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.word(token_id),
            "logprob": finite(logprob),
            "bytes": token_text(self.tokenizer, token_id)[1],
        }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
