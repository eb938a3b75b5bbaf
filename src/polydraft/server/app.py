"""The routes: OpenAI's, Anthropic's, Ollama's and llama.cpp's, and whether the server lives."""

import logging
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from time import time
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles

from polydraft import __version__
from polydraft.config import ServerConfig
from polydraft.engine.asynchronous import AsyncEngine
from polydraft.errors import PolydraftError
from polydraft.server import errors, llamacpp, ollama, ollama_models
from polydraft.server.embeddings import EmbeddingRequest, embeddings
from polydraft.server.errors import ApiError
from polydraft.server.guard import BelowRoot, Guard
from polydraft.server.incoming import body_of
from polydraft.server.messages import CountRequest, MessagesRequest
from polydraft.server.pool import ModelPool
from polydraft.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from polydraft.server.responses import ResponsesRequest
from polydraft.server.service import Service

log = logging.getLogger("polydraft.server")
PAGE = Path(__file__).parent / "page"
B = TypeVar("B", bound=BaseModel)
POSTS: Sequence[tuple[str, Callable[..., Any], type[BaseModel]]] = (
    ("/v1/completions /completions", Service.completions, CompletionRequest),
    ("/v1/chat/completions /chat/completions", Service.chat, ChatRequest),
    ("/v1/responses /responses", Service.responses, ResponsesRequest),
    ("/v1/responses/input_tokens", Service.count_input, ResponsesRequest),
    ("/v1/messages", Service.messages, MessagesRequest),
    ("/v1/messages/count_tokens", Service.count_tokens, CountRequest),
    ("/v1/embeddings /embeddings", embeddings, EmbeddingRequest),
    ("/tokenize", Service.tokenize, TokenizeRequest),
    ("/detokenize", Service.detokenize, DetokenizeRequest),
    ("/completion", llamacpp.completion, llamacpp.LlamaCppCompletion),
    ("/infill", llamacpp.completion, llamacpp.InfillRequest),
    ("/apply-template", llamacpp.apply_template, llamacpp.TemplateRequest),
    ("/api/chat", ollama.chat, ollama.OllamaChat),
    ("/api/generate", ollama.generate, ollama.OllamaGenerate),
    ("/api/embed", ollama.embed, ollama.OllamaEmbed),
    ("/api/embeddings", ollama.embedding, ollama.OllamaEmbedding),
)
"""Paths, the function of a model's service that answers, and the body that it takes."""


def create_app(models: AsyncEngine | ModelPool, config: ServerConfig, keys: Sequence[str] = ()) -> FastAPI:
    """The ASGI application of one engine or of several models; its lifespan runs the engines. keys: API keys, any of which opens; none asks for none."""
    pool = ModelPool.of(models, config) if isinstance(models, AsyncEngine) else models

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        await pool.start()
        app.state.ready = True
        try:
            yield
        finally:
            app.state.ready = False
            await pool.close(config.drain)

    servers = [{"url": config.root_path}] if config.root_path else None
    app = FastAPI(
        title="polydraft",
        version=__version__,
        lifespan=lifespan,
        servers=servers,
        docs_url=None,
        redoc_url=None,
    )
    app.state.ready = False
    app.state.drain = partial(pool.close, config.drain)
    app.add_middleware(Guard, keys=keys, hosts=_hosts(config), origins=config.cors)  # pyright: ignore[reportArgumentType]
    if config.cors:  # around the guard, so that pages can read its refusals
        app.add_middleware(
            CORSMiddleware, allow_origins=config.cors, allow_methods=["*"], allow_headers=["*"]
        )
    if config.root_path:
        app.add_middleware(BelowRoot, root=config.root_path)  # pyright: ignore[reportArgumentType]
    for kind in (ApiError, PolydraftError, ValidationError):
        app.add_exception_handler(kind, _refused)
    app.add_exception_handler(HTTPException, _unrouted)
    _Routes(pool, config.max_body).join(app)
    return app


def _hosts(config: ServerConfig) -> Sequence[str] | None:
    """Names by which a server that listens on this machine alone may be asked; None: any."""
    is_own = config.host in ("localhost", "::1") or config.host.startswith("127.")
    return [name.lower() for name in config.allowed_hosts] if is_own else None


async def _refused(request: Request, error: Exception) -> Response:
    refusal = errors.of(error)
    if refusal.status >= 500:
        log.error("request %s failed: %s", request.state.request_id, error)
    return refusal.response(request.url.path)


async def _unrouted(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = {404: "there is nothing at this path", 405: "this path is not for this method"}.get(
        status, "the request was refused"
    )
    response = ApiError(status, f"{what}: {request.method} {request.url.path[:200]}.").response(
        request.url.path
    )
    if status == 405:
        allowed = (error.headers or {}) if isinstance(error, HTTPException) else {}
        response.headers["Allow"] = allowed.get("Allow", "GET, HEAD")  # files say nothing
    return response


class _Routes:
    """The routes of a server's models."""

    def __init__(self, pool: ModelPool, max_body: int) -> None:
        self.pool = pool
        self.max_body = max_body
        self.began = int(time())

    def join(self, app: FastAPI) -> None:
        """Put them into an application."""
        for path in ("/v1/models", "/models"):
            app.api_route(path, methods=["GET", "HEAD"])(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.api_route("/health", methods=["GET", "HEAD"])(self.health)
        app.api_route("/ready", methods=["GET", "HEAD"])(self.ready)
        app.get("/metrics")(self.metrics)
        app.get("/props")(self.props)
        app.get("/tokenizer_info")(self.tokenizer_info)
        app.get("/slots")(self.slots)
        ollama_models.join(app, self.pool, self._read)
        app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)(self.page)
        app.mount("/page", StaticFiles(directory=PAGE))
        for paths, answer, kind in POSTS:
            for path in paths.split():
                schema = kind.model_json_schema()
                body = {"content": {"application/json": {"schema": schema}}, "required": True}
                app.post(path, openapi_extra={"requestBody": body}, response_model=None)(
                    self._route(answer, kind)
                )

    def _route(self, answer: Callable[..., Any], kind: type[BaseModel]) -> Callable[..., Any]:
        """A route that reads a body of a kind and has the model that it names answer."""

        async def route(request: Request) -> Any:
            body = await self._read(request, kind)
            name = ollama_models.served_name(self.pool, getattr(body, "model", None))
            async with self.pool.use(name) as service:
                content = await answer(service, request, body)
            return (
                content if isinstance(content, Response) else JSONResponse(content)
            )  # FastAPI's own way visits every token id

        route.__name__ = answer.__name__
        return route

    async def models(self) -> dict[str, Any]:
        """The models that are served."""
        names = list(self.pool.models)
        data = [self._described(name) for name in names]
        return {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}

    async def model(self, name: str) -> dict[str, Any]:
        """What is known of one."""
        return self._described(name)

    def _described(self, name: str) -> dict[str, Any]:
        service = self.pool.service(name)
        more = {"loaded": service is not None} | ({} if service is None else service.described())
        anthropic = {
            "type": "model",
            "lifecycle": "active",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self.began, timezone.utc).isoformat(),
        }
        return {
            "id": name,
            "object": "model",
            "created": self.began,
            "owned_by": "polydraft",
            **anthropic,
            **more,
        }

    async def health(self) -> Response:
        """Whether the engines' threads live. Who restarts what is not well shall not end requests that are to finish."""
        if self.pool.draining:
            return JSONResponse({"status": "draining"})
        alive = self.pool.running
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    async def ready(self, request: Request) -> Response:
        """Whether requests are taken at once."""
        ready = self.pool.running and request.app.state.ready
        return JSONResponse({"status": "ready" if ready else "not ready"}, 200 if ready else 503)

    async def metrics(self) -> Response:
        """Figures for Prometheus."""
        return Response(self.pool.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def props(self) -> dict[str, Any]:
        """What llama.cpp's clients ask about the first model."""
        async with self.pool.use(None) as service:
            return llamacpp.props(service, __version__)

    async def tokenizer_info(self) -> dict[str, Any]:
        """Special tokens and the template of the first model."""
        async with self.pool.use(None) as service:
            return service.tokenizer_info()

    async def slots(self) -> list[dict[str, Any]]:
        """Its slots."""
        async with self.pool.use(None) as service:
            return llamacpp.slots(service)

    async def page(self) -> Response:
        """A chat, a text and a race to look at."""
        return FileResponse(PAGE / "index.html")

    async def _read(self, request: Request, kind: type[B]) -> B:
        """The body, checked: JSON, whatever its header says; the guard keeps out the pages of other sites."""
        body = await body_of(request, self.max_body)
        return kind.model_validate_json(body.removeprefix(BOM_UTF8))
