"""The routes: OpenAI's completions and chats, tokens, and whether the server lives."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

from polydraft import __version__
from polydraft.drafters.text.ngram import NgramDrafter
from polydraft.engine.asynchronous import AsyncEngine
from polydraft.engine.output import StepOutput
from polydraft.errors import IncompatibleError, InvalidInputError, PolydraftError
from polydraft.params import SamplingParams, StructuredOutputs
from polydraft.policy.fixed import FixedPolicy
from polydraft.server import errors
from polydraft.server.answers import Answer, Chat, Completion, check
from polydraft.server.errors import ApiError
from polydraft.server.guard import Guard
from polydraft.server.incoming import GONE, body_of, unless_gone
from polydraft.server.messages import CountRequest, MessageAnswer, MessagesRequest
from polydraft.server.metrics import Metrics
from polydraft.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    Sampled,
    Speculation,
    TokenizeRequest,
    Tools,
    text_of,
)
from polydraft.server.responses import Responses, ResponsesRequest
from polydraft.server.tools import HERMES, CallFormat, call_grammar, described, format_of, has_special_marks, with_ids

log = logging.getLogger("polydraft.server")
PAGE = Path(__file__).parent / "page"
B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True)
class Settings:
    """What one server allows.

    model: the name that clients give.  keys: API keys, any of which opens; none asks for none.  cors: origins whose pages may call; none.
    most_body: bytes.  most_choices: prompts times n of a request.  seconds: of a request.  drain: seconds that what runs has when the server ends.
    reasoning: whether chats tell what models think between <think> and </think> as `reasoning_content`.
    """

    model: str
    keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    most_body: int = 4 << 20
    most_choices: int = 64
    seconds: float = 600.0
    drain: float = 30.0
    reasoning: bool = True


def create_app(engine: AsyncEngine, settings: Settings) -> FastAPI:
    """The ASGI application; its lifespan runs the engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        async with engine:
            await engine.generate(
                [0], SamplingParams(max_tokens=1, ignore_eos=True)
            )  # what it compiles is compiled before it is ready
            app.state.ready = True
            yield
            app.state.ready = False
            await engine.close(settings.drain)

    app = FastAPI(title="polydraft", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.ready = False
    app.add_middleware(Guard, keys=settings.keys)  # pyright: ignore[reportArgumentType]
    if settings.cors:  # around the guard, so that pages can read its refusals
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors, allow_methods=["*"], allow_headers=["*"])
    for kind in (ApiError, PolydraftError, ValidationError):
        app.add_exception_handler(kind, _refused)
    app.add_exception_handler(HTTPException, _unrouted)
    _Routes(engine, settings).join(app)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    told = errors.of(error)
    if told.status >= 500:
        log.error("request %s failed: %s", request.state.request_id, error)
    return told.response(anthropic=request.url.path.startswith("/v1/messages"))


async def _unrouted(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = {404: "there is nothing at this path", 405: "this path is not for this method"}.get(status, "the request was refused")
    return ApiError(status, f"{what}: {request.method} {request.url.path[:200]}.").response()


class _Routes:
    """The routes of one engine."""

    def __init__(self, engine: AsyncEngine, settings: Settings) -> None:
        self.engine, self.settings, self.began = engine, settings, int(time())
        engine.engine.menu.offer(NgramDrafter(eos_token_ids=engine.engine.eos_token_ids))  # for predictions
        self._metrics = Metrics(engine.engine, settings.model)
        engine.observe = self._metrics.observe

    def join(self, app: FastAPI) -> None:
        """Put them into an application."""
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.get("/health")(self.health)
        app.get("/ready")(self.ready)
        app.get("/metrics")(self.metrics)
        app.get("/", include_in_schema=False)(self.page)
        app.mount("/page", StaticFiles(directory=PAGE))
        posts: list[tuple[str, Callable[..., Any], type[BaseModel]]] = [
            ("/v1/completions", self.completions, CompletionRequest),
            ("/v1/chat/completions", self.chat, ChatRequest),
            ("/v1/responses", self.responses, ResponsesRequest),
            ("/v1/messages", self.messages, MessagesRequest),
            ("/v1/messages/count_tokens", self.count_tokens, CountRequest),
            ("/tokenize", self.tokenize, TokenizeRequest),
            ("/detokenize", self.detokenize, DetokenizeRequest),
        ]
        for path, route, kind in posts:
            schema = kind.model_json_schema()
            body = {"content": {"application/json": {"schema": schema}}, "required": True}
            app.post(path, openapi_extra={"requestBody": body}, response_model=None)(route)

    async def models(self) -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> dict[str, Any]:
        """What is known of it."""
        self._check_model(name)
        return self._model()

    def _model(self) -> dict[str, Any]:
        built = self.engine.engine.summary()
        drafts = {name: built[name] for name in ("drafter", "drafters", "verifier", "lossless", "decoding")}
        drafts["verifiers"] = self.engine.engine.menu.rules()
        chat = bool(getattr(self._tokenizer, "chat_template", None))
        more = {"max_model_len": built["max_model_len"], "chat": chat, "speculation": drafts}
        return {"id": self.settings.model, "object": "model", "created": self.began, "owned_by": "polydraft", **more}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model:
            raise ApiError(
                404,
                f"model {name[:200]!r} is not here; {self.settings.model!r} is served.",
                param="model",
                code="model_not_found",
            )

    async def health(self) -> Response:
        """Whether the engine's thread lives."""
        alive = self.engine.running
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    async def ready(self, request: Request) -> Response:
        """Whether requests are taken at once."""
        ready = self.engine.running and request.app.state.ready
        return JSONResponse({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def metrics(self) -> Response:
        """Figures for Prometheus."""
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self) -> Response:
        """A chat, a text and a race to look at."""
        return FileResponse(PAGE / "index.html")

    async def completions(self, request: Request) -> Response:
        """Continue texts."""
        given = await self._read(request, CompletionRequest)
        if given.best_of not in (None, given.n or 1):
            raise ApiError(400, "best_of is only taken where it equals n.", param="best_of")
        if given.echo and given.logprobs is not None:
            raise ApiError(
                400, "echo with logprobs asks for those of the prompt, which are not computed. Drop one.", param="echo"
            )
        prompts = given.prompts()
        params = self._params(given, len(prompts), chat=False)
        ids = [await self._encoded(prompt, given.parse_special) for prompt in prompts]
        echo = [p if isinstance(p, str) else self._decode(p) for p in prompts] if given.echo else ()
        answer = Completion(self._tokenizer, self.settings.model, ids, params.n, given.speculation.trace, echo)
        return await self._answer(request, given, answer, params)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        given = await self._read(request, ChatRequest)
        params, tools = self._params(given, 1, chat=True), given.offered_tools()
        ids = await self._encoded_chat(given.messages, given.parse_special, tools=tools, options=given.template_options())
        params = await unless_gone(request, self._with_tools(params, tools))
        if params is None:
            return Response(status_code=GONE)
        answer = Chat(
            self._tokenizer,
            self.settings.model,
            [ids],
            params.n,
            given.speculation.trace,
            tools=[function.name for function in tools.callable],
            reasoning=self.settings.reasoning,
            calls=self._call_format,
        )
        return await self._answer(request, given, answer, params)

    async def _with_tools(self, params: SamplingParams, tools: Tools) -> SamplingParams:
        """With the grammar of the calls that may be made.

        Raises:
            ApiError: a schema that cannot be followed, by its place; another form beside the tools.
        """
        if not tools.callable:
            return params
        form, functions = params.structured_outputs, [function.model_dump() for function in tools.callable]
        if form is not None and not (isinstance(form, StructuredOutputs) and form.kind.startswith("json")):
            raise ApiError(
                400, "tools were given beside a form of the text; expected response_format alone beside them.", param="tools"
            )
        calls = self._call_format
        options = {"required": tools.required, "parallel": tools.parallel, "text": form, "calls": calls}
        grammar = call_grammar(functions, self._tokenizer, **options)
        try:
            source = await self.engine.compile_grammar(grammar)
        except InvalidInputError as error:
            for number, function in enumerate(tools.functions):
                try:
                    await self.engine.compile_grammar(StructuredOutputs(json=function.parameters or {"type": "object"}))
                except InvalidInputError as cause:
                    place = tools.place.format(number)
                    raise ApiError(400, f"{place}: {cause}", param=place) from cause
            raise ApiError(400, str(error), param="tools") from error
        return params.with_(
            structured_outputs=source,
            skip_special_tokens=params.skip_special_tokens and not has_special_marks(self._tokenizer, calls),
        )

    async def responses(self, request: Request) -> Response:
        """Answer a text or a conversation."""
        given = await self._read(request, ResponsesRequest)
        params, tools = self._params(given, 1, chat=True), given.offered_tools()
        ids = await self._encoded_chat(
            given.messages(), given.parse_special, tools=tools, options=given.template_options(), param="input"
        )
        params = await unless_gone(request, self._with_tools(params, tools))
        if params is None:
            return Response(status_code=GONE)
        names = [function.name for function in tools.callable]
        answer = Responses(
            self._tokenizer,
            self.settings.model,
            [ids],
            1,
            given.speculation.trace,
            given=given,
            params=params,
            tools=names,
            calls=self._call_format,
        )
        return await self._answer(request, given, answer, params)

    async def messages(self, request: Request) -> Response:
        """Answer a conversation in Anthropic's format."""
        given = await self._read(request, MessagesRequest)
        params, tools = self._params(given, 1, chat=True), given.offered_tools()
        params = params.with_(stop=(*params.stop, *(given.stop_sequences or ())))
        ids = await self._encoded_chat(given.conversation(), given.parse_special, tools=tools, options=given.template_options())
        params = await unless_gone(request, self._with_tools(params, tools))
        if params is None:
            return Response(status_code=GONE)
        names = [function.name for function in tools.callable]
        answer = MessageAnswer(self._tokenizer, self.settings.model, [ids], 1, tools=names, calls=self._call_format)
        return await self._answer(request, given, answer, params)

    async def count_tokens(self, request: Request) -> dict[str, Any]:
        """Tokens of a conversation in Anthropic's format."""
        given = await self._read(request, CountRequest)
        tools = given.offered_tools()
        ids = await self._encoded_chat(given.conversation(), given.parse_special, tools=tools, options=given.template_options())
        return {"input_tokens": len(ids)}

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Token ids of a text or a conversation."""
        given = await self._read(request, TokenizeRequest)
        if (given.prompt is None) == (given.messages is None):
            raise ApiError(400, "expected one of prompt and messages.", param="prompt")
        if given.messages is not None:
            ids = await self._encoded_chat(given.messages, given.parse_special or False)
        else:
            ids = await self._encoded(given.prompt or "", given.parse_special is not False)
        return {"tokens": ids, "count": len(ids), "max_model_len": self.engine.engine.target.max_model_len}

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """Text of token ids."""
        given = await self._read(request, DetokenizeRequest)
        return {"prompt": self._decode(given.tokens)}

    @property
    def _tokenizer(self) -> Any:
        return self.engine.engine.tokenizer

    @property
    def _template(self) -> str:
        return getattr(self._tokenizer, "chat_template", None) or ""

    @property
    def _call_format(self) -> CallFormat:
        """How the model writes calls; where its template says nothing, as it is told to."""
        return format_of(self._template) or HERMES

    def _decode(self, ids: Sequence[int]) -> str:
        most = self.engine.engine.target.vocab_size
        bad = next((token for token in ids if not 0 <= token < most), None)
        if bad is not None:
            raise ApiError(400, f"token id {bad} was given; expected 0 <= id < {most}.", param="tokens")
        return self._tokenizer.decode(list(ids))

    async def _encoded(self, prompt: str | list[int], parse_special: bool) -> list[int]:
        return await asyncio.to_thread(self.engine.engine.encode, prompt, parse_special=parse_special)

    async def _encoded_chat(
        self,
        messages: Sequence[Message],
        parse_special: bool,
        *,
        tools: Tools | None = None,
        options: Mapping[str, Any] | None = None,
        param: str = "messages",
    ) -> list[int]:
        plain, more = [message.plain() for message in messages], dict(options or {})
        if taken := more.keys() & {"messages", "conversation", "tools", "tokenize", "add_generation_prompt", "parse_special"}:
            raise ApiError(400, f"chat_template_kwargs has {min(taken)!r}, which is not for it.", param="chat_template_kwargs")
        offered = [function.described() for function in tools.functions] if tools else []
        if (calls := format_of(self._template)) is not None:
            more |= {"tools": offered} if offered else {}
            plain = with_ids(plain, calls)
        else:
            plain = described(plain, offered)
        try:
            return await asyncio.to_thread(self.engine.engine.encode_chat, plain, parse_special=parse_special, **more)
        except IncompatibleError as error:  # it names the model by its path
            told = str(error).replace(str(self.engine.engine.summary()["target"]), self.settings.model)
            raise ApiError(400, told, param=param) from error

    async def _read(self, request: Request, kind: type[B]) -> B:
        """The body, checked.

        JSON is asked for by its media type: a page of another site cannot send that without being allowed to.
        """
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            raise ApiError(415, "expected a body in JSON with 'Content-Type: application/json'.")
        body = await body_of(request, self.settings.most_body)
        given = kind.model_validate_json(body)
        self._check_model(getattr(given, "model", None))
        return given

    def _params(self, given: Sampled, num_prompts: int, *, chat: bool) -> SamplingParams:
        params = given.params(self.engine.engine.default_params(chat=chat))
        if params.n * num_prompts > self.settings.most_choices:
            raise ApiError(
                400, f"{num_prompts} prompts with n={params.n} were given; {self.settings.most_choices} choices may be asked for at a time.", param="n"
            )  # fmt: skip
        return params

    def _speculation(self, asked: Speculation, params: SamplingParams) -> dict[str, Any]:
        """Drafter, rule and size that are asked for, as the engine takes them."""
        chosen, budget = self.engine.engine.menu.find(asked.drafter, asked.verifier), asked.budget()
        rule, fixed = chosen.verifier.info, budget is not None or isinstance(chosen.policy, FixedPolicy)
        if asked.seed_exact and not (params.greedy or fixed or rule.shared_noise):
            raise ApiError(
                400, f"seed_exact was asked for, but how much {chosen.source!r} drafts follows the load, and with the rule {rule.name!r} so does the "
                "text of a seed. Ask for the rule 'race' where it fits the drafter, a depth, or temperature 0.", param="speculation"
            )  # fmt: skip
        return {"budget": budget, "drafter": asked.drafter, "verifier": asked.verifier}

    async def _predicted(self, given: Sampled) -> list[int]:
        """Token ids of the prediction, as far as an answer may be long."""
        text = "" if given.prediction is None else text_of(given.prediction.content)
        ids = await self._encoded(text, parse_special=False) if text else []
        first = getattr(self._tokenizer, "bos_token_id", None)
        return ids[ids[:1] == [first] :][: self.engine.engine.target.max_model_len]

    async def _answer(self, request: Request, given: Sampled, answer: Answer, params: SamplingParams) -> Response:
        prediction = await self._predicted(given)
        if prediction and given.speculation.drafter is None and NgramDrafter.info.name in self.engine.engine.menu.names:
            given.speculation.drafter = NgramDrafter.info.name
        asked = self._speculation(given.speculation, params) | {"prediction": prediction}
        chosen = self.engine.engine.menu.find(given.speculation.drafter, given.speculation.verifier)
        answer.num_predicted = len(prediction)
        answer.methods = {
            "drafter": chosen.source,
            "verifier": chosen.verifier.info.name,
            "lossless": chosen.verifier.info.lossless,
        }
        outputs = self.engine.stream_all(answer.prompts, params, seconds=self.settings.seconds, **asked)
        if not given.stream:
            collected = await unless_gone(request, _all(outputs))
            return Response(status_code=GONE) if collected is None else JSONResponse(answer.whole(collected))
        first = await unless_gone(request, anext(outputs))  # a refusal has its own status
        if first is None:
            return Response(status_code=GONE)
        check(first[1])
        usage = given.stream_options is not None and given.stream_options.include_usage
        events = _events(request, answer, first, outputs, usage)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _all(outputs: AsyncGenerator[tuple[int, StepOutput], None]) -> list[tuple[int, StepOutput]]:
    async with aclosing(outputs):
        return [each async for each in outputs]


async def _events(
    request: Request,
    answer: Answer,
    first: tuple[int, StepOutput],
    outputs: AsyncGenerator[tuple[int, StepOutput], None],
    usage: bool,
) -> AsyncGenerator[str, None]:
    """Server-sent events: chunks, perhaps the usage, and the end; an error is the last event."""
    try:
        async with aclosing(outputs):
            for chunk in answer.chunks(*first):
                yield _event(chunk)
            async for each in outputs:
                await asyncio.sleep(0)  # where the client has left, the loop learns of it before more is written
                for chunk in answer.chunks(*each):
                    yield _event(chunk)
        for chunk in answer.closing(usage):
            yield _event(chunk)
    except Exception as error:
        told = errors.of(error)
        level = logging.ERROR if told.status >= 500 else logging.INFO
        log.log(level, "request %s failed while it was streamed: %s", request.state.request_id, error)
        yield _event(answer.failed(told))
    yield answer.end


def _event(body: dict[str, Any]) -> str:
    kind = f"event: {body['type']}\n" if "type" in body else ""
    return f"{kind}data: {json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"
