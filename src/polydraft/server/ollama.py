"""Ollama's requests as chats and completions, see `ollama_answer` for what they are answered."""

import json
from collections.abc import Sequence
from time import perf_counter
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, model_validator

from polydraft.server.bodies import Body, Ids, Requested, Seed, Stops, Texts, Unserved
from polydraft.server.conversation import Tool, text_of_part
from polydraft.server.embeddings import Dimensions, shortened
from polydraft.server.errors import ApiError
from polydraft.server.incoming import GONE, unless_gone
from polydraft.server.ollama_answer import ChatAnswer, GenerateAnswer, nanoseconds, now
from polydraft.server.protocol import ChatRequest, CompletionRequest, ThoughtBudget
from polydraft.server.service import Service


class Options(Requested):
    """How to sample; those of memory and threads are the server's own."""

    group: ClassVar[str] = "options"

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Seed = None
    stop: Annotated[str | list[str] | None, Stops] = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = None

    def fields(self) -> dict[str, Any]:
        """As completions and chats have them; all that the context holds where no length is given."""
        sent = self.model_dump(exclude_none=True, exclude={"num_predict", "repeat_penalty"})
        most = self.num_predict if self.num_predict and self.num_predict > 0 else -1
        return sent | {"max_tokens": most, "repetition_penalty": self.repeat_penalty}


class OllamaBody(Requested):
    """What all have in common. keep_alive: models leave when another needs their place, and not by the clock."""

    model: str | None = None
    options: Options = Field(default_factory=Options)
    keep_alive: str | float | None = None

    @property
    def loads(self) -> str:
        """Why an answer ends that has nothing to say."""
        return "unload" if str(self.keep_alive) in ("0", "0s", "0.0") else "load"


class Asking(OllamaBody):
    """For text. format: "json" or a schema.  think: whether, or how much, a model thinks first, where its template knows it.

    thinking_budget_tokens: most tokens of that.
    """

    stream: bool = True
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    thinking_budget_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    def fields(self) -> dict[str, Any]:
        """As completions and chats have them."""
        fields = self.options.fields() | {"model": self.model, "stream": self.stream}
        if isinstance(self.format, dict):
            fields["guided_json"] = self.format
        elif self.format not in (None, "", "json"):
            raise ApiError(
                400, f"format is {self.format[:64]!r}; expected 'json' or a JSON schema.", param="format"
            )
        elif self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        return fields

    def thought(self) -> dict[str, Any]:
        """For templates."""
        level = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return level | ({} if self.think is None else {"enable_thinking": self.think is not False})


class OllamaFunction(Body):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict[str, Any])


class OllamaCall(Body):
    """One that the model made before."""

    id: str | None = None
    function: OllamaFunction


class OllamaMessage(Body):
    """thinking: what an assistant thought before.  tool_name: whose result this is."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Unserved = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_readable_results(cls, body: Any) -> Any:
        if not (
            isinstance(body, dict) and body.get("role") == "tool" and isinstance(body.get("images"), list)
        ):
            return body
        left_out = "".join(text_of_part({"type": "image"}) for _ in body["images"])
        return {**body, "images": None, "content": f"{body.get('content') or ''}{left_out}"}

    def plain(self, number: int, calls: Sequence[str]) -> dict[str, Any]:
        """As chats have it. number: of the message, in the names of its calls.  calls: names of those whose results are to come."""
        message: dict[str, Any] = {
            "role": self.role,
            "content": self.content,
            "reasoning_content": self.thinking,
        }
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call_{number}_{index}",
                    "function": {
                        "name": call.function.name,
                        "arguments": json.dumps(call.function.arguments),
                    },
                }
                for index, call in enumerate(self.tool_calls)
            ]
        if self.role == "tool":
            message |= {"name": self.tool_name, "tool_call_id": self.tool_call_id or next(iter(calls), None)}
        return message


class OllamaChat(Asking):
    """Of /api/chat. Without messages the model is loaded."""

    group: ClassVar[str] = "ollama chat"

    messages: list[OllamaMessage] = Field(default_factory=list[OllamaMessage])
    tools: list[dict[str, Any]] | None = None

    def chat(self) -> ChatRequest:
        """As OpenAI's clients would ask."""
        messages = list[dict[str, Any]]()
        calls = list[str]()
        for number, message in enumerate(self.messages):
            messages.append(message.plain(number, calls))
            calls = [
                *calls[message.role == "tool" :],
                *(call["id"] for call in messages[-1].get("tool_calls", ())),
            ]
        tools = [Tool.model_validate({"type": "function", **tool}).model_dump() for tool in self.tools or ()]
        fields: dict[str, Any] = {
            "messages": messages,
            "tools": tools or None,
            "chat_template_kwargs": self.thought() or None,
            "thinking_budget_tokens": self.thinking_budget_tokens,
        }
        continued = (
            bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        )
        fields |= {
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
            "continue_final_message": continued,
        }
        return ChatRequest.model_validate(self.fields() | fields)


class OllamaGenerate(Asking):
    """Of /api/generate: a text in the model's template, or `raw`; `suffix`: what it is to fill in before. Without a text the model is loaded."""

    group: ClassVar[str] = "generate"

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool = False
    context: Ids | None = None

    def messages(self) -> list[dict[str, Any]]:
        """A conversation of it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]

    def completion(self, prompt: str | list[int]) -> CompletionRequest:
        """Of a prompt that is written out."""
        fields = {
            "prompt": prompt,
            "suffix": self.suffix,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }
        return CompletionRequest.model_validate(self.fields() | fields)


class OllamaEmbed(OllamaBody):
    """Of /api/embed. truncate: texts beyond the context are cut.  Without a text there is no embedding."""

    group: ClassVar[str] = "embed"

    input: Texts | Literal[""] | Annotated[list[str], Field(max_length=0)] = ""
    truncate: bool = True
    dimensions: Dimensions | None = None


class OllamaEmbedding(OllamaBody):
    """Of /api/embeddings, which came before /api/embed."""

    group: ClassVar[str] = "ollama embeddings"

    prompt: str = ""


async def chat(service: Service, request: Request, body: OllamaChat) -> Response:
    """Answer a conversation."""
    if not body.messages:
        return _nothing(service, body, message={"role": "assistant", "content": ""})
    chat_request = body.chat()
    return await service.converse(request, chat_request, chat_request.messages, ChatAnswer)


async def generate(service: Service, request: Request, body: OllamaGenerate) -> Response:
    """Continue or answer a text."""
    if not body.prompt and not body.suffix:
        return _nothing(service, body, response="")
    prompt: str | list[int] = body.prompt
    thinking = None
    written = body.raw or body.suffix is not None or not service.template()
    if not written:
        chat_request = ChatRequest.model_validate(
            {"messages": body.messages(), "chat_template_kwargs": body.thought() or None}
        )
        prompt = await service.conversation(chat_request, chat_request.messages, "prompt")
        thinking = service.thinking(prompt, budget=ThoughtBudget(body.thinking_budget_tokens))
    if body.context:
        more = service.without_first(await service.encoded(prompt, parse_special=True))
        prompt = [*body.context, *more]
    return await service.completions(request, body.completion(prompt), GenerateAnswer, thinking)


async def embed(service: Service, request: Request, body: OllamaEmbed) -> Response:
    """An embedding of each text."""
    began = perf_counter()
    texts = (
        body.input
        if isinstance(body.input, list) and not (body.input and isinstance(body.input[0], int))
        else [body.input]
    )
    embedded = await _embedded(service, request, texts if body.input else [], body.truncate)
    if embedded is None:
        return Response(status_code=GONE)
    vectors, count = embedded
    counts = {
        "total_duration": nanoseconds(perf_counter() - began),
        "load_duration": 0,
        "prompt_eval_count": count,
    }
    written = [shortened(vector, body.dimensions).tolist() for vector in vectors]
    return JSONResponse({"model": body.model or service.name, "embeddings": written, **counts})


async def embedding(service: Service, request: Request, body: OllamaEmbedding) -> Response:
    """The embedding of a text."""
    embedded = await _embedded(service, request, [body.prompt] if body.prompt else [], True)
    if embedded is None:
        return Response(status_code=GONE)
    vectors, _ = embedded
    return JSONResponse(
        {"embedding": [number for vector in vectors for number in shortened(vector, None).tolist()]}
    )


async def _embedded(
    service: Service, request: Request, texts: Sequence[Any], truncate: bool
) -> tuple[list[Any], int] | None:
    most = service.engine.engine.target.max_model_len
    ids = [(await service.encoded(text, parse_special=False))[: most if truncate else None] for text in texts]
    vectors = await unless_gone(request, service.embedded(ids))
    return None if vectors is None else (vectors, sum(map(len, ids)))


def _nothing(service: Service, body: OllamaBody, **fields: Any) -> Response:
    """The answer to a request that only asks for the model to be there, or not to stay."""
    head = {"model": body.model or service.name, "created_at": now()}
    return JSONResponse({**head, **fields, "done": True, "done_reason": body.loads})
