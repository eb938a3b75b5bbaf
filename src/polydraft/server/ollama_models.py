"""What Ollama's clients ask about a server and its models: version, tags, show, ps."""

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from typing import Any

from fastapi import FastAPI, Request
from pydantic import Field

from polydraft.server.bodies import Body
from polydraft.server.fill_in import fill_form
from polydraft.server.pool import ModelPool
from polydraft.server.service import Service


class ShowRequest(Body):
    """Of /api/show. name: as older clients have it."""

    model: str | None = None
    name: str | None = None
    verbose: bool = Field(default=False)


def served_name(pool: ModelPool, name: str | None) -> str | None:
    """A model's name without the tag that Ollama's clients put behind names that have none."""
    return name if name is None or name in pool.models else name.removesuffix(":latest")


def join(app: FastAPI, pool: ModelPool, reading: Callable[..., Any]) -> None:
    """Put the routes into an application. reading: a body of a kind, checked."""
    began = datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")

    async def version() -> dict[str, Any]:
        return {"version": "0.13.0"}  # of the interface that is followed; some clients want 0.6.4 or later

    async def tags() -> dict[str, Any]:
        return {"models": [{**_listed(pool, name), "modified_at": began} for name in pool.models]}

    async def ps() -> dict[str, Any]:
        leaves = (datetime.now(timezone.utc) + timedelta(days=365)).isoformat().replace("+00:00", "Z")
        return {"models": [_listed(pool, model.name) | _running(model, leaves) for model in pool.loaded]}

    async def show(request: Request) -> dict[str, Any]:
        body = await reading(request, ShowRequest)
        name = served_name(pool, body.model or body.name) or next(iter(pool.models))
        service = pool.service(name)
        about = {"modelfile": f"FROM {name}", "modified_at": began, "details": _details(service)}
        return about | _description(service)

    app.get("/api/version")(version)
    app.get("/api/tags")(tags)
    app.get("/api/ps")(ps)
    schema = {"application/json": {"schema": ShowRequest.model_json_schema()}}
    app.post("/api/show", openapi_extra={"requestBody": {"content": schema}})(show)


def _listed(pool: ModelPool, name: str) -> dict[str, Any]:
    service = pool.service(name)
    size = service.engine.engine.target.weight_bytes if service else pool.models[name].weight_bytes
    digest = sha256(f"{name} {size}".encode()).hexdigest()
    return {"name": name, "model": name, "size": size, "digest": digest, "details": _details(service)}


def _running(service: Service, leaves: str) -> dict[str, Any]:
    target = service.engine.engine.target
    on_gpu = target.weight_bytes if target.on_device else 0
    return {"expires_at": leaves, "size_vram": on_gpu, "context_length": target.max_model_len}


def _details(service: Service | None) -> dict[str, Any]:
    """Of a model that is not loaded nothing is known."""
    target = service.engine.engine.target if service else None
    level = (target.weight_format or target.number_format) if target else ""
    return {
        "parent_model": "", "format": "gguf", "family": "", "families": [], "parameter_size": "", "quantization_level": level,
    }  # fmt: skip


def _description(service: Service | None) -> dict[str, Any]:
    if service is None:
        return {"template": "", "parameters": "", "capabilities": ["completion"], "model_info": {}}
    engine = service.engine.engine
    template = service.template(tools=True)
    target = engine.target
    can = {
        "insert": fill_form(engine.tokenizer) is not None,
        "tools": bool(template),
        "thinking": "<think>" in template,
        "embedding": bool(target.offers.hidden),
    }
    return {
        "template": template,
        "parameters": "\n".join(f"{name} {value}" for name, value in engine.sampling_defaults.items()),
        "capabilities": ["completion", *(name for name, there in can.items() if there)],
        "model_info": {
            "general.architecture": "polydraft",
            "general.basename": service.name,
            "polydraft.context_length": target.max_model_len,
            "polydraft.vocab_size": target.vocab_size,
        },
    }
