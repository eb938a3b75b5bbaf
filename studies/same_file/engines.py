"""Engines of the comparison, each in a process of its own: what is sent is a job, what comes back are seconds."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from polydraft.core import SamplingParams
from polydraft.errors import IncompatibleError
from polydraft.models import load
from polydraft.models.loading.gguf import GgufWeights
from studies.peers import LlamaServer, flags
from studies.same_file.records import CONTEXT, DRAFT_LENGTH, IK, Job

LOOKUP_NGRAM = 3
"""Tokens that OpenVINO looks up in the prompt; its documentation's example."""


def answered(pipe: Any, job: Job) -> tuple[float, float, int]:
    pipe.send(job)
    return pipe.recv()


@contextmanager
def worker(threads: int, build: Any, *options: Any) -> Iterator[tuple[Any, float]]:
    """A process with an engine, and the seconds from its start until it answers."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(build, options, threads, there), daemon=True)
    begin = perf_counter()
    process.start()
    there.close()
    try:
        here.recv()
        yield here, perf_counter() - begin
    except EOFError as error:
        raise IncompatibleError(
            f"{build.__name__} ended on {options[0]!r}; its message is above. Try another file."
        ) from error
    finally:
        process.terminate()
        process.join()


def _serve(build: Any, options: Sequence[Any], threads: int, pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    generate = build(*options)
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        pipe.send(generate(job))
    pipe.send(generate.peak_megabytes() if isinstance(generate, _NativeLlama) else _peak_megabytes())


def ours(file: str, threads: int, draft: Path | None, modes: Sequence[str]) -> Any:
    """Engines of all modes on one pair of models."""
    from polydraft.engine.api import Engine
    from polydraft.engine.parts import limit_draft_vocabulary

    options: dict[str, Any] = {"threads": threads, "max_model_len": _context(file), "max_num_seqs": 1}
    model = load.load_model(file, **options)
    tokenizer = load.load_tokenizer(file)
    small = load.load_model(str(draft), as_draft=True, **options) if draft else None
    if small is not None:
        model.vocab_size = small.vocab_size = load.num_token_ids(
            tokenizer, min(model.vocab_size, small.vocab_size)
        )
        limit_draft_vocabulary(small, tokenizer, None)
    drafts: dict[str, Any] = {"draft_model": small, "draft_tokenizer": tokenizer}
    ways: dict[str, dict[str, Any]] = {"plain": {"drafter": None}, "auto": {"drafter": "auto", **drafts}}
    for mode in modes:
        if mode not in ways:
            ways[mode] = {"drafter": "model:chain", "depth": int(mode.rpartition(" ")[2]), **drafts}
    engines = {
        mode: Engine.of(model, tokenizer=tokenizer, **ways[mode]) for mode in modes
    }  # whose slots keep no prompt

    def generate(job: Job) -> tuple[float, float, int]:
        times = list[tuple[float, int]]()
        begin = perf_counter()
        params = SamplingParams(
            temperature=job.temperature, max_tokens=job.num_tokens, ignore_eos=True, seed=job.seed
        )
        for step in engines[job.mode].stream(job.token_ids, params):
            times.append((perf_counter(), len(step.token_ids)))
        return times[0][0] - begin, times[-1][0] - times[0][0], times[0][1]

    return generate


def llama_cpp(file: str, threads: int, draft: Path | None, mode: str, program: Path | None) -> Any:
    if program is not None:
        return _NativeLlama(program, flags(Path(file), threads, _context(file), draft, mode, DRAFT_LENGTH))
    from polydraft.bench.llama_cpp import LlamaCpp

    drafts: dict[str, Any] = {"plain": {}, "draft": {"draft": draft}}.get(mode, {"lookup": mode.upper()})
    server = LlamaCpp(
        Path(file),
        exact=False,
        num_threads=threads,
        context=_context(file),
        draft_length=DRAFT_LENGTH,
        **drafts,
    )

    def generate(job: Job) -> tuple[float, float, int]:
        times = list[float]()
        begin = perf_counter()
        params = SamplingParams(temperature=job.temperature, max_tokens=job.num_tokens, seed=job.seed)
        server.stream(job.token_ids, params, lambda: times.append(perf_counter()))
        return times[0] - begin, times[-1] - times[0], 1

    return generate


def ik_llama_cpp(file: str, threads: int, draft: Path | None, mode: str, program: Path) -> Any:
    arguments = flags(Path(file), threads, _context(file), draft, mode, DRAFT_LENGTH, IK)
    return _NativeLlama(program, arguments)


def openvino(file: str, threads: int, draft: Path | None, mode: str) -> Any:
    """OpenVINO GenAI, which reads GGUF files of some number formats."""
    import openvino as ov  # pyright: ignore[reportMissingImports]
    import openvino_genai as genai  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if mode == "draft":
        options["draft_model"] = genai.draft_model(str(draft), "CPU", INFERENCE_NUM_THREADS=threads)
    if mode == "lookup":
        options["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(file, "CPU", **options)

    class Deliveries(genai.StreamerBase):
        """When tokens came, and how many."""

        def __init__(self) -> None:
            super().__init__()
            self.times = list[tuple[float, int]]()

        def write(self, token: int | Sequence[int]) -> Any:
            self.times.append((perf_counter(), len(token) if isinstance(token, Sequence) else 1))
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    def generate(job: Job) -> tuple[float, float, int]:
        config = genai.GenerationConfig()
        config.max_new_tokens = job.num_tokens
        config.ignore_eos = True
        config.do_sample = job.temperature > 0
        if config.do_sample:
            config.temperature = job.temperature
            config.rng_seed = job.seed
        if mode != "plain":
            config.num_assistant_tokens = DRAFT_LENGTH
        if mode == "lookup":
            config.max_ngram_size = LOOKUP_NGRAM
        deliveries = Deliveries()
        begin = perf_counter()
        pipeline.generate(ov.Tensor(np.array([job.token_ids], np.int64)), config, deliveries)
        end = perf_counter()
        first, count = deliveries.times[0]
        return first - begin, end - first, count

    return generate


class _NativeLlama:
    """A llama-server as what answers jobs."""

    def __init__(self, program: Path, arguments: Sequence[str]) -> None:
        self._server = LlamaServer(program, arguments)
        self.peak_megabytes = self._server.peak_megabytes

    def __call__(self, job: Job) -> tuple[float, float, int]:
        times = list[tuple[float, int]]()
        begin = perf_counter()
        self._server.stream(
            job.token_ids,
            job.num_tokens,
            job.temperature,
            job.seed,
            lambda n: times.append((perf_counter(), n)),
        )
        return times[0][0] - begin, times[-1][0] - times[0][0], times[0][1]


def transformers_generate(file: str, threads: int, draft: Path | None) -> Any:
    """`generate` of the files' weights in bfloat16, plain and assisted."""
    from transformers.generation.streamers import BaseStreamer

    from polydraft.models.torch.module import load_module

    torch.set_num_threads(threads)
    model = load_module(file, dtype=torch.bfloat16, device="cpu")
    small = load_module(draft, dtype=torch.bfloat16, device="cpu") if draft else None

    class Deliveries(BaseStreamer):
        """When tokens came, and how many; the first delivery is the prompt."""

        def __init__(self) -> None:
            self.times = list[tuple[float, int]]()

        def put(self, value: torch.Tensor) -> None:
            self.times.append((perf_counter(), value.numel()))

        def end(self) -> None:
            pass

    def generate(job: Job) -> tuple[float, float, int]:
        T = job.temperature
        ids = torch.tensor([job.token_ids])
        deliveries = Deliveries()
        sampling = (
            {"do_sample": True, "temperature": T, "top_k": 0, "top_p": 1.0} if T else {"do_sample": False}
        )
        torch.manual_seed(job.seed)
        begin = perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=job.num_tokens,
                eos_token_id=None,
                pad_token_id=0,
                streamer=deliveries,
                assistant_model=small if job.mode == "assisted" else None,
                **sampling,
            )
        first, count = deliveries.times[1]
        last = deliveries.times[-1][0]
        return first - begin, last - first, count

    return generate


def _context(file: str) -> int:
    return min(CONTEXT, GgufWeights.of(file).config.max_position_embeddings)


def _peak_megabytes() -> float:
    """Most memory that this process held, pages of mapped files among it."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
