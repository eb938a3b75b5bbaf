"""llama.cpp's own requests as completions, and their answers as its server writes them; what its clients ask about the server."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import Request, Response
from pydantic import Field, model_validator

from polydraft.engine.output import StepOutput
from polydraft.engine.structured import lark_of
from polydraft.errors import InvalidInputError
from polydraft.server.answers import Completion, Told, finite, token_text
from polydraft.server.bodies import Body, Requested, Seed, Stops, Unserved
from polydraft.server.errors import ApiError
from polydraft.server.protocol import MOST_LOGPROBS, ChatRequest, CompletionRequest
from polydraft.server.service import Service
from polydraft.server.speculation import RequestedSpeculation

__all__ = ["InfillRequest", "LlamaCppCompletion", "TemplateRequest", "apply_template", "completion", "props", "slots"]


class LlamaCppCompletion(Requested):
    """Of /completion. n_predict: -1 is all that the context holds.  n_probs: alternatives to tell beside each token.  grammar: in GBNF."""

    model: str | None = None
    prompt: str | list[Any]
    n_predict: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Seed = None
    stop: Annotated[str | list[str] | None, Stops] = None
    stream: bool = False
    n_probs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    repeat_penalty: float | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool = False
    logit_bias: list[Any] | dict[str, float] | None = None
    return_tokens: bool = False
    json_schema: dict[str, Any] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    grammar: str | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    grammar_lazy: Unserved = None
    speculation: RequestedSpeculation = Field(default_factory=RequestedSpeculation)

    @model_validator(mode="before")
    @classmethod
    def _without_off(cls, body: Any) -> Any:
        """Without values by which llama.cpp's samplers ask for nothing."""
        off = {"dynatemp_range": 0, "mirostat": 0, "top_n_sigma": -1, "xtc_probability": 0, "dry_multiplier": 0}
        return {k: v for k, v in body.items() if k not in off or v != off[k]} if isinstance(body, dict) else body

    async def completion(self, service: Service) -> CompletionRequest:
        """As OpenAI's clients would ask."""
        return await self._completion(service)

    async def _completion(self, service: Service) -> CompletionRequest:
        most = self.n_predict if self.n_predict is not None else self.max_tokens
        same = "model temperature top_k top_p min_p seed stop presence_penalty frequency_penalty ignore_eos stream speculation"
        fields = {name: value for name in same.split() if (value := getattr(self, name)) is not None}
        fields |= {"prompt": await _prompt(service, self.prompt), "max_tokens": -1 if most is None or most < 0 else most}
        fields |= {"logprobs": self.n_probs or None, "guided_json": self.json_schema, "repetition_penalty": self.repeat_penalty}
        fields |= {"guided_grammar": self._lark()} if self.grammar else {}
        return CompletionRequest.model_validate(fields | {"logit_bias": await self._biases(service)})

    def _lark(self) -> str:
        try:
            return lark_of(self.grammar or "")
        except InvalidInputError as error:
            raise ApiError(400, f"grammar: {error}", param="grammar") from error

    async def _biases(self, service: Service) -> dict[str, float] | None:
        """By token id; llama.cpp writes pairs, of ids or of a text whose every token is meant, and false for never."""
        if not isinstance(self.logit_bias, list):
            return self.logit_bias
        biases = dict[str, float]()
        for pair in self.logit_bias:
            if not (
                isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int | str) and isinstance(pair[1], float | int)
            ):
                raise ApiError(
                    400, "logit_bias: expected pairs of a token id, or a text, and a number or false.", param="logit_bias"
                )
            ids = [pair[0]] if isinstance(pair[0], int) else await service.encoded(pair[0], parse_special=False)
            biases |= {str(token): -1e9 if pair[1] is False else float(pair[1]) for token in ids}
        return biases


class ExtraFile(Body):
    """Another file of the project."""

    filename: str = "tmp"
    text: str


class InfillRequest(LlamaCppCompletion):
    """Of /infill. prompt: how what is filled in begins."""

    input_prefix: str
    input_suffix: str
    prompt: str = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    input_extra: list[ExtraFile] = Field(default_factory=list[ExtraFile])

    async def completion(self, service: Service) -> CompletionRequest:
        fields = (await self.model_copy(update={"prompt": "x"})._completion(service)).model_dump(exclude_unset=True)
        fields |= {"prompt": self.input_prefix, "suffix": self.input_suffix}
        return CompletionRequest.infill(fields, [(file.filename, file.text) for file in self.input_extra], self.prompt)


class TemplateRequest(ChatRequest):
    """Of /apply-template."""


async def completion(service: Service, request: Request, body: LlamaCppCompletion) -> Response:
    """Continue a text."""

    def answer(*arguments: Any) -> Completion:
        return LlamaCppAnswer(*arguments).returning(body.return_tokens)

    return await service.completions(request, await body.completion(service), answer)


async def _prompt(service: Service, prompt: str | Sequence[Any]) -> Any:
    """Text, or token ids; pieces of both in one list are joined."""
    kinds = {type(piece) for piece in prompt} if isinstance(prompt, list) else set[type]()
    if not kinds >= {int, str}:
        return prompt
    ids = list[int]()
    for piece in prompt:
        ids += [piece] if isinstance(piece, int) else await service.encoded(piece, parse_special=True)
    return ids


async def apply_template(service: Service, request: Request, body: TemplateRequest) -> dict[str, Any]:
    """The text that a conversation is written as."""
    return {"prompt": service.decoded(await service.conversation(body, body.messages, "messages"))}


class LlamaCppAnswer(Completion):
    """Of /completion."""

    end = ""
    _tokens = False

    def returning(self, tokens: bool) -> "LlamaCppAnswer":
        """tokens: whether ids are told in whole answers too."""
        self._tokens = tokens
        return self

    def whole(self, outputs: Iterable[tuple[int, StepOutput]]) -> Any:
        by_choice: dict[int, list[StepOutput]] = {}
        for prompt, output in outputs:
            self.check(prompt, output)
            by_choice.setdefault(self.number(prompt, output), []).append(output)
        answers = [self._answer(index, by_choice[index]) for index in sorted(by_choice)]
        return answers if len(self.prompts) > 1 else answers[0]

    def chunks(self, prompt: int, output: StepOutput) -> list[dict[str, Any]]:
        self.check(prompt, output)
        index = self.number(prompt, output)
        told_tokens = self.reader(index, output).read(output)
        stats = output.sample.stats
        head = {
            "index": index,
            "id_slot": -1,
            "tokens_predicted": stats.generated_tokens,
            "tokens_evaluated": len(self.prompts[prompt]),
        }
        piece = {
            **head,
            "content": output.text,
            "tokens": list(output.token_ids),
            "stop": False,
            **self._probabilities(told_tokens),
        }
        pieces = [piece] if output.text or told_tokens else []
        return [*pieces, {**self._ended(index, output), "content": "", "tokens": []}] if output.finished else pieces

    def closing(self) -> list[dict[str, Any]]:
        return []

    def _answer(self, index: int, outputs: Sequence[StepOutput]) -> dict[str, Any]:
        told_tokens = self._all_tokens(index, list(outputs))
        text, last = "".join(output.text for output in outputs), outputs[-1]
        ids = list(last.sample.token_ids) if self._tokens else []
        return {**self._ended(index, last), "content": text, "tokens": ids, **self._probabilities(told_tokens)}

    def _ended(self, index: int, output: StepOutput) -> dict[str, Any]:
        sample, prompt = output.sample, self.prompts[index // self.n]
        word = sample.stop_reason if isinstance(sample.stop_reason, str) else ""
        kind = "limit" if sample.finish_reason == "length" else "word" if word else "eos"
        stats = sample.stats
        return {
            "index": index,
            "id_slot": -1,
            "model": self.model,
            "prompt": self.tokenizer.decode(list(prompt)),
            "stop": True,
            "stop_type": kind,
            "stopping_word": word,
            "truncated": False,
            "has_new_line": "\n" in sample.text,
            "tokens_predicted": stats.generated_tokens,
            "tokens_evaluated": len(prompt),
            "tokens_cached": stats.cached_tokens,
            "generation_settings": {"seed": sample.seed, "temperature": self.params.temperature, "top_k": self.params.top_k, "top_p": self.params.top_p, "min_p": self.params.min_p},
            "timings": timings(len(prompt), output),
            "speculation": self.usage()["speculation"],
        }  # fmt: skip

    def _probabilities(self, tokens: Sequence[Told]) -> dict[str, Any]:
        if self.params.logprobs is None:
            return {}
        logprobs = [token.logprob for token in tokens if token.logprob is not None]
        listed = [
            {**self._token(entry.token_id, entry.logprob), "top_logprobs": [self._token(k, v) for k, v in entry.top.items()]}
            for entry in logprobs
        ]
        return {"completion_probabilities": listed}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, parts = token_text(self.tokenizer, token_id)
        return {"id": token_id, "token": text, "bytes": parts or [], "logprob": finite(logprob)}


def timings(num_prompt: int, output: StepOutput) -> dict[str, Any]:
    """Milliseconds of reading the prompt and of generating."""
    stats = output.sample.stats
    reading, count = 1000 * stats.seconds["prefill"], num_prompt - stats.cached_tokens
    writing = 1000 * stats.total_seconds - reading
    timed = {
        "cache_n": stats.cached_tokens,
        "prompt_n": count,
        "prompt_ms": reading,
        "predicted_n": stats.generated_tokens,
        "predicted_ms": writing,
    }
    for name, number, milliseconds in (("prompt", count, reading), ("predicted", stats.generated_tokens, writing)):
        timed[f"{name}_per_token_ms"] = milliseconds / number if number else 0.0
        timed[f"{name}_per_second"] = 1000 * number / milliseconds if milliseconds else 0.0
    return timed | {"draft_n": stats.drafted_tokens, "draft_n_accepted": stats.accepted_tokens}


def props(service: Service, version: str) -> dict[str, Any]:
    """Of the model that is asked first."""
    engine = service.engine.engine
    defaults, tokenizer = engine.default_params(), service.tokenizer
    sampling = {name: getattr(defaults, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return {
        "default_generation_settings": {"id": 0, "n_ctx": engine.target.max_model_len, "params": sampling},
        "total_slots": engine.target.max_num_seqs,
        "model_path": service.name,
        "model_alias": service.name,
        "chat_template": service.template(),
        "bos_token": getattr(tokenizer, "bos_token", None) or "",
        "eos_token": getattr(tokenizer, "eos_token", None) or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"polydraft {version}",
    }


def slots(service: Service) -> list[dict[str, Any]]:
    """As many as the model has, the busy ones first."""
    engine = service.engine.engine
    return [
        {"id": number, "n_ctx": engine.target.max_model_len, "speculative": engine.drafter is not None, "is_processing": number < engine.num_running}
        for number in range(engine.target.max_num_seqs)
    ]  # fmt: skip
