"""Many prompts on many machines, through Ray: actors with an engine each. Ray moves the rows; every engine is one process's own.

`generate` is for Ray's datasets, `run` for files: what it has finished survives the death of a worker and of the driver.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from polydraft.config import BatchConfig, EngineConfig, split
from polydraft.errors import IncompatibleError, InvalidInputError, PolydraftError, first_line
from polydraft.integrations.ray.files import RowParts
from polydraft.integrations.ray.worker import EngineWorker

__all__ = ["generate", "run"]

OLDEST = (2, 40)
"""Of Ray."""
TRIES = 3
"""That the rows of a part get, each on another worker, before they are given up."""


def require(oldest: tuple[int, int] = OLDEST) -> Any:
    """The library, if it can be used. oldest: version that will do.

    Raises:
        IncompatibleError: it is missing, or too old or new.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise IncompatibleError("Ray was asked for and is not installed. Install polydraft[ray].") from error
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if not oldest <= version < (3, 0):
        raise IncompatibleError(
            f"Ray {ray.__version__} is installed; expected 2.{oldest[1]} or a newer 2. Install polydraft[ray] into an environment of its own."
        )
    return ray


def connect(address: str | None = None) -> Any:
    """Ray, connected: to the cluster at an address, or to one on this machine that ends with this process.

    Raises:
        IncompatibleError: as of the library, or nothing answers there.
    """
    ray = require()
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level="ERROR")
        except Exception as error:  # Ray raises plain ones too
            raise IncompatibleError(
                f"no Ray cluster {'began on this machine' if address is None else f'answers at {address!r}'}: {error}. Check the address, start one with "
                "`ray start --head` and give its address, or leave it out."
            ) from error
    return ray


def equal_share(ray: Any, workers: int) -> float:
    """CPUs of each of so many, where all may be used: one at most."""
    return min(1.0, ray.cluster_resources().get("CPU", 1) / workers)


class Exchange:
    """Outputs of all workers, in the order in which they came; an actor."""

    def __init__(self) -> None:
        self._outputs: list[list[int]] = []

    def exchange(self, mine: Sequence[Sequence[int]], since: int) -> tuple[list[list[int]], int]:
        """Take these in; those that came since a number, without these, and the number of now."""
        news = self._outputs[since:]
        self._outputs += [list(output) for output in mine]
        return news, len(self._outputs)


class Actor(EngineWorker):
    """A worker as Ray runs it. exchange: an actor, where outputs are shared."""

    def __init__(self, model: str | None = None, *, exchange: Any = None, **options: Any) -> None:
        super().__init__(model, store=exchange is not None, **options)
        self._exchange = exchange

    def answer_part(self, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Answers of a part, with the rows' numbers."""
        answers = self.answer([(number, row) for number, row in rows if "error" not in row])
        if self._exchange is not None:
            self.share(_Remote(self._exchange), answers)
        remaining = iter(answers)
        return [{"row": number, **(row if "error" in row else next(remaining))} for number, row in rows]


class _Remote:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def exchange(self, mine: Sequence[Sequence[int]], since: int) -> tuple[list[list[int]], int]:
        return require().get(self._actor.exchange.remote(mine, since))


class _Job(NamedTuple):
    """A part of the input: its rows by their numbers, and which try at it this is."""

    part: int
    rows: list[tuple[int, dict[str, Any]]]
    tries: int = 1


def run(
    source: str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    params: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = lambda rows: None,
    **fields: Any,
) -> tuple[int, int]:
    """Answer every row of a file, in order, into another; how many rows were answered, and how many were not.

    source, out: .jsonl or .parquet; rows as of `worker`.  params: of all rows, as `SamplingParams`.
    progress: is called with how many more rows are done.  fields: of `config.BatchConfig` and `config.EngineConfig`.

    Raises:
        InvalidInputError: as of `files`; numbers out of range.
        IncompatibleError: Ray is missing or does not answer, or no engine can be built.
    """
    batch, config = split({"model": model, **fields}, BatchConfig, EngineConfig)
    source = Path(source)
    out = Path(out)
    engine = config.with_(model=None).chosen()
    job = {
        "model": model,
        "params": dict(params or {}),
        "seed": batch.seed,
        "options": {k: str(v) for k, v in engine.items()},
    }
    parts = RowParts(
        out, {"input": _digest(source), "rows_a_part": batch.rows_a_part, **job}, resume=batch.resume
    )
    todo = parts.missing(source, batch.rows_a_part, progress)
    workers = _Workers(connect(batch.address), batch, model, {"params": params, **engine})
    jobs = (_Job(part, rows) for part, rows in todo)
    for job, answers in workers.answered(jobs):
        parts.write(job.part, answers)
        progress(len(job.rows))
    return parts.finish()


class _Workers:
    """Workers that take parts as they are idle; one that dies is replaced, and its part taken up again."""

    def __init__(self, ray: Any, batch: BatchConfig, model: str | None, options: Mapping[str, Any]) -> None:
        self._ray = ray
        exchange = ray.remote(Exchange).options(num_cpus=0).remote() if batch.share else None
        cpus = equal_share(ray, batch.workers) if batch.cpus is None else batch.cpus
        actor = ray.remote(Actor).options(
            max_restarts=0, max_task_retries=0, num_cpus=cpus, num_gpus=batch.gpus
        )
        self._made = partial(actor.remote, model, seed=batch.seed, exchange=exchange, **options)
        self._idle = list[Any]()
        self._running = dict[Any, tuple[Any, _Job | None]]()
        self._again = list[_Job]()
        self._lost = 0
        """Workers in a row that died while they were made, by no error of their engine's."""
        for _ in range(batch.workers):
            self._begin()

    def _begin(self) -> None:
        actor = self._made()
        self._running[actor.__ray_ready__.remote()] = actor, None

    def answered(self, jobs: Iterator[_Job]) -> Iterator[tuple[_Job, list[dict[str, Any]]]]:
        """Each part with its answers, as they are done."""
        ray = self._ray
        while True:
            while self._idle and (job := self._again.pop() if self._again else next(jobs, None)):
                actor = self._idle.pop()
                self._running[actor.answer_part.remote(job.rows)] = actor, job
            if not self._running:
                return
            (done,), _ = ray.wait(list(self._running))
            actor, job = self._running.pop(done)
            try:
                answers = ray.get(done)
            except ray.exceptions.RayError as error:
                answers = self._without(actor, job, error)
            else:
                self._idle.append(actor)
                self._lost = 0
            if job is not None and answers is not None:
                yield job, answers

    def _without(self, actor: Any, job: _Job | None, error: Exception) -> list[dict[str, Any]] | None:
        """Replace a worker that died with its part; answers that say so where too many did, None where another one tries."""
        self._lost += job is None
        if self._lost == TRIES or not _is_of_worker(self._ray, error):
            raise _of_engine(error) from error
        self._ray.kill(actor)
        self._begin()
        if job is None:
            return None
        if job.tries < TRIES:
            self._again.append(job._replace(tries=job.tries + 1))
            return None
        reason = f"{TRIES} workers died with these rows ({type(error).__name__}: {first_line(error)}); give them more memory, or fewer rows a part"
        return [{"row": number, **row, "error": reason} for number, row in job.rows]


def _is_of_worker(ray: Any, error: Any) -> bool:
    """Whether another worker may answer what this one did not: it died, or had no memory left."""
    if not isinstance(error, ray.exceptions.RayTaskError):
        return not getattr(error, "actor_init_failed", False)
    return isinstance(error.cause, MemoryError) or "allocate memory" in str(
        error.cause
    )  # the second: of torch


def _of_engine(error: Exception) -> PolydraftError:
    cause = getattr(error, "cause", None)
    if isinstance(cause, PolydraftError):
        return cause
    last = str(cause or error).strip().splitlines()[-1]
    return IncompatibleError(
        f"a worker's engine failed: {last} If it was for memory, ask for fewer workers. What was finished stays: run it again with --resume."
    )


def _digest(source: Path) -> str:
    if not source.is_file():
        raise InvalidInputError(
            f"{str(source)!r} was given to be answered; expected a .jsonl or .parquet file. Check the path."
        )
    digest = hashlib.sha256()
    with source.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def generate(
    dataset: Any,
    model: str | None = None,
    *,
    workers: int = 1,
    batch_size: int = 16,
    cpus: float = 1,
    gpus: float = 0,
    **options: Any,
) -> Any:
    """A Ray dataset with a column `prompt`, `messages` or `prompt_token_ids`, answered: the same with `text`, `token_ids`, `finish_reason`, `error`.

    workers: engines.  batch_size: rows that an engine answers together.  cpus, gpus: of each.  options: as of `worker.EngineWorker`, among
    them `params`.

    Raises:
        IncompatibleError: as of `run`.
    """
    require()
    return dataset.map_batches(
        _Batches,
        fn_constructor_kwargs={"model": model, **options},
        batch_size=batch_size,
        concurrency=workers,
        num_cpus=cpus,
        num_gpus=gpus,
    )


class _Batches(EngineWorker):
    """An engine that answers batches of columns."""

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        import numpy as np

        count = len(next(iter(batch.values())))
        rows = [{name: column[i] for name, column in batch.items()} for i in range(count)]
        numbers = [
            int.from_bytes(hashlib.blake2s(repr(row).encode(), digest_size=4).digest(), "big") for row in rows
        ]
        answers = self.answer(
            [
                (n, {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in r.items()})
                for n, r in zip(numbers, rows, strict=True)
            ]
        )
        empty: dict[str, Any] = {"text": "", "token_ids": [], "finish_reason": "", "error": ""}
        columns = {name: [answer.get(name) or empty[name] for answer in answers] for name in empty}
        tokens = np.empty(count, object)
        tokens[:] = columns.pop("token_ids")
        return {
            **batch,
            **{name: np.array(column, object) for name, column in columns.items()},
            "token_ids": tokens,
        }
