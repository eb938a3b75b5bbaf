"""The models of a server, by name: each is loaded at its first request, and the least recently used one leaves when another needs its place.

A model is idle when no request is on its way to its engine and its engine has nothing to do. All models share one process and its threads.
"""

import asyncio
import gc
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from polydraft.config import ServerConfig
from polydraft.core.params import SamplingParams
from polydraft.engine.api import Engine
from polydraft.engine.asynchronous import AsyncEngine
from polydraft.errors import CapacityError, InvalidInputError, PolydraftError
from polydraft.models.memory import available_bytes
from polydraft.models.store.gguf_parts import parts_of
from polydraft.server.errors import ApiError
from polydraft.server.metrics import Metrics
from polydraft.server.service import Service

log = logging.getLogger("polydraft.server")


@dataclass(frozen=True)
class ServedModel:
    """A model that can be loaded. name: that clients give.  build: loads it.  weight_bytes: of its files, 0 where that is not known."""

    name: str
    build: Callable[[], Engine]
    weight_bytes: int = 0


def weight_file_bytes(place: str) -> int:
    """Bytes of a model's files of weights, where it is a file or a folder; else 0.

    Example:
        >>> from polydraft.models import pair
        >>> weight_file_bytes(str(pair.draft_folder())) > 100_000, weight_file_bytes("owner/name")
        (True, 0)
    """
    path = Path(place)
    files = parts_of(path) if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files if file.is_file())


class _Turn:
    """Of a model to be loaded. num_users: requests that wait for it.  service: once it is there.  error: why it is not."""

    task: "asyncio.Task[None]"

    def __init__(self) -> None:
        self.num_users = 0
        self.service: Service | None = None
        self.error: Exception | None = None


class ModelPool:
    """Models, of which at most so many are loaded.

    models: the first is that of requests that name none.  max_loaded: at a time.

    Raises:
        InvalidInputError: no models, two of one name, or a number below 1.
    """

    def __init__(self, models: Sequence[ServedModel], config: ServerConfig, *, max_loaded: int = 1) -> None:
        self.models = {model.name: model for model in models}
        if not models or len(self.models) < len(models):
            raise InvalidInputError(
                f"the models {[model.name for model in models]} were given; expected different names, at least one."
            )
        if max_loaded < 1:
            raise InvalidInputError(f"max_loaded={max_loaded} was given; expected at least 1.")
        self.metrics = Metrics()
        self._config = config
        self._max_loaded = max_loaded
        self._services: OrderedDict[str, Service] = OrderedDict()
        """Loaded models, the least recently used first."""
        self.draining = False
        """Whether it takes no more requests, and lets those that run finish."""
        self._turns: dict[str, _Turn] = {}
        """Models that wait for a place or are being loaded, by the time of their first request."""

    @classmethod
    def of(cls, engine: AsyncEngine, config: ServerConfig) -> "ModelPool":
        """One model, which is loaded and stays."""
        name = config.served_model_name or Path(engine.engine.summary()["target"]).name
        pool = cls([ServedModel(name, lambda: engine.engine)], config)
        pool._services[name] = Service(engine, name, config, pool.metrics)
        return pool

    @property
    def loaded(self) -> list[Service]:
        """Those that are loaded now."""
        return list(self._services.values())

    @property
    def running(self) -> bool:
        """Whether the threads of all that is loaded live."""
        return all(service.engine.running for service in self.loaded)

    async def start(self) -> None:
        """Start the engines that are there."""
        for service in self.loaded:
            await _started(service)

    async def close(self, seconds: float) -> None:
        """End all engines, what runs after so many seconds."""
        self.draining = True
        await asyncio.gather(*(service.engine.close(seconds) for service in self.loaded))

    def service(self, name: str) -> Service | None:
        """A model, where it is loaded."""
        self.check(name)
        return self._services.get(name)

    def check(self, name: str) -> None:
        """Refuse a name that is not served."""
        if name not in self.models:
            served = ", ".join(map(repr, self.models))
            raise ApiError(
                404,
                f"model {name[:200]!r} is not here; {served} {'is' if len(self.models) == 1 else 'are'} served.",
                param="model",
                code="model_not_found",
            )

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncGenerator[Service, None]:
        """A model, loaded if need be, which stays while the block runs; None is the first.

        While another one waits for a place, requests to a loaded model wait behind it: places go round by waiting time.

        Raises:
            ApiError: no such model, one that does not fit beside the loaded ones, or none that became idle in time.
        """
        name = next(iter(self.models)) if name is None else name
        self.check(name)
        if name in self._services and not self._turns:
            service = self._services[name]
            service.num_users += 1
        else:
            service = await self._in_turn(name)
        self._services.move_to_end(name)
        try:
            yield service
        finally:
            service.num_users -= 1

    async def _in_turn(self, name: str) -> Service:
        """A model that counts this request among its users, once it had its turn; requests to one model share theirs."""
        turn = self._turns.get(name)
        if turn is None:
            before = list(self._turns.values())[-1:]
            turn = self._turns[name] = _Turn()
            turn.task = asyncio.create_task(self._take_turn(name, turn, before))
        turn.num_users += 1
        try:
            await asyncio.shield(turn.task)
        except asyncio.CancelledError:  # this client has left; others may wait for the same
            if turn.service is not None:
                turn.service.num_users -= 1
            turn.num_users -= 1
            raise
        if turn.service is None:
            assert turn.error is not None
            raise turn.error
        return turn.service

    async def _take_turn(self, name: str, turn: "_Turn", before: Sequence["_Turn"]) -> None:
        until = monotonic() + self._config.timeout
        for earlier in before:
            await asyncio.wait({earlier.task})
        try:
            if name not in self._services and turn.num_users:
                await self._load(self.models[name], until)
        except Exception as error:
            turn.error = error
        finally:
            del self._turns[name]
        turn.service = self._services.get(name)
        if turn.service is not None:
            turn.service.num_users += turn.num_users

    async def _load(self, model: ServedModel, until: float) -> None:
        while len(self._services) >= self._max_loaded:
            idle = next((service for service in self.loaded if service.idle), None)
            if idle is not None:
                await self._unload(idle)
            elif monotonic() > until:
                raise ApiError(
                    503,
                    f"model {model.name!r} waits for a place: {self._busy()} are at work. Ask again later.",
                )
            else:
                await asyncio.sleep(0.02)  # until a loaded model is idle
        self._check_memory(model)
        log.info("loading %s", model.name)
        try:
            engine = await asyncio.to_thread(model.build)
        except (CapacityError, MemoryError) as error:
            raise self._does_not_fit(model, str(error)) from error
        except PolydraftError as error:
            raise ApiError(
                503, f"model {model.name!r} could not be loaded: {error}", param="model"
            ) from error
        service = Service(
            AsyncEngine(engine, max_waiting=self._config.max_waiting), model.name, self._config, self.metrics
        )
        await _started(service)
        self._services[model.name] = service

    def _check_memory(self, model: ServedModel) -> None:
        free = available_bytes()
        if model.weight_bytes > free:
            raise self._does_not_fit(
                model,
                f"its weights take {model.weight_bytes / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free.",
            )

    def _does_not_fit(self, model: ServedModel, why: str) -> ApiError:
        return ApiError(
            503,
            f"model {model.name!r} does not fit beside {self._busy() or 'nothing'}: {why} Lower --max-loaded or --max-model-len.",
            param="model",
            code="model_does_not_fit",
        )

    def _busy(self) -> str:
        return ", ".join(repr(name) for name in self._services)

    async def _unload(self, service: Service) -> None:
        log.info("unloading %s", service.name)
        del self._services[service.name]
        await service.close()
        await asyncio.to_thread(gc.collect)


async def _started(service: Service) -> None:
    """Start a model's engine; what its first request would compile is compiled before it is ready."""
    await service.engine.__aenter__()
    await service.engine.generate([0], SamplingParams(max_tokens=1, ignore_eos=True))
