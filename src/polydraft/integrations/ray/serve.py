"""The server behind Ray Serve: replicas that each run the application of `polydraft serve`, and an ingress that finds the right one.

`application` is for Serve's own ways to deploy (`serve.run`, a RayService); `deploy` is what `polydraft serve --replicas` calls. Deployed again
under its name it is updated replica by replica: each finishes what it has, while the others take what comes.
"""

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from importlib import import_module
from typing import TYPE_CHECKING, Any

from polydraft.config import EngineConfig, ReplicaConfig, ServerConfig, split
from polydraft.errors import IncompatibleError, InvalidInputError, first_line
from polydraft.integrations.ray import connect, equal_share, require
from polydraft.integrations.ray.ingress import ForwardedCall, Ingress, ReplicaLostError, answered

if TYPE_CHECKING:
    from starlette.types import Message


NAME = "polydraft"
"""Of the application in Serve."""
OLDEST = (2, 60)
"""Of Ray, for routers of one's own and calls to all replicas."""


def _serve() -> Any:
    return import_module("ray.serve")


class Replica:
    """An engine, and the server's application around it. config: of the engine."""

    async def __init__(self, config: EngineConfig, server: ServerConfig) -> None:
        from polydraft.engine.api import Engine
        from polydraft.engine.asynchronous import AsyncEngine
        from polydraft.server.app import create_app

        self._name = _serve().get_replica_context().replica_id.unique_id
        self._engine = AsyncEngine(Engine.from_config(config, measured=True), max_waiting=server.max_waiting)
        self._app = create_app(self._engine, server)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    async def answer(self, call: ForwardedCall) -> AsyncGenerator[list["Message"], None]:
        """The ASGI messages of an answer."""
        async with aclosing(answered(self._app, call)) as answer:
            async for messages in answer:
                yield messages

    async def figures(self) -> tuple[str, str]:
        """Its name, and what it tells Prometheus."""
        call = ForwardedCall(
            {"type": "http", "method": "GET", "path": "/metrics", "query_string": b"", "headers": []}, b"", ()
        )
        messages = [message async for several in self.answer(call) for message in several]
        return self._name, b"".join(message.get("body", b"") for message in messages).decode()

    def check_health(self) -> None:
        """Serve replaces it where this raises."""
        if not self._engine.running:
            raise RuntimeError("the engine's thread has died")


class Handle:
    """Replicas by their handle in Serve."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def answer(self, call: ForwardedCall) -> AsyncGenerator[list["Message"], None]:
        """See `ingress.Replicas`."""
        from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]

        answer = self._handle.options(stream=True).answer.remote(call)
        try:
            async for messages in answer:
                yield messages
        except RayActorError as error:
            raise ReplicaLostError(first_line(error)) from error
        finally:
            answer.cancel()

    async def figures(self) -> dict[str, str]:
        """See `ingress.Replicas`."""
        answers = await self._handle.broadcast("figures").results_async(timeout_s=10, return_exceptions=True)
        return dict(answer for answer in answers if isinstance(answer, tuple))


def _prefix_router(slots: int) -> Any:
    """How Serve sends requests where their prefix is. slots: of a replica."""
    from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]

    return RequestRouterConfig(
        request_router_class="polydraft.integrations.ray.router.PrefixRouter",
        request_router_kwargs={"prompts": slots, "margin": max(1, slots // 2)},
    )


def _number_of_replicas(
    scale: ReplicaConfig, ongoing: float, autoscaling: Mapping[str, Any]
) -> dict[str, Any]:
    """How many there are, as a deployment's options. ongoing: requests of a replica beyond which there are more."""
    fewest = scale.replicas or 1
    most = scale.max_replicas or fewest
    if fewest > most:
        raise InvalidInputError(
            f"replicas={fewest} and max_replicas={most} were given; expected replicas <= max_replicas."
        )
    if most == fewest:
        return {"num_replicas": fewest}
    bounds = {"min_replicas": fewest, "max_replicas": most, "target_ongoing_requests": ongoing}
    return {"autoscaling_config": {**bounds, **autoscaling}}


def application(
    model: str | None = None,
    draft_model: str | None = None,
    *,
    server: ServerConfig,
    keys: Sequence[str] = (),
    ongoing: float | None = None,
    autoscaling: Mapping[str, Any] | None = None,
    by_prefix: bool = True,
    **fields: Any,
) -> Any:
    """An application for Ray Serve: an ingress, and replicas that answer.

    model, draft_model: names; None is the embedded pair.  server: of each replica.  keys: API keys, any of which opens.
    fields: of `config.ReplicaConfig` and `config.EngineConfig`; there may become `max_replicas` while each has more than `ongoing` requests (by
    default as many as an engine has slots) on the average; autoscaling: more of Serve's `autoscaling_config`.
    by_prefix: whether requests go where their prefix is,
    else where Serve's own router sends them.

    Raises:
        InvalidInputError: numbers out of range.
        IncompatibleError: Ray is missing or too old.
    """
    require(OLDEST)
    serve = _serve()
    scale, config = split({"model": model, "draft_model": draft_model, **fields}, ReplicaConfig, EngineConfig)
    slots = config.max_num_seqs
    number = _number_of_replicas(scale, ongoing or slots, autoscaling or {})
    if by_prefix:
        number["request_router_config"] = _prefix_router(slots)
    answering = serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=2
        * (server.max_waiting + slots),  # it refuses by itself, with a status that clients know
        max_constructor_retry_count=2,
        graceful_shutdown_timeout_s=server.drain,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 1 if scale.cpus is None else scale.cpus, "num_gpus": scale.gpus},
        **number,
    ).bind(config, server)

    def build() -> Any:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.routing import Mount

        from polydraft.server.guard import BelowRoot, Guard

        behind = Handle(_serve().get_deployment_handle("Replica"))
        guard = Middleware(Guard, keys=keys, origins=("*",))  # pyright: ignore[reportArgumentType] # replicas look at them
        root = [Middleware(BelowRoot, root=server.root_path)] if server.root_path else []  # pyright: ignore[reportArgumentType]
        return Starlette(routes=[Mount("", Ingress(behind, server.max_body))], middleware=[*root, guard])

    ingress = serve.deployment(
        serve.ingress(build)(),
        name="Ingress",
        max_ongoing_requests=1 << 16,  # replicas refuse what is too much for them
        graceful_shutdown_timeout_s=server.drain,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(answering)


def deploy(
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    address: str | None = None,
    cpus: float | None = None,
    **fields: Any,
) -> None:
    """Put an `application` into a cluster, or update it there, and wait until it answers.

    Serve stops none of the old replicas while further ones wait for their CPUs, which the old ones may have: more replicas of another kind
    come in two steps, first as many of that kind as there were, then all.

    host, port: of a Serve that does not run yet; one that does has its own.  address: as of `connect`.  cpus: of each replica, by default an
    equal share.  fields: as of `application`.

    Raises:
        InvalidInputError: numbers out of range.
        IncompatibleError: no cluster answers, or no replica could be started.
    """
    ray = connect(address)
    serve = _serve()
    share = (
        equal_share(ray, fields.get("max_replicas") or fields.get("replicas") or 1) if cpus is None else cpus
    )
    steps = [application(cpus=share, **fields)]
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(http_options={"host": host, "port": port, "keep_alive_timeout_s": 75})
    running = serve.status().applications.get(NAME)
    before = 0 if running is None else running.deployments["Replica"].replica_states.get("RUNNING", 0)
    if 0 < before < (fields.get("replicas") or 1):
        steps.insert(0, application(cpus=share, **{**fields, "replicas": before}))
    try:
        for app in steps:
            serve.run(app, name=NAME, logging_config={"log_level": "WARNING", "enable_access_log": False})
    except RuntimeError as error:
        deployments = serve.status().applications[NAME].deployments
        raise IncompatibleError(
            f"the replicas did not start: {_reason([deployment.message for deployment in deployments.values()])}"
        ) from error


def _reason(messages: Sequence[str]) -> str:
    """The last line of the first traceback that Serve tells of."""
    traceback = next((message for message in messages if "Error" in message), "see Serve's log")
    lines = [line for line in traceback.splitlines() if line.strip() and not line.startswith(" ")]
    last = next((line for line in reversed(lines) if "Error" in line), lines[-1])
    return last.partition(": ")[2] if last.startswith("polydraft.") else last


def shutdown() -> None:
    """End the application, whose replicas finish what they have, and leave the cluster."""
    ray = require(OLDEST)
    if ray.is_initialized():
        _serve().shutdown()
        ray.shutdown()
