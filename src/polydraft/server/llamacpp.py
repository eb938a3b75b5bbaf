"""llama.cpp's own requests as completions, and their answers as its server writes them; what its clients ask about the server."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import Request, Response
from pydantic import Field
from typing_extensions import Self

from polydraft.engine.output import StepOutput
from polydraft.server.answer_tokens import AnswerToken, finite, token_text
from polydraft.server.bodies import Body, Requested, Seed, Stops, also
from polydraft.server.choices import Completion
from polydraft.server.errors import ApiError
from polydraft.server.formats.history import shown
from polydraft.server.measured import timings
from polydraft.server.protocol import ChatRequest, CompletionRequest
from polydraft.server.sampled import MOST_LOGPROBS, RequestedSpeculation
from polydraft.server.service import Service

SAMPLERS: Mapping[str, Mapping[str, Any]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
}
"""In the order that they are applied in, and values with which each does nothing."""
OFF_SAMPLERS = ("dry", "top_n_sigma", "typ_p", "typical_p", "xtc", "adaptive_p")
"""That do nothing without values of their own, which are refused."""


class LlamaCppCompletion(Requested):
    """Of /completion. n_predict: -1 is all that the context holds.  n_probs: alternatives to tell beside each token.  grammar: in GBNF.

    samplers: those that are applied; another does nothing.  response_fields: those that are told; `timings/prompt_n` stands as `prompt_n`.
    """

    group: ClassVar[str] = "completion"

    model: str | None = None
    prompt: str | list[Any]
    n_predict: Annotated[int | None, also("n_predict", "max_tokens")] = None
    n_cmpl: Annotated[int, also("n_cmpl", "n")] = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Seed = None
    stop: Annotated[str | list[str] | None, Stops] = None
    stream: bool = False
    n_probs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    samplers: list[str] | str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool = False
    logit_bias: list[Any] | dict[str, float] | None = None
    return_tokens: bool = False
    response_fields: list[str] | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    speculation: RequestedSpeculation = Field(default_factory=RequestedSpeculation)

    async def completion(self, service: Service) -> CompletionRequest:
        """As OpenAI's clients would ask."""
        return await self._completion(service)

    async def _completion(self, service: Service) -> CompletionRequest:
        most = self.n_predict
        sampled = self._sampled()
        same = "model temperature top_k top_p min_p seed stop presence_penalty frequency_penalty repeat_penalty repeat_last_n ignore_eos stream"
        fields = {
            name: value
            for name in f"{same} speculation grammar".split()
            if (value := getattr(sampled, name)) is not None
        }
        fields |= {
            "prompt": await _prompt(service, self.prompt),
            "max_tokens": -1 if most is None or most < 0 else most,
        }
        fields |= {"logprobs": self.n_probs or None, "json_schema": self.json_schema, "n": self.n_cmpl}
        return CompletionRequest.model_validate(fields | {"logit_bias": await self._biases(service)})

    def _sampled(self) -> Self:
        """Without what no sampler applies.

        Raises:
            ApiError: samplers that are not there, or in an order that gives another distribution.
        """
        names = self._samplers()
        if names is None:
            return self
        if unknown := [name for name in names if name not in (*SAMPLERS, *OFF_SAMPLERS)]:
            raise ApiError(
                400,
                f"samplers names {unknown[0][:64]!r}; expected some of {', '.join(SAMPLERS)}.",
                param="samplers",
            )
        off = {
            field: value
            for name, fields in SAMPLERS.items()
            if name not in names
            for field, value in fields.items()
        }
        applied = self.model_copy(update=off)
        if not applied._keeps_order(names):
            raise ApiError(
                400, f"samplers has the order {', '.join(names)}; they are applied in that of {', '.join(SAMPLERS)}. Leave it out, or order them so.", param="samplers"
            )  # fmt: skip
        return applied

    def _samplers(self) -> list[str] | None:
        """Their names."""
        if isinstance(self.samplers, str):
            raise ApiError(400, "samplers is text; expected a list of names.", param="samplers")
        return self.samplers or None

    def _keeps_order(self, names: Sequence[str]) -> bool:
        """Whether samplers do in this order what they do in ours: those that do nothing have no place in it."""
        active = [
            name
            for name in names
            if name in SAMPLERS and any(getattr(self, f) != x for f, x in SAMPLERS[name].items())
        ]
        is_greedy = self.temperature == 0 and "penalties" not in active
        return is_greedy or active == sorted(active, key=list(SAMPLERS).index)

    async def _biases(self, service: Service) -> dict[str, float] | None:
        """By token id; llama.cpp writes pairs, of ids or of a text whose every token is meant, and false for never."""
        if not isinstance(self.logit_bias, list):
            return self.logit_bias
        biases = dict[str, float]()
        for pair in self.logit_bias:
            if not (
                isinstance(pair, list)
                and len(pair) == 2
                and isinstance(pair[0], int | str)
                and isinstance(pair[1], float | int)
            ):
                raise ApiError(
                    400,
                    "logit_bias: expected pairs of a token id, or a text, and a number or false.",
                    param="logit_bias",
                )
            ids = (
                [pair[0]] if isinstance(pair[0], int) else await service.encoded(pair[0], parse_special=False)
            )
            biases |= {str(token): -1e9 if pair[1] is False else float(pair[1]) for token in ids}
        return biases


class ExtraFile(Body):
    """Another file of the project."""

    filename: str = "tmp"
    text: str


class InfillRequest(LlamaCppCompletion):
    """Of /infill. prompt: how what is filled in begins."""

    group: ClassVar[str] = "infill"

    input_prefix: str
    input_suffix: str
    prompt: str = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    input_extra: list[ExtraFile] = Field(default_factory=list[ExtraFile])

    def _samplers(self) -> list[str] | None:
        """Without the one that joins words alike, which editors ask for: the model's own distribution is sampled from."""
        return [name for name in super()._samplers() or () if name != "infill"] or None

    async def completion(self, service: Service) -> CompletionRequest:
        fields = (await self.model_copy(update={"prompt": "x"})._completion(service)).model_dump(
            exclude_unset=True
        )
        fields |= {"prompt": self.input_prefix, "suffix": self.input_suffix}
        return CompletionRequest.infill(
            fields, [(file.filename, file.text) for file in self.input_extra], self.prompt
        )


class TemplateRequest(ChatRequest):
    """Of /apply-template."""


async def completion(service: Service, request: Request, body: LlamaCppCompletion) -> Response:
    """Continue a text."""

    def answer(*arguments: Any) -> Completion:
        return LlamaCppAnswer(*arguments).returning(body.return_tokens, body.response_fields)

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
    _fields: Sequence[str] | None = None

    def returning(self, tokens: bool, fields: Sequence[str] | None) -> Self:
        """Of whole answers. tokens: whether ids are told there, too.  fields: that are told; none of them, all are."""
        self._tokens = tokens
        self._fields = fields or None
        return self

    def whole(self, outputs: Iterable[tuple[int, StepOutput]]) -> Any:
        by_choice: dict[int, list[StepOutput]] = {}
        for prompt, output in outputs:
            self.check(prompt, output)
            by_choice.setdefault(self.number(prompt, output), []).append(output)
        answers = [self._answer(index, by_choice[index]) for index in sorted(by_choice)]
        return answers if len(answers) > 1 else answers[0]

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
        return (
            [*pieces, {**self._ended(index, output), "content": "", "tokens": []}]
            if output.finished
            else pieces
        )

    def closing(self) -> list[dict[str, Any]]:
        return []

    def _answer(self, index: int, outputs: Sequence[StepOutput]) -> dict[str, Any]:
        told_tokens = self._all_tokens(index, list(outputs))
        text = "".join(output.text for output in outputs)
        last = outputs[-1]
        ids = list(last.sample.token_ids) if self._tokens else []
        return self._chosen(
            {**self._ended(index, last), "content": text, "tokens": ids, **self._probabilities(told_tokens)}
        )

    def _chosen(self, body: dict[str, Any]) -> dict[str, Any]:
        """The fields that were asked for, those of an object in it by their own names."""
        if self._fields is None:
            return body
        chosen = dict[str, Any]()
        for path in self._fields:
            value: Any = body
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            chosen |= {} if value is None else {path.rpartition("/")[2]: value}
        return chosen

    def _ended(self, index: int, output: StepOutput) -> dict[str, Any]:
        sample = output.sample
        prompt = self.prompts[index // self.n]
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
            "timings": timings(len(prompt), [stats]),
            "speculation": self.usage()["speculation"],
        }  # fmt: skip

    def _probabilities(self, tokens: Sequence[AnswerToken]) -> dict[str, Any]:
        if self.params.logprobs is None:
            return {}
        logprobs = [token.logprob for token in tokens if token.logprob is not None]
        listed = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(k, v) for k, v in entry.top.items()],
            }
            for entry in logprobs
        ]
        return {"completion_probabilities": listed}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, parts = token_text(self.tokenizer, token_id)
        return {"id": token_id, "token": text, "bytes": parts or [], "logprob": finite(logprob)}


def props(service: Service, version: str) -> dict[str, Any]:
    """Of the model that is asked first."""
    engine = service.engine.engine
    defaults = engine.default_params()
    tokenizer = service.tokenizer
    sampling = {name: getattr(defaults, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return {
        "default_generation_settings": {"id": 0, "n_ctx": engine.target.max_model_len, "params": sampling},
        "total_slots": engine.target.max_num_seqs,
        "model_path": service.name,
        "model_alias": service.name,
        "chat_template": service.template(),
        "chat_format": shown(service.format()),
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
