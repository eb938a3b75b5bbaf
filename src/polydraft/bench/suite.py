"""`polydraft bench`: every contender on the same models, prompts and threads, in one interleaved run, with checked outputs.

A contender that is absent or fails is named with its reason and does not end the run. One whose tokens are not the
target's is disqualified: it is shown, without speed-ups.
"""

import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from polydraft.bench.compare import Contender, Measurement, Prompts, engine_contender, measure
from polydraft.bench.peers import transformers_contender
from polydraft.bench.speedup import Speedup
from polydraft.bench.ways import DEFAULT_WAYS, Way, engine_options
from polydraft.check.texts import check_distribution
from polydraft.core import SamplingParams
from polydraft.engine.api import Engine
from polydraft.errors import InvalidInputError
from polydraft.models import load, pair
from polydraft.models.compiled.model import CompiledModel
from polydraft.models.store.catalogue import default_draft
from polydraft.models.torch.hf import HFTarget
from polydraft.models.torch.module import as_device, load_module


@dataclass(frozen=True)
class Findings:
    """What one run found. settings: what it was asked.  absent: contender -> why it did not take part.  seconds_to_prepare: building and compiling, by name."""

    settings: dict[str, Any]
    measurements: list[Measurement]
    checks: dict[str, dict[str, Any]]
    absent: dict[str, str]
    seconds_to_prepare: dict[str, float]
    num_parameters: dict[str, int]

    def passed(self, measurement: Measurement) -> bool:
        return self.checks[measurement.contender.name]["passed"]

    def rows(self) -> list[dict[str, Any]]:
        """One row for each contender that ran, as plain data; seconds and bytes."""
        return [
            {
                "contender": m.contender.name,
                "bits_per_weight": m.contender.bits,
                "compared": dict(m.contender.compared),
                **m.row(),
                "tokens_per_cpu_second": m.tokens_per_cpu_second,
                "time_to_first_token": m.time_to_first_token,
                "inter_token_p50": m.inter_token(50),
                "inter_token_p99": m.inter_token(99),
                "peak_memory": m.memory,
                "spread": m.spread,
                "seconds_to_prepare": self.seconds_to_prepare.get(m.contender.name),
                "distribution_check": self.checks[m.contender.name],
            }
            for m in self.measurements
        ]

    def speedups(self) -> dict[str, dict[str, Speedup]]:
        """Of each contender over each other, contenders that failed their check left out."""
        fair = [m for m in self.measurements if self.passed(m)]
        return {
            a.contender.name: {b.contender.name: a.speedup_over(b) for b in fair if b is not a} for a in fair
        }


class Bench:
    """The models, loaded once, and the contenders that could be built on them.

    target, draft: as of `Engine.from_pretrained`, the embedded pair by default; without a draft only contenders that need none.
    ways: see `ways`; without any those of the heads, else DEFAULT_WAYS, as far as they can be built.
    heads: folders of trained drafters, which ways name by their last part.
    device: of all models; without one the CPU.  backend: of ours, "compiled" or "transformers"; "auto" is compiled on a CPU.
    dtype: of all models, by default float32.
    """

    def __init__(
        self,
        *,
        target: str | None = None,
        draft: str | None = None,
        ways: Sequence[str] = (),
        heads: Sequence[Path] = (),
        temperature: float = 1.0,
        num_threads: int = 1,
        batch_size: int = 1,
        peers: bool = True,
        device: str | None = None,
        backend: str = "auto",
        dtype: str | None = None,
    ) -> None:
        target = pair.EMBEDDED if target is None else target
        draft = draft or default_draft(target)
        self.temperature = temperature
        self._threads = num_threads
        self.batch_size = batch_size
        self._heads = {head.name: head for head in heads}
        self.settings = {"temperature": temperature, "threads": num_threads, "batch": batch_size}
        if backend not in load.BACKENDS:
            raise InvalidInputError(
                f"backend={backend!r} was given; expected one of {', '.join(load.BACKENDS)}."
            )
        where = as_device(device or "cpu")
        self._on_cpu = where.type == "cpu"
        self._through = backend == "transformers"
        placed: dict[str, Any] = {"device": str(where), "dtype": dtype or "float32"}
        if not self._on_cpu or self._through:
            self.settings |= {**placed, "backend": backend}
        self.judge = load_module(target, **placed)
        self.tokenizer = load.load_tokenizer(target)
        self._draft_module = None if draft is None else load_module(draft, **placed)
        self._draft = None if self._draft_module is None else self._compile(self._draft_module)
        self.contenders: list[Contender] = []
        self.absent: dict[str, str] = {}
        self.memory: dict[str, int] = {}
        self._files = tempfile.TemporaryDirectory()
        self._add_own(ways or [f"{name}@1x3" for name in self._heads])
        if peers:
            self._add_transformers()
            self._add_llama_cpp()

    @cached_property
    def _target(self) -> Any:
        return self._compile(self.judge)

    def _compile(self, module: Any) -> Any:
        kind = HFTarget if self._through or CompiledModel.why_unsupported(module) else CompiledModel
        return kind(module, max_num_seqs=self.batch_size)

    def _try(self, name: str, build: Callable[[], Contender]) -> None:
        try:
            self.contenders.append(build())
        except Exception as error:
            self.absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

    def _engine(self, way: Way) -> Engine:
        options: dict[str, Any] = {"draft_model": self._draft, **engine_options(way, self._heads)}
        return Engine.of(self._target, tokenizer=self.tokenizer, **options)

    def _add_own(self, ways: Sequence[str]) -> None:
        self._try("plain", lambda: engine_contender("plain", self._engine(Way(None)), self.temperature))
        for text in ways or DEFAULT_WAYS:
            build = partial(self._engine_contender, text)
            if ways:
                self.contenders.append(build())
            else:
                self._try(text, build)

    def _engine_contender(self, text: str) -> Contender:
        return engine_contender(text, self._engine(Way.parse(text)), self.temperature)

    def _add_transformers(self) -> None:
        model = self.judge
        small = self._draft_module
        self._try("transformers", lambda: transformers_contender(model, self.temperature))
        if not self._on_cpu:  # with such a cache it compiles itself on a GPU
            name = "transformers static cache"
            options = {"cache_implementation": "static"}
            self._try(name, lambda: transformers_contender(model, self.temperature, name=name, **options))
        lookup = {"name": "transformers prompt lookup", "drafter": "ngram", "prompt_lookup_num_tokens": 5}
        assisted = {"name": "transformers assisted", "drafter": "model", "assistant_model": small}
        for options in (lookup, assisted):
            name = str(options["name"])
            if self.batch_size > 1:
                self.absent[name] = "transformers assists one sequence at a time"
            elif options.get("assistant_model", model) is None:
                self.absent[name] = "there is no draft model"
            else:
                self._try(
                    name, lambda options=options: transformers_contender(model, self.temperature, **options)
                )

    def _add_llama_cpp(self) -> None:
        names = ["llama.cpp", *(["llama.cpp speculative"] if self._draft_module is not None else [])]
        missing = next((m for m in ("xllamacpp", "gguf") if find_spec(m) is None), None)
        reason = f"{missing} is not installed (pip install polydraft[bench])" if missing else None
        if self.batch_size > 1 or not self._on_cpu:
            reason = "it is measured with one sequence at a time, on a CPU"
        if reason:
            self.absent |= dict.fromkeys(names, reason)
            return
        from polydraft.bench.llama_cpp import LlamaCpp, write_gguf

        folder = Path(self._files.name)

        def build(name: str, drafts: bool) -> Contender:
            for file, module in (("target", self.judge), ("draft", self._draft_module)):
                if module is not None and not (folder / f"{file}.gguf").exists():
                    write_gguf(module, self.tokenizer, folder / f"{file}.gguf")
            draft = folder / "draft.gguf" if drafts else None
            server = LlamaCpp(folder / "target.gguf", draft, num_threads=self._threads)
            server.check_logits(self.judge, load.encode(self.tokenizer, "def f(x):"))
            return server.contender(name, self.temperature)

        for name in names:
            self._try(name, lambda name=name: build(name, name != names[0]))

    def close(self) -> None:
        """Delete temporary files."""
        self._files.cleanup()

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Prompts as token ids."""
        return [load.encode(self.tokenizer, text) for text in texts]

    def prompts(self, count: int) -> list[list[int]]:
        """Held-out prompts of the package, encoded; at most `count`."""
        return self.encoded([p.text for p in pair.prompts()[:count]])

    def prepare(self, prompt: Sequence[int], progress: Callable[[], None] = lambda: None) -> dict[str, float]:
        """A few tokens by everyone, so that nothing compiles while time is taken; seconds by contender. Failures are absent then."""
        seconds: dict[str, float] = {}
        ready: list[Contender] = []
        for contender in self.contenders:
            gc.collect()
            before = _bytes_in_use(self.judge.device)
            start = perf_counter()
            params = SamplingParams(temperature=self.temperature, max_tokens=8, ignore_eos=True, seed=0)
            try:
                contender.generate([prompt] * self.batch_size, params)
                ready.append(contender)
            except Exception as error:
                self.absent[contender.name] = f"{type(error).__name__}: {error}"
            seconds[contender.name] = perf_counter() - start
            self.memory[contender.name] = max(_bytes_in_use(self.judge.device) - before, 0)
            progress()
        self.contenders = ready
        return seconds

    def check(
        self, measured: Measurement, prompts: Prompts, measurements: Sequence[Measurement]
    ) -> dict[str, Any]:
        """Whether a contender's tokens follow the distribution that they should; measurements: everyone's."""
        return check_distribution(self.judge, self.temperature, measured.texts(prompts, self.batch_size))

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int = 64,
        repetitions: int = 2,
        seed: int = 0,
        progress: Callable[[], None] = lambda: None,
    ) -> Findings:
        """Prepare, measure and check; see the module.

        Raises:
            InvalidInputError: nobody could be measured; with the reasons.
        """
        seconds = self.prepare(prompts[0], progress)
        measurements = measure(
            self.contenders,
            prompts,
            max_tokens=max_tokens,
            repetitions=repetitions,
            batch_size=self.batch_size,
            seed=seed,
            progress=progress,
        )
        for m in measurements:
            m.memory = self.memory.get(m.contender.name)
            if m.error:
                self.absent[m.contender.name] = m.error
        measurements = [m for m in measurements if not m.error]
        if not measurements:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.absent.items())
            raise InvalidInputError(f"no contender could be measured; expected at least one. {reasons}")
        checks = {m.contender.name: self.check(m, prompts, measurements) for m in measurements}
        sizes = {"target": self.judge.num_parameters()}
        if self._draft_module is not None:
            sizes["draft"] = self._draft_module.num_parameters()
        run_options = {"max_tokens": max_tokens, "num_prompts": len(prompts), "repetitions": repetitions}
        return Findings(
            {**self.settings, **run_options}, measurements, checks, dict(self.absent), seconds, sizes
        )


def _bytes_in_use(device: torch.device) -> int:
    """Memory of a GPU that torch has taken, of a CPU that this process uses now; 0 where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    try:
        with open("/proc/self/statm") as line:
            return int(line.read().split()[1]) * 4096
    except OSError:
        return 0
