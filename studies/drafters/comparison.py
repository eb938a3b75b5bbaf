"""Drafters that need no training, measured against each other at one node budget.

Three workloads, each in three ways:

    python   the middle of modules that neither the embedded target nor an index has seen
    edits    a function, then the same function with a name changed, to be copied
    chat     turns of a conversation about one subject

    written  the embedded target continues the prompt, at the given temperature
    paired   three texts that it so wrote on each prompt without drafts go on: the same texts for every drafter, so differences are
             those of the drafters and not of what happened to be written
    replayed the text itself goes on: a target that is certain of it (no pass of a model, so its milliseconds are the drafter's)

Stores that outlive a request (`+store`) start empty and see the requests of one workload one after the other: a session.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from polydraft.bench.record import provenance
from polydraft.core import Budget, Drafter, SamplingParams, Target
from polydraft.drafters.base import Parts
from polydraft.drafters.text.index_file import fingerprint
from polydraft.drafters.text.suffix import SuffixStore
from polydraft.drafters.text.text_index import TextIndex
from polydraft.engine.api import Engine
from polydraft.errors import InvalidInputError
from polydraft.methods import registry
from polydraft.models import load, pair
from polydraft.papers.trigram.drafter import TrigramStore
from polydraft.policy.fixed import FixedPolicy
from studies.drafters.scripted_target import ScriptedTarget
from studies.embedded_pair.held_out import library_texts

WORKLOADS = ("python", "edits", "chat")
WAYS = ("written", "paired", "replayed")
TEXTS = 3
"""Texts written on each prompt, for `paired`."""
MIXED = ("ngram", "suffix", "trigram", "retrieval")
"""Sources of the mixture of all."""

CHAT = Path(__file__).with_name("chat.txt").read_text(encoding="utf-8")
"""Conversations of our own, a line each, turns separated by |."""


@dataclass(frozen=True)
class Task:
    """A prompt and the text that goes on from it, as token ids."""

    prompt: list[int]
    rest: list[int]


@dataclass(frozen=True)
class Contender:
    """A drafter under a name. options: of its `build`, made anew for each session.  model: with the embedded draft model."""

    name: str
    drafter: str
    options: Callable[["DrafterBench"], dict[str, Any]] = lambda bench: {}
    model: bool = False


@dataclass
class Row:
    """One contender on one workload in one way. steps[r]: tokens emitted by each step of request r.

    Milliseconds a step: own_ms in the drafter's own calls (propose, extra_nodes, observe); drafting_ms with the engine's budgets and checks
    of the draft; step_ms in all.
    """

    contender: str
    workload: str
    way: str
    steps: list[list[int]] = field(default_factory=list[list[int]])
    own_ms: float = 0.0
    drafting_ms: float = 0.0
    step_ms: float = 0.0
    accepted_by_source: dict[str, int] = field(default_factory=dict[str, int])
    store_bytes: int = 0

    @property
    def tokens_per_step(self) -> float:
        return float(sum(map(sum, self.steps)) / max(1, sum(map(len, self.steps))))

    def error(self, draws: int = 200) -> float:
        """Standard error of tokens per step, by drawing requests anew."""
        rng = np.random.default_rng(0)
        tokens = np.array([sum(s) for s in self.steps])
        calls = np.array([len(s) for s in self.steps])
        picks = rng.integers(0, len(tokens), (draws, len(tokens)))
        return float((tokens[picks].sum(1) / calls[picks].sum(1)).std())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        fields = {"tokens_per_step": self.tokens_per_step, "error": self.error()}
        by_request = [sum(s) / max(1, len(s)) for s in self.steps]
        return {k: v for k, v in asdict(self).items() if k != "steps"} | fields | {"by_request": by_request}


CONTENDERS: tuple[Contender, ...] = (
    Contender("ngram", "ngram"),
    Contender("suffix", "suffix"),
    Contender("suffix+store", "suffix", lambda bench: {"store": SuffixStore()}),
    Contender("trigram static", "trigram", lambda bench: {"index": bench.index, "bump": 0.0}),
    Contender("trigram", "trigram", lambda bench: {"index": bench.index}),
    Contender("trigram c1=0", "trigram", lambda bench: {"index": bench.index, "c1": 0.0}),
    Contender(
        "trigram+store", "trigram", lambda bench: {"index": bench.index, "store": TrigramStore(1 << 16)}
    ),
    Contender("retrieval", "retrieval", lambda bench: {"index": bench.index}),
    Contender("lookahead", "lookahead"),
    Contender("phrases", "phrases", model=True),
    Contender("model:top_k", "model:top_k", model=True),
    Contender(
        "mixture suffix,trigram",
        "mixture",
        lambda bench: {"sources": ["suffix", bench.with_index("trigram")]},
    ),
    Contender(
        "mixture of all", "mixture", lambda bench: {"sources": [bench.with_index(name) for name in MIXED]}
    ),
)


@dataclass(kw_only=True)
class DrafterBench:
    """The embedded target, indexes over the standard library without what is held out, and the workloads.

    nodes, depth, width: the budget of every draft.  num_tokens: of each continuation.  num_requests: of each workload.
    index_bytes: of the corpus of the indexes.
    """

    nodes: int = 16
    depth: int = 8
    width: int = 4
    num_tokens: int = 256
    num_requests: int = 8
    temperature: float = 1.0
    index_bytes: int = 2_000_000

    def __post_init__(self) -> None:
        self.settings = asdict(self)
        self.policy = FixedPolicy(Budget.grown(self.nodes, self.depth, self.width))
        self._written: dict[str, list[Task]] = {}
        self.tokenizer = load.load_tokenizer(str(pair.target_folder()))
        self.target = load.load_model(str(pair.target_folder()), max_num_seqs=1)
        self.target.vocab_size = load.num_token_ids(self.tokenizer, self.target.vocab_size)

    def encode(self, text: str) -> list[int]:
        return load.encode(self.tokenizer, text)

    @cached_property
    def texts(self) -> tuple[list[str], list[str]]:
        """Of the standard library: what the indexes are made of, and what is held out."""
        return library_texts(self.index_bytes)

    @cached_property
    def documents(self) -> list[list[int]]:
        """Token ids of the files that the indexes are made of."""
        return [self.encode(text) for text in self.texts[0]]

    @cached_property
    def index(self) -> TextIndex:
        return TextIndex.build(self.documents, self.target.vocab_size, tokens_of=fingerprint(self.tokenizer))

    def with_index(self, name: str) -> tuple[str, dict[str, Any]]:
        """A source of a mixture, with the index if it reads one."""
        return name, {"index": self.index} if registry.takes(name, "index") else {}

    @cached_property
    def draft_model(self) -> Target:
        model = load.load_model(str(pair.draft_folder()), max_num_seqs=1)
        model.vocab_size = self.target.vocab_size
        return model

    def tasks(self, workload: str) -> list[Task]:
        """Prompts of this workload.

        Raises:
            InvalidInputError: no such workload.
        """
        makers: dict[str, Callable[[], Iterator[Task]]] = {
            "python": self._python,
            "edits": self._edits,
            "chat": self._chat,
        }
        if workload not in makers:
            raise InvalidInputError(
                f"workload {workload!r} was given; expected one of {', '.join(WORKLOADS)}."
            )
        return list(makers[workload]())[: self.num_requests]

    def written(self, workload: str) -> list[Task]:
        """What the target writes on the prompts of this workload without a drafter, `TEXTS` times each; made once."""
        if workload not in self._written:
            engine = Engine.of(self.target, drafter=None)
            texts = []
            for task in self.tasks(workload):
                params = SamplingParams(
                    temperature=self.temperature,
                    max_tokens=self.num_tokens,
                    ignore_eos=True,
                    seed=1000,
                    n=TEXTS,
                )
                texts += [
                    Task(task.prompt, list(s.token_ids))
                    for s in engine.generate([task.prompt], params)[0].samples
                ]
            self._written[workload] = texts
        return self._written[workload]

    def _texts(self) -> Iterator[list[int]]:
        """Held-out modules of the standard library, the longest first, then their later parts."""
        ids = sorted(map(self.encode, self.texts[1]), key=len, reverse=True)
        part = 256 + self.num_tokens
        for skip in range(0, 1 << 20, 2 * part):
            parts = [x[skip : skip + part] for x in ids if len(x) >= skip + part]
            if not parts:
                return
            yield from parts

    def _python(self) -> Iterator[Task]:
        for ids in self._texts():
            yield Task(ids[:256], ids[256:])

    def _edits(self) -> Iterator[Task]:
        """A part of a module, and the part again with its commonest long name changed."""
        for ids in self._texts():
            text = self.tokenizer.decode(ids[: self.num_tokens])
            names = re.findall(r"\b[a-z_]{4,}\b", text)
            if names:
                name = max(sorted(set(names)), key=names.count)
                begin = self.encode(f"{text}\n\n# the same with {name} called {name}_2\n")
                again = self.encode(re.sub(rf"\b{name}\b", f"{name}_2", text))
                yield Task(begin + again[:16], again[16:][: self.num_tokens])

    def _chat(self) -> Iterator[Task]:
        for line in CHAT.splitlines():
            turns = [f"{who}: {turn.strip()}\n" for who, turn in zip("QA" * 9, line.split("|"), strict=False)]
            ids = self.encode("".join(turns))
            prompt = self.encode("".join(turns[:2]))
            yield Task(ids[: len(prompt)], ids[len(prompt) :][: self.num_tokens])

    def drafter(self, contender: Contender, target: Target) -> Drafter:
        """A fresh one, with fresh stores."""
        draft = self.draft_model if contender.model else None
        name, _, kind = contender.drafter.partition(":")
        options = {**contender.options(self), **({"kind": kind} if kind else {})}
        return registry.drafter(name).build(Parts(target, draft, self.tokenizer, ()), **options)

    def run(self, contender: Contender, workload: str, way: str) -> Row:
        """One session: all requests of a workload, one after the other, after one to compile what is used."""
        target = self.target if way == "written" else ScriptedTarget(self.target.vocab_size)
        row = Row(contender.name, workload, way)
        tasks = self.written(workload) if way == "paired" else self.tasks(workload)
        self.play(
            Engine.of(target, drafter=self.drafter(contender, target), policy=self.policy),
            tasks[:1],
            Row("", "", way),
        )
        drafter = self.drafter(contender, target)
        self.play(Engine.of(target, drafter=drafter, policy=self.policy), tasks, row)
        row.store_bytes = getattr(getattr(drafter, "store", None), "num_bytes", 0)
        return row

    def play(self, engine: Engine, tasks: Sequence[Task], row: Row) -> None:
        """Let an engine go on from each prompt, and write into the row what it took."""
        seconds = 0.0
        drafting = 0.0
        calls = 0
        watch = _Watch(engine.drafter)
        for seed, task in enumerate(tasks):
            if isinstance(engine.target, ScriptedTarget):
                engine.target.text = task.prompt + task.rest
            params = SamplingParams(
                temperature=self.temperature if row.way == "written" else 0.0,
                max_tokens=self.num_tokens if row.way == "written" else len(task.rest),
                ignore_eos=True,
                seed=seed,
            )
            steps = []
            sample = None
            for output in engine.stream(task.prompt, params):
                sample = output.sample
                steps.append(len(output.token_ids))
                for origin in output.origins:
                    row.accepted_by_source[origin.source] = row.accepted_by_source.get(origin.source, 0) + 1
            if sample is None or sample.stats.drafter_error:
                raise RuntimeError(f"{row.contender} failed: {sample and sample.stats.drafter_error}")
            row.steps.append(steps)
            spent = sample.stats.seconds
            seconds += sum(spent.values()) - spent["prefill"]
            drafting += spent["drafting"]
            calls += sample.stats.steps
        row.own_ms, row.drafting_ms, row.step_ms = (
            1e3 * x / max(1, calls) for x in (watch.seconds, drafting, seconds)
        )


def compare(
    bench: DrafterBench,
    contenders: Sequence[Contender] = CONTENDERS,
    *,
    program: str = "polydraft",
    progress: Callable[[int], object] = lambda total: None,
) -> dict[str, Any]:
    """Every contender on every workload in every way, as plain data.

    program: how the run was called.  progress: called after each session with the number of them all.
    """
    rows = list[dict[str, Any]]()
    for way, workload, contender in itertools.product(WAYS, WORKLOADS, contenders):
        rows.append(bench.run(contender, workload, way).to_dict())
        progress(len(WAYS) * len(WORKLOADS) * len(contenders))
    settings = {**bench.settings, "index_tokens": sum(map(len, bench.documents))}
    return {**provenance(program), "settings": settings, "rows": rows}


class _Watch:
    """Seconds that a drafter spends in its own calls, from now on."""

    def __init__(self, drafter: Drafter | None) -> None:
        self.seconds = 0.0
        for name in ("propose", "extra_nodes", "observe"):
            if hasattr(drafter, name):
                setattr(drafter, name, self._timed(getattr(drafter, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            start = perf_counter()
            result = call(*given)
            self.seconds += perf_counter() - start
            return result

        return timed
